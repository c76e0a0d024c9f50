"""Compares Baton's placement with round robin and least connections, on a production trace.

    python scripts/placement.py --trace conversation_trace.jsonl

A slice of a Mooncake trace, scaled down, runs through a real router and simulated workers: real
blocks, caches and transfers, pretended computing. The baselines are the same router with another
choice of workers (`load/baseline_router.py`). Each run has a fresh cluster; a round takes the
policies in turn, and what is told is the median over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from load.arrivals import Arrival, Load
from load.clusters import add_options, cluster, parser, setting
from load.driving import blocks_held, drive
from load.outcomes import Run, hit_ratio, medians, percentile, table, ttfts
from load.trace import Scale, arrivals, reusable

OWN = "baton"
POLICIES = (OWN, "round-robin", "least-connections")
_BASELINE = Path(__file__).with_name("load") / "baseline_router.py"
_TIMEOUT_S, _SETTLE_S = 300.0, 20.0
_HEAD = ("placement", "TTFT p50", "TTFT p99", "E2E p50", "E2E p99", "cached", "requests/s",
         "prompt tokens/s")  # fmt: skip
_FIGURES: Sequence[tuple[Callable[[Run], float], str]] = (
    (lambda run: percentile(ttfts(run.finished), 50) * 1e3, "{:.0f} ms"),
    (lambda run: percentile(ttfts(run.finished), 99) * 1e3, "{:.0f} ms"),
    (lambda run: percentile([o.ended_s for o in run.finished], 50) * 1e3, "{:.0f} ms"),
    (lambda run: percentile([o.ended_s for o in run.finished], 99) * 1e3, "{:.0f} ms"),
    (lambda run: hit_ratio(run.finished) * 100, "{:.1f} %"),
    (lambda run: len(run.finished) / run.seconds, "{:.1f}"),
    (lambda run: sum(o.prompt_tokens for o in run.finished) / run.seconds, "{:.0f}"),
)


async def measure(policy: str, requests: list[Arrival], args: argparse.Namespace) -> Run:
    """One run of the slice under a policy, on a fresh cluster."""
    baseline = (sys.executable, str(_BASELINE), policy)
    programs = {} if policy == OWN else {"router": baseline}
    async with cluster(args, programs=programs) as local:
        run = await drive(Load(local.address, requests, timeout_s=_TIMEOUT_S))
        held = await blocks_held(local.address, _SETTLE_S)
    print(f"  {policy:18} {', '.join(cells(run))}; {dict(run.statuses)}, {held} blocks held")
    print(f"  {'':18} generator: {run.lag}", flush=True)
    return run


def cells(*rounds: Run) -> list[str]:
    """A row of the table: medians over rounds."""
    return [text.format(medians(rounds, figure)) for figure, text in _FIGURES]


async def main() -> None:
    """Prints the table."""
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, required=True, help="JSON Lines file")
    options.add_argument("--first", type=int, default=0, help="rows left out")
    options.add_argument("--count", type=int, default=1800, help="rows taken")
    options.add_argument("--length", type=float, default=8.0, help="lengths are divided by this")
    options.add_argument("--rate", type=float, default=6.0, help="times are divided by this")
    options.add_argument("--max-tokens", type=int, default=4096, help="prompts are cut to so many")
    options.add_argument("--rounds", type=int, default=3, help="of each policy")
    options.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    add_options(options, prefill=4, decode=4, simulate="8000,20", kv_blocks=16384)
    args = options.parse_args()
    scale = Scale(args.length, args.rate, args.first, args.count, args.max_tokens)
    requests = arrivals(args.trace, scale)
    tokens = sum(request.prompt_tokens for request in requests)
    print(f"{setting(args)}\n{len(requests)} requests in {requests[-1].at_s:.0f} s, "
          f"{tokens / len(requests):.0f} prompt tokens each, {reusable(requests):.0%} of them seen "
          "before", flush=True)  # fmt: skip
    runs: dict[str, list[Run]] = {policy: [] for policy in args.policies}
    for number in range(args.rounds):
        print(f"round {number + 1}", flush=True)
        for policy in args.policies:
            runs[policy].append(await measure(policy, requests, args))
    print(f"\n{table(_HEAD, ([policy, *cells(*rounds)] for policy, rounds in runs.items()))}")


if __name__ == "__main__":
    asyncio.run(main())
