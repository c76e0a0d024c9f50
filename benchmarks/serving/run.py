"""`python -m benchmarks serve`: each server alone on the same cores, in rounds whose order rotates.

The load generator runs on those cores too, as everybody's client. All are asked over HTTP with
prompts in token ids, and with ignore_eos, so that lengths are the same for all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from baton.bench.demand import Demand, IdRange
from baton.bench.generator import Generator
from baton.bench.over_http import HttpServer
from baton.bench.server import Asking, Server
from baton.config import KV_DTYPES, QUANTIZATIONS, EngineConfig
from baton.errors import BatonError
from benchmarks import checkpoint, machine
from benchmarks.engine.candidates import Rivals
from benchmarks.engine.conversation import Failed, Missing
from benchmarks.serving import table
from benchmarks.serving.interference import Interference, interference
from benchmarks.serving.mixed import Mixed, capacity, mixed
from benchmarks.serving.servers import CLOSING, SERVERS, Place
from benchmarks.serving.table import Measured
from benchmarks.shapes import SHAPES, Shape

_TIMEOUT_S = 300.0
_FIRST_ID = 10
_WARM_UP = ((64, 24), (512, 4), (2048, 4))  # (prompt, output): every code path once
_WARM_UP_SEED = 1 << 55
LOADS = ("interference", "mixed")


@dataclass(frozen=True)
class Settings:
    """What is measured, with what."""

    shape: Shape
    servers: Sequence[str]
    rivals: Rivals
    cache: Path
    cpus: tuple[int, ...]
    rounds: int
    loads: Sequence[str]
    rate: float  # of the mixed load; 0: SHARE of the capacity of `capacity_of`
    capacity_of: str  # a server's name; empty: whoever has the least
    share: float
    engine: EngineConfig
    interference: Interference = field(default_factory=Interference)
    mixed: Mixed = field(default_factory=Mixed)


class Comparison:
    """One run over all servers and rounds."""

    def __init__(self, settings: Settings, say: Callable[[str], None], logs: Path) -> None:
        self.measured: dict[str, Measured] = {name: Measured() for name in settings.servers}
        self.absent: dict[str, str] = {}
        self.rate = settings.rate
        self._settings, self._say, self._logs = settings, say, logs
        self._directory = checkpoint.directory_of(settings.shape, settings.cache)

    async def run(self) -> None:
        """Capacities if they are needed, then the rounds."""
        if "mixed" in self._settings.loads and not self.rate:
            await self._measure_capacities()
        for round_ in range(self._settings.rounds):
            names = [name for name in self.measured if name not in self.absent]
            began = round_ % max(1, len(names))
            for name in [*names[began:], *names[:began]]:
                await self._with(name, partial(self._measure, name, round_))

    async def _measure_capacities(self) -> None:
        settings = self._settings
        for name in [settings.capacity_of] if settings.capacity_of else settings.servers:
            await self._with(name, partial(self._measure_capacity, name))
        known = [one.capacity for one in self.measured.values() if one.capacity]
        if not known:
            raise SystemExit("no server's capacity is known: give --rate")
        self.rate = settings.share * min(known)
        self._say(f"mixed load: {self.rate:.2f} requests/s")

    async def _measure_capacity(self, name: str, server: Server) -> None:
        self._say(f"{name}: capacity for the mixed load")
        found = await capacity(server, self._settings.mixed, 0)
        self.measured[name].capacity = found
        self._say(f"{name}: {found:.2f} requests/s")

    async def _measure(self, name: str, round_: int, server: Server) -> None:
        settings, one = self._settings, self.measured[name]
        which = f"round {round_ + 1} of {settings.rounds}: {name}"
        if "interference" in settings.loads:
            self._say(f"{which}, interference")
            alone_first = round_ % 2 == 0
            one.interference.append(
                await interference(server, settings.interference, round_, alone_first)
            )
        if "mixed" in settings.loads:
            self._say(f"{which}, mixed load")
            one.mixed.append(await mixed(server, settings.mixed, self.rate, round_ + 1))

    async def _with(self, name: str, work: Callable[[Server], Awaitable[None]]) -> None:
        """Does it with the server running and warmed up; one that fails is left out from then on.

        What it did until then stays.
        """
        settings = self._settings
        log = self._logs / f"{name}.log"
        place = Place(settings.shape, self._directory, settings.rivals, log, settings.engine)
        try:
            async with SERVERS[name](place) as url, self._client(name, url) as server:
                self._say(f"{name} serves at {url}")
                await _warm_up(server)
                await work(server)
        except Missing as reason:
            self._leave_out(name, f"not installed: {reason}")
        except (Failed, BatonError, OSError) as failure:
            self._leave_out(name, f"failed: {failure}")

    def _leave_out(self, name: str, why: str) -> None:
        self.absent[name] = why
        self._say(f"{name}: {why}")

    @asynccontextmanager
    async def _client(self, name: str, url: str) -> AsyncIterator[Server]:
        ids = IdRange(_FIRST_ID, self._settings.shape.vocab)
        asking = Asking(ids=ids, timeout_s=_TIMEOUT_S, keep_alive=name not in CLOSING)
        server = HttpServer(url, asking)
        try:
            await server.connect()
            yield server
        finally:
            await server.close()


async def _warm_up(server: Server) -> None:
    """First-time costs, and the connections. Raises Failed when nothing is answered."""
    demands = (
        Demand(0.0, ((_WARM_UP_SEED + number, prompt),), output)
        for number, (prompt, output) in enumerate(_WARM_UP * 2)
    )
    run = await Generator(server, asyncio.Event()).closed_loop(demands, 3, 0.0)
    failures = [outcome for outcome in run.outcomes if not outcome.ok]
    if failures:
        raise Failed(f"a first request ended with {failures[0].status}: {failures[0].message}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    parser.add_argument(
        "--servers",
        type=_names(SERVERS),
        default=tuple(SERVERS),
        metavar="NAME,...",
        help=f"of {', '.join(SERVERS)} (default: all)",
    )
    parser.add_argument(
        "--loads", type=_names(LOADS), default=LOADS, metavar="NAME,...", help="default: both"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument(
        "--rate",
        type=float,
        default=0.0,
        metavar="R",
        help="of the mixed load, requests a second (default: --share of a measured capacity)",
    )
    parser.add_argument("--share", type=float, default=0.6, metavar="X", help="default: 0.6")
    parser.add_argument(
        "--capacity-of",
        choices=SERVERS,
        default="",
        help="whose (default: that of the server with the least)",
    )
    for option, default, text in (
        ("--every", Interference.every_s, "seconds from one long prompt to the next"),
        ("--periods", Interference.periods, "long prompts in each window"),
        ("--mixed-duration", Mixed.duration_s, "seconds in which requests of the mixed load begin"),
        ("--capacity-duration", Mixed.capacity_s, "seconds of measuring a capacity"),
    ):
        parser.add_argument(
            option, type=type(default), default=default, metavar="N", help=f"{text}: {default:g}"
        )
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none", help="Baton's")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="Baton's")
    parser.add_argument("--chunk-tokens", type=int, default=EngineConfig.chunk_tokens, metavar="N",
                        help=f"Baton's, default: {EngineConfig.chunk_tokens}")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Measures what the command line asks for."""
    os.sched_setaffinity(0, args.cpus)  # this process and all that it starts
    directory = checkpoint.directory_of(SHAPES[args.shape], args.cache)
    settings = Settings(
        shape=SHAPES[args.shape],
        servers=args.servers,
        rivals=Rivals(args.rivals, args.llama_cpp),
        cache=args.cache,
        cpus=args.cpus,
        rounds=args.rounds,
        loads=args.loads,
        rate=args.rate,
        capacity_of=args.capacity_of,
        share=args.share,
        engine=EngineConfig(
            model=str(directory),
            dtype="bfloat16",
            quantization=args.quantization,
            kv_dtype=args.kv_dtype,
            chunk_tokens=args.chunk_tokens,
        ),
        interference=Interference(every_s=args.every, periods=args.periods),
        mixed=Mixed(duration_s=args.mixed_duration, capacity_s=args.capacity_duration),
    )
    report = asyncio.run(run(settings, lambda line: print(line, file=sys.stderr, flush=True)))
    print("\n".join(report["text"]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 130 if report["partial"] else 0


async def run(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The report."""
    told = machine.about(settings.cpus, len(settings.cpus))
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
        comparison = Comparison(settings, say, Path(logs))
        is_partial = not await _ended(comparison.run())
    head = (
        f"shape {settings.shape.name}; servers and client on cores {told['cpus']} of "
        f"{told['processor']}, load before {told['load_before']}; one server at a time, "
        f"{settings.rounds} rounds{' (PARTIAL: ended early)' if is_partial else ''}"
    )
    rate = [f"mixed load: {comparison.rate:.2f} requests/s"] if comparison.rate else []
    absent = [f"{name}: {reason}" for name, reason in comparison.absent.items()]
    return {
        "schema": table.SCHEMA,
        "machine": told,
        "partial": is_partial,
        "shape": settings.shape.config(),
        "loads": {
            "interference": asdict(settings.interference),
            "mixed": {**asdict(settings.mixed), "rate": comparison.rate},
        },
        "absent": comparison.absent,
        "servers": table.json_of(comparison.measured),
        "text": [head, *rate, *absent, "", *table.text_of(comparison.measured)],
    }


async def _ended(work: Coroutine[None, None, None]) -> bool:
    """Whether it ran to its end; ctrl-C or SIGTERM ends it early, with what there is by then."""
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    try:
        await work
    except asyncio.CancelledError:  # the servers have been stopped on its way
        task.uncancel()
        return False
    return True


def _names(known: Container[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is not known")
        return names

    return parse
