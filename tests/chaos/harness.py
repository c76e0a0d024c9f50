"""A real cluster under test: every worker behind a proxy, every process open to inspection.

    async with Harness(HarnessConfig(prefill=2, decode=2)) as harness:
        stats = await harness.round(runs, seed=1, seconds=20.0)

A round is: callers and faults at once, then recovery, then the checks. Each violation is a line in
the stats' `violations`; nothing is raised for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.errors import ConfigError, DeadlineExceeded
from baton.local import ports
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore, is_complete
from tests.chaos import checks, kv_faults, process
from tests.chaos.faults import Injector, plan
from tests.chaos.load import Load, send
from tests.chaos.proxy import Proxy, owner
from tests.chaos.requests import CUT, ChaosRequest, ChaosStats, Outcome, Run, violation

ROOT = Path(__file__).parents[2]
ENGINE = EngineConfig(dtype="float32", kv_cache_bytes=48 << 20)  # float32: tokens can be compared
RECOVERY_S = 90.0  # for every process to be back after the last fault
TRACE_S = 20.0  # for the spans of the last requests to arrive
_EXPORT_S = 6.0  # spans that are younger die with their process
_WARM_UPS = 30  # rounds in which every pair of workers must have a link
_PROGRESS_S = 5.0


@dataclass(frozen=True)
class HarnessConfig:
    """The cluster under test and its number of callers."""

    prefill: int = 2
    decode: int = 2
    routers: int = 2
    transport: str = "auto"
    callers: int = 10
    mean_pause_s: float = 3.0


class Harness:
    """Started and stopped with `async with`; `log` gets a line for everything that happens."""

    def __init__(
        self, config: HarnessConfig, log: Callable[[str], None] = lambda line: None
    ) -> None:
        self.config = config
        self.cluster: LocalCluster
        self.proxies: dict[str, Proxy] = {}
        self._log = log
        self._directory: Path
        self._store = SpanStore(max_traces=20_000, max_spans=1_000_000)
        self._resources = AsyncExitStack()
        self._used_ports: set[int] = set()
        self._seen: set[psutil.Process] = set()  # distinct even if a pid is reused

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._resources.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._resources.aclose()

    def leftovers(self) -> list[str]:
        """After the end: processes and ports of the cluster that are still there."""
        return checks.leftovers(self._seen, self._used_ports)

    async def warm_up(self, runs: Sequence[Run]) -> None:
        """Requests every run several times at once, until every pair of workers has a link.

        What links hold is then part of the baseline.
        """
        pairs = self.config.prefill * self.config.decode
        async with AsyncClient(self.cluster.targets) as client:
            for salt in map(str, range(_WARM_UPS)):
                requests = [
                    ChaosRequest(run, len(run.whole.token_ids), salt) for run in (*runs, *runs)
                ]
                await asyncio.gather(*(send(client, request) for request in requests))
                if len((await client.status())["pairs"]) >= pairs:
                    return
        raise AssertionError(f"not all {pairs} pairs have a link after {_WARM_UPS} rounds")

    async def round(self, runs: Sequence[Run], seed: int, seconds: float) -> ChaosStats:
        """One round of faults under load, with everything checked at its end."""
        stats = ChaosStats()
        before = await checks.holdings(self.cluster, self._directory)
        injector = self._injector()
        processes = {p.name: p.role for p in self.cluster.processes.values()}
        faults = plan(seed, seconds, processes, self.config.mean_pause_s)
        outcomes: list[tuple[ChaosRequest, Outcome]] = []
        async with AsyncClient(self.cluster.targets) as client:
            on_end = lambda request, outcome: outcomes.append((request, outcome))  # noqa: E731
            gateways = dict(zip(self._routers(), self.cluster.http_addresses, strict=True))
            load = Load(client, gateways, runs, seed, self.config.callers, on_end)
            progress = asyncio.create_task(self._log_progress(load, injector))
            try:
                until_s = asyncio.get_running_loop().time() + seconds
                await asyncio.gather(injector.run(faults), load.run(until_s))
            finally:
                progress.cancel()
        self._judge(outcomes, injector, stats)
        stats.faults, stats.skipped = injector.done, injector.skipped
        stats.kv_faults = self._kv_faults_done()
        await self._check_recovery(stats, before)
        await self._check_traces(outcomes, injector, stats)
        return stats

    def _judge(
        self,
        outcomes: Sequence[tuple[ChaosRequest, Outcome]],
        injector: Injector,
        stats: ChaosStats,
    ) -> None:
        for request, outcome in outcomes:
            while_s = (outcome.began_s, outcome.ended_s)
            # While one router is well, the SDK goes on there, whatever has been delivered.
            excused = injector.any_router_down(*while_s, every=True)
            if request.http:  # goes on nowhere else, but is cut only by its own router's death
                excused = injector.router_down(
                    outcome.router, *while_s, killed=outcome.failure == CUT
                )
            role_down = injector.role_down(*while_s)
            wrong = violation(request, outcome, excused, role_down)
            stats.count(outcome, wrong, role_down or injector.any_router_down(*while_s))
            if wrong:
                stats.violations.append(f"a request of {request}: {wrong}")

    async def _check_recovery(self, stats: ChaosStats, before: dict[int, checks.Holdings]) -> None:
        """All processes ready again, nothing held, nothing leaked."""
        self._note_processes()
        try:
            await self.cluster.wait_ready(RECOVERY_S)
        except DeadlineExceeded as error:
            stats.violations.append(str(error))
            return
        self._note_processes()
        busy = await checks.wait_idle(self.cluster)
        stats.busy_workers += len(busy)
        stats.violations += [f"{worker} holds {what}" for worker, what in busy.items()]
        routers = await checks.busy_routers(self.cluster.addresses)
        stats.violations += [f"router {address}: {what}" for address, what in routers.items()]
        stats.violations += await checks.wait_no_leaks(self.cluster, self._directory, before)
        stats.violations += await checks.stale_mappings(self.cluster)

    async def _check_traces(
        self,
        outcomes: Sequence[tuple[ChaosRequest, Outcome]],
        injector: Injector,
        stats: ChaosStats,
    ) -> None:
        """Every completed request has one whole trace, but for spans that died in a process."""
        end_s = asyncio.get_running_loop().time() + TRACE_S
        for _, outcome in outcomes:
            if outcome.completion is None:
                continue
            killed = injector.killed(outcome.began_s, outcome.ended_s + _EXPORT_S)
            left_s = 0.0 if killed else end_s - asyncio.get_running_loop().time()
            stats.traces += 1
            if await self._is_whole(outcome.completion.trace_id, left_s):
                continue
            if killed:
                stats.excused_traces += 1
            else:
                stats.torn_traces += 1
                spans = self._store.trace(outcome.completion.trace_id)
                stats.violations.append(f"a trace is torn: {_orphans(spans)}")

    async def _is_whole(self, trace_id: str, timeout_s: float) -> bool:
        try:
            await self._store.wait_for(trace_id, is_complete, max(0.01, timeout_s))
        except DeadlineExceeded:
            return False
        return True

    async def _log_progress(self, load: Load, injector: Injector) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            self._note_processes()
            down = sorted({one.name for one in injector.outages if one.until_s is None})
            self._log(
                f"         … {load.ended} requests ended, {load.running} run; "
                f"down: {', '.join(down) or 'none'}"
            )

    async def _start(self) -> None:
        enter = self._resources.enter_async_context
        self._directory = Path(
            self._resources.enter_context(tempfile.TemporaryDirectory(prefix="baton-chaos-"))
        )
        receiver = await enter(OtlpReceiver(self._store))
        extra_args = {}
        for role, count in (("prefill", self.config.prefill), ("decode", self.config.decode)):
            for number in range(count):
                name, port = f"{role}-{number}", ports.free()
                self.proxies[name] = await enter(Proxy(port, self._name_of))
                extra_args[name] = ["--port", str(port), "--advertise", self.proxies[name].address]
                self._used_ports |= {port, int(self.proxies[name].address.rpartition(":")[2])}
        self.cluster = LocalCluster(
            self._cluster_config(receiver.address),
            say=lambda line: self._log(f"         {line}"),
            programs=dict.fromkeys(
                ("router", "prefill", "decode"), (sys.executable, "-m", "tests.chaos.process")
            ),
            extra_args=extra_args,
            env=self._environment(),
        )
        await enter(self.cluster)
        addresses = (*self.cluster.addresses, *self.cluster.http_addresses)
        self._used_ports |= {int(address.rpartition(":")[2]) for address in addresses}
        self._note_processes()

    def _cluster_config(self, otlp: str) -> ClusterConfig:
        return ClusterConfig(
            engine=ENGINE,
            prefill=self.config.prefill,
            decode=self.config.decode,
            routers=self.config.routers,
            transport=self.config.transport,
            port=0,
            http_port=_http_port(self.config.routers),
            otlp=otlp,
            log_level="info",
        )

    def _environment(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
            kv_faults.VARIABLE: str(self._directory / "kv.json"),
            process.HELD_VARIABLE: str(self._directory),
        }

    def _injector(self) -> Injector:
        addresses = dict(zip(self._routers(), self.cluster.addresses, strict=True))
        control = self._directory / "kv.json"
        return Injector(self.cluster, self.proxies, control, addresses.__getitem__, self._log)

    def _routers(self) -> list[str]:
        return [p.name for p in self.cluster.processes.values() if p.role == "router"]

    def _kv_faults_done(self) -> Counter[str]:
        """KV faults that were done since the last call."""
        path = self._directory / "kv.done"
        if not path.exists():
            return Counter()
        done = path.read_text().split()
        path.unlink()
        return Counter(done)

    def _note_processes(self) -> None:
        for child in self.cluster.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                self._seen.add(psutil.Process(child.pid))

    def _name_of(self, port: int) -> str:
        """Which process of the cluster has a connection from this local port."""
        return owner(port, {name: child.pid for name, child in self.cluster.processes.items()})


def _http_port(routers: int) -> int:
    """The first of as many free ports in a row."""
    for _ in range(50):
        first = ports.free()
        with contextlib.suppress(ConfigError):
            return ports.consecutive("127.0.0.1", first, routers)[0]
    raise AssertionError(f"no {routers} free ports in a row")


def logs(harness: Harness) -> str:
    """The last lines of every process, for a run that went wrong."""
    return "\n\n".join(
        f"--- {child.name} (pid {child.pid}, {child.exit_status})\n{child.log_tail(60)}"
        for child in harness.cluster.processes.values()
    )


def _orphans(spans: Sequence[Span]) -> str:
    ids = {span.span_id for span in spans}
    lost = [
        f"{span.service}:{span.name}"
        for span in spans
        if span.parent_id and span.parent_id not in ids
    ]
    return f"{len(spans)} spans, without parents {lost}" if spans else "no span arrived"
