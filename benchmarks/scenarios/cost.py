"""What serving costs: of a router, of serving around a decode engine, of a handoff."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import psutil
import torch

from baton.bench.generator import Generator
from baton.bench.request import Demand, IdRange
from baton.bench.servers import Server
from baton.bench.stats import percentile
from baton.bench.terminal import table
from baton.bench.workload import Lengths, Workload
from baton.config import ClusterConfig, EngineConfig
from baton.local import ports
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore
from benchmarks import checkpoint
from benchmarks.engine.adapters.baton import Baton
from benchmarks.engine.adapters.protocol import Setup
from benchmarks.scenarios.common import connected, console, spread
from benchmarks.shapes import SHAPES


def router_cost_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    parser.add_argument("--requests", type=int, default=1000, help="of each kind: 1000")
    parser.add_argument("--callers", type=int, default=32, help="32")
    parser.add_argument("--tokens", type=int, default=32, help="of output: 32")


async def router_cost(args: argparse.Namespace) -> None:
    """What do a router and its HTTP gateway cost, with workers that take no time?

    Workers are simulated with steps of no length, so what is left is Python and gRPC: the router,
    the control path of the workers, and the client. First one caller, for latencies; then many,
    for throughput and CPU seconds of each process for 1,000 requests. A request has a prompt of 16
    tokens, which decode computes by itself.
    """
    # The demo model for its tokenizer: without one, streams over HTTP would carry empty texts.
    engine = EngineConfig(simulate="1e9,0", prefix_cache=False)
    http = ports.free("127.0.0.1")
    config = ClusterConfig(engine=engine, port=0, http_port=http)
    load = Workload(
        prompt_lengths=Lengths(16, 16), output_lengths=Lengths(args.tokens, args.tokens)
    )
    one: list[list[str]] = []
    many: list[list[str]] = []
    async with LocalCluster(config) as cluster, AsyncExitStack() as stack:
        processes = {n: psutil.Process(p.pid) for n, p in cluster.processes.items()}
        processes["client"] = psutil.Process()
        for name, url, stream in (
            ("gRPC, streamed", cluster.address, True),
            ("HTTP, streamed", f"http://127.0.0.1:{http}", True),
            ("HTTP, whole", f"http://127.0.0.1:{http}", False),
        ):
            server = await stack.enter_async_context(connected(url, stream=stream))

            async def send(
                server: Server, seed: int, count: int, callers: int
            ) -> tuple[float, list[str]]:
                demands = replace(load, concurrency=callers, count=count, seed=seed).demands()
                run = await Generator(server).closed_loop(demands, callers)
                assert run.ok == count, run.outcomes[0].message
                return run.seconds, [
                    spread(o.ttft_s for o in run.outcomes),
                    spread(o.ended_s for o in run.outcomes),
                ]

            await send(server, 0, 50, 1)  # warms up
            _, spreads = await send(server, 1, args.requests // 2, 1)
            one.append([name, *spreads])
            before = {n: sum(p.cpu_times()[:2]) for n, p in processes.items()}
            seconds, _ = await send(server, 2, args.requests, args.callers)
            spent = [sum(p.cpu_times()[:2]) - before[n] for n, p in processes.items()]
            per_1000 = [f"{cpu_s * 1000 / args.requests:.2f}" for cpu_s in spent]
            many.append([name, f"{args.requests / seconds:.0f}", *per_1000])
    console.print(table("one caller", ("first output", "end"), one))
    columns = ("requests/s", *(f"{name}, CPU s per 1,000" for name in processes))
    console.print("", table(f"{args.callers} callers", columns, many), sep="\n")


def served_decode_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="M", help="M")
    add("--batch", type=int, default=8, help="8")
    add("--context", type=int, default=512, help="tokens of each prompt: 512")
    add("--tokens", type=int, default=400, help="that each stream gets: 400")
    add("--rounds", type=int, default=5, help="5")
    add("--quantization", choices=("none", "int8"), default="none")


async def served_decode(args: argparse.Namespace) -> None:
    """What does serving take from decoding? Tokens/s of an engine alone and through a cluster.

    Both have one thread on one core. Alone: an engine in this process. Served: as many streams
    through router, prefill and decode worker, counted from when all of them run until the first
    ends. The two take turns.
    """
    shape, batch, context, tokens = SHAPES[args.shape], args.batch, args.context, args.tokens
    all_cores = os.sched_getaffinity(0)
    core = max(all_cores)  # where the decode worker computes
    directory = checkpoint.directory_of(shape, checkpoint.default_cache())
    options = {"dtype": "bfloat16", "quantization": args.quantization}
    setup = Setup(str(directory), shape.vocab, 1, (core,), batch, context + tokens, 1, options)
    os.sched_setaffinity(0, {core})  # the engine's thread inherits it
    alone = Baton(setup)
    os.sched_setaffinity(0, all_cores)
    blocks = batch * (-(-(context + tokens) // EngineConfig.block_size) + 1)
    engine = EngineConfig(model=str(directory), kv_blocks=blocks, max_batch=batch, **options)
    load = Workload(
        concurrency=batch,
        count=batch,
        prompt_lengths=Lengths(context, context),
        output_lengths=Lengths(tokens, tokens),
    )
    shares = []
    async with (
        LocalCluster(ClusterConfig(engine=engine, port=0)) as cluster,
        connected(cluster.address, ids=IdRange(10, shape.vocab)) as server,
    ):
        for number in range(args.rounds + 1):
            timed = await asyncio.to_thread(alone.decode, batch, context, tokens // 2)
            by_engine = batch * (tokens // 2) / timed.seconds
            demands = replace(load, seed=number).demands()
            run = await Generator(server).closed_loop(demands, batch)
            assert run.ok == batch, run.outcomes[0].message
            times = [[o.sent_s + t for t in o.token_times_s[1:]] for o in run.outcomes]
            begin, end = max(t[0] for t in times), min(t[-1] for t in times)
            if end <= begin:
                raise SystemExit("a stream ended before the last one began: raise --tokens")
            got = sum(begin < at <= end for stream in times for at in stream)
            by_cluster = got / (end - begin)
            if number:  # the first warms up
                shares.append(by_cluster / by_engine)
                console.print(
                    f"alone {by_engine:.1f} tokens/s, served {by_cluster:.1f}: {shares[-1]:.1%}"
                )
    median = statistics.median(shares)
    console.print(f"serving keeps {median:.1%} (median of {len(shares)} rounds)")


@dataclass(frozen=True)
class HandoffCost:
    """One handoff; milliseconds.

    last chunk ends ── notice ── last put ── Commit, verify ── wait for a step ── first step begins
    """

    prompt_tokens: int
    chunks: int
    num_bytes: int
    notice: float  # to the first put, where there is but one chunk
    last_put: float
    commit: float  # everything else until the KV was verified
    wait: float  # from then until the first step began
    hidden: float  # share of the puts' time that had passed before the last chunk ended

    def bookkeeping(self, bytes_per_ms: float) -> float:
        """Up to the verified Commit, without one memcpy of what was put after the last chunk."""
        copied = self.num_bytes * (1 - self.hidden) / bytes_per_ms
        return self.notice + self.last_put + self.commit - copied


def cost_of(spans: Sequence[Span]) -> HandoffCost | None:
    """From a request's trace; None where nothing was handed over."""
    named: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.end_ns):
        named.setdefault(span.name, []).append(span)
    needed = ("prefill", "prefill.chunk", "kv.transfer", "decode.admit", "decode.first_step")
    if any(name not in named for name in needed):
        return None
    (transfer,), (admit,), (step,) = (named[name] for name in needed[2:])
    chunk_end, chunks = named["prefill.chunk"][-1].end_ns, len(named["prefill.chunk"])
    wire, hidden = (float(transfer.attributes[name]) for name in ("wire_ms", "hidden_ms"))
    notice = (transfer.start_ns - chunk_end) / 1e6 if chunks == 1 else 0.0
    return HandoffCost(
        prompt_tokens=int(named["prefill"][0].attributes["baton.prompt_tokens"]),
        chunks=chunks,
        num_bytes=int(transfer.attributes["bytes"]),
        notice=notice,
        last_put=wire - hidden,
        commit=(admit.start_ns - chunk_end) / 1e6 - notice - (wire - hidden),
        wait=(step.start_ns - admit.start_ns) / 1e6,
        hidden=hidden / wire if wire else 0.0,
    )


def memcpy_bytes_per_ms() -> float:
    """How fast one thread copies what no cache holds, here and now."""
    torch.set_num_threads(1)
    source, target = (torch.ones(64 << 20, dtype=torch.uint8) for _ in range(2))
    times = []
    for _ in range(7):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return len(source) / statistics.median(times) / 1e3


def handoff_cost_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default="demo", help="directory of a model")
    which.add_argument("--random-weights", metavar="CONFIG", help="made-up weights instead")
    add = parser.add_argument
    add("--dtype", default="bfloat16", help="float32 or bfloat16")
    add("--transport", default="shm", help="shm or gloo")
    add("--chunk-tokens", type=int, default=EngineConfig.chunk_tokens)
    add("--lengths", type=int, nargs="+", default=(64, 256, 512, 1024, 1900), help="of prompts")
    add("--repeats", type=int, default=40, help="requests for each length: 40")
    add("--rest-only", action="store_true", help="not beside streams")


async def handoff_cost(args: argparse.Namespace) -> None:
    """What does a handoff cost beyond computing and copying, from the traces of a 1P1D cluster?

    Requests go one after the other, at rest and beside six running streams. What counts is the time
    from the end of a prompt's last chunk on the prefill worker to the first decode step that it is
    in; the processes share one clock. `bookkeeping` is that without the wait for the step that
    decode was in, and less the time of one memcpy of what was put after the last chunk. `hidden` is
    the share of the transfer's time that had passed before the last chunk ended.
    """
    engine = EngineConfig(
        model=args.random_weights or args.model,
        random_weights=bool(args.random_weights),
        dtype=args.dtype,
        chunk_tokens=args.chunk_tokens,
    )
    bytes_per_ms = memcpy_bytes_per_ms()
    console.print(f"memcpy: {bytes_per_ms / 1e6:.1f} GB/s")
    store, known = SpanStore(100_000, 2_000_000), 0
    async with OtlpReceiver(store) as receiver, AsyncExitStack() as stack:
        config = ClusterConfig(
            engine=engine, port=0, transport=args.transport, otlp=receiver.address
        )
        cluster = await stack.enter_async_context(LocalCluster(config))
        server = await stack.enter_async_context(connected(cluster.address))
        warm = Demand(0.0, ((1 << 70, max(args.lengths)),), 8)  # opens the link
        await Generator(server).closed_loop([warm], 1)
        for streams in (0, 6)[: 1 if args.rest_only else 2]:
            stop = asyncio.Event()
            lengths = Lengths(16, 16), Lengths(400, 400)
            load = Workload(concurrency=6, prompt_lengths=lengths[0], output_lengths=lengths[1])
            running = asyncio.create_task(
                Generator(server, stop).closed_loop(load.demands(), streams)
            )
            await asyncio.sleep(1.0)
            seeds = range(streams << 40, (streams << 40) + args.repeats)
            prompts = [
                Demand(0.0, ((seed << 20 | n, n),), 8) for seed in seeds for n in args.lengths
            ]
            await Generator(server).closed_loop(prompts, 1)
            stop.set()
            await running
            await asyncio.sleep(3.0)  # all exporters have sent what they had
            costs = [c for c in map(cost_of, store.traces()) if c and c.prompt_tokens != 16]
            title = f"beside {streams} streams, ms" if streams else "at rest, ms"
            console.print("", _handoff_table(title, costs[known:], bytes_per_ms), sep="\n")
            known = len(costs)


def _handoff_table(title: str, costs: Sequence[HandoffCost], bytes_per_ms: float) -> object:
    parts = ("chunks", "notice", "last_put", "commit", "wait", "hidden")
    rows = []
    for length in sorted({cost.prompt_tokens for cost in costs}):
        some = [cost for cost in costs if cost.prompt_tokens == length]
        kept = [cost.bookkeeping(bytes_per_ms) for cost in some]
        medians = (statistics.median(getattr(cost, part) for cost in some) for part in parts)
        numbers = [*medians, percentile(kept, 50), percentile(kept, 99)]
        rows.append([f"{length} tokens", *(f"{number:.2f}" for number in numbers)])
    return table(title, (*parts, "bookkeeping p50", "p99"), rows)
