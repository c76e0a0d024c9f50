"""Measures when decode should compute a short prompt itself instead of getting it handed over.

    python scripts/local_prefill.py

Two clusters of the demo model, one prefill and one decode worker each, stand side by side: in one
every prompt is handed over, in the other decode computes every prompt. For each prompt length they
are asked in turn, so that what else runs on the machine disturbs both alike. First at rest: time to
the first token and to the eighth. Then beside six running streams: the same two times, and the
streams' inter-token latency (ITL), which a prompt on decode makes longer. Figures are medians over
requests, and for the streams percentiles over all their tokens. `alone` is without any prompt.

`RouterLimits.local_prefill_max_tokens` is the longest prompt for which decode is not worse.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig, RouterLimits
from baton.local.cluster import LocalCluster

LENGTHS = [1, 8, 16, 32, 64, 96, 128, 256]
WAYS = {"handed over": 0, "by decode": 100_000}  # and local_prefill_max_tokens for that
STREAMS, STREAM_TOKENS, STREAM_PROMPT = 6, 160, 64
FIRST_TOKENS = 8
PAUSE_S = 0.1  # between prompts beside the streams

salts = itertools.count()


@dataclass
class Seen:
    """What was measured for one prompt length in one way; milliseconds."""

    first: list[float] = field(default_factory=list)  # to the first token
    eighth: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # of the streams beside it

    def times(self) -> str:
        """Medians of both times."""
        return f"{statistics.median(self.first):7.1f} {statistics.median(self.eighth):8.1f}"

    def itl(self) -> str:
        """Percentiles of the streams' gaps."""
        cuts = statistics.quantiles(self.gaps, n=100)
        return f"{cuts[49]:6.1f} {cuts[98]:6.1f} {max(self.gaps):6.1f}"


async def arrivals(client: AsyncClient, length: int, tokens: int) -> tuple[float, list[float]]:
    """When a prompt that nothing is cached of was sent, and when each of its tokens came."""
    salt = next(salts)
    ids = [(7 * i + 131 * salt) % 4000 + 10 for i in range(length)]
    began, came = time.perf_counter(), []
    async with client.stream(
        ids, max_tokens=tokens, ignore_eos=True, cache_salt=str(salt)
    ) as stream:
        async for _ in stream:
            came.append(time.perf_counter())
    return began, came


async def ask(client: AsyncClient, length: int, seen: Seen) -> None:
    """One prompt's times."""
    began, came = await arrivals(client, length, FIRST_TOKENS)
    seen.first.append((came[0] - began) * 1e3)
    seen.eighth.append((came[-1] - began) * 1e3)


async def beside_streams(client: AsyncClient, length: int, seen: Seen) -> None:
    """Prompts, one after the other, for as long as six streams run; none if `length` is 0."""

    async def prompts() -> None:
        while length:
            await asyncio.sleep(PAUSE_S)
            await ask(client, length, seen)

    async def gaps() -> list[float]:
        _, came = await arrivals(client, STREAM_PROMPT, STREAM_TOKENS)
        between = [(after - before) * 1e3 for before, after in itertools.pairwise(came)]
        return between[STREAMS:]  # while the others begin, decode is disturbed by them

    task = asyncio.create_task(prompts())
    for gap in await asyncio.gather(*(gaps() for _ in range(STREAMS))):
        seen.gaps += gap
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def at_rest(clients: dict[str, AsyncClient], lengths: list[int], repeats: int) -> None:
    """Prints the times of single requests."""
    print("at rest: tokens in the prompt | way | first ms, eighth ms", flush=True)
    for length in lengths:
        seen = {way: Seen() for way in clients}
        for repeat in range(repeats + 1):
            for way, client in clients.items():
                await ask(client, length, seen[way] if repeat else Seen())  # the first warms up
        for way in clients:
            print(f"{length:>7} | {way:<11} | {seen[way].times()}", flush=True)


async def under_load(clients: dict[str, AsyncClient], lengths: list[int], repeats: int) -> None:
    """Prints the times and the streams' ITL while prompts of one length arrive."""
    print(f"\nbeside {STREAMS} streams: tokens | way | first ms, eighth ms | "
          "streams' ITL p50, p99, max", flush=True)  # fmt: skip
    for length in (0, *lengths):
        seen = {way: Seen() for way in clients}
        for _ in range(repeats):
            for way, client in clients.items():
                await beside_streams(client, length, seen[way])
        for way in clients:
            times = seen[way].times() if length else " " * 16
            told = length or "alone"
            print(f"{told:>7} | {way:<11} | {times} | {seen[way].itl()}", flush=True)


async def main() -> None:
    """Starts both clusters and asks them in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="tokens in the prompts"
    )
    parser.add_argument("--repeats", type=int, default=11, help="requests for each prompt length")
    parser.add_argument("--rounds", type=int, default=3, help="sets of streams for each of them")
    options = parser.parse_args()
    async with AsyncExitStack() as stack:
        clients = {}
        for way, most in WAYS.items():
            config = ClusterConfig(
                engine=EngineConfig(dtype=options.dtype),
                limits=RouterLimits(local_prefill_max_tokens=most),
                port=0,
            )
            cluster = await stack.enter_async_context(LocalCluster(config))
            clients[way] = await stack.enter_async_context(AsyncClient(cluster.address))
        await at_rest(clients, options.lengths, options.repeats)
        await under_load(clients, options.lengths, options.rounds)


if __name__ == "__main__":
    asyncio.run(main())
