"""`baton bench serve`: warm-up, stages, report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from baton.bench.generator import Generator, Run
from baton.bench.interference import interference
from baton.bench.report import Report, Stage, report_of
from baton.bench.servers import Server, connected
from baton.bench.stats import Stats
from baton.bench.terminal import Progress
from baton.bench.workload import Interference, Settings
from baton.config import options
from baton.errors import ConfigError, Unavailable

_WARM_UP_TOKENS = 16  # most output tokens of a warm-up request
_WARM_UP = 4  # requests, all at a time
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WRITTEN = (  # of an outcome, in requests.jsonl
    "at_s", "sent_s", "status", "message", "planned_prompt_tokens", "planned_output_tokens",
    "prompt_tokens", "output_tokens", "cached_tokens", "ended_s",
)  # fmt: skip


async def run(settings: Settings, progress: Progress) -> Report:
    """Runs a benchmark; returns the report, and writes it to `output` if given.

    SIGINT or SIGTERM ends it early, with a report of the measurements so far. Raises BatonError if
    the server does not answer.
    """
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(connected(*settings.target))
        if settings.output:  # before the run, which would otherwise be for nothing
            try:
                settings.output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--output {settings.output} cannot be made: {error.strerror}"
                ) from error
        stop = stack.enter_context(_stop_on_signals(progress))
        bench = _Bench(settings, server, stop, progress)
        await bench.warm_up()
        if settings.interference:
            await bench.interfere(settings.interference)
        else:
            await bench.measure()
    report = report_of(
        _asked(settings),
        {"url": server.url, "protocol": server.protocol, "model": server.model},
        *(bench.stages, settings.slo, stop.is_set(), bench.interference, bench.further.values()),
    )
    if settings.output:
        write(settings.output, report, bench.runs)
    return report


@dataclass
class _Bench:
    """State of a benchmark."""

    settings: Settings
    server: Server
    stop: asyncio.Event
    progress: Progress
    stages: list[Stage] = field(default_factory=list)
    interference: Stats | None = None
    further: dict[str, Run] = field(default_factory=dict)  # parts of interference

    @property
    def runs(self) -> list[tuple[int | str, Run]]:
        """The measured runs, by the number of their stage or their part of interference."""
        return [*enumerate(stage.run for stage in self.stages), *self.further.items()]

    async def warm_up(self) -> None:
        """Opens connections and warms up the server; nothing is measured.

        The requests have the workload's prompt lengths, other prompts, and short outputs.
        """
        workload, load = replace(self.settings.workload, salt=0), self.settings.interference
        number = self.settings.warm_up
        if number is None:
            number = max(_WARM_UP, workload.concurrency)
        long = islice(load.prompts(workload), 1) if load else ()
        demands = (
            replace(demand, new_tokens=min(demand.new_tokens, _WARM_UP_TOKENS))
            for demand in islice(chain(long, workload.demands()), number)
        )
        generator = Generator(self.server, self.stop)
        async with self.progress.reporting("warming up", generator.run):
            done = await generator.closed_loop(demands, workload.concurrency or _WARM_UP)
        if done.outcomes and not self.stop.is_set() and not done.ok:
            first = done.outcomes[0]
            why = f"{first.status}: {first.message}"
            raise Unavailable(f"{self.server.url} answers no request: {why}")

    async def measure(self) -> None:
        """Runs all stages."""
        workload = self.settings.workload
        for value in self.settings.sweep or (None,):
            if self.stop.is_set():
                return
            stage = Stage(workload if value is None else workload.at(value), value)
            self.stages.append(stage)
            # Each stage has different prompts, or later ones would be served from caches. Salt 0
            # is the warm-up's.
            demands = replace(stage.workload, salt=len(self.stages)).demands()
            generator = Generator(self.server, self.stop)
            stage.run = generator.run
            async with self.progress.reporting(stage.workload.label, generator.run):
                if workload.concurrency:
                    limit_s = workload.duration_s
                    await generator.closed_loop(demands, workload.concurrency, limit_s)
                else:
                    await generator.open_loop(demands)

    async def interfere(self, load: Interference) -> None:
        """Measures the workload's streams with and without long prompts."""
        workload = replace(self.settings.workload, salt=1)
        alone_first = workload.seed % 2 == 0
        stats, self.further = await interference(
            self.server, workload, load, alone_first, self.stop
        )
        if not self.stop.is_set():  # statistics of a partial run are meaningless
            self.interference = stats


def write(output: Path, report: Report, runs: Iterable[tuple[int | str, Run]]) -> None:
    """Writes report.json, and requests.jsonl with all outcomes of runs, by their stage."""
    (output / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    with (output / "requests.jsonl").open("w") as lines:
        for stage, run in runs:
            for outcome in run.outcomes:
                line = {
                    "stage": stage,
                    **{name: getattr(outcome, name) for name in _WRITTEN},
                    "token_times_s": [round(time_s, 6) for time_s in outcome.token_times_s],
                    "token_counts": list(outcome.token_counts),
                }
                lines.write(json.dumps(line, separators=(",", ":")) + "\n")


@contextlib.contextmanager
def _stop_on_signals(progress: Progress) -> Iterator[asyncio.Event]:
    """An event that the first signal sets; a second signal ends the program."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    before = {signum: signal.getsignal(signum) for signum in _STOP_SIGNALS}

    def restore() -> None:
        for signum in _STOP_SIGNALS:
            if loop.remove_signal_handler(signum):
                signal.signal(signum, before[signum])

    def end_early() -> None:
        restore()
        stop.set()
        progress.say("ended early: the report is of the measurements so far")

    for signum in _STOP_SIGNALS:
        loop.add_signal_handler(signum, end_early)
    try:
        yield stop
    finally:
        restore()


def _asked(settings: Settings) -> dict[str, Any]:
    """Options of the load that differ from their defaults, and the seed."""
    given = options.values(settings) | options.values(settings.target[1])
    given = {key: value for key, value in given.items() if key not in ("slo", "output")}
    found: dict[str, Any] = json.loads(json.dumps(given, default=str))
    return {**found, "seed": settings.workload.seed}
