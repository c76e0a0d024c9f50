"""Baton's choice of workers against round robin and least connections, on a production trace.

A slice of a Mooncake trace, scaled down, runs through a real router and simulated workers: real
blocks, caches and transfers, simulated computing. The baselines are the same router with another
choice of workers. Each run has a fresh cluster; a round takes the policies in turn, and what is
shown is the median over rounds.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from baton.bench.trace import Scale
from baton.bench.workload import Settings, Workload
from baton.cli import options
from baton.options import build
from benchmarks.scenarios import baseline_router, common
from benchmarks.scenarios.common import Comparison, Target

_OWN = "baton"
_POLICIES = (_OWN, *baseline_router.POLICIES)
_SCALE = {
    "rate-scale": 6.0, "length-scale": 0.125, "max-prompt": 4096, "max-output": 1024,
    "spread-ties": True,
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="Mooncake's JSON Lines")
    add("--count", type=int, default=1800, help="rows taken: 1800")
    add("--rounds", type=int, default=3, help="of each policy: 3")
    add("--policies", nargs="+", choices=_POLICIES, default=_POLICIES)
    options.add_declared(parser, Scale, f"trace (here by default: {_SCALE})")
    common.add_cluster_options(
        parser, workers=4, simulate="8000,20", kv_blocks=16384, chunk_tokens=256
    )


def main(args: argparse.Namespace) -> int:
    def start(policy: str) -> AbstractAsyncContextManager[Target]:
        program = (sys.executable, baseline_router.__file__, policy)
        programs = {} if policy == _OWN else {"router": program}
        return common.target_of(common.cluster(args, programs=programs), timeout_s=300.0)

    scale = build(Scale, _SCALE | vars(args))
    workload = Workload(trace=args.trace, scale=scale, count=args.count)
    loads = {"trace": Settings(workload, warm_up=0)}
    variants = {policy: partial(start, policy) for policy in args.policies}
    return Comparison(loads).run(variants, args.rounds)
