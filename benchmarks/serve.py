"""Whole servers under load on the same cores: streams beside long prompts, and a mixed load.

Each server runs alone, in rounds whose order rotates. The load generator runs on the same cores, as
everybody's client. All serve HTTP with prompts in token ids and ignore_eos, so that lengths are the
same for all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from baton.bench.generator import Generator
from baton.bench.interference import Interference, interference, stream_stats
from baton.bench.request import Demand, IdRange
from baton.bench.servers import RequestOptions, Server, connected
from baton.bench.stats import Stats, stats_of
from baton.bench.terminal import INTERFERENCE_ROWS, median_table
from baton.bench.workload import Lengths, Workload
from baton.config import ClusterConfig, EngineConfig, RouterLimits
from baton.errors import BatonError
from baton.local import ports
from baton.local.cluster import LocalCluster
from baton.slo import Slo
from benchmarks import checkpoint, environment
from benchmarks.child import Failed, exit_text
from benchmarks.engine.adapters.gguf_file import gguf_of
from benchmarks.environment import Missing, Rivals, console, cores, rotated, say
from benchmarks.shapes import SHAPES

SCHEMA = "baton.bench.comparison/2"
_READY_S, _END_S, _POLL_S, _TIMEOUT_S = 600.0, 20.0, 0.5, 300.0
_MOST_CONTEXT, _SLOTS = 4096, 16
_EVERY_PROMPT = 1 << 20  # longer than any: decode computes all of them itself
_IDLE_BLOCKS = 64
_WARM_UP = ((64, 24), (512, 4), (2048, 4))  # (prompt, output): every code path once
_WARM_UP_SEED = 1 << 55
_FIRST_ID = 10
LOADS = ("interference", "mixed")
# Prompts of 363 tokens on average and outputs of 58.
MIXED = Workload(
    prompt_lengths=Lengths.parse("lognormal:260,0.85,2000"),
    output_lengths=Lengths.parse("lognormal:45,0.7,256"),
)
MIXED_SLO = Slo.parse("ttft=1,tpot=0.1")
_MIXED_ROWS = (
    ("requests/s finished", "requests_per_s", 1, ".2f"),
    ("output tokens/s", "output_tokens_per_s", 1, ".0f"),
    ("TTFT p50, ms", "ttft_s.p50", 1e3, ".1f"),
    ("TTFT p95, ms", "ttft_s.p95", 1e3, ".1f"),
    ("TPOT p50, ms", "tpot_s.p50", 1e3, ".1f"),
    ("TPOT p95, ms", "tpot_s.p95", 1e3, ".1f"),
    ("ITL p50, ms", "itl_s.p50", 1e3, ".1f"),
    ("ITL p99, ms", "itl_s.p99", 1e3, ".1f"),
    ("ITL max, ms", "itl_s.max", 1e3, ".1f"),
    ("time in gaps over 200 ms, %", "long_gap_share", 100, ".2f"),
    ("goodput, requests/s", "goodput.requests_per_s", 1, ".2f"),
    ("goodput, % of requests", "goodput.share", 100, ".1f"),
    ("failed requests", "requests.failed", 1, ".0f"),
)


@dataclass(frozen=True)
class Start:
    """What every server is started with."""

    shape: str
    directory: Path
    rivals: Rivals
    log: Path
    engine: EngineConfig  # Baton's


def baton_1p1d(start: Start) -> AbstractAsyncContextManager[str]:
    """Baton as `baton up` starts it: a prefill and a decode worker that share the cores."""
    return _cluster(ClusterConfig(engine=start.engine), {})


def baton_aggregated(start: Start) -> AbstractAsyncContextManager[str]:
    """Baton with one engine on all cores: its decode worker computes prompts in chunks itself.

    The router pairs workers, so there is a prefill worker too, with a small cache: it gets nothing
    to do, and takes memory only.
    """
    limits = RouterLimits(local_prefill_max_tokens=_EVERY_PROMPT)
    pinned = ("--cpus", ",".join(map(str, cores())))
    extra = {
        "decode": ("--threads", str(len(cores())), *pinned),
        "prefill": ("--threads", "1", "--kv-blocks", str(_IDLE_BLOCKS), *pinned),
    }
    return _cluster(ClusterConfig(engine=start.engine, limits=limits), extra)


@asynccontextmanager
async def _cluster(config: ClusterConfig, extra: Mapping[str, Sequence[str]]) -> AsyncIterator[str]:
    config = replace(config, port=0, http_port=ports.free(), trace_sample=0.0)
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
    return program(argv, env, start.log)


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
    return program(argv, {}, start.log)


SERVERS: Mapping[str, Callable[[Start], AbstractAsyncContextManager[str]]] = {
    "baton-1p1d": baton_1p1d,
    "baton-aggregated": baton_aggregated,
    "vllm": vllm,
    "llama-server": llama_server,
}
# They close connections after a streamed answer without saying so in its head.
_CLOSING = frozenset({"llama-server"})


@asynccontextmanager
async def program(argv: Sequence[str], env: Mapping[str, str], log: Path) -> AsyncIterator[str]:
    """Runs a server until the block ends; its URL once it is healthy. Raises Failed."""
    port = str(ports.free())
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + _READY_S
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(*argv, "--host", "127.0.0.1", "--port", port),
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,  # so that whatever it starts can be ended with it
        )
    try:
        async with aiohttp.ClientSession() as session:
            while True:
                if process.returncode is not None:
                    raise Failed(exit_text(process.returncode, log))
                # llama-server lists models before it has loaded one: /health waits for it.
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/health") as response:
                        if response.status == 200:
                            break
                if time.monotonic() > until:
                    raise Failed(f"not ready after {_READY_S:g} s")
                await asyncio.sleep(_POLL_S)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()
            await asyncio.wait_for(process.wait(), _END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def mixed(server: Server, args: argparse.Namespace, seed: int) -> Stats:
    """Requests of mixed sizes at Poisson times; the statistics of `baton bench serve`."""
    load = replace(MIXED, rate=args.rate, duration_s=args.mixed_duration, seed=seed)
    run = await Generator(server).open_loop(load.demands())
    ok = [outcome for outcome in run.outcomes if outcome.ok]
    gaps = stream_stats(ok, (0.0, math.inf))["long_gap_share"]
    return {**stats_of(run.outcomes, run.seconds, MIXED_SLO), "long_gap_share": gaps}


async def warm_up(server: Server) -> None:
    """First-time costs, and the connections. Raises Failed when a request is not answered."""
    demands = (
        Demand(0.0, ((_WARM_UP_SEED + number, prompt),), output)
        for number, (prompt, output) in enumerate(_WARM_UP * 2)
    )
    run = await Generator(server).closed_loop(demands, 3)
    if failed := next((outcome for outcome in run.outcomes if not outcome.ok), None):
        raise Failed(f"a first request ended with {failed.status}: {failed.message}")


Results = dict[str, dict[str, list[Stats]]]  # by load, by server: one for each round


async def rounds(args: argparse.Namespace, results: Results, absent: dict[str, str]) -> None:
    """All servers in turn; one that fails is left out from then on, its results stay."""
    shape = SHAPES[args.shape]
    directory = checkpoint.directory_of(shape, args.cache)
    engine = EngineConfig(model=str(directory), dtype="bfloat16")
    load = Interference(every_s=args.every, periods=args.periods)
    rivals, ids = Rivals(args.rivals, args.llama_cpp), IdRange(_FIRST_ID, shape.vocab)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
        for round_ in range(args.rounds):
            for name in rotated([name for name in args.servers if name not in absent], round_):
                start = Start(args.shape, directory, rivals, Path(logs) / name, engine)
                options = RequestOptions(
                    ids=ids, timeout_s=_TIMEOUT_S, keep_alive=name not in _CLOSING
                )
                try:
                    async with SERVERS[name](start) as url, connected(url, options) as server:
                        await warm_up(server)
                        for kind in args.loads:
                            say(f"round {round_ + 1} of {args.rounds}: {name}, {kind}")
                            if kind == "interference":
                                found, _ = await interference(server, load, round_, round_ % 2 == 0)
                            else:
                                found = await mixed(server, args, round_ + 1)
                            results[kind].setdefault(name, []).append(found)
                except (Missing, Failed, BatonError, OSError) as error:
                    kind = "not installed" if isinstance(error, Missing) else "failed"
                    absent[name] = f"{kind}: {error}"
                    say(f"{name}: {absent[name]}")


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
    results: Results = {kind: {} for kind in args.loads}
    absent: dict[str, str] = {}
    is_partial = False
    try:
        asyncio.run(rounds(args, results, absent))
    except KeyboardInterrupt:  # the servers have been stopped on its way
        is_partial = True
    console.print(
        f"shape {args.shape}; servers and client on cores {machine['cpus']} of "
        f"{machine['processor']}, load before {machine['load_before']}; one server at a time, "
        f"{args.rounds} rounds{' (PARTIAL: ended early)' if is_partial else ''}"
    )
    for name, why in absent.items():
        console.print(f"{name}: {why}")
    for kind, rows in (("interference", INTERFERENCE_ROWS), ("mixed", _MIXED_ROWS)):
        if found := results.get(kind):
            console.print("", median_table(f"{kind}: median (min-max)", rows, found), sep="\n")
    report = {"schema": SCHEMA, "machine": machine, "partial": is_partial, "absent": absent}
    environment.write(args.json, {**report, "shape": SHAPES[args.shape].config(), **results})
    return 130 if is_partial else 0
