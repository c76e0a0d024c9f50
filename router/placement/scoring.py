"""Pairs of workers for one request: what keeps one from being used, and its cost in milliseconds.

The cost is the predicted time from now to the request's last token. A worker's cache counts for
the time that it saves and for nothing else, so it never outweighs a queue that takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from router.fleet.snapshot import Snapshot, WorkerView, kv_difference
from router.placement.cost_model import (
    DecodeSide,
    Pace,
    PrefillSide,
    decode_side,
    prefill_side,
)
from router.placement.placement_request import Wants


@dataclass(frozen=True)
class Way:
    """What lies between two workers."""

    handoff_s: float  # control calls: Reserve, Prefill, Offer, Ready, Commit
    bytes_per_s: float


# On one host a short prompt's first token comes 2 to 3 ms later than from decode itself
# (python -m benchmarks local_prefill); shared memory moves 4 to 9 GB/s. The network's are
# assumptions.
_SAME_HOST, _NETWORK = Way(0.003, 4e9), Way(0.005, 1e9)
# Decode's time is everybody's, also of streams that are still to come: computing prompts there
# counts double.
_DECODE_PRICE = 2
# How many tokens are expected where the request says nothing, and at most: many requests end
# before their limit, and their own pace must not outweigh everything else.
_NEW_TOKENS, _MOST_NEW_TOKENS = 64, 256
# A decode pool that runs full preempts sequences, and what they had is computed again. The price
# rises with the square of the share in use: half a pool costs little.
_FULL_POOL_MS = 100.0
_MOST_UNREADY = 16  # workers of a role


@dataclass(frozen=True)
class Choice:
    """A pair of workers as it is judged for one request; `refused` says why it is left out."""

    prefill: WorkerView
    decode: WorkerView
    refused: str
    ttft_s: float  # predicted, from now
    tpot_s: float  # predicted, with this request in the batch
    transfer_s: float
    score_ms: float  # what pairs are compared by: lower is better
    queue_tokens: int  # computed on the prefill worker before the request's
    prefill_cached: int  # leading tokens of the request's
    decode_cached: int
    decode_prefills: bool  # decode computes what it does not cache
    local_prefill_max_tokens: int  # for Reserve: it starts by itself if no more than this is left
    same_host: bool
    candidates: int  # pairs that were considered

    @property
    def names(self) -> tuple[str, str]:
        """Both incarnations, prefill first."""
        return self.prefill.incarnation, self.decode.incarnation


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode worker, and what the request finds on each."""

    prefill: PrefillSide
    decode: DecodeSide
    wants: Wants
    shut: str  # why nothing is handed over between the two; empty when something is

    # Filters: each says why, or nothing.

    @cached_property
    def unusable(self) -> str:
        """Why the pair cannot be used, whatever room there is."""
        p, d = self.prefill.worker, self.decode.worker
        if not (p.ready and d.ready):
            return "; ".join(worker.told for worker in (p, d) if not worker.ready)
        if not self.same_kv:
            return f"incompatible KV caches: {kv_difference(p, d)}"
        if self.shut:
            return f"{p.incarnation} does not hand over to {d.incarnation}: {self.shut}"
        return ""

    @property
    def no_room(self) -> list[str]:
        """Why the pair takes nothing now. Where decode prefills, the prefill worker may be full."""
        needed = (self.decode,) if self.decode_prefills else (self.decode, self.prefill)
        return [side.no_room for side in needed if side.no_room]

    @property
    def same_kv(self) -> bool:
        """Whether KV bytes mean the same to both."""
        same: bool = self.prefill.worker.record.kv == self.decode.worker.record.kv
        return same

    # Scores.

    @cached_property
    def way(self) -> Way:
        """What lies between the two."""
        same = self.prefill.worker.record.host_id == self.decode.worker.record.host_id
        return _SAME_HOST if same else _NETWORK

    @cached_property
    def decode_prefills(self) -> bool:
        """Whether decode computes what it does not cache: it is little, or that costs less."""
        decode, most = self.decode, self.wants.local_prefill_max_tokens
        if decode.left <= most:
            return True
        if not most or not decode.cached or decode.left > decode.chunk:
            return False
        return self._alone_cost_s < self._handed_over_s + self._sent_s

    @property
    def ttft_s(self) -> float:
        """Time to first token, from now."""
        if self.decode_prefills:
            return self.decode.wait_s + self.decode.compute_s
        return self._handed_over_s

    @property
    def transfer_s(self) -> float:
        """Time for the KV that decode does not cache; hides in the gap before the second token."""
        return 0.0 if self.decode_prefills else self._sent_s

    @cached_property
    def score_ms(self) -> float:
        """The predicted time to the last token, and what the request costs the others there."""
        prompt_s = self._alone_cost_s if self.decode_prefills else self.ttft_s + self._sent_s
        tokens = min(self.wants.new_tokens or _NEW_TOKENS, _MOST_NEW_TOKENS)
        time_s = prompt_s + self.decode.tpot_s * tokens
        return time_s * 1e3 + _FULL_POOL_MS * self.decode.blocks_share**2

    def rank(self, failed: Set[str] = frozenset()) -> tuple[int | float | str, ...]:
        """The least is picked. Equals are told apart by what they have been given, lately and ever.

        Last by name, so that equal snapshots give equal choices.
        """
        p, d = self.prefill.worker, self.decode.worker
        names = (p.incarnation, d.incarnation)
        return (
            sum(name in failed for name in names),
            round(self.score_ms, 3),
            round(self.prefill.wait_s, 6),  # matters where decode prefills
            len(p.assigned),
            p.load.steps,
            d.load.steps,
            *names,
        )

    def choice(self, candidates: int) -> Choice:
        """The pair with all its numbers, one of so many that were considered."""
        prefill, decode, most = self.prefill, self.decode, self.wants.local_prefill_max_tokens
        return Choice(
            prefill=prefill.worker,
            decode=decode.worker,
            refused=self.unusable or "; ".join(self.no_room),
            ttft_s=self.ttft_s,
            tpot_s=decode.tpot_s,
            transfer_s=self.transfer_s,
            score_ms=self.score_ms,
            queue_tokens=prefill.queue_tokens,
            prefill_cached=prefill.cached,
            decode_cached=decode.cached,
            decode_prefills=self.decode_prefills,
            local_prefill_max_tokens=max(most, decode.left) if self.decode_prefills else most,
            same_host=self.way is _SAME_HOST,
            candidates=candidates,
        )

    @property
    def _handed_over_s(self) -> float:
        return self.prefill.wait_s + self.prefill.compute_s + self.way.handoff_s

    @property
    def _alone_cost_s(self) -> float:
        """Decode's batch waits while it computes, so that costs its time once for everybody."""
        decode = self.decode
        return _DECODE_PRICE * (decode.wait_s + decode.compute_s * (1 + decode.busy))

    @property
    def _sent_s(self) -> float:
        return self.decode.left * self.decode.token_bytes / self.way.bytes_per_s


def pairs_of(snapshot: Snapshot, wants: Wants, full: Set[str] = frozenset()) -> list[Pair]:
    """All pairs, usable or not; decode workers in `full` have just refused.

    Of many workers that are not ready only some are considered: a registry may hold thousands that
    do not exist.
    """
    pace = Pace.of(snapshot)
    prefill = [prefill_side(worker, wants, pace) for worker in _considered(snapshot.prefill)]
    decode = [decode_side(worker, wants, pace, full) for worker in _considered(snapshot.decode)]
    shut = snapshot.shut_pairs
    return [
        Pair(p, d, wants, shut.get((p.worker.incarnation, d.worker.incarnation), ""))
        for p in prefill
        for d in decode
    ]


def _considered(workers: Sequence[WorkerView]) -> list[WorkerView]:
    unready = [worker for worker in workers if not worker.ready]
    return [*(worker for worker in workers if worker.ready), *unready[:_MOST_UNREADY]]
