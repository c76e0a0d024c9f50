"""The cost model: what one request would find on each worker, and how long it takes there.

A pair only adds up a number of each of its workers. The formulas are those of single numbers and of
columns: few workers are computed one by one, because a numpy call takes as long as a worker, many
at once. Rates are what workers measured of themselves; the median of its kind stands in for a
worker without one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from router.fleet.kv_index import leading_of
from router.fleet.snapshot import Column, Flags, Row, Snapshot, WorkerView
from router.request import Demand

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
# from decode itself; shared memory moves 4 to 9 GB/s. The network's are assumptions.
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

_REFUSED = "refused just now, or is kept for another request"
_FEW = 12  # workers: so many take as long one by one as in columns


@dataclass(frozen=True)
class Estimate:
    """The request on one worker."""

    worker: WorkerView
    no_room: str  # why it takes nothing now; empty when it does
    cached: int  # leading tokens of the request's
    uncached: int
    queue_tokens: int  # computed before the request's first
    tpot_s: float = 0.0  # of a decode worker, with the request in its batch


class OnPrefill(NamedTuple):
    """The request on a prefill worker, or on many: then each is a column.

    Costs are whole microseconds, so that sums compare exactly.
    """

    cached: Any  # leading tokens
    ahead: Any  # tokens to compute before its first
    window: Any  # at so many the worker is full
    blocks: Any  # that it needs of those available
    full: Any
    wait_us: Any
    us: Any  # until the prompt is computed, with the wait


class OnDecode(NamedTuple):
    """The request on a decode worker, or on many.

    A pair costs `OnPrefill.us` and the handoff's, or `local_us` where that is less, as decode then
    computes the prompt itself. Either is infinite where it is out of the question. It costs
    `alone_us` where there is no prefill worker.
    """

    cached: Any
    blocks: Any
    most_busy: Any
    full: Any
    tpot_s: Any
    local_ttft_s: Any
    local_us: Any
    alone_us: Any
    near_us: Any  # of a handoff on one host, and of what follows
    far_us: Any


class _Numbers:
    """What the formulas need of numpy, for single numbers."""

    maximum, minimum, rint = staticmethod(max), staticmethod(min), staticmethod(round)

    @staticmethod
    def where(condition: Any, one: Any, other: Any) -> Any:
        return one if condition else other


class Costs(ABC):
    """One request on the workers of a snapshot."""

    def __init__(self, snapshot: Snapshot, request: Demand) -> None:
        self.snapshot, self.request = snapshot, request

    @abstractmethod
    def prefill_at(self, row: int) -> OnPrefill:
        """Single numbers, as of `decode_at`."""

    @abstractmethod
    def decode_at(self, row: int) -> OnDecode: ...

    @abstractmethod
    def full(self, refused: Set[str]) -> tuple[Any, Any]:
        """By prefill and by decode worker: whether it takes nothing now. Those in `refused` have
        just said so, or are kept for another request."""

    def on_prefill(self, row: int, refused: Set[str] = frozenset()) -> Estimate:
        worker, found = self.snapshot.prefill[row], self.prefill_at(row)
        queued, no_room = int(found.ahead), ""
        if worker.incarnation in refused:
            no_room = _REFUSED
        elif queued >= found.window:
            no_room = (
                f"has {queued} tokens to compute first and is given no more than "
                f"{found.window:.0f} ahead"
            )
        elif found.full:
            no_room = _blocks_missing(self.snapshot.numbers[row], found.blocks)
        return self._estimate(worker, no_room, found.cached, queued)

    def on_decode(self, row: int, refused: Set[str] = frozenset()) -> Estimate:
        worker, found, no_room = self.snapshot.decode[row], self.decode_at(row), ""
        d = self.snapshot.numbers[len(self.snapshot.prefill) + row]
        if worker.incarnation in refused:
            no_room = _REFUSED
        elif d.busy >= found.most_busy:
            no_room = f"has {d.busy} sequences for a batch of {d.max_batch}"
        elif found.full:
            no_room = _blocks_missing(d, found.blocks)
        tpot_s = float(found.tpot_s)
        return self._estimate(worker, no_room, found.cached, d.queued_tokens, tpot_s)

    def _estimate(
        self, worker: WorkerView, no_room: str, cached: float, queued: int, tpot_s: float = 0.0
    ) -> Estimate:
        no_room = no_room and f"{worker.incarnation} {no_room}"
        uncached = self.request.num_tokens - int(cached)
        return Estimate(worker, no_room, int(cached), uncached, queued, tpot_s)

    def _block_sizes(self) -> set[int]:
        return {block_size for _, block_size, _ in self.snapshot.kvs.values()} - {0}


class RowCosts(Costs):
    """Worker by worker."""

    def __init__(self, snapshot: Snapshot, request: Demand) -> None:
        super().__init__(snapshot, request)
        index, finish = snapshot.index, request.pending.virtual_finish
        found = [(index.holders(request.hashes(size)), size) for size in self._block_sizes()]
        cached = [
            max((leading_of(held, row.slot) * size for held, size in found), default=0)
            for row in snapshot.numbers
        ]
        split = len(snapshot.prefill)
        prefill, decode = snapshot.numbers[:split], snapshot.numbers[split:]
        rate = _middle(sorted(p.rate for p in prefill if p.ready and p.rate > 0), _TOKENS_PER_S)
        lone = [_lone_ms(_Numbers, d) for d in decode]
        known = (ms for ms, d in zip(lone, decode, strict=True) if d.ready and ms > 0)
        usual_ms = _middle(sorted(known), _STEP_MS)
        self.prefill, self.decode = [], []
        for p, view, has in zip(prefill, snapshot.prefill, cached, strict=False):
            ours = sum(one.num_tokens for one in view.assigned if one.virtual_finish <= finish)
            self.prefill.append(_on_prefill(_Numbers, p, request, rate, has, ours))
        for d, lone_ms, has in zip(decode, lone, cached[split:], strict=True):
            self.decode.append(_on_decode(_Numbers, d, request, rate, has, lone_ms, usual_ms))

    def prefill_at(self, row: int) -> OnPrefill:
        return self.prefill[row]

    def decode_at(self, row: int) -> OnDecode:
        return self.decode[row]

    def full(self, refused: Set[str]) -> tuple[list[bool], list[bool]]:
        prefill = zip(self.snapshot.prefill, self.prefill, strict=True)
        decode = zip(self.snapshot.decode, self.decode, strict=True)
        return (
            [found.full or worker.incarnation in refused for worker, found in prefill],
            [found.full or worker.incarnation in refused for worker, found in decode],
        )


class ColumnCosts(Costs):
    """All workers at once."""

    def __init__(self, snapshot: Snapshot, request: Demand) -> None:
        super().__init__(snapshot, request)
        p, d = snapshot.columns.prefill, snapshot.columns.decode
        cached = np.zeros(1)
        for size in self._block_sizes():
            cached = np.maximum(cached, snapshot.index.leading(request.hashes(size)) * size)
        rate = _middle(np.sort(p.rate[p.ready & (p.rate > 0)]), _TOKENS_PER_S)
        lone_ms = _lone_ms(np, d)
        usual_ms = _middle(np.sort(lone_ms[d.ready & (lone_ms > 0)]), _STEP_MS)
        ours = snapshot.columns.assigned_before(request.pending.virtual_finish)
        self.prefill = _on_prefill(np, p, request, rate, cached[p.slot], ours)
        self.decode = _on_decode(np, d, request, rate, cached[d.slot], lone_ms, usual_ms)

    def prefill_at(self, row: int) -> OnPrefill:
        return OnPrefill(*(column[row] for column in self.prefill))

    def decode_at(self, row: int) -> OnDecode:
        return OnDecode(*(column[row] for column in self.decode))

    def full(self, refused: Set[str]) -> tuple[Flags, Flags]:
        p_full, d_full = self.prefill.full, self.decode.full
        if not refused:
            return p_full, d_full
        p_refused, d_refused = self.snapshot.flags(refused)
        return p_full | p_refused, d_full | d_refused

    def of(self, p: Any, d: Any) -> tuple[Any, Any]:
        """What pairs cost, and whether decode prefills: see `pair_cost`."""
        columns, on_decode = self.snapshot.columns, self.decode
        same_host = columns.prefill.host[p] == columns.decode.host[d]
        handoff = np.where(same_host, on_decode.near_us[d], on_decode.far_us[d])
        handed_over, local = self.prefill.us[p] + handoff, on_decode.local_us[d]
        return np.minimum(local, handed_over), local < handed_over


def pair_cost(p: OnPrefill, d: OnDecode, same_host: bool) -> tuple[float, bool]:
    """What a pair costs, and whether decode prefills: it is little, or that costs less."""
    handed_over = p.us + (d.near_us if same_host else d.far_us)
    return min(d.local_us, handed_over), d.local_us < handed_over


def _on_prefill(
    xp: Any, p: Row, request: Demand, usual_rate: float, cached: Any, ours: Any
) -> OnPrefill:
    """`ours` are the tokens of assigned prompts that go first."""
    rate = _settled(xp, p.rate, usual_rate)
    # Other routers' prompts count fully: their virtual finish times are not known.
    ahead = ours + xp.maximum(0, p.reported_tokens - p.assigned_tokens)
    # A chunk of what goes later may be running: on average half of it is still to come.
    later = p.queued_tokens - ahead
    before = ahead + xp.maximum(0, xp.minimum(later, p.chunk_tokens // 2))
    # The queue is kept in the router, where it can be ordered, and not on the worker.
    window = xp.maximum(_WINDOW_CHUNKS * p.chunk_tokens, rate * _WINDOW_S // 1)
    blocks = _blocks(xp, p, request, cached)
    # An idle pool is as free as it ever gets.
    held = (p.blocks_held > 0) & (blocks > p.blocks_available)
    wait_us = xp.rint(before / rate * 1e6)
    us = xp.rint((before + request.num_tokens - cached) / rate * 1e6)
    return OnPrefill(cached, ahead, window, blocks, held | (ahead >= window), wait_us, us)


def _on_decode(
    xp: Any, d: Row, request: Demand, usual_rate: float, cached: Any, lone_ms: Any,
    usual_ms: float,
) -> OnDecode:  # fmt: skip
    """`lone_ms` is what its measured step would be with one sequence; 0 when there is none."""
    uncached = request.num_tokens - cached
    # Rates of small steps say little: that decode is the faster one is not believed.
    rate = xp.minimum(_settled(xp, d.rate, usual_rate), usual_rate)
    outdated = (lone_ms > usual_ms) & (d.running == 0)  # of a batch long gone
    lone_ms = xp.where(outdated, usual_ms, _settled(xp, lone_ms, usual_ms))
    tpot_s = lone_ms / 1e3 * _relative_step(d.busy + 1)
    most = d.max_batch * request.decodes
    most_busy = xp.where(most, most + xp.maximum(1, most // _SPARE_SHARE), np.inf)
    blocks = _blocks(xp, d, request, cached)
    full = ((d.busy >= most_busy) | (blocks > d.blocks_available)) & request.decodes
    wait_s = d.queued_tokens / rate + tpot_s / 2  # the step that runs, on average
    compute_s = uncached / rate
    free = d.blocks_available - (request.num_tokens // d.block_size + 1)
    used = xp.maximum(0, xp.minimum(1, 1 - free / xp.maximum(1, d.blocks_total)))
    tokens = min(request.max_new_tokens or _NEW_TOKENS, _MOST_NEW_TOKENS)
    rest_us = tpot_s * tokens * 1e6 + _FULL_POOL_MS * used * used * 1e3
    # Decode's batch waits while it computes, so that costs its time once a sequence.
    # And it costs no less than a handoff: where nothing waits, prefill workers compute.
    here_s = _DECODE_PRICE * (wait_s + compute_s * (1 + d.busy)) + HANDOFF_S[False]
    alone_us = xp.rint(here_s * 1e6 + rest_us)
    most_local = request.local_prefill_max_tokens
    always = uncached <= most_local
    # One step computes it and what waits there, and lasts no longer than streams can bear.
    step_tokens = d.queued_tokens + uncached
    is_short = (step_tokens <= d.chunk_tokens) & (tpot_s + step_tokens / rate <= request.max_itl_s)
    may = is_short & (most_local > 0)

    def handoff_us(same_host: bool) -> Any:
        """What decode does not cache is sent, in the gap before the second token."""
        send_s = uncached * d.token_bytes / _BYTES_PER_S[same_host]
        us = xp.rint((HANDOFF_S[same_host] + send_s) * 1e6 + rest_us) * request.decodes
        return xp.where(always, np.inf, us)

    return OnDecode(
        cached,
        blocks,
        most_busy,
        full,
        tpot_s,
        wait_s + compute_s,
        xp.where(always | may, alone_us, np.inf),
        alone_us,
        handoff_us(True),
        handoff_us(False),
    )


def _blocks(xp: Any, workers: Row, request: Demand, cached: Any) -> Any:
    """What the sequence and its next token need of the blocks that are available.

    Blocks that are shared with a running sequence are not needed again. Of those that match, as
    many as the pool keeps unheld may be among the available ones and are counted there.
    """
    shared = xp.maximum(0, cached // workers.block_size - workers.blocks_cached)
    return request.num_tokens // workers.block_size + 1 - shared


@lru_cache(maxsize=1)
def costs_of(snapshot: Snapshot, request: Demand) -> RowCosts | ColumnCosts:
    """Admission predicts, and placement picks, by the same, unless the fleet changes between."""
    return (RowCosts if len(snapshot.numbers) <= _FEW else ColumnCosts)(snapshot, request)


def room_ms(worker: Row, blocks: float, most_busy: float = math.inf) -> float:
    """How soon a worker has so many blocks and a place: 0 if it has, infinite if it never has.

    Comparable between workers, and no more than that: by the share of what runs there that has to
    end, which nobody knows when it does, and by the time of a step.
    """
    if not worker.ready or blocks > worker.blocks_total:
        return math.inf
    places = (worker.busy + 1 - most_busy) / max(1, worker.busy)
    share = max(0.0, places, (blocks - worker.blocks_available) / max(1, worker.blocks_held))
    return float(share * (worker.step_ms or _STEP_MS))


def _blocks_missing(worker: Row, needed: float) -> str:
    return f"has {worker.blocks_available} KV blocks available and {needed:.0f} are needed"


def _lone_ms(xp: Any, d: Row) -> Any:
    return d.step_ms / _relative_step(xp.maximum(1, d.running))


def _relative_step(sequences: Any) -> Any:
    """Time of a step by that of a step with one sequence."""
    return (_STEP_BASE_SEQUENCES + sequences) / (_STEP_BASE_SEQUENCES + 1)


def _settled(xp: Any, own: Any, usual: float) -> Any:
    """A worker's own rate, unless it has none or it differs from the usual one by noise only."""
    is_usual = (own == 0) | (abs(own - usual) <= _NOISE * xp.maximum(own, usual))
    return xp.where(is_usual, usual, own)


def _middle(ordered: Sequence[float] | Column, otherwise: float) -> float:
    """The median, or the lower one of two."""
    return float(ordered[(len(ordered) - 1) // 2]) if len(ordered) else otherwise
