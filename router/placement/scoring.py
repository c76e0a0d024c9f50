"""Chooses the pair of workers for a request: filter, score, pick, over an immutable snapshot.

The filter leaves out pairs that cannot be used (`Pair.unusable`) and workers without room now (the
request waits in the router). The score is the predicted time to the request's last token. A
worker's cache counts for the time it saves only, so it never outweighs a queue that takes longer.

Pairs of many workers are not enumerated: a lower bound for each prefill worker follows from the
least handoff cost on its host and between hosts, and only the best ones are computed exactly.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from baton.errors import Unavailable
from baton.v1 import common_pb2
from router.fleet.snapshot import Column, Flags, Rows, Snapshot, WorkerView, kv_difference
from router.placement.cost_model import HANDOFF_S, Costs, Estimate, costs_of
from router.placement.room import (
    RETRY_AFTER_S,
    NoRoom,
    serving_alone,
    with_room_alone,
)
from router.request import Demand

_PREFILL, _DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE
_MAX_PAIRS = 256  # explained
_MAX_UNREADY = 16  # workers of a role that are explained: a registry may hold thousands

_Rank = tuple[float, ...]  # sort key of a pair or worker: the lowest is best; rows at its end


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode worker, and the request's estimates there."""

    on_prefill: Estimate
    on_decode: Estimate
    demand: Demand
    unusable: str  # why it cannot be used, regardless of room; empty if it can
    same_host: bool
    decode_prefills: bool
    ttft_s: float  # predicted, from now
    handed_over_ttft_s: float  # predicted if the prefill worker computes the prompt
    score_ms: float  # predicted time to the last token, and the cost for others; lowest wins
    candidates: int = 0  # number of pairs that can be used

    @property
    def prefill(self) -> WorkerView:
        return self.on_prefill.worker

    @property
    def decode(self) -> WorkerView:
        return self.on_decode.worker

    @property
    def names(self) -> tuple[str, str]:
        """The incarnations of the prefill and the decode worker."""
        return self.prefill.incarnation, self.decode.incarnation

    @property
    def alone(self) -> bool:
        """Whether one worker has both roles, because there is none of the other role."""
        return self.on_prefill is self.on_decode

    @property
    def refused(self) -> str:
        """Why it may not be picked, or empty. Decode may compute prompts if prefill is full."""
        on_prefill = "" if self.decode_prefills else self.on_prefill.no_room
        return self.unusable or "; ".join(filter(None, (self.on_decode.no_room, on_prefill)))

    @property
    def local_prefill_max_tokens(self) -> int:
        """For Reserve: decode computes the prompt itself if at most this much is not cached.

        A worker that is both computes any, as it cannot hand over to itself.
        """
        if self.prefill.incarnation == self.decode.incarnation:
            return self.demand.num_tokens
        most = self.demand.local_prefill_max_tokens
        return max(most, self.on_decode.uncached) if self.decode_prefills else most


def pick(
    snapshot: Snapshot,
    demand: Demand,
    failed: Set[str] = frozenset(),
    full: Set[str] = frozenset(),
) -> Pair:
    """Returns the best pair for a request.

    `failed`: workers that are used only if there are no others. `full`: workers that are not used,
    as they have just refused or are reserved for another request. Of equal pairs, the one whose
    workers were given less, recently and ever, is picked. Raises Unavailable if no workers can be
    used, Overloaded if none of them has room now.
    """
    if why := snapshot.why_unserved(demand.decodes):
        raise Unavailable(why, RETRY_AFTER_S)
    costs = costs_of(snapshot, demand)
    if pair := _best(costs, frozenset(failed), frozenset(full)):
        return pair
    raise NoRoom(costs, full)


def predict(snapshot: Snapshot, demand: Demand) -> tuple[float, bool]:
    """Seconds to the first token on the best pair, without queueing, and whether it has room.

    0 seconds if nothing is known. If no pair has room, the best of all is used: the wait for room
    is predicted by the wait queue.
    """
    costs = costs_of(snapshot, demand)
    with_room = _best(costs, frozenset(), frozenset())
    best = with_room or _best(costs, frozenset(), frozenset(), False)
    if best is None or not snapshot.prefill_rate:
        return 0.0, with_room is not None
    return best.ttft_s, with_room is not None


def rank_all(snapshot: Snapshot, demand: Demand, full: Set[str] = frozenset()) -> list[Pair]:
    """Pairs in order, best first and refused ones last; of many the first _MAX_PAIRS."""
    costs = costs_of(snapshot, demand)
    in_pairs = snapshot.num_usable and demand.decodes
    may = with_room_alone(costs, full) if in_pairs else serving_alone(costs)
    ranks = sorted(_ranks_alone(costs, frozenset(), may))[:_MAX_PAIRS]
    alone = [_lone_pair(costs, int(rank[-1]), full) for rank in ranks]
    if alone and not in_pairs:
        return sorted(alone, key=lambda pair: bool(pair.refused))
    role, ready = snapshot.columns.role, snapshot.columns.ready
    p, d = (_explained(ready, role != other) for other in (_DECODE, _PREFILL))
    p = p[np.lexsort([ties[p] for ties in reversed(_prefill_ties(costs))])]
    d = d[np.argsort(snapshot.columns.steps[d], kind="stable")]
    column = p[:, None]
    cost, decode_prefills = costs.pair_costs(column, d, need_room=False)
    p_full, d_full = costs.full(full)
    full_now = np.where(decode_prefills, costs.local_full[d], p_full[column]) | d_full[d]
    refused = ~snapshot.usable()[column, d] | full_now
    order = np.lexsort((cost.ravel(), refused.ravel()))[:_MAX_PAIRS]
    at = zip(*np.unravel_index(order, cost.shape), strict=True)
    pairs = [_pair(costs, int(p[i]), int(d[j]), full) for i, j in at]
    return pairs if any(not pair.refused for pair in pairs[:1]) else [*alone, *pairs]


@lru_cache(maxsize=1)  # the pair of the prediction is picked unless the fleet changes between
def _best(
    costs: Costs, failed: frozenset[str], full: frozenset[str], need_room: bool = True
) -> Pair | None:
    snapshot, demand = costs.snapshot, costs.demand
    if snapshot.num_usable and demand.decodes:
        rank = _best_rank(costs, failed, full, need_room)
        if rank is not None:
            p, d = int(rank[-3]), int(rank[-1])
            return _pair(costs, p, d, candidates=snapshot.num_usable, need_room=need_room)
    alone = with_room_alone(costs, full) if need_room else serving_alone(costs)
    rank = min(_ranks_alone(costs, failed, alone), default=None)
    return None if rank is None else _lone_pair(costs, int(rank[-1]))


def _best_rank(costs: Costs, failed: Set[str], full: Set[str], need_room: bool) -> _Rank | None:
    """The best pair, with as few failed workers as possible, over all kinds of KV cache."""
    snapshot = costs.snapshot
    p_full, d_full = costs.full(full) if need_room else (None, None)
    is_failed = snapshot.flags(failed) if failed else None
    for failures in range(3 if failed else 1):  # failed workers in the pair
        best = None
        for p, d in snapshot.ready_by_kv:
            if d_full is not None:
                d = d[~d_full[d]]  # noqa: PLW2901
            for p_failures in range(failures + 1):
                if is_failed is not None:
                    chosen_p = p[is_failed[p] == p_failures]
                    chosen_d = d[is_failed[d] == failures - p_failures]
                else:
                    chosen_p, chosen_d = p, d
                rank = _best_of(costs, chosen_p, chosen_d, p_full)
                if rank is not None and (best is None or rank < best):
                    best = rank
        if best is not None:
            return best
    return None


def _best_of(costs: Costs, p: Rows, d: Rows, p_full: Flags | None) -> _Rank | None:
    """The best pair of these prefill and decode workers, which may be paired with each other.

    A lower bound for each prefill worker is its cost with any decode worker. The one with the least
    bound is computed with all of them: that is exact, and usually equal to the bound.
    """
    if not (p.size and d.size):
        return None
    full = p_full[p] if p_full is not None else None
    bound = _lower_bounds(costs, p, d, full) if p.size > 1 else np.zeros(1)
    ties = [tie[p] for tie in _prefill_ties(costs)]
    steps = costs.snapshot.columns.steps[d]
    while (least := bound.min()) < inf:
        i = _first(bound, *ties)
        cost, decode_prefills = costs.pair_costs(p[i], d, full is not None)
        if full is not None and full[i]:
            cost[~decode_prefills] = inf
        if others := costs.snapshot.excluded_rows.get(int(p[i])):
            cost[np.isin(d, others)] = inf
        j = _first(cost, steps)
        if cost[j] <= least or (p.size == 1 and cost[j] < inf):
            return (cost[j], *(tie[i] for tie in ties), p[i], steps[j], d[j])
        bound[i] = cost[j]
    return None


def _lower_bounds(costs: Costs, p: Rows, d: Rows, full: Flags | None) -> Column:
    """The least cost of each prefill worker with any of the decode workers."""
    host, decode = costs.snapshot.columns.host, costs.decode
    local, far, near = costs.local_us(full is not None)[d], decode.far_us[d], decode.near_us[d]
    by_host = np.full(len(costs.snapshot.hosts), far.min())
    np.minimum.at(by_host, host[d], near)
    prefill_us = costs.prompt_us[p]
    handed_over = prefill_us + by_host[host[p]]
    bound: Column = np.minimum(local.min(), handed_over)
    if full is not None and full.any():
        bound[full] = _local_bound(prefill_us[full], local, far)
    return bound


def _local_bound(prefill_us: Column, local: Column, other: Column) -> Column:
    """Bounds of prefill workers without room: decode computes, which must cost less."""
    threshold = local - other  # decode computes where prefill takes longer
    order = np.argsort(threshold)
    least: Column = np.concatenate(([np.inf], np.minimum.accumulate(local[order])))
    return least[np.searchsorted(threshold[order], prefill_us)]


def _prefill_ties(costs: Costs) -> tuple[Column, ...]:
    """Decide between equal costs: the wait, which matters where decode computes, and usage."""
    workers = costs.snapshot.columns
    return costs.prefill.wait_us, workers.num_assigned, workers.steps


def _first(values: Column, *ties: Column) -> int:
    """Row of the least value; of equal ones that of the least `ties`, then the first by name."""
    if values.size == 1:
        return 0
    rows = np.flatnonzero(values == values.min())
    for tie in ties:
        if rows.size == 1:
            break
        rows = rows[tie[rows] == tie[rows].min()]
    return int(rows[0])


def _ranks_alone(costs: Costs, failed: Set[str], alone: Flags) -> list[_Rank]:
    """The workers that serve the request alone."""
    cost = costs.decode.alone_us if costs.demand.decodes else costs.prefill.us
    workers = costs.snapshot.workers
    return [
        (view.incarnation in failed, cost[row], len(view.assigned), view.load.steps, row)
        for row, view in ((int(row), workers[row]) for row in np.flatnonzero(alone))
    ]


def _lone_pair(costs: Costs, row: int, full: Set[str] = frozenset()) -> Pair:
    """A worker that serves the request alone, in both roles of a pair."""
    decodes = costs.demand.decodes
    found = costs.on_decode(row, full) if decodes else costs.on_prefill(row, full)
    us = costs.decode.alone_us[row] if decodes else costs.prefill.us[row]
    ttft_us = costs.decode.local_ttft_us[row] if decodes else us
    return Pair(
        on_prefill=found,
        on_decode=found,
        demand=costs.demand,
        unusable="",
        same_host=True,
        decode_prefills=decodes,
        ttft_s=float(ttft_us) / 1e6,
        handed_over_ttft_s=0.0,
        score_ms=float(us) / 1e3,
        candidates=int(serving_alone(costs).sum()),
    )


def _pair(
    costs: Costs,
    p: int,
    d: int,
    full: Set[str] = frozenset(),
    candidates: int = 0,
    need_room: bool = False,
) -> Pair:
    snapshot = costs.snapshot
    prefill, decode = snapshot.workers[p], snapshot.workers[d]
    same_host = prefill.record.host_id == decode.record.host_id
    handoff_us = (costs.decode.near_us if same_host else costs.decode.far_us)[d]
    handed_over_us = float(costs.prompt_us[p] + handoff_us) if p != d else inf
    local_us = float(costs.local_us(need_room)[d])
    decode_prefills = local_us < handed_over_us
    handoff_ttft_s = float(costs.prefill.us[p]) / 1e6 + HANDOFF_S[same_host]
    return Pair(
        on_prefill=costs.on_prefill(p, full),
        on_decode=costs.on_decode(d, full),
        demand=costs.demand,
        unusable=_why_unusable(snapshot, prefill, decode),
        same_host=same_host,
        decode_prefills=decode_prefills,
        ttft_s=float(costs.decode.local_ttft_us[d]) / 1e6 if decode_prefills else handoff_ttft_s,
        handed_over_ttft_s=handoff_ttft_s,
        score_ms=min(local_us, handed_over_us) / 1e3,
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


def _explained(ready: Flags, role: Flags) -> Rows:
    """The rows of all READY workers of a role and of some others."""
    return np.concatenate(
        (np.flatnonzero(ready & role), np.flatnonzero(~ready & role)[:_MAX_UNREADY])
    )
