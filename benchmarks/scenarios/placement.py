"""Baton's choice of workers against round robin and least connections, on a production trace.

A slice of a Mooncake trace, scaled down, runs through a real router and simulated workers: real
blocks, caches and transfers, simulated computing. The baselines are the same router with another
choice of workers. Each run has a fresh cluster; a round takes the policies in turn, and what is
shown is the median over rounds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baton.bench.generator import Generator
from baton.bench.stats import Stats, stats_of
from baton.bench.terminal import median_table
from baton.bench.trace import Scale
from baton.bench.workload import Workload
from benchmarks.environment import console
from benchmarks.scenarios import baseline_router
from benchmarks.scenarios.common import add_cluster_options, blocks_held, cluster, connected, lag_of

_OWN = "baton"
_POLICIES = (_OWN, *baseline_router.POLICIES)
_ROWS = (
    ("TTFT p50, ms", "ttft_s.p50", 1e3, ".0f"),
    ("TTFT p99, ms", "ttft_s.p99", 1e3, ".0f"),
    ("E2E p50, ms", "e2e_s.p50", 1e3, ".0f"),
    ("E2E p99, ms", "e2e_s.p99", 1e3, ".0f"),
    ("cached, %", "prefix_cache.share", 100, ".1f"),
    ("requests/s", "requests_per_s", 1, ".1f"),
    ("prompt tokens/s", "input_tokens_per_s", 1, ".0f"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="Mooncake's JSON Lines")
    add("--first", type=int, default=0, help="rows left out")
    add("--count", type=int, default=1800, help="rows taken: 1800")
    add("--length", type=float, default=8.0, help="lengths are divided by this: 8")
    add("--rate", type=float, default=6.0, help="times are divided by this: 6")
    add("--max-tokens", type=int, default=4096, help="prompts are cut to so many: 4096")
    add("--rounds", type=int, default=3, help="of each policy: 3")
    add("--policies", nargs="+", choices=_POLICIES, default=_POLICIES)
    add_cluster_options(parser, workers=4, simulate="8000,20", kv_blocks=16384)


async def main(args: argparse.Namespace) -> None:
    scale = Scale(
        rate=args.rate,
        length=1 / args.length,
        skip=args.first,
        max_prompt=args.max_tokens,
        max_output=args.max_tokens // 4,
        spread_ties=True,
    )
    demands = list(Workload(trace=args.trace, scale=scale, count=args.count).demands())
    tokens = sum(demand.prompt_tokens for demand in demands) / len(demands)
    seconds = demands[-1].at_s
    console.print(f"{len(demands)} requests in {seconds:.0f} s, {tokens:.0f} prompt tokens each")
    rounds: dict[str, list[Stats]] = {policy: [] for policy in args.policies}
    for _ in range(args.rounds):
        for policy in args.policies:
            program = (sys.executable, baseline_router.__file__, policy)
            programs = {} if policy == _OWN else {"router": program}
            async with cluster(args, programs=programs) as local:
                async with connected(local.address, timeout_s=300.0) as server:
                    run = await Generator(server).open_loop(demands)
                held = await blocks_held(local.address)
            stats = stats_of(run.outcomes, run.seconds)
            rounds[policy].append(stats)
            console.print(f"  {policy}: {stats['statuses']}, {held} blocks held; {lag_of(run)}")
    console.print(median_table("\nmedian (min-max)", _ROWS, rounds))
