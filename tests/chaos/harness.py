"""A real cluster under test: every worker behind a proxy, every process open to inspection.

    async with Harness(print, transport="gloo") as harness:
        stats = await harness.round(runs, seed=1, seconds=20.0)

A round is: callers and faults at once, then recovery, then the checks. Each violation is a line in
the stats' `violations`; nothing is raised for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.errors import ConfigError, DeadlineExceeded
from baton.local import ports
from baton.local.cluster import LocalCluster
from baton.local.etcd_process import EmbeddedEtcd
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import SpanStore, is_complete
from baton.registry.membership import ROLES
from tests.chaos import checks, kv_faults, process
from tests.chaos.faults import (
    DOWN,
    KILLS,
    KINDS,
    OF_VERSIONS,
    SILENCE_S,
    Injector,
    Outages,
    plan,
    set_role,
)
from tests.chaos.judge import ChaosStats, violation
from tests.chaos.load import CUT, ChaosRequest, Outcome, Run, run_load, send
from tests.chaos.versions import ADAPTER, FIRST, NAME, SECOND, Changes, Versions
from tests.etcd_members import etcd_members
from tests.proxy import Proxy, owner
from tests.waiting import WAIT_S, LoopLag, eventually

ROOT = Path(__file__).parents[2]
# Float32, so that tokens can be compared.
ENGINE = EngineConfig(dtype="float32", kv_cache_bytes=48 << 20, tp_backend="gloo")
IDLE_S = 90.0  # a reservation's lease is 30 s, and nothing may be held after it
RELEASE_S = 60.0
BUSY_S = 0.2  # of lag for each thread that wants a core: workers compute for longer than this one
TRACE_S = 60.0  # for the spans of the last requests to arrive
_EXPORT_S = 6.0  # spans that are younger die with their process


@dataclass
class Harness:
    """Started and stopped with `async with`; `log` gets a line for everything that happens."""

    log: Callable[[str], None]
    workers: int = 2  # of each role and version
    routers: int = 2
    transport: str = "auto"
    tp: tuple[int, int] = (1, 1)  # ranks of a prefill and of a decode worker
    versions: Versions | None = None  # then each has as many workers, adapters and routes change
    callers: int = 10
    mean_pause_s: float = 3.0
    stats: ChaosStats = field(default_factory=ChaosStats)

    async def __aenter__(self) -> Self:
        self._baseline: dict[str, checks.Holdings] = {}
        self._store = SpanStore(max_traces=20_000, max_spans=1_000_000)
        self._proxies: dict[str, Proxy] = {}
        self._warm_ups = itertools.count()
        async with AsyncExitStack() as resources:
            temporary = tempfile.TemporaryDirectory(prefix="baton-chaos-")
            self._directory = Path(resources.enter_context(temporary))
            await self._start(resources.enter_async_context)
            self._resources = resources.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._resources.aclose()

    async def _start(self, enter: Callable[..., Any]) -> None:
        self._lag = await enter(LoopLag())
        receiver = await enter(OtlpReceiver(self._store))
        extra_args = {}
        models = self.versions.models if self.versions else ()
        numbers = range(self.workers * max(1, len(models)))
        for role, number in itertools.product(("prefill", "decode"), numbers):
            name, port = f"{role}-{number}", ports.free()
            proxy = Proxy(port, self._name_of)
            self._proxies[name] = await enter(proxy)
            extra_args[name] = ["--port", str(port), "--advertise", proxy.address]
        self._etcds: Sequence[EmbeddedEtcd] = await enter(etcd_members()) if models else ()
        config = ClusterConfig(
            etcd=",".join(one.address for one in self._etcds) or None,
            engine=replace(ENGINE, max_loras=1) if models else ENGINE,
            models=models,
            prefill=self.workers,
            decode=self.workers,
            prefill_tp=self.tp[0],
            decode_tp=self.tp[1],
            routers=self.routers,
            transport=self.transport,
            port=0,
            http_port=_http_port(self.routers),
            otlp=receiver.address,
            log_level="info",
        )
        program = (sys.executable, "-m", "tests.chaos.process")
        self.cluster = LocalCluster(
            config,
            say=lambda line: self.log(f"         {line}"),
            programs=dict.fromkeys(("router", "prefill", "decode"), program),
            extra_args=extra_args,
            env={
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "MALLOC_ARENA_MAX": "2",  # what is freed goes back: memory tells what is held
                "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
                "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
                kv_faults.VARIABLE: str(self._directory / "kv.json"),
                process.HELD_VARIABLE: str(self._directory),
            },
            start_timeout_s=WAIT_S,
        )
        await enter(self.cluster)
        if self.cluster.etcd is not None:
            self._etcds = (self.cluster.etcd,)
        self._changes: Changes | None = None
        if self.versions is not None:
            self._changes = await enter(Changes(self.cluster, self.versions.adapter))

    async def _warm_up(self, runs: Sequence[Run]) -> None:
        """Requests every run several times at once, until every pair of workers has used its link.

        What links hold is then part of the baseline. Workers are given back the roles that the last
        round's faults and planners changed: only a pair of two roles hands over for certain.
        """

        async def unused() -> set[tuple[str, str]]:
            await self._restore_roles()
            salt = f"warm-up {next(self._warm_ups)}"  # what decode caches is not sent
            asked = [ChaosRequest(run, len(run.whole.token_ids), salt) for run in (*runs, *runs)]
            await asyncio.gather(*(send(client, request) for request in asked))
            pairs = (await client.status())["pairs"]
            return self._pairs() - checks.used_links(pairs, self.cluster.membership.records)

        async with AsyncClient(self.cluster.targets) as client:
            await eventually(unused, lambda found: not found, "pairs that have used no link")

    def _pairs(self) -> set[tuple[str, str]]:
        """Names of the prefill and decode workers that hand over, each in its own role."""
        versions = len(self.versions.models) if self.versions else 1
        numbers = range(self.workers * versions)
        return {
            (f"prefill-{p}", f"decode-{d}")
            for p, d in itertools.product(numbers, numbers)
            if p // self.workers == d // self.workers
        }

    async def _restore_roles(self) -> None:
        """Gives each worker the role that it was started with."""
        own = {process.pid: process.role for process in self.cluster.processes.values()}
        for record in self.cluster.membership.records.values():
            role = own.get(record.pid)
            if role is not None and ROLES[record.role] != role:
                await set_role(record, role)

    async def round(self, runs: Sequence[Run], seed: int, seconds: float) -> ChaosStats:
        """Faults under load, with everything checked at the end; the stats of all rounds so far."""
        if self._changes is not None:
            await self._changes.load()
        await self._warm_up(runs)
        stats = self.stats
        # Of the first round: what grows from round to round is seen, also in replaced processes.
        self._baseline = await checks.holdings(self.cluster, self._directory) | self._baseline
        names = [p.name for p in self.cluster.processes.values() if p.role == "router"]
        routers = dict(zip(names, self.cluster.addresses, strict=True))
        gateways = itertools.cycle(zip(names, self.cluster.http_addresses, strict=True))
        control = self._directory / "kv.json"
        roles = {one.name: one.role for one in self.cluster.processes.values()}
        outages = Outages({name: self._group_of(name, role) for name, role in roles.items()})
        injector = Injector(
            self.cluster, self._proxies, control, routers, self.log,
            outages, self._etcds, self._changes, max(self.tp),
        )  # fmt: skip
        kinds = [kind for kind in KINDS if self.versions or kind not in OF_VERSIONS]
        faults = plan(seed, seconds, roles, self.mean_pause_s, kinds)
        async with AsyncClient(self.cluster.targets) as client:
            until_s = asyncio.get_running_loop().time() + seconds
            load = run_load(
                client, gateways, runs, seed=seed, callers=self.callers, until_s=until_s
            )
            outcomes, _ = await asyncio.gather(load, injector.run(faults))
        stats.counts["faults"] += injector.done
        stats.counts["faults that hit nothing"] += injector.missed
        stats.counts["faults left out"]["that could not hit"] += injector.skipped
        stats.counts["faulty KV transfers"] += kv_faults.done(control)
        control.with_suffix(".done").unlink(missing_ok=True)
        busy_s = BUSY_S * os.getloadavg()[0] / len(os.sched_getaffinity(0))
        for request, outcome in outcomes:
            outcome.lag_s = max(busy_s, self._lag.within_s(outcome.began_s, outcome.ended_s))
            self._judge(request, outcome, outages, stats)
        await self._check_recovery(stats)
        end_s = asyncio.get_running_loop().time() + TRACE_S
        for _, outcome in outcomes:
            await self._check_trace(outcome, outages, end_s, stats)
        return stats

    def logs(self) -> str:
        """The last lines of every process, for a run that went wrong."""
        return "\n\n".join(
            f"--- {child.name} (pid {child.pid}, {child.exit_status})\n{child.log_tail(60)}"
            for child in self.cluster.processes.values()
        )

    def _judge(
        self, request: ChaosRequest, outcome: Outcome, outages: Outages, stats: ChaosStats
    ) -> None:
        while_s = (outcome.began_s, outcome.ended_s)
        groups = self._groups_of(request.run)
        # All connections to workers pass through this process: while it is late, they are silent.
        stats.largest_s["lag of this program"] = self._lag.largest_s
        silent = self._lag.within_s(*while_s) > SILENCE_S
        workers_down = silent or any(outages.role_down(group, *while_s) for group in groups)
        # While one router is well, the SDK goes on there, whatever has been delivered.
        router_down = outages.role_down("router", *while_s)
        if request.http:  # goes on nowhere else, but is cut only by its own router's death
            kinds = KILLS if outcome.end == CUT else DOWN
            router_down = outages.any_down((outcome.router,), *while_s, kinds)
        stats.count(outcome)
        # Who starts again loads what another worker of its version has.
        lost = any(outages.role_down(group, 0.0, outcome.ended_s) for group in groups)
        gone = request.run.model == ADAPTER and (lost or outages.any_down((ADAPTER,), *while_s))
        excused_s = partial(outages.excused_s, (*groups, "router"), outcome.router)
        if wrong := violation(request, outcome, router_down, workers_down, gone, excused_s):
            stats.violations.append(f"{request} to {outcome.router or 'any router'}: {wrong}")

    def _group_of(self, name: str, role: str) -> str:
        """Of which processes at least one must be well: routers, or workers of a version."""
        if self.versions is None or role == "router":
            return "router" if role == "router" else "worker"
        return FIRST if int(name.rpartition("-")[2]) < self.workers else SECOND

    def _groups_of(self, run: Run) -> tuple[str, ...]:
        """The groups of workers that a request needs."""
        if self.versions is None:
            return ("worker",)
        return {SECOND: (SECOND,), NAME: (FIRST, SECOND)}.get(run.model, (FIRST,))

    async def _check_recovery(self, stats: ChaosStats) -> None:
        """All processes ready again, nothing held, nothing leaked."""
        try:
            await self.cluster.wait_ready(WAIT_S)
        except DeadlineExceeded as error:
            stats.violations.append(str(error))
            return

        async def leaked() -> list[str]:
            held = await checks.holdings(self.cluster, self._directory)
            return checks.leaks(self._baseline, held)

        for look, timeout_s in (
            (partial(checks.busy_workers, self.cluster), IDLE_S),
            (partial(checks.busy_routers, self.cluster), IDLE_S),
            (leaked, RELEASE_S),
            (partial(checks.stale_mappings, self.cluster), RELEASE_S),
        ):
            try:
                await eventually(look, lambda found: not found, "in the end", timeout_s)
            except AssertionError as error:
                stats.violations.append(str(error))

    async def _check_trace(
        self, outcome: Outcome, outages: Outages, end_s: float, stats: ChaosStats
    ) -> None:
        """A completed request has one whole trace, but for spans that died in a process."""
        if outcome.completion is None:
            return
        trace_id = outcome.completion.trace_id
        from_s, until_s = outcome.began_s, outcome.ended_s + _EXPORT_S
        # Spans also die with a process that drains while this one, which takes them, stands still.
        stalled = self._lag.within_s(from_s, until_s) > _EXPORT_S / 2
        killed = outages.memory_lost(from_s, until_s) or stalled
        left_s = 0.0 if killed else end_s - asyncio.get_running_loop().time()
        try:
            await self._store.wait_for(trace_id, is_complete, max(0.01, left_s))
            stats.counts["traces"]["whole"] += 1
        except DeadlineExceeded:
            stats.counts["traces"]["torn by a kill" if killed else "torn"] += 1
            if not killed:
                spans = [f"{one.service}:{one.name}" for one in self._store.trace(trace_id)]
                stats.violations.append(f"trace {trace_id} is torn: {spans}")

    def _name_of(self, port: int) -> str:
        return owner(port, {name: child.pid for name, child in self.cluster.processes.items()})


def _http_port(routers: int) -> int:
    """The first of as many free ports in a row."""
    while True:
        with contextlib.suppress(ConfigError):
            return ports.consecutive("127.0.0.1", ports.free(), routers)[0]
