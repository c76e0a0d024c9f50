"""Whole servers under load on the same cores: streams beside long prompts, and a mixed load.

Each server runs alone, in rounds whose order rotates. The load generator runs on the same cores, as
everybody's client. All serve HTTP with prompts in token ids and ignore_eos, so that lengths are the
same for all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import aiohttp

from baton.bench import serve
from baton.bench.report import failures_of
from baton.bench.request import RequestOptions
from baton.bench.stats import FIGURES, INTERFERENCE_FIGURES, Stats
from baton.bench.terminal import Progress, median_table
from baton.bench.workload import Interference, Lengths, Settings, Workload
from baton.config import ClusterConfig, EngineConfig
from baton.config.slo import Slo
from baton.errors import BatonError
from baton.local import ports
from baton.local.cluster import LocalCluster
from baton.local.process import ChildProcess
from benchmarks import checkpoint, environment
from benchmarks.child import TAIL_LINES, Failed
from benchmarks.engine.adapters.gguf_file import gguf_of
from benchmarks.environment import Missing, Rivals, cores, rotated
from benchmarks.shapes import SHAPES

SCHEMA = "baton.bench.comparison/2"
_READY_S, _END_S, _POLL_S, _TIMEOUT_S = 600.0, 20.0, 0.5, 300.0
_MOST_CONTEXT, _SLOTS = 4096, 16
_FIRST_ID = 10
STREAMS = Workload(concurrency=6, prompt_lengths=Lengths(64, 64), output_lengths=Lengths(200, 200))
# Prompts of 363 tokens on average and outputs of 58.
MIXED = Workload(
    prompt_lengths=Lengths.parse("lognormal:260,0.85,2000"),
    output_lengths=Lengths.parse("lognormal:45,0.7,256"),
)
LOADS = ("interference", "mixed")
MIXED_SLO = Slo.parse("ttft=1,tpot=0.1")


Target = tuple[str, RequestOptions]
Variants = Mapping[str, Callable[[], AbstractAsyncContextManager[Target]]]


@dataclass
class Comparison:
    """Variants under the same loads, one at a time, in rounds whose order rotates.

    Loads are runs of `baton bench serve`, by name. A variant that fails is left out from then on;
    one whose requests fail is measured on, and named with the first reason. What there is when
    ctrl-C comes is kept.
    """

    loads: Mapping[str, Settings]
    results: dict[str, dict[str, list[Stats]]] = field(default_factory=dict)  # by load, by variant
    absent: dict[str, str] = field(default_factory=dict)  # and why
    failed: dict[str, str] = field(default_factory=dict)  # requests, and why
    is_partial: bool = False

    def run(self, variants: Variants, rounds: int) -> int:
        """Measures and prints a table for each load; the exit status."""
        self.results = {kind: {} for kind in self.loads}
        try:
            asyncio.run(self._rounds(variants, rounds))
        except KeyboardInterrupt:  # what was started has been stopped on its way
            self.is_partial = True
        for kind, load in self.loads.items():
            title = f"{kind}: median (min-max){', PARTIAL: ended early' * self.is_partial}"
            figures = INTERFERENCE_FIGURES if load.interference else FIGURES
            print("", *median_table(title, figures, self.results[kind]), sep="\n")
        for name, why in (self.absent | self.failed).items():
            print(f"{name}: {why}")
        if self.is_partial:
            return 130
        nothing = bool(self.absent) and not any(self.results.values())
        return int(nothing or bool(self.failed))

    async def _rounds(self, variants: Variants, rounds: int) -> None:
        for round_ in range(rounds):
            for name in rotated([name for name in variants if name not in self.absent], round_):
                try:
                    async with variants[name]() as target:
                        await self._round(name, round_, target)
                except (Missing, Failed, BatonError, OSError) as error:
                    kind = "not installed" if isinstance(error, Missing) else "failed"
                    self.absent[name] = f"{kind}: {error}"
                    print(f"{name}: {self.absent[name]}")

    async def _round(self, name: str, round_: int, target: Target) -> None:
        progress = Progress()
        for place, (kind, load) in enumerate(self.loads.items()):
            progress.say(f"round {round_ + 1}: {name}, {kind}")
            # No two loads have a prompt in common, all variants have the same.
            workload = replace(load.workload, seed=place << 16 | round_)
            report = await serve.run(replace(load, workload=workload, target=target), progress)
            if report["partial"]:
                raise KeyboardInterrupt
            for complaint in report["generator"]["complaints"]:
                print(f"{name}, {kind}: the generator was slow: {complaint}")
            if why := failures_of(report):
                self.failed.setdefault(name, f"{kind}: {why}")
                print(f"{name}, {kind}: {why}")
            stats = report["interference"] or report["stages"][0]["figures"]
            self.results[kind].setdefault(name, []).append(stats)


@dataclass(frozen=True)
class Start:
    """What every server is started with."""

    shape: str
    directory: Path
    rivals: Rivals


@asynccontextmanager
async def baton(start: Start, aggregated: bool = False) -> AsyncIterator[str]:
    """Baton as `baton up` starts it: a prefill and a decode worker that share the cores.

    `aggregated`: one decode worker on all cores, which computes prompts in chunks itself.
    """
    extra = {}
    if aggregated:
        pinned = ("--cpus", ",".join(map(str, cores())))
        extra = {"decode": ("--threads", str(len(cores())), *pinned)}
    engine = EngineConfig(model=str(start.directory), dtype="bfloat16")
    config = ClusterConfig(
        engine=engine, prefill=0 if aggregated else 1, port=0, http_port=ports.free(),
        trace_sample=0.0,
    )  # fmt: skip
    async with LocalCluster(config, extra_args=extra, start_timeout_s=_READY_S) as cluster:
        yield f"http://{cluster.http_addresses[0]}"


def vllm(start: Start) -> AbstractAsyncContextManager[str]:
    """vLLM's OpenAI server, its defaults but for what is set here."""
    start.rivals.need("vllm")
    argv = [
        *(start.rivals.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(start.directory), "--dtype", "bfloat16"),
        *("--max-model-len", str(_MOST_CONTEXT)),
    ]
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores())),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "LD_PRELOAD": start.rivals.preload,
    }
    return program(argv, env)


def llama_server(start: Start) -> AbstractAsyncContextManager[str]:
    """llama.cpp's server with bf16 weights and a slot for each request in flight."""
    folder, threads = start.rivals.llama_cpp, str(len(cores()))
    if folder is None or not (folder / "llama-server").is_file():
        raise Missing("no llama-server in the directory that --llama-cpp names")
    start.rivals.need("gguf")
    file = gguf_of(start.rivals.python, str(start.directory), start.shape, "bf16")
    argv = [
        *(str(folder / "llama-server"), "--model", str(file)),
        *("--threads", threads, "--threads-batch", threads),
        *("--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _MOST_CONTEXT)),
    ]
    return program(argv, {})


SERVERS: Mapping[str, Callable[[Start], AbstractAsyncContextManager[str]]] = {
    "baton-1p1d": baton,
    "baton-aggregated": partial(baton, aggregated=True),
    "vllm": vllm,
    "llama-server": llama_server,
}
# They close connections after a streamed answer without saying so in its head.
_CLOSING = frozenset({"llama-server"})


@asynccontextmanager
async def program(argv: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[str]:
    """Runs a server until the block ends; its URL once it is healthy. Raises Failed."""
    port = str(ports.free())
    url = f"http://127.0.0.1:{port}"
    process = ChildProcess("it", "server", [*argv, "--host", "127.0.0.1", "--port", port], env)
    await process.start()
    try:
        while not await _is_healthy(url):
            if process.exit_status is not None:
                await process.wait()
                raise Failed(f"{process.failure} | {process.log_tail(TAIL_LINES)}")
            if process.age_s > _READY_S:
                raise Failed(f"not ready after {_READY_S:g} s | {process.log_tail(TAIL_LINES)}")
            await asyncio.sleep(_POLL_S)
        yield url
    finally:
        await process.stop(_END_S)
        with contextlib.suppress(ProcessLookupError):  # what it started and left behind
            os.killpg(process.pid, signal.SIGKILL)


async def _is_healthy(url: str) -> bool:
    """llama-server lists models before it has loaded one: /health waits for it."""
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.request("GET", f"{url}/health") as response:
            return response.status == 200
    return False


@asynccontextmanager
async def target(name: str, start: Start) -> AsyncIterator[Target]:
    """One of the servers while it runs."""
    ids = range(_FIRST_ID, SHAPES[start.shape].vocab)
    options = RequestOptions(ids=ids, timeout_s=_TIMEOUT_S, keep_alive=name not in _CLOSING)
    async with SERVERS[name](start) as url:
        yield url, options


def add_options(parser: argparse.ArgumentParser) -> None:
    environment.add_options(parser)
    add = parser.add_argument
    names, text = environment.names, f"of {', '.join(SERVERS)} (default: all)"
    add("--servers", type=names(SERVERS), default=tuple(SERVERS), metavar="NAME,...", help=text)
    add("--loads", type=names(LOADS), default=LOADS, metavar="NAME,...", help="default: both")
    add("--rounds", type=int, default=3, metavar="N", help="default: 3")
    add("--rate", type=float, default=1.9, metavar="R", help="of the mixed load, requests/s: 1.9")
    add("--mixed-duration", type=float, default=45.0, metavar="S", help="of its arrivals: 45 s")
    add("--every", type=float, default=6.0, metavar="S", help="between long prompts: 6 s")
    add("--periods", type=int, default=4, metavar="N", help="long prompts in each window: 4")


def main(args: argparse.Namespace) -> int:
    """Measures what the command line asks for; what there is when it is interrupted, too."""
    os.sched_setaffinity(0, args.cpus)  # this process and all that it starts
    machine = environment.machine(args.cpus, len(args.cpus))
    print(
        f"shape {args.shape}; servers and client on cores {machine['cpus']} of "
        f"{machine['processor']}, load before {machine['load_before']}; one server at a time, "
        f"{args.rounds} rounds"
    )
    beside = Interference(every_s=args.every, periods=args.periods)
    mixed = replace(MIXED, rate=args.rate, duration_s=args.mixed_duration)
    known = Settings(STREAMS, interference=beside), Settings(mixed, slo=MIXED_SLO)
    loads = dict(zip(LOADS, known, strict=True))
    directory = checkpoint.directory_of(SHAPES[args.shape], args.cache)
    start = Start(args.shape, directory, Rivals(args.rivals, args.llama_cpp))
    comparison = Comparison({kind: loads[kind] for kind in args.loads})
    variants = {name: partial(target, name, start) for name in args.servers}
    status = comparison.run(variants, args.rounds)
    found = {"partial": comparison.is_partial, "absent": comparison.absent}
    found |= {"failed": comparison.failed, **comparison.results}
    shape = SHAPES[args.shape].config()
    environment.write(args.json, {"schema": SCHEMA, "machine": machine, "shape": shape, **found})
    return status
