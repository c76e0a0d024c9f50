"""What a tenant that floods the cluster costs another one that does not.

    python scripts/tenants.py

Two tenants of equal weight, told apart by their keys. One sends a steady trickle, and its time to
first token (TTFT) is measured alone and while the other sends several times what the cluster can
carry, in turn, several rounds on one cluster. The p99 beside the flood is to stay within 1.5 times
the p99 alone.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import secrets
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from load.arrivals import Load, Mix
from load.clusters import add_options, cluster, parser, setting
from load.driving import drive
from load.outcomes import Run, percentile, spread, ttfts

_GOAL = 1.5
_HEAD_START_S = 3.0  # of the flood, which lasts as much longer
_PAUSE_S = 2.0
_CALLERS = 32


def tenants_file(folder: Path, keys: dict[str, str]) -> Path:
    """A router's tenants, with equal shares and no limits."""
    tables = (
        f'[tenants.{name}]\nkeys = ["sha256:{hashlib.sha256(key.encode()).hexdigest()}"]\n'
        for name, key in keys.items()
    )
    file = folder / "tenants.toml"
    file.write_text("\n".join(tables))
    return file


async def flooded(flood: Load, steady: Load) -> tuple[Run, Run]:
    """Both at once, the flood first and last."""

    async def later() -> Run:
        await asyncio.sleep(_HEAD_START_S)
        return await drive(steady)

    both = await asyncio.gather(drive(flood), later())
    return both[0], both[1]


def told(name: str, run: Run) -> str:
    """One line about a run."""
    return (f"  {name:12} {len(run.outcomes):5} requests, {dict(run.statuses)}, "
            f"TTFT {spread(ttfts(run.finished))}")  # fmt: skip


async def rounds(target: str, keys: dict[str, str], args: argparse.Namespace) -> float:
    """Runs them all; the ratio of the two p99, each over all rounds."""
    big = Mix(tuple(args.flood_prompt), tuple(args.flood_new))
    small = Mix(tuple(args.prompt), tuple(args.new))
    begun = big.arrivals(400.0, args.seconds, seed=0)
    closed = Load(target, begun, _CALLERS, args.seconds / 2, api_key=keys["flood"])
    run = await drive(closed)
    rate = len(run.finished) / run.seconds
    flood_rate = args.times * rate
    print(
        f"capacity: {rate:.1f} of the flood's requests/s; the flood sends {flood_rate:.1f}",
        flush=True,
    )
    alone: list[Run] = []
    beside: list[Run] = []
    for number in range(1, args.rounds + 1):
        steady = Load(
            target, small.arrivals(args.rate, args.seconds, 2 * number), api_key=keys["steady"]
        )
        long = args.seconds + 2 * _HEAD_START_S
        flood = Load(target, big.arrivals(flood_rate, long, -number), api_key=keys["flood"])
        print(f"round {number}", flush=True)
        alone.append(await drive(steady))
        print(told("alone", alone[-1]), flush=True)
        again = replace(steady, arrivals=small.arrivals(args.rate, args.seconds, 2 * number + 1))
        flood_run, run = await flooded(flood, again)
        beside.append(run)
        print(f"{told('beside flood', run)}\n{told('the flood', flood_run)}")
        print(f"  generator: {run.lag}", flush=True)
        await asyncio.sleep(_PAUSE_S)
    return summary(alone, beside)


def summary(alone: list[Run], beside: list[Run]) -> float:
    """Prints p50 and p99 of both, over all rounds and as medians of rounds; the ratio of p99."""
    for percent in (50, 99):
        first, second = (
            percentile([t for run in runs for t in ttfts(run.finished)], percent) * 1e3
            for runs in (alone, beside)
        )
        of_rounds = [
            percentile(ttfts(b.finished), percent) / percentile(ttfts(a.finished), percent)
            for a, b in zip(alone, beside, strict=True)
        ]
        times = f"{second / first:.2f} times (median of rounds {statistics.median(of_rounds):.2f})"
        print(f"TTFT p{percent}: alone {first:.1f} ms, beside the flood {second:.1f} ms: {times}")
    return second / first


async def main() -> int:
    """0 when the goal is met."""
    options = parser(__doc__)
    add_options(options, prefill=2, decode=2, simulate="8000,10,0.2", chunk_tokens=128)
    options.add_argument("--seconds", type=float, default=20.0, help="of each part of a round")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--rate", type=float, default=4.0, help="of the steady tenant, requests/s")
    options.add_argument("--times", type=float, default=3.0, help="the capacity: the flood")
    options.add_argument("--prompt", type=int, nargs=2, default=(256, 768), metavar="N")
    options.add_argument("--new", type=int, nargs=2, default=(16, 64), metavar="N")
    options.add_argument("--flood-prompt", type=int, nargs=2, default=(256, 2048), metavar="N")
    options.add_argument("--flood-new", type=int, nargs=2, default=(16, 128), metavar="N")
    args = options.parse_args()
    print(setting(args))
    keys = {name: secrets.token_hex(16) for name in ("steady", "flood")}
    with tempfile.TemporaryDirectory() as folder:
        file = tenants_file(Path(folder), keys)
        async with cluster(args, ["--tenants", str(file)]) as local:
            ratio = await rounds(local.address, keys, args)
    print(f"goal: at most {_GOAL} times: {'met' if ratio <= _GOAL else 'NOT met'}")
    return 0 if ratio <= _GOAL else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
