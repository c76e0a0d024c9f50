"""Baton's router with another placement, to compare with. Not part of the product.

    python benchmarks/scenarios/baseline_router.py round-robin router --model demo …

Everything but the choice of workers is the real router. Both policies send a request on at once, as
a load balancer does, and leave out only workers that are down or a decode worker without room.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Set
from dataclasses import replace

from baton.cli import main
from router.fleet.snapshot import Snapshot, WorkerView
from router.placement import placement
from router.placement.cost_model import PlacementRequest
from router.placement.placement import Pair, rank_all

Pick = Callable[[Snapshot, PlacementRequest, Set[str], Set[str]], Pair]
Rank = Callable[[WorkerView], int]
POLICIES: dict[str, Rank] = {
    "round-robin": lambda worker: 0,  # nothing but the order of use counts, which `picker` adds
    "least-connections": lambda worker: max(len(worker.assigned), worker.assigned_sequences),
}


def picker(rank: Rank) -> Pick:
    """What stands in for `placement.pick`: the least rank, among equals who waited longest."""
    real = placement.pick
    turns: dict[str, int] = {}
    clock = itertools.count(1)

    def cost(pair: Pair, failed: Set[str]) -> tuple[int, ...]:
        p, d = pair.prefill, pair.decode
        avoided = sum(worker.incarnation in failed for worker in (p, d))
        last = (turns.get(worker.incarnation, 0) for worker in (p, d))
        return (avoided, rank(p) + rank(d), *last)

    def pick(
        snapshot: Snapshot,
        request: PlacementRequest,
        failed: Set[str] = frozenset(),
        full: Set[str] = frozenset(),
    ) -> Pair:
        ranked = sorted(rank_all(snapshot, request, full), key=lambda pair: pair.names)
        pairs = [pair for pair in ranked if not pair.unusable]
        roomy = [pair for pair in pairs if not pair.on_decode.no_room]
        if not roomy:
            return real(snapshot, request, failed, full)  # it says what is missing
        best = min(roomy, key=lambda pair: cost(pair, failed))
        turns[best.prefill.incarnation] = next(clock)
        turns[best.decode.incarnation] = next(clock)
        return replace(best, candidates=len(roomy))

    return pick


if __name__ == "__main__":  # `baton ARGV…` under a policy
    setattr(placement, "pick", picker(POLICIES[sys.argv[1]]))  # noqa: B010 - a function to mypy
    sys.exit(main(sys.argv[2:]))
