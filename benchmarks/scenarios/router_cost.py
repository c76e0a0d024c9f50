"""What do a router and its HTTP gateway cost, with workers that take no time?

Workers are simulated with steps of no length, so what is left is Python and gRPC. A request is a
chat message of about 70 tokens: template, tokenizer, Reserve, a prefill call with a real handoff,
and 32 tokens of output; over gRPC, over HTTP, and over HTTP as one whole answer. One caller shows
latencies: the first output bounds a token's way from a worker to its caller. Many callers show the
CPU time of each process for 1,000 requests and, for the router, for a token of output as well, in
`json.dumps` of one chunk of OpenAI's stream: measured in the same run, that makes machines
comparable. Then workers that are timers send the time as a token: the delay from a worker to the
chunk of a stream, with and without other callers. In the end requests wait for workers that are
full: the router's memory for each of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from baton.bench import servers
from baton.bench.generator import Generator, Run
from baton.bench.request import RequestOptions
from baton.bench.servers import Server
from baton.bench.stats import Figure, percentile
from baton.bench.terminal import median_table
from baton.bench.workload import Lengths, Workload
from baton.cli.options import count
from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig, RouterLimits
from baton.local import ports
from baton.local.cluster import LocalCluster
from baton.tables import align
from benchmarks.environment import cores, machine, rotated
from benchmarks.scenarios import fleet_workers

_WARM_UP = 64
_CHAT_WORDS = 58  # of a prompt: 70 tokens with the template
_DUMPS = 20_000
_FIRST_CHUNKS = 220  # of which the first tenth warms up
_WAITING_TOKENS = (64, 1024)  # of prompts that wait; in this order, as memory does not shrink
_FULL_BLOCKS = 96  # of a worker that few of them fill
_WAIT_S, _POLL_S = 120.0, 0.25
_PATIENT_S = 1e5  # a deadline that such a queue is expected to miss would refuse requests
_KIB = 1024

# Over HTTP or gRPC, and options of the requests.
KINDS: Mapping[str, tuple[bool, dict[str, Any]]] = {
    "gRPC": (False, {}),
    "HTTP": (True, {}),
    "HTTP, whole": (True, {"stream": False}),
}
FIGURES = (
    Figure("prompt tokens", "prompt_tokens", 1, ".0f"),
    Figure("one caller: first output p50, ms", "first_s", 1e3, ".2f"),
    Figure("one caller: end p50, ms", "end_s", 1e3, ".2f"),
    Figure("requests/s", "per_s", 1, ".0f"),
    Figure("CPU s per 1,000: router", "router", 1, ".2f"),
    Figure("the same a token, in json.dumps", "dumps", 1, ".1f"),
    Figure("CPU s per 1,000: prefill worker", "prefill-0", 1, ".2f"),
    Figure("decode worker, event loop", "event loop", 1, ".2f"),
    Figure("decode worker, engine", "engine", 1, ".2f"),
    Figure("decode worker, others", "others", 1, ".2f"),
    Figure("client", "client", 1, ".2f"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=count, default=1000, help="of each kind in a round: 1000")
    add("--callers", type=count, default=32, help="32")
    add("--tokens", type=count, default=32, help="of output: 32")
    add("--rounds", type=count, default=3, help="whose medians are shown: 3")
    text = "of the router: 1; gRPC's one connection reaches one, HTTP's one for each caller all"
    add("--router-processes", type=int, default=1, metavar="N", help=text)
    add("--waiting", type=int, default=2000, help="requests that wait: 2000; 0 leaves that out")
    add("--beside", type=Path, metavar="DIR", help="another checkout, in turns with this one")


async def main(args: argparse.Namespace) -> None:
    if 0 < args.waiting <= _FULL_BLOCKS:
        raise SystemExit(f"--waiting: {_FULL_BLOCKS} run at once; give more than that, or 0")
    here = machine(cores(), len(cores()))
    print(f"{here['processor']}, {len(cores())} cores, load before {here['load_before']}")
    checkouts = {"": None} if args.beside is None else {"": None, " beside": args.beside.resolve()}
    results: dict[str, list[dict[str, float]]] = {}
    # The demo model for its tokenizer: without one, streams over HTTP would carry empty texts.
    engine = EngineConfig(simulate="1e9,0", prefix_cache=False)
    async with AsyncExitStack() as stack:
        clusters = {
            name: await stack.enter_async_context(
                _cluster(directory, engine, router_processes=args.router_processes)
            )
            for name, directory in checkouts.items()
        }
        cases = [(kind, name) for kind in KINDS for name in clusters]
        for round_ in range(args.rounds):
            dumps_s = _dumps_s()
            print(f"round {round_ + 1}: one json.dumps takes {dumps_s * 1e6:.2f} µs")
            for kind, name in rotated(cases, round_):
                found = await _measure(args, clusters[name], kind, round_)
                found["dumps"] = found["router"] / (1000 * args.tokens) / dumps_s
                results.setdefault(kind + name, []).append(found)
        for name, cluster in clusters.items():
            async with AsyncClient(cluster.address) as client:
                counts = (await client.status())["router"]["counts"]
            print(f"requests{name}: {counts['served']}")
    rows = [["a first token, to its chunk", "p50, ms", "p99, ms"]]
    rows += [row for name, of in checkouts.items() for row in await _first_chunks(args, name, of)]
    columns = {kind + name: results[kind + name] for kind, name in cases}
    print("", *median_table(f"{args.callers} callers", FIGURES, columns), sep="\n")
    print("", *align(rows), sep="\n")
    if args.waiting:
        waits = [["requests that wait", "number", "KiB of router each"]]
        waits += [row for name, of in checkouts.items() for row in await _waiting(args, name, of)]
        print("", *align(waits), sep="\n")


@asynccontextmanager
async def _cluster(
    checkout: Path | None,
    engine: EngineConfig,
    programs: Mapping[str, Sequence[str]] | None = None,
    router_processes: int = 1,
    **limits: Any,
) -> AsyncIterator[LocalCluster]:
    config = ClusterConfig(
        engine=engine,
        limits=RouterLimits(**limits),
        router_processes=router_processes,
        port=0,
        http_port=ports.free(),
    )
    programs, env = {**(programs or {})}, {}
    if checkout is not None:
        program = (sys.executable, "-P", "-m", "baton")  # -P: not that of this directory
        programs = dict.fromkeys(("router", "prefill", "decode"), program) | programs
        env = {"PYTHONPATH": str(checkout)}
    async with LocalCluster(config, programs=programs, env=env) as cluster:
        yield cluster


async def _measure(
    args: argparse.Namespace, cluster: LocalCluster, kind: str, round_: int
) -> dict[str, float]:
    """One kind of requests, by names of FIGURES."""
    is_http, options = KINDS[kind]
    url = f"http://{cluster.http_addresses[0]}" if is_http else cluster.address
    pids = {process.name: process.pid for process in cluster.processes.values()}
    load = Workload(
        prompt_lengths=Lengths(_CHAT_WORDS, _CHAT_WORDS),
        output_lengths=Lengths(args.tokens, args.tokens),
    )

    async def send(server: Server, part: int, count: int, callers: int) -> Run:
        demands = replace(load, concurrency=callers, count=count, seed=round_ << 2 | part).demands()
        run = await Generator(server).closed_loop(demands, callers)
        assert run.ok == count, next(o for o in run.outcomes if not o.ok).message
        return run

    async with servers.connected(url, RequestOptions(prompt_form="chat", **options)) as server:
        await send(server, 0, _WARM_UP, args.callers)
        alone = (await send(server, 1, max(1, args.requests // 4), 1)).outcomes
        before = _cpu_s(pids)
        run = await send(server, 2, args.requests, args.callers)
        after = _cpu_s(pids)
    return {
        "prompt_tokens": percentile((o.prompt_tokens for o in run.outcomes), 50),
        "first_s": percentile((o.ttft_s or 0.0 for o in alone), 50),
        "end_s": percentile((o.ended_s for o in alone), 50),
        "per_s": args.requests / run.seconds,
        **{name: (after[name] - cpu_s) * 1000 / args.requests for name, cpu_s in before.items()},
    }


def _cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds so far of each process, and of the decode worker's threads."""
    all_pids = {**pids, "client": os.getpid()}
    user_system = {name: psutil.Process(pid).cpu_times()[:2] for name, pid in all_pids.items()}
    spent = {name: user_s + system_s for name, (user_s, system_s) in user_system.items()}
    spent["router"] = sum(cpu_s for name, cpu_s in spent.items() if name.startswith("router"))
    spent |= dict.fromkeys(("event loop", "engine", "others"), 0.0)
    for thread in psutil.Process(decode := pids["decode-0"]).threads():
        comm = Path(f"/proc/{decode}/task/{thread.id}/comm").read_text().strip()
        other = "engine" if comm == "engine" else "others"
        spent["event loop" if thread.id == decode else other] += sum(thread[1:])
    return spent


def _dumps_s() -> float:
    """CPU seconds of one `json.dumps` of a chunk."""
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    chunk = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "demo",
        "choices": [choice],
    }
    began = time.process_time()
    for _ in range(_DUMPS):
        json.dumps(chunk)
    return (time.process_time() - began) / _DUMPS


async def _first_chunks(
    args: argparse.Namespace, name: str, checkout: Path | None
) -> list[list[str]]:
    """From a worker's write of a first token to this process's read of its chunk, over HTTP."""
    body = {"prompt": [*range(2, 66)], "max_tokens": 2, "stream": True, "return_token_ids": True}
    program = (sys.executable, fleet_workers.__file__, "1")
    engine = EngineConfig(simulate="1e6,20")
    rows, load = [], Workload(count=1 << 30, output_lengths=Lengths(args.tokens, args.tokens))
    async with (
        _cluster(checkout, engine, dict.fromkeys(("prefill", "decode"), program)) as cluster,
        servers.connected(cluster.address, RequestOptions(prompt_form="chat")) as server,
        aiohttp.ClientSession(f"http://{cluster.http_addresses[0]}") as session,
    ):

        async def age_s() -> float:
            async with session.post("/v1/completions", json=body) as response:
                chunk = await response.content.readline()
                (token,) = json.loads(chunk.removeprefix(b"data: "))["choices"][0]["token_ids"]
                age_s = fleet_workers.first_token_age_s(token)
                await response.read()
                return age_s

        for callers in (0, args.callers):
            stop = asyncio.Event()
            others = asyncio.create_task(
                Generator(server, stop).closed_loop(load.demands(), callers)
            )
            ages_s = [await age_s() for _ in range(_FIRST_CHUNKS)][_FIRST_CHUNKS // 10 :]
            stop.set()
            await others
            what = f"{callers} other callers{name}"
            rows.append([what, *(f"{percentile(ages_s, p) * 1e3:.2f}" for p in (50, 99))])
    return rows


async def _waiting(args: argparse.Namespace, name: str, checkout: Path | None) -> list[list[str]]:
    """What requests in the queue take of the router's memory, by the length of their prompts."""
    engine = EngineConfig(simulate="1e9,1000", kv_blocks=_FULL_BLOCKS, prefix_cache=False)
    rows = []
    async with (
        _cluster(checkout, engine, max_queue=args.waiting) as cluster,
        servers.connected(cluster.address, RequestOptions(timeout_s=_PATIENT_S)) as server,
        AsyncClient(cluster.address) as client,
    ):
        router = psutil.Process(cluster.processes["router"].pid)

        async def until(least: int, most: int) -> int:
            """Returns how many wait, once they are as many as that."""
            async with asyncio.timeout(_WAIT_S):
                while True:
                    queued = int((await client.status())["router"]["queued"])
                    if least <= queued <= most:
                        return queued
                    await asyncio.sleep(_POLL_S)

        before = router.memory_info().rss
        for tokens in _WAITING_TOKENS:
            load = Workload(
                prompt_lengths=Lengths(tokens, tokens),
                output_lengths=Lengths(256, 256),
                concurrency=args.waiting,
                count=args.waiting,
            )
            stop = asyncio.Event()
            sending = asyncio.create_task(
                Generator(server, stop).closed_loop(load.demands(), args.waiting)
            )
            number = await until(args.waiting - _FULL_BLOCKS, args.waiting)
            each = (router.memory_info().rss - before) / number / _KIB
            rows.append([f"prompts of {tokens} tokens{name}", str(number), f"{each:.1f}"])
            stop.set()
            await sending
            await until(0, 0)
    return rows
