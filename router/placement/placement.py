"""Which pair of workers runs a request: filter, score, pick, as plain functions over a snapshot.

A filter leaves out what cannot be used (`Pair.unusable`) and what has no room now
(`Pair.no_room`: the request waits in the router). The score is the predicted time to the request's
last token. A worker's cache counts for the time that it saves and for nothing else, so it never
outweighs a queue that takes longer.

Pairs are not walked: the least that each prefill worker costs with any decode worker follows from
the least handoff on its host and elsewhere, and only the best one is looked at closely.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from baton.errors import Overloaded, Unavailable
from router.fleet.snapshot import Column, Flags, Snapshot, WorkerView, kv_difference
from router.placement.cost_model import HANDOFF_S, Costs, Estimate, PlacementRequest, costs_of

RETRY_AFTER_S = 1.0
_MOST_REASONS = 8  # in one message
_MOST_PAIRS = 256  # explained
_MOST_UNREADY = 16  # workers of a role that are explained: a registry may hold thousands

_Rows = npt.NDArray[np.intp]
_Rank = tuple[float, ...]  # of a pair, the least is best; by cost, and at its end the two rows


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode worker, and what the request would find there."""

    on_prefill: Estimate
    on_decode: Estimate
    request: PlacementRequest
    unusable: str  # why it cannot be used, whatever room there is; empty when it can
    same_host: bool
    decode_prefills: bool
    ttft_s: float  # predicted, from now
    score_ms: float  # the predicted time to the last token, and what it costs others: lower wins
    candidates: int = 0  # pairs that can be used

    @property
    def prefill(self) -> WorkerView:
        return self.on_prefill.worker

    @property
    def decode(self) -> WorkerView:
        return self.on_decode.worker

    @property
    def names(self) -> tuple[str, str]:
        """Both incarnations, prefill first."""
        return self.prefill.incarnation, self.decode.incarnation

    @property
    def refused(self) -> str:
        """Why it is not picked; empty when it may be. Decode may prefill where prefill is full."""
        on_prefill = "" if self.decode_prefills else self.on_prefill.no_room
        return self.unusable or "; ".join(filter(None, (self.on_decode.no_room, on_prefill)))

    @property
    def local_prefill_max_tokens(self) -> int:
        """For Reserve: decode starts by itself if no more than this is not cached."""
        most = self.request.local_prefill_max_tokens
        return max(most, self.on_decode.uncached) if self.decode_prefills else most


def pick(
    snapshot: Snapshot,
    request: PlacementRequest,
    failed: Set[str] = frozenset(),
    full: Set[str] = frozenset(),
) -> Pair:
    """The best pair for a request.

    Workers in `failed` are taken only if there are no others, decode workers in `full`, which have
    just refused, not at all. Of equal pairs the one is taken whose workers have been given less,
    lately and ever. Raises Unavailable when no two workers can be used, Overloaded when none of
    them has room now.
    """
    if snapshot.why_not_ready:
        raise Unavailable(snapshot.why_not_ready, RETRY_AFTER_S)
    costs = costs_of(snapshot, request)
    if pair := _best(costs, frozenset(failed), frozenset(full)):
        return replace(pair, candidates=snapshot.num_usable)
    reasons = _why_no_room(costs, full)
    raise Overloaded(f"no room for {request.num_tokens} tokens now ({reasons})", RETRY_AFTER_S)


def predict(snapshot: Snapshot, request: PlacementRequest) -> tuple[float, bool]:
    """Seconds to a first token on the best pair, without the wait queue, and whether there is room.

    0 seconds when nothing is known. Where no pair has room, it is the best of all: waiting for room
    is the wait queue's part of the prediction.
    """
    p, costs = snapshot.of_prefill, costs_of(snapshot, request)
    with_room = _best(costs, frozenset(), frozenset())
    best = with_room or _best(costs, frozenset(), frozenset(), False)
    if best is None or not p["rate"][p["ready"]].any():
        return 0.0, with_room is not None
    return best.ttft_s, with_room is not None


def rank_all(
    snapshot: Snapshot, request: PlacementRequest, full: Set[str] = frozenset()
) -> list[Pair]:
    """The pairs, best first, those that are left out last; of many the first of these."""
    costs, prefill, decode = costs_of(snapshot, request), snapshot.of_prefill, snapshot.of_decode
    p, d = _explained(prefill["ready"]), _explained(decode["ready"])
    p = p[np.lexsort([ties[p] for ties in reversed(_prefill_ties(costs))])]
    d = d[np.argsort(decode["steps"][d], kind="stable")]
    column = p[:, None]
    cost, decode_prefills = costs.of(column, d)
    refused = ~snapshot.usable()[column, d]
    refused |= costs.no_decode_room(full)[d]
    refused |= costs.p_full[column] & ~decode_prefills
    order = np.lexsort((cost.ravel(), refused.ravel()))[:_MOST_PAIRS]
    at = zip(*np.unravel_index(order, cost.shape), strict=True)
    return [_pair(costs, p[i], d[j], full) for i, j in at]


@lru_cache(maxsize=1)  # the prediction's pair is picked, unless the fleet changes between
def _best(
    costs: Costs, failed: frozenset[str], full: frozenset[str], need_room: bool = True
) -> Pair | None:
    snapshot = costs.snapshot
    prefill, decode = snapshot.of_prefill, snapshot.of_decode
    p_good, d_good = prefill["ready"], decode["ready"]
    if need_room:
        d_good = d_good & ~costs.no_decode_room(full)
    p_failed, d_failed = snapshot.flags(failed)
    for failures in range(3 if failed else 1):  # of the two workers
        found = (
            _least(
                costs,
                np.flatnonzero(p_good & (p_failed == p_fails) & (prefill["kv"] == kv)),
                np.flatnonzero(d_good & (d_failed == failures - p_fails) & (decode["kv"] == kv)),
                need_room,
            )
            for kv in range(len(snapshot.kvs))
            for p_fails in range(failures + 1)
        )
        if best := min(filter(None, found), default=None):
            return _pair(costs, int(best[-3]), int(best[-1]))
    return None


def _least(costs: Costs, p: _Rows, d: _Rows, need_room: bool) -> _Rank | None:
    """Of these prefill and decode workers, which can be used with each other.

    For each prefill worker there is a bound, what it costs at least with any decode worker. The
    best is tried with all of them: that is exact, and usually equal to the bound.
    """
    if not (p.size and d.size):
        return None
    snapshot = costs.snapshot
    local, other, same = (
        column[d] for column in (costs.local_us, costs.handoff_us[False], costs.handoff_us[True])
    )
    handoff = np.full(len(snapshot.hosts), other.min())
    np.minimum.at(handoff, snapshot.of_decode["host"][d], same)
    prefill_us = costs.prefill_us[p]
    bound = np.minimum(local.min(), prefill_us + handoff[snapshot.of_prefill["host"][p]])
    full = costs.p_full[p] & need_room
    if full.any():
        bound[full] = _local_bound(prefill_us[full], local, other)
    ties = [tie[p] for tie in _prefill_ties(costs)]
    steps = snapshot.of_decode["steps"][d]
    while (least := bound.min()) < np.inf:
        i = _first(bound, *ties)
        cost, decode_prefills = costs.of(p[i], d)
        if full[i]:
            cost[~decode_prefills] = np.inf
        if others := snapshot.excluded_rows.get(int(p[i])):
            cost[np.isin(d, others)] = np.inf
        j = _first(cost, steps)
        if cost[j] <= least:
            return (cost[j], *(tie[i] for tie in ties), p[i], steps[j], d[j])
        bound[i] = cost[j]
    return None


def _local_bound(prefill_us: Column, local: Column, other: Column) -> Column:
    """Of prefill workers without room: the least where decode prefills because that costs less."""
    from_us = local - other  # where prefill takes longer than this
    order = np.argsort(from_us)
    least: Column = np.concatenate(([np.inf], np.minimum.accumulate(local[order])))
    return least[np.searchsorted(from_us[order], prefill_us)]


def _prefill_ties(costs: Costs) -> tuple[Column, ...]:
    """What decides between equal costs: the wait, which matters where decode prefills, and use."""
    p = costs.snapshot.of_prefill
    return costs.wait_us, p["num_assigned"], p["steps"]


def _first(values: Column, *ties: Column) -> int:
    """The least; of equal ones that with the least of `ties`, then the first by name."""
    rows = np.flatnonzero(values == values.min())
    for tie in ties:
        if rows.size > 1:
            rows = rows[tie[rows] == tie[rows].min()]
    return int(rows[0])


def _pair(costs: Costs, p: int, d: int, full: Set[str] = frozenset()) -> Pair:
    snapshot = costs.snapshot
    prefill, decode = snapshot.prefill[p], snapshot.decode[d]
    cost_us, decode_prefills = costs.of(p, d)
    same_host = bool(costs.same_host(p, d))
    handoff_ttft_s = costs.prefill_us[p] / 1e6 + HANDOFF_S[same_host]
    return Pair(
        on_prefill=costs.on_prefill(p),
        on_decode=costs.on_decode(d, full),
        request=costs.request,
        unusable=_why_unusable(snapshot, prefill, decode),
        same_host=same_host,
        decode_prefills=bool(decode_prefills),
        ttft_s=float(costs.local_ttft_s[d] if decode_prefills else handoff_ttft_s),
        score_ms=float(cost_us) / 1e3,
    )


def _why_unusable(snapshot: Snapshot, prefill: WorkerView, decode: WorkerView) -> str:
    if not (prefill.ready and decode.ready):
        return "; ".join(worker.description for worker in (prefill, decode) if not worker.ready)
    if prefill.record.kv != decode.record.kv:
        return f"incompatible KV caches: {kv_difference(prefill, decode)}"
    names = prefill.incarnation, decode.incarnation
    if why := snapshot.excluded_pairs.get(names):
        return f"{names[0]} does not hand over to {names[1]}: {why}"
    return ""


def _why_no_room(costs: Costs, refused: Set[str]) -> str:
    """Of each worker, but of not more of them than can be read."""
    d = np.flatnonzero(costs.snapshot.of_decode["ready"] & costs.no_decode_room(refused))
    p = np.flatnonzero(costs.snapshot.of_prefill["ready"] & costs.p_full)
    found = [costs.on_decode(int(row), refused) for row in d[:_MOST_REASONS]]
    found += [costs.on_prefill(int(row)) for row in p[: _MOST_REASONS - len(found)]]
    more = d.size + p.size - len(found)
    reasons = "; ".join(estimate.no_room for estimate in found)
    return reasons + (f"; and {more} more" if more else "")


def _explained(ready: Flags) -> _Rows:
    """All that are ready and some that are not."""
    return np.concatenate((np.flatnonzero(ready), np.flatnonzero(~ready)[:_MOST_UNREADY]))
