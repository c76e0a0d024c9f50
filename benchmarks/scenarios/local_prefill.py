"""When should decode compute a short prompt itself instead of getting it handed over?

Two 1P1D clusters of the demo model stand side by side: in one every prompt is handed over, in the
other decode computes every prompt. They are used in turn, so that what else runs on the machine
disturbs both alike. First at rest: time to the first token and to the eighth. Then prompts beside
six running streams, whose inter-token latency a prompt on decode makes longer.
`RouterLimits.local_prefill_max_tokens` is the longest prompt for which decode is not worse.
"""

from __future__ import annotations

import argparse
import random
from contextlib import AsyncExitStack

from baton.bench.generator import Generator
from baton.bench.interference import Interference, interference
from baton.bench.request import Demand, Outcome
from baton.bench.servers import Server
from baton.bench.stats import Stats, stats_of
from baton.bench.terminal import INTERFERENCE_ROWS, median_table
from baton.config import ClusterConfig, EngineConfig, RouterLimits
from baton.local.cluster import LocalCluster
from benchmarks.environment import console
from benchmarks.scenarios.common import connected

_REST_ROWS = (
    ("TTFT p50, ms", "ttft_s.p50", 1e3, ".1f"),
    ("TPOT p50, ms", "tpot_s.p50", 1e3, ".2f"),
    ("last token p50, ms", "e2e_s.p50", 1e3, ".1f"),
    ("KV transfer p50, ms", "phases.transfer_s.p50", 1e3, ".1f"),
    ("KiB moved in all", "phases.transfer_bytes", 1 / 1024, ".0f"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    lengths = [1, 8, 16, 32, 64, 96, 128, 256]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="of the prompts")
    parser.add_argument("--repeats", type=int, default=11, help="requests for each prompt length")
    parser.add_argument("--rounds", type=int, default=3, help="sets of streams for each of them")


async def main(args: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, most in (("handed over", 0), ("by decode", 100_000)):
            limits = RouterLimits(local_prefill_max_tokens=most)
            config = ClusterConfig(engine=EngineConfig(dtype=args.dtype), limits=limits, port=0)
            cluster = await stack.enter_async_context(LocalCluster(config))
            servers[name] = await stack.enter_async_context(connected(cluster.address))
        for length in args.lengths:
            outcomes: dict[str, list[Outcome]] = {name: [] for name in servers}
            beside: dict[str, list[Stats]] = {name: [] for name in servers}
            for repeat in range(args.repeats + 1):
                for name, server in servers.items():
                    demand = Demand(0.0, ((random.getrandbits(60), length),), 8)  # in no cache
                    run = await Generator(server).closed_loop([demand], 1)
                    outcomes[name] += run.outcomes if repeat else []  # the first warms up
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
