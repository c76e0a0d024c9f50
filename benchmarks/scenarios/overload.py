"""What does a cluster do with several times the load it can carry?

First the capacity: closed loops of more and more callers, until they finish no more requests a
second. Then so many times that rate arrives, Poisson, while the router has a target for the time to
first token. Accepted requests must keep the target at p99, others be refused at once with usable
retry advice; the router's memory must not grow. Exits with 0 when all goals are met.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
from collections import Counter
from dataclasses import replace

import psutil

from baton.bench.generator import Generator, Run
from baton.bench.servers import Server
from baton.bench.stats import percentile
from baton.bench.workload import Lengths, Workload
from benchmarks.environment import console
from benchmarks.scenarios import common
from benchmarks.scenarios.common import cluster, connected, spread

_SIZES = Workload(prompt_lengths=Lengths(64, 512), output_lengths=Lengths(16, 64))
_CALLERS = (4, 8, 16, 32)
_NO_TARGET_MS = 600_000  # while the capacity is measured nothing is refused
_REFUSED = "RESOURCE_EXHAUSTED"
_REFUSAL_GOAL_S, _RETRY_S = 0.05, (0.01, 60.0)
_GROWTH = 1.1  # of memory, over the second half of the run
_MIB = 2**20


def add_options(parser: argparse.ArgumentParser) -> None:
    common.add_cluster_options(parser, workers=2, kv_blocks=4096, chunk_tokens=256)
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of overload: 60")
    add("--times", type=float, default=5.0, help="the capacity: 5")
    add("--ttft-target", type=int, default=1000, metavar="MS", help="1000")
    add("--capacity-seconds", type=float, default=8.0, help="for each step: 8")


async def main(args: argparse.Namespace) -> int:
    target_s = args.ttft_target / 1e3
    async with (
        cluster(args, ttft_target_s=target_s) as local,
        connected(local.address) as server,
    ):
        async with connected(local.address, ttft_target_ms=_NO_TARGET_MS) as patient:
            rates = [
                await capacity(patient, _SIZES, callers, args.capacity_seconds)
                for callers in _CALLERS
            ]
        load = replace(_SIZES, rate=args.times * max(rates), duration_s=args.seconds)
        console.print(f"{load.rate:.1f} requests/s for {args.seconds:g} s")
        router = psutil.Process(local.processes["router"].pid)
        memory = [router.memory_info().rss]
        sampling = asyncio.create_task(_sample(router, memory))
        run = await Generator(server).open_loop(load.demands())
        sampling.cancel()
        held = await common.blocks_held(local.address)
    before, half, end = memory[0], memory[len(memory) // 2], max(memory[-3:])
    goals = {
        **goals_of(run, target_s),
        f"router: {before / _MIB:.0f} MiB before, {half / _MIB:.0f} at half time, "
        f"{end / _MIB:.0f} at the end": end <= half * _GROWTH,
        f"blocks held afterwards: {held}": not held,
    }
    for text, is_met in goals.items():
        console.print(f"{text}: {'met' if is_met else 'NOT met'}")
    console.print(common.lag_of(run))
    return 0 if all(goals.values()) else 1


async def capacity(server: Server, sizes: Workload, callers: int, seconds: float) -> float:
    """Requests that so many callers finish a second."""
    load = replace(sizes, concurrency=callers, seed=secrets.randbits(31))
    run = await Generator(server).closed_loop(load.demands(), callers, seconds)
    rate = run.ok / run.seconds
    ttfts = spread(o.ttft_s for o in run.outcomes)
    console.print(f"{callers:3} callers: {rate:.1f} requests/s, TTFT {ttfts}")
    return rate


async def _sample(process: psutil.Process, memory: list[int]) -> None:
    while True:
        await asyncio.sleep(0.5)
        memory.append(process.memory_info().rss)


def goals_of(run: Run, target_s: float) -> dict[str, bool]:
    """The goals for requests by text, and whether each is met."""
    accepted = [(o, o.ttft_s) for o in run.outcomes if o.ttft_s is not None]
    refused = [o for o in run.outcomes if o.status == _REFUSED]
    reasons = Counter(re.sub(r"\d", "#", o.message)[:72] for o in refused)
    for why, count in reasons.most_common(5):
        console.print(f"{count:6} refused: {why}")
    ttfts, ended_s = [ttft_s for _, ttft_s in accepted], [o.ended_s for o in refused]
    advised = sum(_RETRY_S[0] <= o.retry_after_s <= _RETRY_S[1] for o in refused)
    others = Counter(o.status for o in run.outcomes if o.status not in ("OK", _REFUSED))
    return {
        f"accepted {len(accepted)} ({len(accepted) / run.seconds:.1f}/s), all finished": all(
            o.ok for o, _ in accepted
        ),
        f"their TTFT {spread(ttfts)}, target {target_s * 1e3:g} ms at p99": (
            percentile(ttfts, 99) <= target_s
        ),
        f"refused {len(refused)}, with usable advice {advised}": advised == len(refused),
        f"refused after {spread(ended_s)}, goal {_REFUSAL_GOAL_S * 1e3:g} ms": (
            max(ended_s, default=0.0) <= _REFUSAL_GOAL_S
        ),
        f"other endings: {dict(others) or 'none'}": not others,
    }
