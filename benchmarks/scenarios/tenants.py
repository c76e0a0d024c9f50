"""What does a tenant that floods the cluster cost another one that does not?

Two tenants of equal weight. One sends a steady trickle, and its time to first token is measured
alone and while the other sends several times what the cluster can carry, in turn, several rounds on
one cluster. The p99 beside the flood is to stay within 1.5 times the p99 alone.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import secrets
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from baton.bench.generator import Generator, Run
from baton.bench.stats import percentile
from baton.bench.workload import Lengths, Workload
from benchmarks.environment import console
from benchmarks.scenarios.common import add_cluster_options, cluster, connected, lag_of, spread
from benchmarks.scenarios.overload import capacity

_STEADY = Workload(prompt_lengths=Lengths(256, 768), output_lengths=Lengths(16, 64))
_FLOOD = Workload(prompt_lengths=Lengths(256, 2048), output_lengths=Lengths(16, 128))
_GOAL = 1.5
_HEAD_START_S = 3.0  # of the flood, which lasts as much longer


def add_options(parser: argparse.ArgumentParser) -> None:
    add_cluster_options(parser, workers=2, simulate="8000,10,0.2", kv_blocks=4096, chunk_tokens=128)
    add = parser.add_argument
    add("--seconds", type=float, default=20.0, help="of each part of a round: 20")
    add("--rounds", type=int, default=3, help="3")
    add("--rate", type=float, default=4.0, help="of the steady tenant, requests/s: 4")
    add("--times", type=float, default=3.0, help="the capacity, of the flood: 3")


async def main(args: argparse.Namespace) -> int:
    keys = {name: secrets.token_hex(16) for name in ("steady", "flood")}
    ttfts: dict[str, list[float]] = {"alone": [], "beside": [], "flood": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.toml"
        hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
        tables = (f'[tenants.{n}]\nkeys = ["sha256:{digest}"]\n' for n, digest in hashes.items())
        file.write_text("\n".join(tables))
        async with (
            cluster(args, tenants_file=file) as local,
            connected(local.address, api_key=keys["steady"]) as steady,
            connected(local.address, api_key=keys["flood"]) as flood,
        ):
            rate = args.times * await capacity(flood, _FLOOD, 32, args.seconds / 2)
            flood_load = replace(_FLOOD, rate=rate, duration_s=args.seconds + 2 * _HEAD_START_S)
            load = replace(_STEADY, rate=args.rate, duration_s=args.seconds)
            seeds = itertools.count()

            async def trickle(wait_s: float = 0.0) -> Run:
                await asyncio.sleep(wait_s)
                return await Generator(steady).open_loop(replace(load, seed=next(seeds)).demands())

            for number in range(args.rounds):
                alone = await trickle()
                demands = replace(flood_load, seed=1000 + number).demands()
                flooding, beside = await asyncio.gather(
                    Generator(flood).open_loop(demands), trickle(_HEAD_START_S)
                )
                for name, run in (("alone", alone), ("beside", beside), ("flood", flooding)):
                    found = [o.ttft_s for o in run.outcomes if o.ok and o.ttft_s]
                    ttfts[name] += found
                    statuses = dict(Counter(o.status for o in run.outcomes))
                    console.print(f"round {number + 1}, {name}: {statuses}, TTFT {spread(found)}")
                console.print(f"  {lag_of(beside)}")
                await asyncio.sleep(2.0)
    ratio = percentile(ttfts["beside"], 99) / percentile(ttfts["alone"], 99)
    is_met = ratio <= _GOAL
    console.print(
        f"TTFT alone {spread(ttfts['alone'])}; beside the flood {spread(ttfts['beside'])}"
    )
    goal = f"at most {_GOAL}: {'met' if is_met else 'NOT met'}"
    console.print(f"p99 beside / alone: {ratio:.2f}, {goal}")
    return 0 if is_met else 1
