"""Latencies of 1P1D clusters of the demo model: at rest, and of streams beside prompts."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

from baton.bench.generator import Generator
from baton.bench.interference import Interference, InterferenceStats, interference
from baton.bench.request import Outcome
from baton.bench.servers import Server
from baton.bench.stats import Stats, stats_of
from baton.bench.terminal import INTERFERENCE_ROWS, median_table
from baton.bench.workload import Lengths, Workload
from baton.config import ClusterConfig, EngineConfig, RouterLimits
from baton.local.cluster import LocalCluster
from benchmarks.scenarios.common import connected, console

_REST_ROWS = (
    ("TTFT p50, ms", ("ttft_s", "p50"), 1e3, ".1f"),
    ("TPOT p50, ms", ("tpot_s", "p50"), 1e3, ".2f"),
    ("last token p50, ms", ("e2e_s", "p50"), 1e3, ".1f"),
    ("KV transfer p50, ms", ("phases", "transfer_s", "p50"), 1e3, ".1f"),
    ("KiB moved in all", ("phases", "transfer_bytes"), 1 / 1024, ".0f"),
)


async def one_by_one(server: Server, length: int, new_tokens: int, count: int) -> list[Outcome]:
    """Requests with prompts that no cache has, one at a time."""
    load = Workload(
        concurrency=1,
        count=count,
        prompt_lengths=Lengths(length, length),
        output_lengths=Lengths(new_tokens, new_tokens),
        seed=random.getrandbits(32),
    )
    return (await Generator(server).closed_loop(load.demands(), 1)).outcomes


def latency_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--transport", default="shm", help="shm or gloo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512, 1900])
    parser.add_argument("--repeats", type=int, default=9, help="requests for each prompt length")
    parser.add_argument("--rounds", type=int, default=3, help="of streams beside prompts")


async def latency(args: argparse.Namespace) -> None:
    """Single requests, prompt length by prompt length; then six streams, alone and beside a long
    prompt every 2 s, in turn.

    A look, not a load test: one client, one machine.
    """
    engine = EngineConfig(dtype=args.dtype)
    config = ClusterConfig(engine=engine, port=0, transport=args.transport)
    async with LocalCluster(config) as cluster, connected(cluster.address) as server:
        rest: dict[str, Sequence[Stats]] = {}
        for length in args.lengths:
            outcomes = await one_by_one(server, length, 32, args.repeats + 1)
            rest[str(length)] = [stats_of(outcomes[1:], 0.0)]  # the first one warms up
        console.print(median_table("at rest: prompt tokens", _REST_ROWS, rest))
        load = Interference(prompt=max(args.lengths), every_s=2.0)
        rounds = [
            (await interference(server, load, number, number % 2 == 0))[0]
            for number in range(args.rounds)
        ]
    console.print(median_table("\nmedian (min-max)", INTERFERENCE_ROWS, {"1P1D": rounds}))


def local_prefill_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    lengths = [1, 8, 16, 32, 64, 96, 128, 256]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="of the prompts")
    parser.add_argument("--repeats", type=int, default=11, help="requests for each prompt length")
    parser.add_argument("--rounds", type=int, default=3, help="sets of streams for each of them")


async def local_prefill(args: argparse.Namespace) -> None:
    """When should decode compute a short prompt itself instead of getting it handed over?

    Two 1P1D clusters of the demo model stand side by side: in one every prompt is handed over, in
    the other decode computes every prompt. They are used in turn, so that what else runs on the
    machine disturbs both alike. First at rest: time to the first token and to the eighth. Then
    prompts beside six running streams, whose inter-token latency a prompt on decode makes longer.
    `RouterLimits.local_prefill_max_tokens` is the longest prompt for which decode is not worse.
    """
    async with AsyncExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, most in (("handed over", 0), ("by decode", 100_000)):
            limits = RouterLimits(local_prefill_max_tokens=most)
            config = ClusterConfig(engine=EngineConfig(dtype=args.dtype), limits=limits, port=0)
            cluster = await stack.enter_async_context(LocalCluster(config))
            servers[name] = await stack.enter_async_context(connected(cluster.address))
        for length in args.lengths:
            outcomes: dict[str, list[Outcome]] = {name: [] for name in servers}
            beside: dict[str, list[InterferenceStats]] = {name: [] for name in servers}
            for repeat in range(args.repeats + 1):
                for name, server in servers.items():
                    found = await one_by_one(server, length, 8, 1)
                    outcomes[name] += found if repeat else []  # the first warms up
            load = Interference(prompt=length, every_s=0.2, periods=20, ramp_s=1.0)
            for number in range(args.rounds):
                for name, server in servers.items():
                    seed = random.getrandbits(32)
                    stats, _ = await interference(server, load, seed, number % 2 == 0)
                    beside[name].append(stats)
            rest = {name: [stats_of(done, 0.0)] for name, done in outcomes.items()}
            console.print(median_table(f"\n{length} tokens, at rest", _REST_ROWS, rest))
            title = f"{length} tokens beside streams"
            console.print(median_table(title, INTERFERENCE_ROWS, beside))
