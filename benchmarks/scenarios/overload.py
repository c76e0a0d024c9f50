"""More load than a cluster can carry: from everybody, and from one tenant of two."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import secrets
import tempfile
from collections import Counter
from pathlib import Path

import psutil

from baton.bench.generator import Generator, Run
from baton.bench.request import Outcome
from baton.bench.servers import Server
from baton.bench.stats import percentile
from baton.bench.workload import Lengths, Workload
from benchmarks.scenarios.common import (
    add_cluster_options,
    blocks_held,
    cluster,
    connected,
    console,
    lag_of,
    spread,
)

_CALLERS = (4, 8, 16, 32)
_NO_TARGET_MS = 600_000  # while the capacity is measured nothing is refused
_REFUSED = "RESOURCE_EXHAUSTED"
_REFUSAL_GOAL_S, _RETRY_S = 0.05, (0.01, 60.0)
_GROWTH = 1.1  # of memory, over the second half of the run
_TENANTS_GOAL = 1.5
_HEAD_START_S = 3.0  # of the flood, which lasts as much longer
_MIB = 2**20


def overload_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    add_cluster_options(parser, prefill=2, decode=2)
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of overload: 60")
    add("--times", type=float, default=5.0, help="the capacity: 5")
    add("--ttft-target", type=int, default=1000, metavar="MS", help="1000")
    add("--prompt-tokens", type=Lengths.parse, default=Lengths(64, 512), help="64-512")
    add("--new-tokens", type=Lengths.parse, default=Lengths(16, 64), help="16-64")
    add("--capacity-seconds", type=float, default=8.0, help="for each step: 8")


async def overload(args: argparse.Namespace) -> int:
    """What does a cluster do with several times the load it can carry?

    First the capacity: closed loops of more and more callers, until they finish no more requests a
    second. Then so many times that rate arrives, Poisson, while the router has a target for the
    time to first token. Accepted requests must keep the target at p99, others be refused at once
    with usable retry advice; the router's memory must not grow. Exits with 0 when all goals are
    met.
    """
    sizes = Workload(prompt_lengths=args.prompt_tokens, output_lengths=args.new_tokens)
    target = ["--ttft-target", str(args.ttft_target / 1e3)]
    async with cluster(args, target) as local, connected(local.address) as server:
        async with connected(local.address, ttft_target_ms=_NO_TARGET_MS) as patient:
            rates = [
                await capacity(patient, sizes, callers, args.capacity_seconds)
                for callers in _CALLERS
            ]
        load = sizes.at(args.times * max(rates))
        console.print(f"{load.rate:.1f} requests/s for {args.seconds:g} s")
        router = psutil.Process(local.processes["router"].pid)
        memory = [router.memory_info().rss]
        sampling = asyncio.create_task(_sample(router, memory))
        demands = Workload(**{**load.__dict__, "duration_s": args.seconds}).demands()
        run = await Generator(server).open_loop(demands)
        sampling.cancel()
        held = await blocks_held(local.address)
        half, end = memory[len(memory) // 2], max(memory[-3:])
    met = {
        **report(run, args.ttft_target / 1e3),
        f"router: {memory[0] / _MIB:.0f} MiB before, {half / _MIB:.0f} at half time, "
        f"{end / _MIB:.0f} at the end": end <= half * _GROWTH,
        f"blocks held afterwards: {held}": not held,
    }
    for text, is_met in met.items():
        console.print(f"{text}: {'met' if is_met else 'NOT met'}")
    console.print(lag_of(run))
    return 0 if all(met.values()) else 1


async def capacity(server: Server, sizes: Workload, callers: int, seconds: float) -> float:
    """Requests that so many callers finish a second."""
    load = Workload(**{**sizes.__dict__, "concurrency": callers, "seed": secrets.randbits(31)})
    run = await Generator(server).closed_loop(load.demands(), callers, seconds)
    rate = run.ok / run.seconds
    ttfts = spread(o.ttft_s for o in run.outcomes)
    console.print(f"{callers:3} callers: {rate:.1f} requests/s, TTFT {ttfts}")
    return rate


async def _sample(process: psutil.Process, memory: list[int]) -> None:
    while True:
        await asyncio.sleep(0.5)
        memory.append(process.memory_info().rss)


def report(run: Run, target_s: float) -> dict[str, bool]:
    """The goals for requests by text, and whether each is met."""
    accepted = [o for o in run.outcomes if o.ttft_s is not None]
    refused = [o for o in run.outcomes if o.status == _REFUSED]
    ended_s = [o.ended_s for o in refused]
    advised = [o for o in refused if _RETRY_S[0] <= o.retry_after_s <= _RETRY_S[1]]
    odd = Counter(o.status for o in run.outcomes if o.status not in ("OK", _REFUSED))
    reasons = Counter("".join("#" if c.isdigit() else c for c in o.message)[:72] for o in refused)
    for why, count in reasons.most_common(5):
        console.print(f"{count:6} refused: {why}")
    ttfts = [o.ttft_s for o in accepted if o.ttft_s is not None]
    return {
        f"accepted {len(accepted)} ({len(accepted) / run.seconds:.1f}/s), all finished": all(
            o.ok for o in accepted
        ),
        f"their TTFT {spread(ttfts)}, target {target_s * 1e3:g} ms at p99": percentile(ttfts, 99)
        <= target_s,
        f"refused {len(refused)}, with usable advice {len(advised)}": len(advised) == len(refused),
        f"refused after {spread(ended_s)}, goal {_REFUSAL_GOAL_S * 1e3:g} ms": max(
            ended_s, default=0.0
        )
        <= _REFUSAL_GOAL_S,
        f"other endings: {dict(odd) or 'none'}": not odd,
    }


def tenants_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    add_cluster_options(parser, prefill=2, decode=2, simulate="8000,10,0.2", chunk_tokens=128)
    add = parser.add_argument
    add("--seconds", type=float, default=20.0, help="of each part of a round: 20")
    add("--rounds", type=int, default=3, help="3")
    add("--rate", type=float, default=4.0, help="of the steady tenant, requests/s: 4")
    add("--times", type=float, default=3.0, help="the capacity, of the flood: 3")
    add("--prompt", type=Lengths.parse, default=Lengths(256, 768), help="256-768")
    add("--new", type=Lengths.parse, default=Lengths(16, 64), help="16-64")
    add("--flood-prompt", type=Lengths.parse, default=Lengths(256, 2048), help="256-2048")
    add("--flood-new", type=Lengths.parse, default=Lengths(16, 128), help="16-128")


async def tenants(args: argparse.Namespace) -> int:
    """What does a tenant that floods the cluster cost another one that does not?

    Two tenants of equal weight. One sends a steady trickle, and its time to first token is measured
    alone and while the other sends several times what the cluster can carry, in turn, several
    rounds on one cluster. The p99 beside the flood is to stay within 1.5 times the p99 alone.
    """
    keys = {name: secrets.token_hex(16) for name in ("steady", "flood")}
    alone: list[Outcome] = []
    beside: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.toml"
        hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
        tables = (f'[tenants.{n}]\nkeys = ["sha256:{digest}"]\n' for n, digest in hashes.items())
        file.write_text("\n".join(tables))
        async with (
            cluster(args, ["--tenants", str(file)]) as local,
            connected(local.address, api_key=keys["steady"]) as steady,
            connected(local.address, api_key=keys["flood"]) as flood,
        ):
            sizes = Workload(prompt_lengths=args.flood_prompt, output_lengths=args.flood_new)
            rate = args.times * await capacity(flood, sizes, 32, args.seconds / 2)
            seeds = itertools.count()

            async def trickle(wait_s: float = 0.0) -> Run:
                await asyncio.sleep(wait_s)
                load = Workload(
                    rate=args.rate,
                    duration_s=args.seconds,
                    prompt_lengths=args.prompt,
                    output_lengths=args.new,
                    seed=next(seeds),
                )
                return await Generator(steady).open_loop(load.demands())

            for number in range(args.rounds):
                first = await trickle()
                long_s = args.seconds + 2 * _HEAD_START_S
                settings = {**sizes.__dict__, "rate": rate, "duration_s": long_s}
                load = Workload(**{**settings, "seed": 1000 + number})
                flooding, second = await asyncio.gather(
                    Generator(flood).open_loop(load.demands()), trickle(_HEAD_START_S)
                )
                alone += first.outcomes
                beside += second.outcomes
                for name, run in (("alone", first), ("beside", second), ("flood", flooding)):
                    statuses = dict(Counter(o.status for o in run.outcomes))
                    ttfts = spread(o.ttft_s for o in run.outcomes if o.ok)
                    console.print(f"round {number + 1}, {name}: {statuses}, TTFT {ttfts}")
                console.print(f"  {lag_of(second)}")
                await asyncio.sleep(2.0)
    a, b = ([o.ttft_s for o in outcomes if o.ok and o.ttft_s] for outcomes in (alone, beside))
    ratio = percentile(b, 99) / percentile(a, 99)
    is_met = ratio <= _TENANTS_GOAL
    console.print(f"TTFT alone {spread(a)}; beside the flood {spread(b)}")
    goal = f"at most {_TENANTS_GOAL}: {'met' if is_met else 'NOT met'}"
    console.print(f"p99 beside / alone: {ratio:.2f}, {goal}")
    return 0 if is_met else 1
