"""Measures what a handoff costs beyond computing and copying, from the traces of a 1P1D cluster.

    python scripts/handoff_cost.py

Requests go through a cluster of real processes one after the other, then beside running streams.
What counts is the time from the end of a prompt's last chunk on the prefill worker to the beginning
of the first decode step that it is in, both as their spans tell; the processes share one clock.

    last chunk ends ── notice ── last put ── Commit, verify ── wait for a step ── first step begins

`bookkeeping` is all of that, less the time in which one memcpy would copy what was put after the
last chunk, and less the wait for the step that decode was in, if any. `hidden` is the share of the
transfer's time that had passed before the last chunk ended.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore

LENGTHS = (64, 256, 512, 1024, 1900)
NEW_TOKENS = 8
STREAMS, STREAM_TOKENS = 6, 400
FLUSHED_S = 3.0  # all exporters have sent what they had
_COPIED = 64 << 20

salts = itertools.count(1)


@dataclass(frozen=True)
class Cost:
    """One handoff; milliseconds."""

    prompt_tokens: int
    chunks: int
    num_bytes: int
    notice: float  # to the first put, where there is but one chunk
    last_put: float
    commit: float  # everything else until the KV was verified
    wait: float  # from then until the first step began
    hidden: float  # share of the puts' time

    @property
    def whole(self) -> float:
        """From the last chunk's end to the first step's beginning."""
        return self.until_verified + self.wait

    @property
    def until_verified(self) -> float:
        """From the last chunk's end to the verified Commit."""
        return self.notice + self.last_put + self.commit


def cost_of(spans: Sequence[Span]) -> Cost | None:
    """What a trace tells; None where nothing was handed over."""
    named: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.end_ns):
        named.setdefault(span.name, []).append(span)
    needed = ("prefill", "prefill.chunk", "kv.transfer", "decode.admit", "decode.first_step")
    if any(len(named.get(name, ())) == 0 for name in needed):
        return None
    (transfer,), (admit,), (step,) = (named[name] for name in needed[2:])
    chunk_end = named["prefill.chunk"][-1].end_ns
    chunks = len(named["prefill.chunk"])
    told = {key: float(value) for key, value in transfer.attributes.items() if _is_number(value)}
    last_put = told["wire_ms"] - told["hidden_ms"]
    until_verified = (admit.start_ns - chunk_end) / 1e6
    notice = (transfer.start_ns - chunk_end) / 1e6 if chunks == 1 else 0.0
    return Cost(
        prompt_tokens=int(named["prefill"][0].attributes["baton.prompt_tokens"]),
        chunks=chunks,
        num_bytes=int(told["bytes"]),
        notice=notice,
        last_put=last_put,
        commit=until_verified - notice - last_put,
        wait=(step.start_ns - admit.start_ns) / 1e6,
        hidden=told["hidden_ms"] / told["wire_ms"] if told["wire_ms"] else 0.0,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def memcpy_bytes_per_ms() -> float:
    """How fast one thread copies what no cache holds, here and now."""
    torch.set_num_threads(1)
    source, target = (torch.ones(_COPIED, dtype=torch.uint8) for _ in range(2))
    times = []
    for _ in range(7):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return _COPIED / statistics.median(times) / 1e3


def prompt(length: int) -> list[int]:
    """Token ids that share no prefix with any other prompt."""
    draw = random.Random(next(salts))
    return [draw.randrange(10, 4000) for _ in range(length)]


async def ask(client: AsyncClient, length: int) -> None:
    """One request, to its end."""
    await client.generate(prompt(length), max_tokens=NEW_TOKENS, ignore_eos=True, timeout=30)


async def beside_streams(client: AsyncClient, lengths: Sequence[int], repeats: int) -> None:
    """Requests, one after the other, while streams keep decode busy."""

    async def stream() -> None:
        while True:
            await client.generate(prompt(16), max_tokens=STREAM_TOKENS, ignore_eos=True)

    running = [asyncio.create_task(stream()) for _ in range(STREAMS)]
    await asyncio.sleep(1)
    for _, length in itertools.product(range(repeats), lengths):
        await ask(client, length)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def costs_of(store: SpanStore, lengths: Sequence[int]) -> Iterator[Cost]:
    """What every trace tells whose prompt was of a length that was asked for."""
    for spans in store.traces():
        cost = cost_of(spans)
        if cost is not None and cost.prompt_tokens in lengths:
            yield cost


def show(title: str, costs: Sequence[Cost], bytes_per_ms: float) -> None:
    """Medians by length, and p50 and p99 of what is nobody's work."""
    print(f"\n{title}\n tokens chunks    KiB | notice last put commit   wait |  whole p50    p99"
          " | bookkeeping p50    p99 | hidden", flush=True)  # fmt: skip
    for length in sorted({cost.prompt_tokens for cost in costs}):
        some = [cost for cost in costs if cost.prompt_tokens == length]
        parts = ("chunks", "num_bytes", "notice", "last_put", "commit", "wait", "hidden")
        mid = {name: statistics.median(getattr(cost, name) for cost in some) for name in parts}
        whole = _percentiles([cost.whole for cost in some])
        kept = _percentiles([bookkeeping(cost, bytes_per_ms) for cost in some])
        print(
            f"{length:>7} {mid['chunks']:>6.0f} {mid['num_bytes'] / 1024:>6.0f} |"
            f" {mid['notice']:>6.2f} {mid['last_put']:>8.2f} {mid['commit']:>6.2f}"
            f" {mid['wait']:>6.2f} | {whole} | {kept:>22} | {100 * mid['hidden']:>4.0f} %"
        )


def bookkeeping(cost: Cost, bytes_per_ms: float) -> float:
    """What is left of it, without the copy and without decode's step."""
    put_late = cost.num_bytes * (1 - cost.hidden)
    return cost.until_verified - put_late / bytes_per_ms


def _percentiles(values: Sequence[float]) -> str:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return f"{cuts[49]:>9.2f} {cuts[98]:>6.2f}"


async def measure(config: ClusterConfig, lengths: Sequence[int], repeats: int, load: bool) -> None:
    """Everything on one cluster whose spans are kept here."""
    bytes_per_ms = memcpy_bytes_per_ms()
    print(f"memcpy: {bytes_per_ms / 1e6:.1f} GB/s", flush=True)
    store = SpanStore(100_000, 2_000_000)
    async with OtlpReceiver(store) as receiver:
        here = dataclasses.replace(config, otlp=receiver.address)
        async with LocalCluster(here) as cluster, AsyncClient(cluster.address) as client:
            await ask(client, max(lengths))  # opens the link
            for title, work in (
                ("at rest", partial(at_rest, client, lengths, repeats)),
                (f"beside {STREAMS} streams", partial(beside_streams, client, lengths, repeats)),
            )[: 1 + load]:
                known = len(list(costs_of(store, lengths)))
                await work()
                await asyncio.sleep(FLUSHED_S)
                show(title, list(costs_of(store, lengths))[known:], bytes_per_ms)


async def at_rest(client: AsyncClient, lengths: Sequence[int], repeats: int) -> None:
    """Requests, one after the other."""
    for _, length in itertools.product(range(repeats), lengths):
        await ask(client, length)


def main() -> None:
    """Starts the cluster and measures it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default="demo", help="directory of a model")
    which.add_argument("--random-weights", metavar="CONFIG", help="made-up weights instead")
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--transport", default="shm", help="shm or gloo")
    parser.add_argument("--chunk-tokens", type=int, default=EngineConfig.chunk_tokens)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="prompt tokens")
    parser.add_argument("--repeats", type=int, default=40, help="requests for each length")
    parser.add_argument("--rest-only", action="store_true", help="not beside streams")
    options = parser.parse_args()
    engine = EngineConfig(
        model=options.random_weights or options.model,
        random_weights=bool(options.random_weights),
        dtype=options.dtype,
        chunk_tokens=options.chunk_tokens,
    )
    config = ClusterConfig(engine=engine, port=0, transport=options.transport)
    asyncio.run(measure(config, options.lengths, options.repeats, not options.rest_only))


if __name__ == "__main__":
    main()
