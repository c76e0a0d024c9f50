"""Which pair of workers runs a request: filter, score, pick, as plain functions over a snapshot.

A filter leaves out what cannot be used (`Pair.unusable`) and what has no room now
(`Pair.no_room`: the request waits in the router). The score is the predicted time to the request's
last token. A worker's cache counts for the time that it saves and for nothing else, so it never
outweighs a queue that takes longer.

Pairs of many workers are not walked: the least that each prefill worker costs with any decode
worker follows from the least handoff on its host and elsewhere, and only the best one is looked at
closely.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import inf

import numpy as np
import numpy.typing as npt

from baton.errors import Overloaded, Unavailable
from router.fleet.snapshot import Column, Flags, Row, Snapshot, WorkerView, kv_difference
from router.placement.cost_model import (
    HANDOFF_S,
    ColumnCosts,
    Costs,
    Estimate,
    OnPrefill,
    RowCosts,
    costs_of,
    pair_cost,
    room_ms,
)
from router.request import Demand

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
    demand: Demand
    unusable: str  # why it cannot be used, whatever room there is; empty when it can
    same_host: bool
    decode_prefills: bool
    ttft_s: float  # predicted, from now
    handed_over_ttft_s: float  # the same if the prefill worker computes the prompt
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
    def alone(self) -> bool:
        """Whether one worker stands on both sides: there is none of the other role."""
        return self.on_prefill is self.on_decode

    @property
    def refused(self) -> str:
        """Why it is not picked; empty when it may be. Decode may prefill where prefill is full."""
        on_prefill = "" if self.decode_prefills else self.on_prefill.no_room
        return self.unusable or "; ".join(filter(None, (self.on_decode.no_room, on_prefill)))

    @property
    def local_prefill_max_tokens(self) -> int:
        """For Reserve: decode starts by itself if no more than this is not cached."""
        if self.alone:
            return self.demand.num_tokens
        most = self.demand.local_prefill_max_tokens
        return max(most, self.on_decode.uncached) if self.decode_prefills else most


def pick(
    snapshot: Snapshot,
    request: Demand,
    failed: Set[str] = frozenset(),
    full: Set[str] = frozenset(),
) -> Pair:
    """The best pair for a request.

    Workers in `failed` are taken only if there are no others; those in `full`, which have just
    refused or are kept for another request, not at all. Of equal pairs the one is taken whose
    workers have been given less, lately and ever. Raises Unavailable when no workers can be used,
    Overloaded when none of them has room now.
    """
    if why := snapshot.why_unserved(request.decodes):
        raise Unavailable(why, RETRY_AFTER_S)
    costs = costs_of(snapshot, request)
    if pair := _best(costs, frozenset(failed), frozenset(full)):
        return pair
    reasons = _why_no_room(costs, full)
    raise Overloaded(f"no room for {request.num_tokens} tokens now ({reasons})", RETRY_AFTER_S)


def predict(snapshot: Snapshot, request: Demand) -> tuple[float, bool]:
    """Seconds to a first token on the best pair, without the wait queue, and whether there is room.

    0 seconds when nothing is known. Where no pair has room, it is the best of all: waiting for room
    is the wait queue's part of the prediction.
    """
    costs = costs_of(snapshot, request)
    with_room = _best(costs, frozenset(), frozenset())
    best = with_room or _best(costs, frozenset(), frozenset(), False)
    if best is None or not snapshot.prefill_rate:
        return 0.0, with_room is not None
    return best.ttft_s, with_room is not None


def soonest_room(
    snapshot: Snapshot, request: Demand, kept: frozenset[str] = frozenset()
) -> frozenset[str] | None:
    """The workers to keep for a request that finds no room: what is full of the pair that has room
    first. Those that are `kept` already stay as long as they are READY.

    Empty where nothing is in the way but prompts that go first; None where no pair ever has room.
    """
    views = (*snapshot.prefill, *snapshot.decode)
    rows = [snapshot.rows.get(name) for name in kept]
    if kept and all(row is not None and views[row].ready for row in rows):
        return kept
    costs, numbers, split = costs_of(snapshot, request), snapshot.numbers, len(snapshot.prefill)
    prefill = [(_prefill_room_ms(p, costs.prefill_at(i)), i) for i, p in enumerate(numbers[:split])]
    decode = [(0.0, j) for j in range(len(numbers) - split)]
    if request.decodes:
        found = ((d, costs.decode_at(j)) for j, d in enumerate(numbers[split:]))
        decode = [(room_ms(d, on.blocks, on.most_busy), j) for j, (d, on) in enumerate(found)]
    if not snapshot.num_usable:
        alone = decode if snapshot.alone and request.decodes else []
        ms, row = min(alone if request.decodes else prefill, default=(inf, 0))
        lone = (snapshot.decode if request.decodes else snapshot.prefill)[row : row + 1]
        return None if ms == inf else frozenset(view.incarnation for view in lone if ms > 0)
    finite = (sorted(one for one in waits if one[0] < inf) for waits in (decode, prefill))
    for (d_ms, j), (p_ms, i) in product(*finite):
        fits = snapshot.fits(numbers[i], numbers[split + j])
        if fits and j not in snapshot.excluded_rows.get(i, ()):
            waits = ((p_ms, snapshot.prefill[i]), (d_ms, snapshot.decode[j]))
            return frozenset(view.incarnation for ms, view in waits if ms > 0)
    return None


def _prefill_room_ms(worker: Row, found: OnPrefill) -> float:
    """As `room_ms`, of blocks alone: a window is full of prompts that go first."""
    return room_ms(worker, found.blocks) if worker.blocks_held else 0.0 if worker.ready else inf


def rank_all(snapshot: Snapshot, request: Demand, full: Set[str] = frozenset()) -> list[Pair]:
    """The pairs, best first, those that are left out last; of many the first of these."""
    costs, columns = ColumnCosts(snapshot, request), snapshot.columns
    if not snapshot.num_usable and (ranks := _ranks_alone(costs, frozenset(), full, False)):
        alone = [_lone_pair(costs, int(rank[-1]), full) for rank in sorted(ranks)]
        return sorted(alone[:_MOST_PAIRS], key=lambda pair: bool(pair.refused))
    p, d = _explained(columns.prefill.ready), _explained(columns.decode.ready)
    p = p[np.lexsort([ties[p] for ties in reversed(_prefill_ties(costs))])]
    d = d[np.argsort(columns.decode.steps[d], kind="stable")]
    column = p[:, None]
    cost, decode_prefills = costs.of(column, d)
    no_room = costs.full(full)
    refused = ~snapshot.usable()[column, d] | no_room[1][d] | no_room[0][column] & ~decode_prefills
    order = np.lexsort((cost.ravel(), refused.ravel()))[:_MOST_PAIRS]
    at = zip(*np.unravel_index(order, cost.shape), strict=True)
    return [_pair(costs, int(p[i]), int(d[j]), full) for i, j in at]


@lru_cache(maxsize=1)  # the prediction's pair is picked, unless the fleet changes between
def _best(
    costs: RowCosts | ColumnCosts,
    failed: frozenset[str],
    full: frozenset[str],
    need_room: bool = True,
) -> Pair | None:
    if not costs.snapshot.num_usable:
        rank = min(_ranks_alone(costs, failed, full, need_room), default=None)
        return None if rank is None else _lone_pair(costs, int(rank[-1]))
    least = _least_row if isinstance(costs, RowCosts) else _least_column
    found = least(costs, failed, full, need_room)  # type: ignore[arg-type]
    if found is None:
        return None
    return _pair(costs, int(found[-3]), int(found[-1]), candidates=costs.snapshot.num_usable)


def _least_row(costs: RowCosts, failed: Set[str], full: Set[str], need_room: bool) -> _Rank | None:
    """The best of all pairs, one after the other."""
    snapshot, best = costs.snapshot, None
    p_full, d_full = costs.full(full)
    numbers, split = snapshot.numbers, len(snapshot.prefill)
    for i, (p, on_prefill) in enumerate(zip(numbers, costs.prefill, strict=False)):
        excluded = snapshot.excluded_rows.get(i, ())
        for j, (d, on_decode) in enumerate(zip(numbers[split:], costs.decode, strict=True)):
            if not snapshot.fits(p, d) or j in excluded or (need_room and d_full[j]):
                continue
            cost, decode_prefills = pair_cost(on_prefill, on_decode, p.host == d.host)
            if need_room and p_full[i] and not decode_prefills:
                continue
            failures = (snapshot.prefill[i].incarnation in failed) + (
                snapshot.decode[j].incarnation in failed
            )
            rank = (failures, cost, on_prefill.wait_us, p.num_assigned, p.steps, i, d.steps, j)
            if best is None or rank < best:
                best = rank
    return best


def _least_column(
    costs: ColumnCosts, failed: Set[str], full: Set[str], need_room: bool
) -> _Rank | None:
    """The best pair, by workers that have failed and by kind of KV cache."""
    snapshot = costs.snapshot
    prefill, decode = snapshot.columns.prefill, snapshot.columns.decode
    d_good = decode.ready & ~costs.full(full)[1] if need_room else decode.ready
    p_failed, d_failed = snapshot.flags(failed)
    for failures in range(3 if failed else 1):  # of the two workers
        found = (
            _least(
                costs,
                np.flatnonzero(prefill.ready & (p_failed == p_fails) & (prefill.kv == kv)),
                np.flatnonzero(d_good & (d_failed == failures - p_fails) & (decode.kv == kv)),
                need_room,
            )
            for kv in range(len(snapshot.kvs))
            for p_fails in range(failures + 1)
        )
        if best := min(filter(None, found), default=None):
            return best
    return None


def _least(costs: ColumnCosts, p: _Rows, d: _Rows, need_room: bool) -> _Rank | None:
    """Of these prefill and decode workers, which can be used with each other.

    For each prefill worker there is a bound, what it costs at least with any decode worker. The
    best is tried with all of them: that is exact, and usually equal to the bound.
    """
    if not (p.size and d.size):
        return None
    snapshot, columns, on_decode = costs.snapshot, costs.snapshot.columns, costs.decode
    local, other, same = on_decode.local_us[d], on_decode.far_us[d], on_decode.near_us[d]
    handoff = np.full(len(snapshot.hosts), other.min())
    np.minimum.at(handoff, columns.decode.host[d], same)
    prefill_us = costs.prefill.us[p]
    bound = np.minimum(local.min(), prefill_us + handoff[columns.prefill.host[p]])
    full = costs.prefill.full[p] & need_room
    if full.any():
        bound[full] = _local_bound(prefill_us[full], local, other)
    ties = [tie[p] for tie in _prefill_ties(costs)]
    steps = columns.decode.steps[d]
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


def _prefill_ties(costs: ColumnCosts) -> tuple[Column, ...]:
    """What decides between equal costs: the wait, which matters where decode prefills, and use."""
    p = costs.snapshot.columns.prefill
    return costs.prefill.wait_us, p.num_assigned, p.steps


def _first(values: Column, *ties: Column) -> int:
    """The least; of equal ones that with the least of `ties`, then the first by name."""
    rows = np.flatnonzero(values == values.min())
    for tie in ties:
        if rows.size > 1:
            rows = rows[tie[rows] == tie[rows].min()]
    return int(rows[0])


def _ranks_alone(
    costs: RowCosts | ColumnCosts, failed: Set[str], full: Set[str], need_room: bool
) -> list[_Rank]:
    """Of the workers that can serve the request without one of the other role."""
    snapshot, decodes = costs.snapshot, costs.request.decodes
    if decodes and not snapshot.alone:
        return []
    workers = snapshot.decode if decodes else snapshot.prefill
    no_room = costs.full(full)[decodes]
    return [
        (
            view.incarnation in failed,
            costs.decode_at(row).alone_us if decodes else costs.prefill_at(row).us,
            len(view.assigned),
            view.load.steps,
            row,
        )
        for row, view in enumerate(workers)
        if view.ready and not (need_room and no_room[row])
    ]


def _lone_pair(costs: Costs, row: int, full: Set[str] = frozenset()) -> Pair:
    """A worker that serves the request alone, on both sides of a pair."""
    snapshot, decodes = costs.snapshot, costs.request.decodes
    found = costs.on_decode(row, full) if decodes else costs.on_prefill(row, full)
    us = costs.decode_at(row).alone_us if decodes else costs.prefill_at(row).us
    ttft_s = costs.decode_at(row).local_ttft_s if decodes else us / 1e6
    return Pair(
        on_prefill=found,
        on_decode=found,
        demand=costs.request,
        unusable="",
        same_host=True,
        decode_prefills=decodes,
        ttft_s=float(ttft_s),
        handed_over_ttft_s=0.0,
        score_ms=float(us) / 1e3,
        candidates=sum(view.ready for view in (snapshot.decode if decodes else snapshot.prefill)),
    )


def _pair(costs: Costs, p: int, d: int, full: Set[str] = frozenset(), candidates: int = 0) -> Pair:
    snapshot = costs.snapshot
    prefill, decode = snapshot.prefill[p], snapshot.decode[d]
    on_prefill, on_decode = costs.prefill_at(p), costs.decode_at(d)
    same_host = prefill.record.host_id == decode.record.host_id
    cost_us, decode_prefills = pair_cost(on_prefill, on_decode, same_host)
    handoff_ttft_s = on_prefill.us / 1e6 + HANDOFF_S[same_host]
    return Pair(
        on_prefill=costs.on_prefill(p, full),
        on_decode=costs.on_decode(d, full),
        demand=costs.request,
        unusable=_why_unusable(snapshot, prefill, decode),
        same_host=same_host,
        decode_prefills=bool(decode_prefills),
        ttft_s=float(on_decode.local_ttft_s if decode_prefills else handoff_ttft_s),
        handed_over_ttft_s=float(handoff_ttft_s),
        score_ms=float(cost_us) / 1e3,
        candidates=candidates,
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
    snapshot = costs.snapshot
    p, d = (
        [row for row, worker in enumerate(workers) if full[row] and worker.ready]
        for full, workers in zip(
            costs.full(refused), (snapshot.prefill, snapshot.decode), strict=True
        )
    )
    found = [costs.on_decode(row, refused) for row in d[:_MOST_REASONS]]
    found += [costs.on_prefill(row, refused) for row in p[: _MOST_REASONS - len(found)]]
    more = len(d) + len(p) - len(found)
    reasons = "; ".join(estimate.no_room for estimate in found)
    return reasons + (f"; and {more} more" if more else "")


def _explained(ready: Flags) -> _Rows:
    """All that are ready and some that are not."""
    return np.concatenate((np.flatnonzero(ready), np.flatnonzero(~ready)[:_MOST_UNREADY]))
