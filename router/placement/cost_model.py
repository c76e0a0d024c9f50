"""The cost model: what one request would find on each worker, and how long it takes there.

Computed for all workers at once, in columns, so that a pair only adds up a number of each. Rates
are what workers measured of themselves; the median of its kind stands in for a worker without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from baton.config import RouterLimits
from baton.prefix import block_hash, root_hash
from router.admission.fair_queue import PendingPrompt
from router.fleet.snapshot import Column, Flags, Snapshot, WorkerView

_CHUNK_TOKENS = 512  # of a worker that does not report it
_WINDOW_CHUNKS = 2  # queued on a prefill worker: one that runs and one to go on with
_WINDOW_S = 0.1  # or so much work, where chunks are short: no gap while the router hears of room
_SPARE_SHARE = 8  # a batch is given an eighth more, so that a place is taken as soon as it is free
_NOISE = 0.15  # rates that differ by no more count as equal
_TOKENS_PER_S, _STEP_MS = 1000.0, 10.0  # before any worker has measured anything
# A decode step reads all weights once and each sequence's KV: it takes as long as if so many
# sequences were there before the first. Measured on the CPU path: 14 ms with 1, 24 ms with 8,
# 63 ms with 32 sequences.
_STEP_BASE_SEQUENCES = 8
# Of a handoff on one host and over the network: its control calls (Reserve, Prefill, Offer, Ready,
# Commit), and bytes a second. On one host a short prompt's first token comes 2 to 3 ms later than
# from decode itself (python -m benchmarks local_prefill); shared memory moves 4 to 9 GB/s. The
# network's are assumptions.
HANDOFF_S, _BYTES_PER_S = {True: 0.003, False: 0.005}, {True: 4e9, False: 1e9}
# A decode step delays all streams of the worker, also those still to come: computing prompts there
# counts double.
_DECODE_PRICE = 2
# How many tokens are expected where the request says nothing, and at most: many requests end
# before their limit, and TPOT must not outweigh everything else.
_NEW_TOKENS, _MOST_NEW_TOKENS = 64, 256
# A decode pool that runs full preempts sequences, and what they had is computed again. The price
# rises with the square of the share in use: half a pool costs little.
_FULL_POOL_MS = 100.0

Rows = Any  # the index of one worker, or of many


@dataclass(frozen=True, eq=False)
class PlacementRequest:
    """What a request needs of a pair of workers, in tokens.

    Made once for an attempt: its prompt is hashed once, as far as any worker caches it. Decode
    computes up to `local_prefill_max_tokens` by itself; 0 is never.
    """

    token_ids: Sequence[int]  # prompt, then what earlier attempts delivered
    pending: PendingPrompt
    cache_salt: str = ""
    new_tokens: int = 0  # at most so many outputs; 0: not known
    local_prefill_max_tokens: int = RouterLimits.local_prefill_max_tokens
    _chains: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute where nothing is cached."""
        return len(self.token_ids)

    def hashes(self, block_size: int) -> Iterator[int]:
        """Of its whole blocks; never of all tokens, as the last one is always computed."""
        chain = self._chains.setdefault(block_size, [root_hash(self.cache_salt)])
        for number in range(1, (self.num_tokens - 1) // block_size + 1):
            if number == len(chain):
                tokens = self.token_ids[(number - 1) * block_size : number * block_size]
                chain.append(block_hash(chain[-1], tokens))
            yield chain[number]


@dataclass(frozen=True)
class Estimate:
    """The request on one worker."""

    worker: WorkerView
    no_room: str  # why it takes nothing now; empty when it does
    cached: int  # leading tokens of the request's
    uncached: int
    queue_tokens: int  # computed before the request's first
    tpot_s: float = 0.0  # of a decode worker, with the request in its batch


class Costs:
    """One request on all workers of a snapshot: columns by prefill or by decode worker.

    Costs are whole microseconds, so that sums compare exactly: a pair costs `prefill_us` and
    `handoff_us`, or `local_us` where that is less, as decode then computes the prompt itself.
    Either is infinite where it is out of the question.
    """

    def __init__(self, snapshot: Snapshot, request: PlacementRequest) -> None:
        self.snapshot, self.request = snapshot, request
        p, d = snapshot.of_prefill, snapshot.of_decode
        cached = self._cached_tokens()
        self.p_cached, self.d_cached = cached[p["slot"]], cached[d["slot"]]
        usual_rate = _median(p["rate"][p["ready"]], _TOKENS_PER_S)
        self._on_prefill(p, usual_rate)
        self._on_decode(d, usual_rate)

    def of(self, p: Rows, d: Rows) -> tuple[Any, Any]:
        """What pairs cost, and whether decode prefills: it is little, or that costs less."""
        same_host = self.same_host(p, d)
        handoff = self.handoff_us[True][d], self.handoff_us[False][d]
        handed_over = self.prefill_us[p] + np.where(same_host, *handoff)
        local = self.local_us[d]
        return np.minimum(local, handed_over), local < handed_over

    def same_host(self, p: Rows, d: Rows) -> Any:
        """Whether KV goes through shared memory."""
        return self.snapshot.of_prefill["host"][p] == self.snapshot.of_decode["host"][d]

    def no_decode_room(self, refused: Set[str]) -> Flags:
        """Decode workers that take nothing now; `refused` are those that have just done so."""
        return self.d_full | self.snapshot.flags(refused)[1] if refused else self.d_full

    def on_prefill(self, row: int) -> Estimate:
        queued, no_room = int(self.ahead[row]), ""
        if queued >= self.window[row]:
            no_room = (
                f"has {queued} tokens to compute first and is given no more than "
                f"{self.window[row]:.0f} ahead"
            )
        elif self.p_full[row]:
            available = self.snapshot.of_prefill["blocks_available"][row]
            no_room = _blocks_missing(available, self.p_blocks[row])
        return self._estimate(self.snapshot.prefill[row], no_room, self.p_cached[row], queued)

    def on_decode(self, row: int, refused: Set[str] = frozenset()) -> Estimate:
        worker, d, no_room = self.snapshot.decode[row], self.snapshot.of_decode[row], ""
        if worker.incarnation in refused:
            no_room = "refused just now"
        elif d["busy"] >= self.most_busy[row]:
            no_room = f"has {d['busy']:.0f} sequences for a batch of {d['max_batch']:.0f}"
        elif self.d_full[row]:
            no_room = _blocks_missing(d["blocks_available"], self.d_blocks[row])
        queued, tpot_s = int(d["reported_tokens"]), float(self.tpot_s[row])
        return self._estimate(worker, no_room, self.d_cached[row], queued, tpot_s)

    def _estimate(
        self, worker: WorkerView, no_room: str, cached: float, queued: int, tpot_s: float = 0.0
    ) -> Estimate:
        no_room = no_room and f"{worker.incarnation} {no_room}"
        uncached = self.request.num_tokens - int(cached)
        return Estimate(worker, no_room, int(cached), uncached, queued, tpot_s)

    def _cached_tokens(self) -> Column:
        """By slot: leading tokens whose KV the worker seems to cache."""
        index, tokens = self.snapshot.index, np.zeros(1)
        for size in {block_size for _, block_size, _ in self.snapshot.kvs.values()} - {0}:
            tokens = np.maximum(tokens, index.leading(self.request.hashes(size)) * size)
        return tokens

    def _on_prefill(self, p: Any, usual_rate: float) -> None:
        rate = _settled(p["rate"], usual_rate)
        chunk = np.where(p["chunk_tokens"], p["chunk_tokens"], _CHUNK_TOKENS)
        ours = self.snapshot.assigned_before(self.request.pending.virtual_finish)
        # Other routers' prompts count fully: their virtual finish times are not known.
        self.ahead = ours + np.maximum(0, p["reported_tokens"] - p["assigned_tokens"])
        # A chunk of what goes later may be running: on average half of it is still to come.
        later = self.snapshot.queued_tokens - self.ahead
        before = self.ahead + np.maximum(0, np.minimum(later, chunk // 2))
        # The queue is kept in the router, where it can be ordered, and not on the worker.
        self.window = np.maximum(_WINDOW_CHUNKS * chunk, rate * _WINDOW_S // 1)
        self.p_blocks = self._blocks(p, self.p_cached)
        # An idle pool is as free as it ever gets.
        held = (p["blocks_held"] > 0) & (self.p_blocks > p["blocks_available"])
        self.p_full: Flags = held | (self.ahead >= self.window)
        self.wait_us = np.rint(before / rate * 1e6)
        self.prefill_us = np.rint((before + self.request.num_tokens - self.p_cached) / rate * 1e6)

    def _on_decode(self, d: Any, usual_rate: float) -> None:
        request = self.request
        uncached = request.num_tokens - self.d_cached
        rate = _settled(d["rate"], usual_rate)
        # What its measured step would be with one sequence; 0 when there is none measured.
        lone_ms = d["step_ms"] / _relative_step(np.maximum(1, d["running"]))
        usual_ms = _median(lone_ms[d["ready"]], _STEP_MS)
        outdated = (lone_ms > usual_ms) & (d["running"] == 0)  # of a batch long gone
        lone_ms = np.where(outdated, usual_ms, _settled(lone_ms, usual_ms))
        self.tpot_s = lone_ms / 1e3 * _relative_step(d["busy"] + 1)
        most = d["max_batch"]
        self.most_busy = np.where(most, most + np.maximum(1, most // _SPARE_SHARE), np.inf)
        self.d_blocks = self._blocks(d, self.d_cached)
        self.d_full: Flags = (d["busy"] >= self.most_busy) | (self.d_blocks > d["blocks_available"])
        wait_s = d["reported_tokens"] / rate + self.tpot_s / 2  # the step that runs, on average
        compute_s = uncached / rate
        self.local_ttft_s = wait_s + compute_s
        free = d["blocks_available"] - (request.num_tokens // d["block_size"] + 1)
        used = np.maximum(0, np.minimum(1, 1 - free / np.maximum(1, d["blocks_total"])))
        tokens = min(request.new_tokens or _NEW_TOKENS, _MOST_NEW_TOKENS)
        rest_us = self.tpot_s * tokens * 1e6 + _FULL_POOL_MS * used**2 * 1e3
        # Decode's batch waits while it computes, so that costs its time once a sequence.
        local_us = _DECODE_PRICE * (wait_s + compute_s * (1 + d["busy"])) * 1e6 + rest_us
        most_local = request.local_prefill_max_tokens
        always = uncached <= most_local
        chunk = np.where(d["chunk_tokens"], d["chunk_tokens"], _CHUNK_TOKENS)
        may = (self.d_cached > 0) & (uncached <= chunk) & (most_local > 0)
        self.local_us = np.where(always | may, np.rint(local_us), np.inf)
        # What decode does not cache is sent, in the gap before the second token.
        self.handoff_us = {}
        for same_host, handoff_s in HANDOFF_S.items():
            send_s = uncached * d["token_bytes"] / _BYTES_PER_S[same_host]
            handoff_us = np.rint((handoff_s + send_s) * 1e6 + rest_us)
            self.handoff_us[same_host] = np.where(always, np.inf, handoff_us)

    def _blocks(self, rows: Any, cached: Column) -> Column:
        """What the sequence and its next token need of the blocks that are available.

        Blocks that are shared with a running sequence are not needed again. Of those that match, as
        many as the pool keeps unheld may be among the available ones and are counted there.
        """
        shared = np.maximum(0, cached // rows["block_size"] - rows["blocks_cached"])
        needed: Column = self.request.num_tokens // rows["block_size"] + 1 - shared
        return needed


@lru_cache(maxsize=1)
def costs_of(snapshot: Snapshot, request: PlacementRequest) -> Costs:
    """Admission predicts, and placement picks, by the same, unless the fleet changes between."""
    return Costs(snapshot, request)


def _blocks_missing(available: float, needed: float) -> str:
    return f"has {available:.0f} KV blocks available and {needed:.0f} are needed"


def _relative_step(sequences: Column) -> Column:
    """Time of a step by that of a step with one sequence."""
    return (_STEP_BASE_SEQUENCES + sequences) / (_STEP_BASE_SEQUENCES + 1)


def _settled(own: Column, usual: float) -> Column:
    """A worker's own rate, unless it has none or it differs from the usual one by noise only."""
    is_usual = (own == 0) | (np.abs(own - usual) <= _NOISE * np.maximum(own, usual))
    return np.where(is_usual, usual, own)


def _median(values: Column, otherwise: float) -> float:
    """The lower one of two."""
    known = np.sort(values[values > 0])
    return float(known[(known.size - 1) // 2]) if known.size else otherwise
