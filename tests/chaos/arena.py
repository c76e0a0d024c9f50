"""A real cluster that can be hurt: every worker behind a proxy, every process open to be looked at.

    async with Arena(ArenaConfig(prefill=2, decode=2)) as arena:
        tally = await arena.round(runs, seed=1, seconds=20.0)

A round is: callers and faults at once, then peace, then the checks. What is wrong is a line in the
tally's `violations`; nothing is raised for it.
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
from types import TracebackType
from typing import Self

import psutil

from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.errors import ConfigError, DeadlineExceeded
from baton.local import ports
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore, is_complete
from tests.chaos import checks, kv, process
from tests.chaos.faults import Injector
from tests.chaos.load import Load, ask
from tests.chaos.plan import plan
from tests.chaos.proxy import Proxy
from tests.chaos.sockets import owner
from tests.chaos.tally import Tally
from tests.chaos.wishes import CUT, Ending, Run, Wish, complaint

ROOT = Path(__file__).parents[2]
ENGINE = EngineConfig(dtype="float32", kv_cache_bytes=48 << 20)  # float32: tokens can be compared
PEACE_S = 90.0  # for every process to be back after the last fault
TRACE_S = 20.0  # for the spans of the last requests to arrive
_EXPORT_S = 6.0  # spans that are younger die with their process
_WARM_UPS = 30  # rounds in which every pair of workers is to meet
_PROGRESS_S = 5.0


@dataclass(frozen=True)
class ArenaConfig:
    """What cluster stands in the arena, and how many callers press it."""

    prefill: int = 2
    decode: int = 2
    routers: int = 2
    transport: str = "auto"
    callers: int = 10
    mean_pause_s: float = 3.0


class Arena:
    """Started and stopped with `async with`; `say` gets a line for everything that happens."""

    def __init__(self, config: ArenaConfig, say: Callable[[str], None] = lambda line: None) -> None:
        self.config = config
        self.cluster: LocalCluster
        self.proxies: dict[str, Proxy] = {}
        self._say = say
        self._directory: Path
        self._store = SpanStore(max_traces=20_000, max_spans=1_000_000)
        self._resources = AsyncExitStack()
        self._used_ports: set[int] = set()
        self._seen: set[psutil.Process] = set()  # told apart also where a pid is used again

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._resources.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._resources.aclose()

    def left_behind(self) -> list[str]:
        """After the end: processes and ports of the cluster that are still there."""
        return checks.left_behind(self._seen, self._used_ports)

    async def warm_up(self, runs: Sequence[Run]) -> None:
        """Has every run asked for several times at once, until every pair of workers has met.

        What a link takes is then there before anything is counted.
        """
        pairs = self.config.prefill * self.config.decode
        async with AsyncClient(self.cluster.targets) as client:
            for salt in map(str, range(_WARM_UPS)):
                wishes = [Wish(run, len(run.whole.token_ids), salt) for run in (*runs, *runs)]
                await asyncio.gather(*(ask(client, wish) for wish in wishes))
                if len((await client.status())["pairs"]) >= pairs:
                    return
        raise AssertionError(f"not all {pairs} pairs have met after {_WARM_UPS} rounds")

    async def round(self, runs: Sequence[Run], seed: int, seconds: float) -> Tally:
        """One round of faults under load, with everything checked at its end."""
        tally = Tally()
        before = await checks.holdings(self.cluster, self._directory)
        injector = self._injector()
        processes = {p.name: p.role for p in self.cluster.processes.values()}
        faults = plan(seed, seconds, processes, self.config.mean_pause_s)
        endings: list[tuple[Wish, Ending]] = []
        async with AsyncClient(self.cluster.targets) as client:
            on_end = lambda wish, ending: endings.append((wish, ending))  # noqa: E731
            gateways = dict(zip(self._routers(), self.cluster.http_addresses, strict=True))
            load = Load(client, gateways, runs, seed, self.config.callers, on_end)
            progress = asyncio.create_task(self._tell_progress(load, injector))
            try:
                until_s = asyncio.get_running_loop().time() + seconds
                await asyncio.gather(injector.run(faults), load.run(until_s))
            finally:
                progress.cancel()
        self._judge(endings, injector, tally)
        tally.faults, tally.skipped = injector.done, injector.skipped
        tally.kv_faults = self._spoilt()
        await self._check_peace(tally, before)
        await self._check_traces(endings, injector, tally)
        return tally

    def _judge(
        self, endings: Sequence[tuple[Wish, Ending]], injector: Injector, tally: Tally
    ) -> None:
        for wish, ending in endings:
            while_s = (ending.began_s, ending.ended_s)
            # While one router is well, the SDK goes on there, whatever has been delivered.
            excused = injector.routers_hurt(*while_s, every=True)
            if wish.http:  # goes on nowhere else, but is cut only by its own router's death
                excused = injector.router_hurt(ending.router, *while_s, killed=ending.broke == CUT)
            role_down = injector.role_down(*while_s)
            wrong = complaint(wish, ending, excused, role_down)
            tally.count(ending, wrong, role_down or injector.routers_hurt(*while_s))
            if wrong:
                tally.violations.append(f"a request of {wish}: {wrong}")

    async def _check_peace(self, tally: Tally, before: dict[int, checks.Held]) -> None:
        """Everybody back, nothing held, nothing leaked."""
        self._note_processes()
        try:
            await self.cluster.wait_ready(PEACE_S)
        except DeadlineExceeded as error:
            tally.violations.append(str(error))
            return
        self._note_processes()
        busy = await checks.wait_idle(self.cluster)
        tally.busy_workers += len(busy)
        tally.violations += [f"{worker} holds {what}" for worker, what in busy.items()]
        routers = await checks.busy_routers(self.cluster.addresses)
        tally.violations += [f"router {address}: {what}" for address, what in routers.items()]
        tally.violations += await checks.wait_no_leaks(self.cluster, self._directory, before)
        tally.violations += await checks.memory_of_the_dead(self.cluster)

    async def _check_traces(
        self, endings: Sequence[tuple[Wish, Ending]], injector: Injector, tally: Tally
    ) -> None:
        """Every completed request has one whole trace, but for spans that died in a process."""
        end_s = asyncio.get_running_loop().time() + TRACE_S
        for _, ending in endings:
            if ending.completion is None:
                continue
            killed = injector.killed(ending.began_s, ending.ended_s + _EXPORT_S)
            left_s = 0.0 if killed else end_s - asyncio.get_running_loop().time()
            tally.traces += 1
            if await self._is_whole(ending.completion.trace_id, left_s):
                continue
            if killed:
                tally.excused_traces += 1
            else:
                tally.torn_traces += 1
                spans = self._store.trace(ending.completion.trace_id)
                tally.violations.append(f"a trace is torn: {_orphans(spans)}")

    async def _is_whole(self, trace_id: str, timeout_s: float) -> bool:
        try:
            await self._store.wait_for(trace_id, is_complete, max(0.01, timeout_s))
        except DeadlineExceeded:
            return False
        return True

    async def _tell_progress(self, load: Load, injector: Injector) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            self._note_processes()
            hurt = sorted({one.name for one in injector.hurts if one.until_s is None})
            self._say(
                f"         … {load.ended} requests ended, {load.running} run; "
                f"hurt: {', '.join(hurt) or 'nobody'}"
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
            say=lambda line: self._say(f"         {line}"),
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
            kv.VARIABLE: str(self._directory / "kv.json"),
            process.HELD_VARIABLE: str(self._directory),
        }

    def _injector(self) -> Injector:
        addresses = dict(zip(self._routers(), self.cluster.addresses, strict=True))
        control = self._directory / "kv.json"
        return Injector(self.cluster, self.proxies, control, addresses.__getitem__, self._say)

    def _routers(self) -> list[str]:
        return [p.name for p in self.cluster.processes.values() if p.role == "router"]

    def _spoilt(self) -> Counter[str]:
        """KV faults that were done since this was asked last."""
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


def logs(arena: Arena) -> str:
    """The last lines of every process, for a run that went wrong."""
    return "\n\n".join(
        f"--- {child.name} (pid {child.pid}, {child.exit_status})\n{child.log_tail(60)}"
        for child in arena.cluster.processes.values()
    )


def _orphans(spans: Sequence[Span]) -> str:
    ids = {span.span_id for span in spans}
    lost = [
        f"{span.service}:{span.name}"
        for span in spans
        if span.parent_id and span.parent_id not in ids
    ]
    return f"{len(spans)} spans, without parents {lost}" if spans else "no span arrived"
