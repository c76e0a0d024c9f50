"""What does a handoff cost beyond computing and copying, from the traces of a 1P1D cluster?

Requests go one after the other, at rest and beside six running streams. What counts is the time
from the end of a prompt's last chunk on the prefill worker to the first decode step that it is in;
the processes share one clock. `bookkeeping` is that without the wait for the step that decode was
in, and less the time of one memcpy of what was put after the last chunk. `hidden` is the share of
the transfer's time that had passed before the last chunk ended.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from baton.bench.generator import Generator
from baton.bench.request import Demand
from baton.bench.stats import percentile
from baton.bench.terminal import table
from baton.bench.workload import Lengths, Workload
from baton.config import ClusterConfig, EngineConfig
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore
from benchmarks.environment import console
from benchmarks.scenarios.common import connected


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


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="directory of a model")
    add("--dtype", default="bfloat16", help="float32 or bfloat16")
    add("--transport", default="shm", help="shm or gloo")
    add("--lengths", type=int, nargs="+", default=(64, 256, 512, 1024, 1900), help="of prompts")
    add("--repeats", type=int, default=40, help="requests for each length: 40")


async def main(args: argparse.Namespace) -> None:
    bytes_per_ms = memcpy_bytes_per_ms()
    console.print(f"memcpy: {bytes_per_ms / 1e6:.1f} GB/s")
    store, known = SpanStore(100_000, 2_000_000), 0
    engine = EngineConfig(model=args.model, dtype=args.dtype)
    async with OtlpReceiver(store) as receiver:
        config = ClusterConfig(
            engine=engine, port=0, transport=args.transport, otlp=receiver.address
        )
        async with LocalCluster(config) as cluster, connected(cluster.address) as server:
            warm = Demand(0.0, ((1 << 70, max(args.lengths)),), 8)  # opens the link
            await Generator(server).closed_loop([warm], 1)
            for streams in (0, 6):
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
                console.print("", table_of(title, costs[known:], bytes_per_ms), sep="\n")
                known = len(costs)


def table_of(title: str, costs: Sequence[HandoffCost], bytes_per_ms: float) -> Table:
    """Medians for each prompt length."""
    parts = ("chunks", "notice", "last_put", "commit", "wait", "hidden")
    rows = []
    for length in sorted({cost.prompt_tokens for cost in costs}):
        some = [cost for cost in costs if cost.prompt_tokens == length]
        kept = [cost.bookkeeping(bytes_per_ms) for cost in some]
        medians = (statistics.median(getattr(cost, part) for cost in some) for part in parts)
        numbers = [*medians, percentile(kept, 50), percentile(kept, 99)]
        rows.append([f"{length} tokens", *(f"{number:.2f}" for number in numbers)])
    return table(title, (*parts, "bookkeeping p50", "p99"), rows)
