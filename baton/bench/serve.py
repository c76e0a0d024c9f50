"""`baton bench serve`: warm-up, then each stage in turns between the servers, then the report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from baton import config
from baton.bench.demand import Demand
from baton.bench.generator import Generator, Run
from baton.bench.over_grpc import GrpcServer
from baton.bench.over_http import HttpServer
from baton.bench.page import page_of
from baton.bench.progress import Progress
from baton.bench.report import Report, ServerTold, Stage, WorkloadTold, report_of, stitched
from baton.bench.server import Asking, Server
from baton.bench.slo import Slo
from baton.bench.workload import Workload
from baton.errors import ConfigError, Unavailable

_WARM_UP_TOKENS = 16  # of output at most: enough to touch every part of a server
_WARM_UP_SALT = 0  # apart from those of stages: a warm-up must not fill caches for the run
_WARM_UP_AT_A_TIME = 4
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Settings:
    """What a run is to do."""

    workload: Workload
    targets: Sequence[tuple[str, Asking]]  # one, or two that are compared
    sweep: Sequence[float] = ()
    slo: Slo | None = None
    warm_up: int = 4
    blocks: int = 4  # turns that each server has in a stage, when there are two
    output: Path = field(default_factory=Path)


async def run(settings: Settings, progress: Progress) -> Report:
    """Runs it and writes report.json, report.html and requests.jsonl; returns the report.

    SIGINT or SIGTERM ends it early, with a report of what has been measured. Raises BatonError
    when a server does not answer.
    """
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(_server(*t)) for t in settings.targets]
        told = await _connected(servers)
        _make(settings.output)
        stop = stack.enter_context(_stop_on_signals(progress))
        bench = _Bench(settings, servers, told, stop, progress)
        for server, one in zip(servers, told, strict=True):
            await bench.warm_up(server, one)
        await bench.measure()
    report = report_of(_workload(settings), told, bench.stages, settings.slo, stop.is_set())
    write(settings.output, report, bench.stages)
    return report


class _Bench:
    """The stages of one run as they are driven."""

    def __init__(
        self,
        settings: Settings,
        servers: Sequence[Server],
        told: Sequence[ServerTold],
        stop: asyncio.Event,
        progress: Progress,
    ) -> None:
        self.stages: list[Stage] = []
        self._settings, self._servers, self._told = settings, servers, told
        self._stop, self._progress = stop, progress

    async def warm_up(self, server: Server, told: ServerTold) -> None:
        """Connections are opened and code paths warmed; nothing of it is measured."""
        settings = self._settings
        generator = Generator(server, self._stop)
        most = settings.workload.concurrency or _WARM_UP_AT_A_TIME
        demands = _warm_up_demands(settings)
        async with self._progress.of(f"warming up {told['name']}", generator.run):
            done = await generator.closed_loop(demands, most, 0.0)
        if done.outcomes and not self._stop.is_set() and not any(o.ok for o in done.outcomes):
            first = done.outcomes[0]
            raise Unavailable(f"{told['url']} answers no request: {first.status}: {first.message}")

    async def measure(self) -> None:
        """All stages, one after the other."""
        workload = self._settings.workload
        values: Sequence[float | None] = self._settings.sweep or (None,)
        for value in values:
            if self._stop.is_set():
                break
            self.stages.append(Stage(workload if value is None else workload.at(value), value))
            await self._stage(self.stages[-1])

    async def _stage(self, stage: Stage) -> None:
        turns = self._settings.blocks if len(self._servers) > 1 else 1
        blocks = [
            self._prompts_of(stage, place).blocks(turns) for place in range(len(self._servers))
        ]
        for turn in range(turns):
            if self._stop.is_set():
                break
            runs = [Run() for _ in self._servers]
            stage.blocks.append(runs)
            # Who begins alternates, so that a machine that warms up or slows down favours nobody.
            for i in range(len(runs))[:: 1 if turn % 2 == 0 else -1]:
                runs[i] = await self._block(stage.workload, i, *blocks[i][turn])

    def _prompts_of(self, stage: Stage, place: int) -> Workload:
        """Each stage and server has prompts of its own: else the second is served from caches."""
        salt = len(self.stages) * len(self._servers) + place
        return replace(stage.workload, salt=salt)

    async def _block(
        self, workload: Workload, place: int, demands: Iterator[Demand], limit_s: float
    ) -> Run:
        generator = Generator(self._servers[place], self._stop)
        name = f" → {self._told[place]['name']}" if len(self._servers) > 1 else ""
        async with self._progress.of(f"{workload.label}{name}", generator.run):
            if workload.concurrency:
                return await generator.closed_loop(demands, workload.concurrency, limit_s)
            return await generator.open_loop(demands)


def _make(output: Path) -> None:
    """The directory for the report: before the run, which would otherwise be for nothing."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be made: {error.strerror}") from error


def write(output: Path, report: Report, stages: Sequence[Stage]) -> None:
    """The three files; requests.jsonl has what every figure was made of."""
    (output / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    (output / "report.html").write_text(page_of(report))
    with (output / "requests.jsonl").open("w") as lines:
        for place, stage in enumerate(stages):
            for i, server in enumerate(report["servers"]):
                for outcome in stitched([block[i] for block in stage.blocks]):
                    line = {"stage": place, "server": server["name"], **outcome.to_json()}
                    lines.write(json.dumps(line, separators=(",", ":")) + "\n")


@asynccontextmanager
async def _server(url: str, asking: Asking) -> AsyncIterator[Server]:
    server: Server
    if url.startswith(("http://", "https://")):
        server = HttpServer(url, asking)
    elif "://" not in url or url.startswith("grpc://"):
        address = url.removeprefix("grpc://")
        config.split_address(address, "--target")
        server = GrpcServer(address, asking)
    else:
        raise ConfigError(f"{url} is no server: give HOST:PORT, grpc://HOST:PORT or an http URL")
    try:
        yield server
    finally:
        await server.close()


async def _connected(servers: Sequence[Server]) -> list[ServerTold]:
    return [
        ServerTold(
            name="AB"[i], url=server.url, protocol=server.protocol, model=await server.connect()
        )
        for i, server in enumerate(servers)
    ]


def _warm_up_demands(settings: Settings) -> Iterator[Demand]:
    """Requests of the run's sizes, with prompts of their own and short outputs."""
    workload = replace(settings.workload, salt=_WARM_UP_SALT)
    for demand in islice(workload.demands(), settings.warm_up):
        yield replace(demand, new_tokens=min(demand.new_tokens, _WARM_UP_TOKENS))


@contextlib.contextmanager
def _stop_on_signals(progress: Progress) -> Iterator[asyncio.Event]:
    """An event that the first signal sets; the second one ends the program as usual."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    before = {signum: signal.getsignal(signum) for signum in _STOP_SIGNALS}

    def restore() -> None:
        for signum in _STOP_SIGNALS:
            if loop.remove_signal_handler(signum):
                signal.signal(signum, before[signum])

    def end_early() -> None:
        restore()
        stop.set()
        progress.say("ended early: the report is of what has been measured")

    for signum in _STOP_SIGNALS:
        loop.add_signal_handler(signum, end_early)
    try:
        yield stop
    finally:
        restore()


def _workload(settings: Settings) -> WorkloadTold:
    workload, asking = settings.workload, settings.targets[0][1]
    is_open, is_made_up = not workload.concurrency, workload.trace is None
    return WorkloadTold(
        rate=None if settings.sweep else workload.rate or None,
        sweep=list(settings.sweep),
        concurrency=workload.concurrency or None,
        arrivals=workload.arrivals if is_open and is_made_up else None,
        burstiness=workload.burstiness if workload.arrivals == "bursty" else None,
        count=workload.count or None,
        duration_s=workload.duration_s or None,
        prompt_tokens=str(workload.prompt_lengths) if is_made_up else None,
        output_tokens=str(workload.output_lengths) if is_made_up else None,
        shared_prefix=workload.shared_prefix,
        prefixes=workload.prefixes if workload.shared_prefix else 0,
        trace=workload.trace.name if workload.trace else None,
        rate_scale=None if is_made_up else workload.scale.rate,
        length_scale=None if is_made_up else workload.scale.length,
        seed=workload.seed,
        prompt_form=asking.prompt_form,
        ignore_eos=asking.ignore_eos,
        timeout_s=asking.timeout_s,
    )
