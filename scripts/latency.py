"""Measures a 1P1D cluster of the demo model on this machine: latencies, and what long prompts cost.

    python scripts/latency.py

First the cluster is measured at rest, prompt length by prompt length. Then six streams run, first
alone and then while long prompts keep arriving, three times in turn; what counts is how the
streams' inter-token latency (ITL) changes. It is a look, not a load test: one client, one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.local.cluster import LocalCluster

PROMPT_LENGTHS = (32, 128, 512, 1900)
STREAMS, STREAM_TOKENS, LONG_PROMPT, LONG_EVERY_S = 6, 200, 1900, 2.0


def prompt(length: int, salt: int) -> list[int]:
    """Token ids that share no prefix with those of another salt."""
    return [(7 * i + 131 * salt) % 4000 + 10 for i in range(length)]


async def at_rest(client: AsyncClient, repeats: int) -> None:
    """Prints medians of single requests, one after the other."""
    print("at rest: prompt tokens | TTFT ms | TPOT ms | transfer ms | KiB moved")
    for length in PROMPT_LENGTHS:
        timings = []
        for repeat in range(repeats + 1):
            ids = prompt(length, 1000 + 17 * repeat + length)
            done = await client.generate(ids, max_tokens=32, ignore_eos=True)
            timings.append(done.timing)
        kept = timings[1:]  # the first one warms up
        ttft, tpot, transfer = (
            statistics.median(getattr(timing, name) for timing in kept)
            for name in ("ttft_ms", "tpot_ms", "transfer_ms")
        )
        moved = kept[0].transfer_bytes // 1024
        print(f"{length:>22} | {ttft:7.1f} | {tpot:7.2f} | {transfer:11.1f} | {moved}", flush=True)


async def stream_gaps(client: AsyncClient, salt: int) -> list[float]:
    """The ITLs, in ms, of one stream."""
    gaps: list[float] = []
    last = 0.0
    async with client.stream(
        prompt(64, salt), max_tokens=STREAM_TOKENS, ignore_eos=True, cache_salt=str(salt)
    ) as stream:
        async for _ in stream:
            now = time.perf_counter()
            if last:
                gaps.append((now - last) * 1e3)
            last = now
    return gaps


async def streams(client: AsyncClient, beside: Callable[[], Awaitable[None]] | None) -> list[float]:
    """ITLs of all streams, with `beside` running for as long as they do."""
    task = asyncio.ensure_future(beside()) if beside else None
    runs = await asyncio.gather(*(stream_gaps(client, salt) for salt in range(STREAMS)))
    if task:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return [gap for run in runs for gap in run]


def summary(gaps: list[float]) -> str:
    """Median, tail and rate of ITLs."""
    cuts = statistics.quantiles(gaps, n=100)
    rate = STREAMS * 1e3 / statistics.fmean(gaps)
    return (
        f"p50 {cuts[49]:6.1f} | p99 {cuts[98]:6.1f} | max {max(gaps):6.1f} | {rate:6.0f} tokens/s"
    )


async def under_prompts(client: AsyncClient, repeats: int) -> None:
    """Prints the streams' ITL without and with long prompts arriving, in turn."""
    salt = 5000

    async def long_prompts() -> None:
        nonlocal salt
        while True:
            salt += 1
            ids = prompt(LONG_PROMPT, salt)
            sent = asyncio.ensure_future(client.generate(ids, max_tokens=8, ignore_eos=True))
            await asyncio.wait({sent, asyncio.ensure_future(asyncio.sleep(LONG_EVERY_S))})

    print(f"\n{STREAMS} streams' ITL ms, alone and with a {LONG_PROMPT}-token prompt every "
          f"{LONG_EVERY_S:g} s")  # fmt: skip
    for _ in range(repeats):
        print(f"  alone        {summary(await streams(client, None))}", flush=True)
        print(f"  with prompts {summary(await streams(client, long_prompts))}", flush=True)


async def main() -> None:
    """Starts the cluster and measures it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--transport", default="shm", help="shm or gloo")
    parser.add_argument("--repeats", type=int, default=9, help="requests for each prompt length")
    options = parser.parse_args()
    config = ClusterConfig(
        engine=EngineConfig(dtype=options.dtype), port=0, transport=options.transport
    )
    async with LocalCluster(config) as cluster, AsyncClient(cluster.address) as client:
        await at_rest(client, options.repeats)
        await under_prompts(client, 3)


if __name__ == "__main__":
    asyncio.run(main())
