"""When should decode compute a short prompt itself instead of getting it handed over?

Two 1P1D clusters of the demo model take turns: in one every prompt is handed over, in the other
decode computes every prompt. First at rest, then beside six running streams, whose inter-token
latency a prompt on decode makes longer. `RouterLimits.local_prefill_max_tokens` is the longest
prompt for which decode is not worse.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

from baton.bench.workload import Interference, Lengths, Settings, Workload
from baton.config import ClusterConfig, EngineConfig, RouterLimits
from baton.local.cluster import LocalCluster
from benchmarks.scenarios.common import Comparison, Target, target_of

_MOST = {"handed over": 0, "by decode": 100_000}  # tokens of prompts that decode computes
_ALONE = Workload(concurrency=1, output_lengths=Lengths(8, 8))
_STREAMS = Workload(concurrency=6, prompt_lengths=Lengths(64, 64), output_lengths=Lengths(200, 200))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    lengths = [1, 8, 16, 32, 64, 96, 128, 256]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="of the prompts")
    parser.add_argument("--repeats", type=int, default=11, help="requests for each prompt length")
    parser.add_argument("--rounds", type=int, default=3, help="of both clusters: 3")


def main(args: argparse.Namespace) -> int:
    def start(most: int) -> AbstractAsyncContextManager[Target]:
        limits = RouterLimits(local_prefill_max_tokens=most)
        config = ClusterConfig(engine=EngineConfig(dtype=args.dtype), limits=limits, port=0)
        return target_of(LocalCluster(config))

    loads: dict[str, Settings] = {}
    for n in args.lengths:
        one = replace(_ALONE, count=args.repeats, prompt_lengths=Lengths(n, n))
        beside = Interference(n, every_s=0.2, periods=20, ramp_s=1.0)
        loads[f"{n} tokens, at rest"] = Settings(one)
        loads[f"{n} tokens beside streams"] = Settings(_STREAMS, interference=beside)
    return Comparison(loads).run({k: partial(start, v) for k, v in _MOST.items()}, args.rounds)
