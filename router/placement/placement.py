"""Which pair of workers runs a request: filter, score, pick, as plain functions over a snapshot.

A filter leaves out what cannot be used (`Pair.unusable`) and what has no room now
(`Pair.no_room`: the request waits in the router). The score is the predicted time to the request's
last token. A worker's cache counts for the time that it saves and for nothing else, so it never
outweighs a queue that takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from functools import cached_property

from baton.errors import Overloaded, Unavailable
from router.fleet.snapshot import Snapshot, WorkerView, kv_difference
from router.placement.cost_model import Estimate, PlacementRequest, chunk_tokens, estimates

RETRY_AFTER_S = 1.0
_MOST_REASONS = 8  # in one message
# Of a handoff on one host and over the network: its control calls (Reserve, Prefill, Offer, Ready,
# Commit), and bytes a second. On one host a short prompt's first token comes 2 to 3 ms later than
# from decode itself (python -m benchmarks local_prefill); shared memory moves 4 to 9 GB/s. The
# network's are assumptions.
_HANDOFF_S, _BYTES_PER_S = {True: 0.003, False: 0.005}, {True: 4e9, False: 1e9}
# A decode step delays all streams of the worker, also those still to come: computing prompts there
# counts double.
_DECODE_PRICE = 2
# How many tokens are expected where the request says nothing, and at most: many requests end
# before their limit, and TPOT must not outweigh everything else.
_NEW_TOKENS, _MOST_NEW_TOKENS = 64, 256
# A decode pool that runs full preempts sequences, and what they had is computed again. The price
# rises with the square of the share in use: half a pool costs little.
_FULL_POOL_MS = 100.0


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode worker, and the request's estimates on each."""

    on_prefill: Estimate
    on_decode: Estimate
    request: PlacementRequest
    excluded: str  # why nothing is handed over between the two; empty when something is
    candidates: int = 0  # of the pair that was picked: pairs that were considered

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

    @cached_property
    def unusable(self) -> str:
        """Why the pair cannot be used, whatever room there is; empty when it can."""
        p, d = self.prefill, self.decode
        if not (p.ready and d.ready):
            return "; ".join(worker.description for worker in (p, d) if not worker.ready)
        if p.record.kv != d.record.kv:
            return f"incompatible KV caches: {kv_difference(p, d)}"
        if self.excluded:
            return f"{p.incarnation} does not hand over to {d.incarnation}: {self.excluded}"
        return ""

    @property
    def no_room(self) -> list[str]:
        """Why the pair takes nothing now. Where decode prefills, the prefill worker may be full."""
        reasons = [self.on_decode.no_room, "" if self.decode_prefills else self.on_prefill.no_room]
        return [reason for reason in reasons if reason]

    @property
    def refused(self) -> str:
        """Why the pair is not picked; empty when it may be."""
        return self.unusable or "; ".join(self.no_room)

    @cached_property
    def same_host(self) -> bool:
        """Whether KV goes through shared memory."""
        return bool(self.prefill.record.host_id == self.decode.record.host_id)

    @cached_property
    def decode_prefills(self) -> bool:
        """Whether decode computes what it does not cache: it is little, or that costs less."""
        decode, most = self.on_decode, self.request.local_prefill_max_tokens
        if decode.uncached <= most:
            return True
        if not most or not decode.cached or decode.uncached > chunk_tokens(self.decode):
            return False
        return self._local_cost_s < self._handoff_ttft_s + self._send_s

    @property
    def local_prefill_max_tokens(self) -> int:
        """For Reserve: decode starts by itself if no more than this is not cached."""
        most = self.request.local_prefill_max_tokens
        return max(most, self.on_decode.uncached) if self.decode_prefills else most

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token, from now."""
        if self.decode_prefills:
            return self.on_decode.wait_s + self.on_decode.compute_s
        return self._handoff_ttft_s

    @cached_property
    def score_ms(self) -> float:
        """The predicted time to the last token, and what the request costs others: lower wins."""
        decode = self.on_decode
        prompt_s = self._handoff_ttft_s + self._send_s
        if self.decode_prefills:
            prompt_s = self._local_cost_s
        tokens = min(self.request.new_tokens or _NEW_TOKENS, _MOST_NEW_TOKENS)
        return (prompt_s + decode.tpot_s * tokens) * 1e3 + _FULL_POOL_MS * decode.blocks_share**2

    def rank(self, failed: Set[str] = frozenset()) -> tuple[int | float | str, ...]:
        """The least is picked. Ties go to what has been given less, lately and ever.

        Last by name, so that equal snapshots give equal picks.
        """
        return (
            sum(name in failed for name in self.names),
            round(self.score_ms, 3),
            round(self.on_prefill.wait_s, 6),  # matters where decode prefills
            len(self.prefill.assigned),
            self.prefill.load.steps,
            self.decode.load.steps,
            *self.names,
        )

    @property
    def _handoff_ttft_s(self) -> float:
        prefill = self.on_prefill
        return prefill.wait_s + prefill.compute_s + _HANDOFF_S[self.same_host]

    @property
    def _local_cost_s(self) -> float:
        """Decode's batch waits while it computes, so that costs its time once a sequence."""
        decode = self.on_decode
        return _DECODE_PRICE * (decode.wait_s + decode.compute_s * (1 + decode.busy))

    @property
    def _send_s(self) -> float:
        """For the KV that decode does not cache; hides in the gap before the second token."""
        decode = self.on_decode
        return decode.uncached * decode.token_bytes / _BYTES_PER_S[self.same_host]


def pairs_of(
    snapshot: Snapshot, request: PlacementRequest, full: Set[str] = frozenset()
) -> list[Pair]:
    """All pairs, usable or not; decode workers in `full` have just refused."""
    prefill, decode = estimates(snapshot, request, full)
    excluded = snapshot.excluded_pairs
    return [
        Pair(p, d, request, excluded.get((p.worker.incarnation, d.worker.incarnation), ""))
        for p in prefill
        for d in decode
    ]


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
    return sorted(pairs_of(snapshot, request), key=lambda pair: (bool(pair.refused), pair.rank()))


def predict(snapshot: Snapshot, request: PlacementRequest) -> tuple[float, bool]:
    """The least seconds to a first token, without the wait queue, and whether there is room now.

    0 seconds when nothing is known. Pairs without room count for the time too: waiting for it is
    the wait queue's part of the prediction.
    """
    usable = [pair for pair in pairs_of(snapshot, request) if not pair.unusable]
    room = any(not pair.no_room for pair in usable)
    measured = any(w.ready and w.load.prefill_tokens_per_s for w in snapshot.prefill)
    return min((pair.ttft_s for pair in usable if measured), default=0.0), room


def _joined(reasons: Iterable[str]) -> str:
    """Each reason once, and not more of them than can be read."""
    distinct = list(dict.fromkeys(reasons))
    more = len(distinct) - _MOST_REASONS
    return "; ".join(distinct[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
