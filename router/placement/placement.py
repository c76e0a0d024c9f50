"""Which pair runs a request: filter, score, pick, as plain functions over a snapshot.

A filter leaves out what cannot be used (`Pair.unusable`) and what has no room now
(`Pair.no_room`: the request waits in the router); the rest is ranked by the predicted time to the
request's last token (`Pair.score_ms`), and the first of the ranking is picked.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from baton.errors import Overloaded, Unavailable
from router.fleet.snapshot import Snapshot
from router.placement.cost_model import PlacementRequest
from router.placement.scoring import Pair, pairs_of

RETRY_AFTER_S = 1.0
_MOST_REASONS = 8  # in one message


def pick(
    snapshot: Snapshot,
    request: PlacementRequest,
    failed: Set[str] = frozenset(),
    full: Set[str] = frozenset(),
) -> Pair:
    """The best pair for a request.

    Workers in `failed` are taken only if there are no others, decode workers in `full` not at all.
    Raises Unavailable when no two workers can be used, Overloaded when none of them has room now.
    """
    usable = [pair for pair in pairs_of(snapshot, request, full) if not pair.unusable]
    if not usable:
        raise Unavailable(snapshot.why_not_ready, RETRY_AFTER_S)
    with_room = [pair for pair in usable if not pair.no_room]
    if not with_room:
        reasons = _joined(reason for pair in usable for reason in pair.no_room)
        raise Overloaded(f"no room for {request.num_tokens} tokens now ({reasons})", RETRY_AFTER_S)
    best = min(with_room, key=lambda pair: pair.rank(failed))
    return replace(best, candidates=len(with_room))


def rank_all(snapshot: Snapshot, request: PlacementRequest) -> list[Pair]:
    """Every pair: best first, those that are left out last."""
    return sorted(
        sorted(pairs_of(snapshot, request), key=Pair.rank), key=lambda pair: bool(pair.refused)
    )


def has_room(snapshot: Snapshot, request: PlacementRequest) -> bool:
    """Whether a pair that can be used takes the request now."""
    return any(not pair.unusable and not pair.no_room for pair in pairs_of(snapshot, request))


def predicted_ttft_s(snapshot: Snapshot, request: PlacementRequest) -> float:
    """The least time to a first token, without the wait queue; 0 when nothing is known.

    Pairs without room now count too: waiting for it is the wait queue's part of the prediction.
    """
    if not any(worker.ready and worker.load.prefill_tokens_per_s for worker in snapshot.prefill):
        return 0.0
    usable = (pair for pair in pairs_of(snapshot, request) if not pair.unusable)
    return min((pair.ttft_s for pair in usable), default=0.0)


def span_attributes(pair: Pair) -> dict[str, str | int | float | bool]:
    """The numbers of a picked pair, for its span."""
    return {
        "predicted_ttft_ms": round(pair.ttft_s * 1e3, 3),
        "predicted_tpot_ms": round(pair.on_decode.tpot_s * 1e3, 3),
        "score_ms": round(pair.score_ms, 3),
        "queue_tokens": pair.on_prefill.queue_tokens,
        "prefill_cached_tokens": pair.on_prefill.cached,
        "decode_cached_tokens": pair.on_decode.cached,
        "decode_prefills": pair.decode_prefills,
        "same_host": pair.same_host,
        "candidates": pair.candidates,
    }


def _joined(reasons: Iterable[str]) -> str:
    """Each reason once, and not more of them than can be read."""
    distinct = list(dict.fromkeys(reasons))
    more = len(distinct) - _MOST_REASONS
    return "; ".join(distinct[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
