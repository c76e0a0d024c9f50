"""What serving takes from decoding: tokens/s of a batch, by an engine alone and through a cluster.

    python scripts/served_decode.py

Both have one thread on one core. Alone: a decode engine in this process, its sequences begun as if
their KV had been handed over. Served: as many streams through router, prefill and decode worker,
counted from when all of them run until the first ends. The two take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from step_profile import SHAPES, config_of, profile

from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.engine import build
from baton.local.cluster import LocalCluster
from baton.sampling import SamplingParams


def alone(loaded: build.Loaded, context: int, batch: int, tokens: int, core: int) -> float:
    """Tokens/s of the engine on a core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # the engine's thread inherits it
    try:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        found = profile(loaded, loaded.runner.model, params, context, batch)  # type: ignore[attr-defined]
    finally:
        os.sched_setaffinity(0, before)
    return batch / found.parts["step"]


async def served(client: AsyncClient, context: int, batch: int, tokens: int, salt: int) -> float:
    """Tokens/s of all streams while all of them run."""
    times = await asyncio.gather(
        *(one_stream(client, context, tokens, salt * 1000 + at) for at in range(batch))
    )
    begin, end = max(stream[0] for stream in times), min(stream[-1] for stream in times)
    if end <= begin:
        raise SystemExit("a stream ended before the last one began: raise --tokens")
    return sum(begin < at <= end for stream in times for at in stream) / (end - begin)


async def one_stream(client: AsyncClient, context: int, tokens: int, salt: int) -> list[float]:
    """When its tokens came, but for the first, which prefill gives."""
    ids = [(7 * i + 131 * salt) % 4000 + 10 for i in range(context)]
    times = []
    async with client.stream(ids, max_tokens=tokens, ignore_eos=True) as stream:
        async for delta in stream:
            times += [time.perf_counter()] * len(delta.token_ids)
    return times[1:]


async def compare(args: argparse.Namespace, folder: Path) -> None:
    """Prints each round and the median share that serving leaves."""
    context, batch, tokens = args.context, args.batch, args.tokens
    blocks = batch * (-(-(context + tokens) // 16) + 1)
    engine = EngineConfig(
        model=str(config_of(args.shape, folder)), random_weights=True, dtype="bfloat16",
        threads=1, kv_blocks=blocks, max_batch=batch, quantization=args.quantization,
    )  # fmt: skip
    loaded = build.load(engine)
    core = max(os.sched_getaffinity(0))  # where the decode worker computes
    config = ClusterConfig(engine=replace(engine, threads=0), port=0)
    shares = []
    print(f"{batch} sequences, {context} tokens each and {tokens} more; tokens/s")
    async with LocalCluster(config) as cluster, AsyncClient(cluster.address) as client:
        await served(client, context, batch, tokens, 0)  # warms up
        for number in range(1, args.rounds + 1):
            by_engine = await asyncio.to_thread(alone, loaded, context, batch, tokens, core)
            by_cluster = await served(client, context, batch, tokens, number)
            shares.append(by_cluster / by_engine)
            print(
                f"  alone {by_engine:7.1f} | served {by_cluster:7.1f} | {shares[-1]:6.1%}",
                flush=True,
            )
    print(f"serving keeps {statistics.median(shares):.1%} (median of {len(shares)} rounds)")


def main() -> None:
    """Reads the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=400, help="that each stream gets")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(args, Path(folder)))


if __name__ == "__main__":
    main()
