"""Which pair runs a request: filter, score, pick, as plain functions over a snapshot.

A filter leaves out what cannot be used (`Pair.unusable`) and what has no room now
(`Pair.no_room`: the queue stands in the router); the rest is ranked by the predicted time to the
request's last token (`Pair.score_ms`), and the first of the ranking is picked.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from baton.errors import Overloaded, Unavailable
from router.fleet.snapshot import Snapshot
from router.placement.placement_request import Wants
from router.placement.scoring import Choice, Pair, pairs_of

__all__ = [
    "RETRY_AFTER_S",
    "Choice",
    "Wants",
    "has_room",
    "judge",
    "pick",
    "predicted_ttft_s",
    "why",
]

RETRY_AFTER_S = 1.0
_REASONS_TOLD = 8  # in one message


def pick(
    snapshot: Snapshot,
    wants: Wants,
    failed: Set[str] = frozenset(),
    full: Set[str] = frozenset(),
) -> Choice:
    """The best pair for a request.

    Workers in `failed` are taken only if there are no others, decode workers in `full` not at all.
    Raises Unavailable when no two workers can be used, Overloaded when none of them has room now.
    """
    pairs = pairs_of(snapshot, wants, full)
    usable = [pair for pair in pairs if not pair.unusable]
    if not usable:
        raise Unavailable(snapshot.why_not_ready, RETRY_AFTER_S)
    roomy = [pair for pair in usable if not pair.no_room]
    if not roomy:
        raise Overloaded(_why_no_room(usable, wants), RETRY_AFTER_S)
    return min(roomy, key=lambda pair: pair.rank(failed)).choice(len(roomy))


def judge(snapshot: Snapshot, wants: Wants) -> list[Choice]:
    """Every pair with its numbers: best first, those that are left out last."""
    ranked = sorted(pairs_of(snapshot, wants), key=Pair.rank)
    choices = [pair.choice(len(ranked)) for pair in ranked]
    return sorted(choices, key=lambda choice: bool(choice.refused))


def has_room(snapshot: Snapshot, wants: Wants) -> bool:
    """Whether a pair that can be used takes the request now."""
    return any(not pair.unusable and not pair.no_room for pair in pairs_of(snapshot, wants))


def predicted_ttft_s(snapshot: Snapshot, wants: Wants) -> float:
    """The least time to a first token, without the router's own line; 0 when nothing is known.

    Pairs without room now count too: waiting for it is the line's part of the prediction.
    """
    if not any(worker.ready and worker.load.prefill_tokens_per_s for worker in snapshot.prefill):
        return 0.0
    usable = (pair for pair in pairs_of(snapshot, wants) if not pair.unusable)
    return min((pair.ttft_s for pair in usable), default=0.0)


def why(choice: Choice) -> dict[str, str | int | float | bool]:
    """What a span tells of a choice."""
    return {
        "predicted_ttft_ms": round(choice.ttft_s * 1e3, 3),
        "predicted_tpot_ms": round(choice.tpot_s * 1e3, 3),
        "score_ms": round(choice.score_ms, 3),
        "queue_tokens": choice.queue_tokens,
        "prefill_cached_tokens": choice.prefill_cached,
        "decode_cached_tokens": choice.decode_cached,
        "decode_prefills": choice.decode_prefills,
        "same_host": choice.same_host,
        "candidates": choice.candidates,
    }


def _why_no_room(usable: Iterable[Pair], wants: Wants) -> str:
    reasons = (reason for pair in usable for reason in pair.no_room)
    return f"no room for {wants.num_tokens} tokens now ({_joined(reasons)})"


def _joined(reasons: Iterable[str]) -> str:
    """Each reason once, and not more of them than can be read."""
    distinct = list(dict.fromkeys(reasons))
    more = len(distinct) - _REASONS_TOLD
    return "; ".join(distinct[:_REASONS_TOLD]) + (f"; and {more} more" if more > 0 else "")
