"""`baton bench serve`: warm-up, then each stage in turns between the servers, then the report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from baton.bench.generator import Generator, Run
from baton.bench.interference import interference
from baton.bench.page import page_of
from baton.bench.report import Report, Stage, report_of, stitched
from baton.bench.servers import Server, connected
from baton.bench.terminal import Progress
from baton.bench.workload import Interference, Settings
from baton.errors import ConfigError, Unavailable

_WARM_UP_TOKENS = 16  # of output at most: enough to touch every part of a server
_WARM_UP = 4  # requests, and so many at a time
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WRITTEN = (  # of an outcome, in requests.jsonl
    "at_s", "sent_s", "status", "message", "planned_prompt_tokens", "planned_output_tokens",
    "prompt_tokens", "output_tokens", "cached_tokens", "ended_s",
)  # fmt: skip


async def run(settings: Settings, progress: Progress) -> Report:
    """Runs it; returns the report, and writes its three files where there is an `output`.

    SIGINT or SIGTERM ends it early, with a report of what has been measured. Raises BatonError
    when a server does not answer.
    """
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(connected(*one)) for one in settings.targets]
        infos = [
            {"name": name, "url": one.url, "protocol": one.protocol, "model": one.model}
            for name, one in zip("AB", servers, strict=False)
        ]
        if settings.output:  # before the run, which would otherwise be for nothing
            try:
                settings.output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--output {settings.output} cannot be made: {error.strerror}"
                ) from error
        stop = stack.enter_context(_stop_on_signals(progress))
        bench = _Bench(settings, servers, stop, progress)
        for name, server in zip("AB", servers, strict=False):
            await bench.warm_up(name, server)
        if settings.interference:
            await bench.interfere(settings.interference)
        else:
            await bench.measure()
    report = report_of(
        *(_workload_info(settings), infos, bench.stages, settings.slo, stop.is_set()),
        bench.interference or None,
        bench.interference_runs,
    )
    if settings.output:
        write(settings.output, report, bench.stages)
    return report


class _Bench:
    """The stages of one run as they are driven."""

    def __init__(
        self, settings: Settings, servers: Sequence[Server], stop: asyncio.Event, progress: Progress
    ) -> None:
        self.stages: list[Stage] = []
        self.interference: list[dict[str, Any]] = []
        self.interference_runs: list[Run] = []
        self._settings, self._servers = settings, servers
        self._names = "AB"[: len(servers)]
        self._stop, self._progress = stop, progress
        self._num_turns = settings.blocks if len(servers) > 1 else 1

    async def warm_up(self, name: str, server: Server) -> None:
        """Opens connections and warms code paths; nothing of it is measured.

        The requests have the run's prompt lengths, prompts of their own and short outputs.
        """
        workload, load = replace(self._settings.workload, salt=0), self._settings.interference
        number = self._settings.warm_up
        if number is None:
            number = max(_WARM_UP, workload.concurrency)
        long = islice(load.prompts(workload), 1) if load else ()
        found = chain(long, workload.demands())
        demands = (
            replace(demand, new_tokens=min(demand.new_tokens, _WARM_UP_TOKENS))
            for demand in islice(found, number)
        )
        generator = Generator(server, self._stop)
        async with self._progress.of(f"warming up {name}", generator.run):
            concurrency = workload.concurrency or _WARM_UP
            done = await generator.closed_loop(demands, concurrency)
        if done.outcomes and not self._stop.is_set() and not done.ok:
            first = done.outcomes[0]
            raise Unavailable(f"{server.url} answers no request: {first.status}: {first.message}")

    async def measure(self) -> None:
        """All stages, one after the other."""
        workload = self._settings.workload
        for value in self._settings.sweep or (None,):
            if self._stop.is_set():
                return
            stage = Stage(workload if value is None else workload.at(value), value)
            self.stages.append(stage)
            # Each stage and server has prompts of its own: else the second is served from caches.
            # Salt 0 is the warm-up's.
            number = len(self._servers)
            blocks = [
                replace(stage.workload, salt=len(self.stages) * number + i).blocks(self._num_turns)
                for i in range(number)
            ]
            for turn, i in self._turns():
                if self._stop.is_set():
                    break
                if len(stage.blocks) == turn:
                    stage.blocks.append([Run() for _ in self._servers])
                demands, limit_s = blocks[i][turn]
                generator = Generator(self._servers[i], self._stop)
                stage.blocks[turn][i] = generator.run
                name = f" → {self._names[i]}" if number > 1 else ""
                async with self._progress.of(f"{stage.workload.label}{name}", generator.run):
                    if workload.concurrency:
                        await generator.closed_loop(demands, workload.concurrency, limit_s)
                    else:
                        await generator.open_loop(demands)

    async def interfere(self, load: Interference) -> None:
        """The interference workload in turns on each server."""
        self.interference += [{"server": name, "rounds": []} for name in self._names]
        for turn, i in self._turns():
            if self._stop.is_set():
                return
            self._progress.say(f"interference on {self._names[i]}, round {turn + 1}")
            workload = self._settings.workload
            salted = replace(workload, salt=1 + turn * len(self._servers) + i)
            alone_first = (workload.seed + turn) % 2 == 0
            stats, runs = await interference(
                self._servers[i], salted, load, alone_first, self._stop
            )
            if not self._stop.is_set():  # a round that was ended early has no meaning
                self.interference[i]["rounds"].append(stats)
            self.interference_runs += runs

    def _turns(self) -> Iterator[tuple[int, int]]:
        """(turn, server). The first server alternates: a machine that slows down favours none."""
        for turn in range(self._num_turns):
            order = range(len(self._servers))
            for i in order if turn % 2 == 0 else reversed(order):
                yield turn, i


def write(output: Path, report: Report, stages: Sequence[Stage]) -> None:
    """report.json, report.html, and requests.jsonl with the outcomes that all is made of."""
    (output / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    (output / "report.html").write_text(page_of(report))
    with (output / "requests.jsonl").open("w") as lines:
        for place, stage in enumerate(stages):
            for i, server in enumerate(report["servers"]):
                for outcome in stitched(stage.runs_of(i)):
                    line = {
                        "stage": place,
                        "server": server["name"],
                        **{name: getattr(outcome, name) for name in _WRITTEN},
                        "token_times_s": [round(time_s, 6) for time_s in outcome.token_times_s],
                        "token_counts": list(outcome.token_counts),
                    }
                    lines.write(json.dumps(line, separators=(",", ":")) + "\n")


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


def _workload_info(settings: Settings) -> dict[str, Any]:
    """The load as it was asked for, None where it does not apply."""
    workload, options = settings.workload, settings.targets[0][1]
    is_generated = workload.trace is None
    is_open = is_generated and not workload.concurrency
    return {
        "rate": workload.rate if is_open and not settings.sweep else None,
        "sweep": list(settings.sweep),
        "concurrency": workload.concurrency or None,
        "count": workload.count or None,
        "duration_s": workload.duration_s or None,
        "arrivals": workload.arrivals if is_open else None,
        "burstiness": workload.burstiness if workload.arrivals == "bursty" else None,
        "prompt_tokens": str(workload.prompt_lengths) if is_generated else None,
        "output_tokens": str(workload.output_lengths) if is_generated else None,
        "shared_prefix": workload.shared_prefix,
        "prefixes": workload.prefixes if workload.shared_prefix else 0,
        "trace": workload.trace.name if workload.trace else None,
        "rate_scale": None if is_generated else workload.scale.rate,
        "length_scale": None if is_generated else workload.scale.length,
        "seed": workload.seed,
        "prompt_form": options.prompt_form,
        "ignore_eos": not options.stop_at_eos,
        "timeout_s": options.timeout_s,
    }
