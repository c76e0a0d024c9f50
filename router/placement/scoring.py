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
    DecodeEstimate,
    FleetRates,
    PlacementRequest,
    PrefillEstimate,
    estimate_decode,
    estimate_prefill,
)


@dataclass(frozen=True)
class LinkCost:
    """The cost of a handoff between two workers."""

    handoff_s: float  # control calls: Reserve, Prefill, Offer, Ready, Commit
    bytes_per_s: float


# On one host a short prompt's first token comes 2 to 3 ms later than from decode itself
# (python -m benchmarks local_prefill); shared memory moves 4 to 9 GB/s. The network's are
# assumptions.
_SAME_HOST, _NETWORK = LinkCost(0.003, 4e9), LinkCost(0.005, 1e9)
# A decode step delays all streams of the worker, also those still to come: computing prompts there
# counts double.
_DECODE_PRICE = 2
# How many tokens are expected where the request says nothing, and at most: many requests end
# before their limit, and TPOT must not outweigh everything else.
_NEW_TOKENS, _MOST_NEW_TOKENS = 64, 256
# A decode pool that runs full preempts sequences, and what they had is computed again. The price
# rises with the square of the share in use: half a pool costs little.
_FULL_POOL_MS = 100.0
_MOST_UNREADY = 16  # workers of a role


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode worker, and the request's estimates on each."""

    on_prefill: PrefillEstimate
    on_decode: DecodeEstimate
    request: PlacementRequest
    excluded: str  # why nothing is handed over between the two; empty when something is
    candidates: int = 0  # of the pair that was picked: pairs that were considered

    @property
    def prefill(self) -> WorkerView:
        """The prefill worker."""
        return self.on_prefill.worker

    @property
    def decode(self) -> WorkerView:
        """The decode worker."""
        return self.on_decode.worker

    @property
    def names(self) -> tuple[str, str]:
        """Both incarnations, prefill first."""
        return self.on_prefill.worker.incarnation, self.on_decode.worker.incarnation

    # Filters: each gives the reason, or nothing.

    @cached_property
    def unusable(self) -> str:
        """Why the pair cannot be used, whatever room there is."""
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

    # Scores.

    @cached_property
    def link(self) -> LinkCost:
        """The link between the two."""
        same = self.on_prefill.worker.record.host_id == self.on_decode.worker.record.host_id
        return _SAME_HOST if same else _NETWORK

    @property
    def same_host(self) -> bool:
        """Whether KV goes through shared memory."""
        return self.link is _SAME_HOST

    @cached_property
    def decode_prefills(self) -> bool:
        """Whether decode computes what it does not cache: it is little, or that costs less."""
        decode, most = self.on_decode, self.request.local_prefill_max_tokens
        if decode.uncached <= most:
            return True
        if not most or not decode.cached or decode.uncached > decode.chunk:
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

    @property
    def transfer_s(self) -> float:
        """Time for the KV that decode does not cache; hides in the gap before the second token."""
        return 0.0 if self.decode_prefills else self._send_s

    @cached_property
    def score_ms(self) -> float:
        """The predicted time to the last token, and what the request costs others: lower wins."""
        prompt_s = self._local_cost_s if self.decode_prefills else self.ttft_s + self._send_s
        tokens = min(self.request.new_tokens or _NEW_TOKENS, _MOST_NEW_TOKENS)
        time_s = prompt_s + self.on_decode.tpot_s * tokens
        return time_s * 1e3 + _FULL_POOL_MS * self.on_decode.blocks_share**2

    def rank(self, failed: Set[str] = frozenset()) -> tuple[int | float | str, ...]:
        """The least is picked. Ties go to what has been given less, lately and ever.

        Last by name, so that equal snapshots give equal picks.
        """
        p, d, names = self.prefill, self.decode, self.names
        return (
            sum(name in failed for name in names),
            round(self.score_ms, 3),
            round(self.on_prefill.wait_s, 6),  # matters where decode prefills
            len(p.assigned),
            p.load.steps,
            d.load.steps,
            *names,
        )

    @property
    def _handoff_ttft_s(self) -> float:
        return self.on_prefill.wait_s + self.on_prefill.compute_s + self.link.handoff_s

    @property
    def _local_cost_s(self) -> float:
        """Decode's batch waits while it computes, so that costs its time once a sequence."""
        decode = self.on_decode
        return _DECODE_PRICE * (decode.wait_s + decode.compute_s * (1 + decode.busy))

    @property
    def _send_s(self) -> float:
        return self.on_decode.uncached * self.on_decode.token_bytes / self.link.bytes_per_s


def pairs_of(
    snapshot: Snapshot, request: PlacementRequest, full: Set[str] = frozenset()
) -> list[Pair]:
    """All pairs, usable or not; decode workers in `full` have just refused.

    Of many workers that are not ready only some are considered: a registry may hold thousands that
    do not exist.
    """
    rates = FleetRates.of(snapshot)
    prefill = [estimate_prefill(worker, request, rates) for worker in _considered(snapshot.prefill)]
    decode = [
        estimate_decode(worker, request, rates, full) for worker in _considered(snapshot.decode)
    ]
    excluded = snapshot.excluded_pairs
    return [
        Pair(p, d, request, excluded.get((p.worker.incarnation, d.worker.incarnation), ""))
        for p in prefill
        for d in decode
    ]


def _considered(workers: Sequence[WorkerView]) -> list[WorkerView]:
    unready = [worker for worker in workers if not worker.ready]
    return [*(worker for worker in workers if worker.ready), *unready[:_MOST_UNREADY]]
