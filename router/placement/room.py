"""The filter of placement: which workers have room for a request now, and which have it soonest."""

from __future__ import annotations

from collections.abc import Set
from itertools import product
from math import inf

import numpy as np

from baton.errors import Overloaded
from router.fleet.snapshot import Flags, Snapshot
from router.placement.cost_model import Costs, costs_of
from router.request import Demand

RETRY_AFTER_S = 1.0
_MAX_REASONS = 8  # in one message


class NoRoom(Overloaded):
    """No worker has room for a request now; the text, with their reasons, is made when read."""

    def __init__(self, costs: Costs, full: Set[str]) -> None:
        super().__init__("", RETRY_AFTER_S)
        self._costs, self._full = costs, full

    def __str__(self) -> str:
        reasons = _why_no_room(self._costs, self._full)
        return f"no room for {self._costs.demand.num_tokens} tokens now ({reasons})"


def has_room(snapshot: Snapshot, demand: Demand, full: Set[str] = frozenset()) -> bool:
    """Whether `pick` may find a pair, without the costs; true if workers are missing."""
    missing = snapshot.why_unserved(demand.decodes)
    return bool(missing) or _any_has_room(costs_of(snapshot, demand), full)


def _any_has_room(costs: Costs, refused: Set[str]) -> bool:
    """Whether any worker serves the request alone, or some take its prompt and its sequence."""
    if with_room_alone(costs, refused).any():
        return True
    snapshot, (p_full, d_full) = costs.snapshot, costs.full(refused)
    decodes = snapshot.decodes & ~d_full
    if not (snapshot.num_usable and costs.demand.decodes and decodes.any()):
        return False
    prompts = snapshot.prefills & ~p_full
    return bool(prompts.any() or (decodes & costs.computes & ~costs.local_full).any())


def serving_alone(costs: Costs) -> Flags:
    """The workers that may serve the request alone whatever their role.

    The prompt alone is for any worker, by preference for one whose role is prompts. While no other
    worker has room, sequences are kept on prefill workers whose tokens meet the SLO.
    """
    snapshot, demand = costs.snapshot, costs.demand
    if not demand.decodes:
        return snapshot.prefills if snapshot.prefills.any() else snapshot.columns.ready
    if not snapshot.num_usable:
        return snapshot.alone
    in_time = (costs.fleet.tpot_us <= demand.max_itl_s * 1e6) & (not snapshot.is_named)
    return snapshot.prefills & ~snapshot.decodes & in_time


def with_room_alone(costs: Costs, refused: Set[str]) -> Flags:
    """Of these, the workers that have room now."""
    p_full, d_full = costs.full(refused)
    if not costs.demand.decodes:
        return serving_alone(costs) & ~p_full
    full = d_full | p_full if costs.snapshot.num_usable else d_full
    return serving_alone(costs) & ~full


def soonest_room(
    snapshot: Snapshot, demand: Demand, reserved: frozenset[str] = frozenset()
) -> frozenset[str] | None:
    """The workers to reserve for a request without room: the full ones of the pair that has room
    soonest. Workers that are `reserved` already stay while they are READY.

    Empty if only prompts that go first are in the way; None if no pair ever has room.
    """
    rows = [snapshot.rows.get(name) for name in reserved]
    if reserved and all(row is not None and snapshot.workers[row].ready for row in rows):
        return reserved
    costs = costs_of(snapshot, demand)
    prefill_ms, decode_ms = costs.room_ms()
    if not (snapshot.num_usable and demand.decodes):
        alone_ms = np.where(serving_alone(costs), decode_ms if demand.decodes else prefill_ms, inf)
        if not alone_ms.size or alone_ms.min() == inf:
            return None
        row = int(alone_ms.argmin())
        return frozenset({snapshot.workers[row].incarnation} if alone_ms[row] > 0 else ())
    decode_ms = np.where(snapshot.decodes, decode_ms, inf)
    prefill_ms = np.where(snapshot.prefills, prefill_ms, inf)
    soonest = (
        [int(row) for row in np.argsort(ms, kind="stable") if ms[row] < inf]
        for ms in (decode_ms, prefill_ms)
    )
    for d, p in product(*soonest):
        if snapshot.can_pair(p, d) and d not in snapshot.excluded_rows.get(p, ()):
            waits = ((prefill_ms[p], p), (decode_ms[d], d))
            return frozenset(snapshot.workers[row].incarnation for ms, row in waits if ms > 0)
    return None


def _why_no_room(costs: Costs, refused: Set[str]) -> str:
    """The reasons of the READY workers without room, up to _MAX_REASONS."""
    p_full, d_full = costs.full(refused)
    p = [int(row) for row in np.flatnonzero(p_full & costs.snapshot.prefills)]
    d = [int(row) for row in np.flatnonzero(d_full & costs.snapshot.decodes)]
    found = [costs.on_decode(row, refused) for row in d[:_MAX_REASONS]]
    found += [costs.on_prefill(row, refused) for row in p[: _MAX_REASONS - len(found)]]
    more = len(d) + len(p) - len(found)
    reasons = "; ".join(estimate.no_room for estimate in found)
    return reasons + (f"; and {more} more" if more else "")
