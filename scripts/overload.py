"""What a cluster does with several times the load it can carry.

    python scripts/overload.py
    python scripts/overload.py --prefill 2 --decode 2 --simulate 4000,10

First the capacity is found: closed loops of more and more callers, until they finish no more
requests a second. Then so many times that rate arrives, Poisson, whatever becomes of it, while the
router has a target for the time to first token (TTFT). Accepted requests must keep the target at
p99, others be refused at once with advice when to come again; the router's memory must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from load.arrivals import Load, Mix
from load.clusters import add_options, cluster, parser, setting
from load.driving import blocks_held, drive, memory_of
from load.outcomes import REFUSED, Run, percentile, spread, ttfts

from baton.local.cluster import LocalCluster

_CALLERS = (4, 8, 16, 32)
_NO_TARGET_MS = 600_000  # while the capacity is measured nothing is refused
_REFUSAL_GOAL_S, _RETRY_S = 0.05, (0.01, 60.0)
_GROWTH = 1.1  # of memory, over the second half of the run
_SETTLE_S = 20.0


async def capacity(target: str, mix: Mix, seconds: float) -> float:
    """Requests finished a second, at the best number of callers."""
    best = 0.0
    for callers in _CALLERS:
        arrivals = mix.arrivals(400.0, seconds, seed=callers)
        load = Load(target, arrivals, callers, seconds, ttft_target_ms=_NO_TARGET_MS)
        run = await drive(load)
        rate = len(run.finished) / run.seconds
        print(f"{callers:3} callers: {rate:6.1f} requests/s, TTFT {spread(ttfts(run.finished))}"
              f"{told(run)}", flush=True)  # fmt: skip
        best = max(best, rate)
    return best


def told(run: Run) -> str:
    """Endings other than good ones."""
    others = {status: n for status, n in run.statuses.items() if status != "OK"}
    return f"; {others}" if others else ""


async def overload(
    local: LocalCluster, mix: Mix, rate: float, args: argparse.Namespace
) -> tuple[Run, list[int]]:
    """The run, and the router's memory while it lasted."""
    arrivals = mix.arrivals(rate, args.seconds, seed=1)
    print(f"\n{rate:.1f} requests/s for {args.seconds:g} s: {len(arrivals)} requests", flush=True)
    async with memory_of(local.processes["router"].pid) as memory:
        run = await drive(Load(local.address, arrivals))
    return run, memory


def report(run: Run, target_s: float) -> bool:
    """Prints what became of the requests; whether the goals are met."""
    accepted = [o for o in run.outcomes if o.ttft_s]
    broken = len(accepted) - len([o for o in accepted if o.finished])
    in_time = percentile(ttfts(accepted), 99) <= target_s
    print(f"accepted  {len(accepted)} ({len(accepted) / run.seconds:.1f}/s), not finished {broken}")
    print(
        f"  TTFT    {spread(ttfts(accepted))}; target {target_s * 1e3:g} ms at p99: {_met(in_time)}"
    )
    refused = run.refused
    late = [o.ended_s for o in refused]
    advised = [o.retry_after_s for o in refused if _RETRY_S[0] <= o.retry_after_s <= _RETRY_S[1]]
    soon = not refused or max(late) <= _REFUSAL_GOAL_S
    again = f"p50 {percentile(advised, 50):.2f} s, max {percentile(advised, 100):.2f} s"
    print(f"refused   {len(refused)}, with usable advice {len(advised)} ({again})")
    print(f"  after   {spread(late)}, p99.9 {percentile(late, 99.9) * 1e3:.1f} ms; "
          f"goal {_REFUSAL_GOAL_S * 1e3:g} ms: {_met(soon)}")  # fmt: skip
    for why, count in _reasons(run).items():
        print(f"          {count:6} {why}")
    odd = {status: n for status, n in run.statuses.items() if status not in ("OK", REFUSED)}
    print(f"others    {odd or 'none'}")
    print(f"generator {run.lag}")
    return in_time and soon and len(advised) == len(refused) and not odd and not broken


def _reasons(run: Run) -> dict[str, int]:
    """Refusals by the words they begin with, figures left out."""
    counts: dict[str, int] = {}
    for outcome in run.refused:
        words = "".join("#" if c.isdigit() else c for c in outcome.message)[:72]
        counts[words] = counts.get(words, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:5])


def report_memory(memory: list[int], before: int, after: int) -> bool:
    """Prints the router's memory; whether it stopped growing."""
    half, end = memory[len(memory) // 2], max(memory[-3:])
    steady = end <= half * _GROWTH
    most = max(memory)
    mib = [f"{value / 2**20:.0f}" for value in (before, most, half, end, after)]
    print(f"router    {mib[0]} MiB before, {mib[1]} at most, {mib[2]} at half time, {mib[3]} at "
          f"the end, {mib[4]} after: {_met(steady)}")  # fmt: skip
    return steady


def _met(goal: bool) -> str:
    return "met" if goal else "NOT met"


async def main() -> int:
    """0 when every goal is met."""
    options = parser(__doc__)
    add_options(options, prefill=2, decode=2)
    options.add_argument("--seconds", type=float, default=60.0, help="of overload")
    options.add_argument("--times", type=float, default=5.0, help="the capacity")
    options.add_argument("--ttft-target", type=int, default=1000, metavar="MS")
    options.add_argument("--prompt-tokens", type=int, nargs=2, default=(64, 512), metavar="N")
    options.add_argument("--new-tokens", type=int, nargs=2, default=(16, 64), metavar="N")
    options.add_argument("--capacity-seconds", type=float, default=8.0, help="for each step")
    args = options.parse_args()
    mix = Mix(tuple(args.prompt_tokens), tuple(args.new_tokens))
    print(f"{setting(args)}; prompts of {mix.prompt_tokens}, outputs of {mix.new_tokens} tokens")
    async with cluster(args, ["--ttft-target", str(args.ttft_target / 1000)]) as local:
        found = await capacity(local.address, mix, args.capacity_seconds)
        async with memory_of(local.processes["router"].pid) as before:
            await asyncio.sleep(1.0)
        run, memory = await overload(local, mix, args.times * found, args)
        good = report(run, args.ttft_target / 1e3)
        held = await blocks_held(local.address, _SETTLE_S)
        async with memory_of(local.processes["router"].pid) as after:
            await asyncio.sleep(1.0)
        good &= report_memory(memory, before[-1], after[-1])
        print(f"blocks    {held} held afterwards: {_met(not held)}")
    return 0 if good and not held else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
