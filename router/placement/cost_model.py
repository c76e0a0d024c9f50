"""The cost model: what a request would find on each worker, and how long it takes there.

The cost of a pair is a sum of one number of each of its workers, so each number is computed once a
worker, in numpy columns. Rates are what workers measured of themselves; the median of its kind
replaces that of a worker without one.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from baton.v1 import common_pb2
from router.fleet.snapshot import Column, Flags, Snapshot, WorkerColumns, WorkerView
from router.request import Demand

_WINDOW_CHUNKS = 2  # queued on a prefill worker: one that runs and the next one
_WINDOW_S = 0.1  # or this much work, if chunks are short, so that none is missing between reports
_NOISE = 0.15  # rates that differ by no more count as equal
_TOKENS_PER_S, _STEP_MS = 1000.0, 10.0  # before any worker has measured anything
# A decode step reads all weights once, and each sequence's KV: reading the weights takes as long as
# this many sequences. Measured on CPUs: 14 ms with 1 sequence, 24 ms with 8, 63 ms with 32.
_STEP_BASE_SEQUENCES = 8
# Cost of a handoff on one host and over the network: its control messages (Reserve, Prefill, Offer,
# Ready, Commit), and bytes a second. On one host a short prompt's first token comes 2 to 3 ms later
# than from decode itself; shared memory moves 4 to 9 GB/s. Those of the network are assumptions.
HANDOFF_S, _BYTES_PER_S = {True: 0.003, False: 0.005}, {True: 4e9, False: 1e9}
# A decode step delays all streams of the worker, also future ones: computing prompts there counts
# twice. So does what makes tokens of streams later than their SLO.
_DECODE_PRICE = _LATE_PRICE = 2
# Output tokens expected if the request does not limit them, and at most: many requests end before
# their limit, and TPOT must not outweigh everything else.
_NEW_TOKENS, _MAX_NEW_TOKENS = 64, 256
# A decode pool that becomes full preempts sequences, whose KV is computed again. The price rises
# with the square of the share in use: half a pool costs little.
_FULL_POOL_MS = 100.0

_DECODE, _MIXED = common_pb2.WORKER_ROLE_DECODE, common_pb2.WORKER_ROLE_MIXED
_REFUSED = "refused just now, or is reserved for another request"


@dataclass(frozen=True)
class Estimate:
    """A request on one worker."""

    worker: WorkerView
    no_room: str  # why it accepts nothing now; empty if it does
    cached: int  # leading tokens of the request's
    uncached: int
    queue_tokens: int  # computed before the request's first
    tpot_s: float = 0.0  # of a decode worker, with the request in its batch


class PrefillCosts(NamedTuple):
    """The request's prompt on each worker. Costs are whole microseconds: sums compare exactly."""

    cached: Column  # leading tokens
    ahead: Column  # tokens to compute before its first; the worker is full at `window`
    blocks: Column  # that it needs of the available ones
    full: Flags
    wait_us: Column
    us: Column  # until the prompt is computed, waiting included
    others_us: Column  # that streams of the worker wait for it


class DecodeCosts(NamedTuple):
    """The request's tokens on each worker.

    A pair costs `us` and `others_us` of PrefillCosts and the handoff's cost, or `local_us` if that
    is less: then the second worker computes the prompt itself. Either is infinite where it is ruled
    out. The cost is `alone_us` where a worker serves the request alone whatever its role.
    """

    cached: Column
    blocks: Column
    full: Flags
    local_full: Flags  # has too much to compute to be given a prompt, too
    local_ttft_s: Column
    local_us: Column
    alone_us: Column
    near_us: Column  # a handoff on one host, and the rest of the request
    far_us: Column  # the same between hosts


class FleetCosts:
    """The part of the costs that is the same for all requests on a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        w, prefills, decodes = snapshot.columns, snapshot.prefills, snapshot.decodes
        usual_rate = _median(w.rate[prefills & (w.rate > 0)], _TOKENS_PER_S)
        rates = _without_noise(w.rate, usual_rate)
        # Rates of small steps say little: decode is never assumed to be the faster one.
        self.rate = np.where(w.role == _DECODE, np.minimum(rates, usual_rate), rates)
        # The queue is kept in the router, where it can be ordered, and not on the worker.
        self.window = np.maximum(w.chunk_tokens * _WINDOW_CHUNKS, self.rate * _WINDOW_S // 1)
        self.half_chunk = w.chunk_tokens // 2

        # The measured step as it would be with one sequence; 0 if there is no measurement.
        single_ms = w.step_ms / _relative_step(np.maximum(w.running, 1))
        usual_ms = _median(single_ms[decodes & (single_ms > 0)], _STEP_MS)
        outdated = (single_ms > usual_ms) & (w.running == 0)  # measured with an earlier batch
        single_ms = np.where(outdated, usual_ms, _without_noise(single_ms, usual_ms))
        # Prompts are no streams yet.
        self.num_streams = np.where(
            w.role == _DECODE, w.busy, np.maximum(w.busy - w.num_assigned, 0)
        )
        step_s = single_ms / 1e3 * _relative_step(self.num_streams + 1)
        self.tpot_s = step_s / (1 - w.prefill_share)
        self.batch_full = w.busy >= w.max_busy
        self.step_s = step_s
        # The queue, and the rest of the current step, on average.
        self.decode_wait_s = w.queued_tokens / self.rate + step_s / 2


class Costs:
    """One request on all workers of a snapshot."""

    def __init__(self, snapshot: Snapshot, demand: Demand) -> None:
        self.snapshot, self.demand = snapshot, demand
        self.fleet = _fleet_costs(snapshot)
        workers = snapshot.columns
        cached = np.zeros(len(workers.slot))
        for block_size in {size for _, size, _ in snapshot.kvs.values()} - {0}:
            found = snapshot.index.leading(demand.hashes(block_size))
            if found is not None:
                cached = np.maximum(cached, found[workers.slot] * block_size)
        # Blocks that the sequence and its next token need of the available ones. Blocks shared with
        # a running sequence are not needed again. Of the cached ones, as many as the pool has
        # unheld may be among the available ones and are counted as such.
        whole = demand.num_tokens // workers.block_size + 1
        shared = np.maximum(cached // workers.block_size - workers.blocks_cached, 0)
        blocks, uncached = whole - shared, demand.num_tokens - cached
        self.prefill = self._prefill_costs(cached, uncached, blocks)
        self.decode = self._decode_costs(uncached, whole)

    def _prefill_costs(self, cached: Column, uncached: Column, blocks: Column) -> PrefillCosts:
        fleet, w = self.fleet, self.snapshot.columns
        # Other routers' prompts count fully: their virtual finish times are not known.
        finish = self.demand.pending.virtual_finish
        ahead = self.snapshot.table.assigned_before(finish) + w.others_tokens
        # A chunk of a later prompt may be running: on average half of it remains.
        running = np.maximum(np.minimum(w.queued_tokens - ahead, fleet.half_chunk), 0)
        before = ahead + running
        full = (blocks > w.blocks_freeable) | (ahead >= fleet.window)
        wait_us = np.rint(before / fleet.rate * 1e6)
        us = np.rint((before + uncached) / fleet.rate * 1e6)
        streams = np.where(self.snapshot.decodes, fleet.num_streams, 0)
        # Each step with a part of a prompt delays all streams of a worker, also future ones, and
        # delays them too long where the step exceeds their SLO.
        part_s = np.minimum(uncached, np.maximum(w.chunk_tokens, 1)) / fleet.rate
        price = np.where(fleet.step_s + part_s > self.demand.max_itl_s, _LATE_PRICE, 1.0)
        others_us = np.rint(uncached / fleet.rate * streams * price * 1e6)
        return PrefillCosts(cached, ahead, blocks, full, wait_us, us, others_us)

    def _decode_costs(self, uncached: Column, whole: Column) -> DecodeCosts:
        """`whole`: blocks of the sequence, wherever they are."""
        fleet, demand, w, prefill = self.fleet, self.demand, self.snapshot.columns, self.prefill
        cached, blocks = prefill.cached, prefill.blocks
        is_mixed = w.role == _MIXED
        compute_s, wait_s = uncached / fleet.rate, fleet.decode_wait_s
        used = 1 - (w.blocks_available - whole) / np.maximum(w.blocks_total, 1)
        used = np.maximum(np.minimum(used, 1), 0)
        tokens = min(demand.max_new_tokens or _NEW_TOKENS, _MAX_NEW_TOKENS)
        late_s = np.maximum(fleet.tpot_s - demand.max_itl_s, 0) * _LATE_PRICE
        rest_us = (fleet.tpot_s + late_s) * (tokens * 1e6) + used * used * (_FULL_POOL_MS * 1e3)
        # Each sequence of decode's batch waits while it computes. The cost is never less than that
        # of a handoff: where nothing waits, prefill workers compute.
        here_s = (wait_s + compute_s * (fleet.num_streams + 1)) * _DECODE_PRICE + HANDOFF_S[False]
        mixed_us = prefill.us + fleet.step_s * 5e5 + prefill.others_us
        alone_us = np.rint(np.where(is_mixed, mixed_us, here_s * 1e6) + rest_us)
        mixed_ttft_s = prefill.us / 1e6 + fleet.step_s / 2
        local_ttft_s = np.where(is_mixed, mixed_ttft_s, wait_s + compute_s)
        if not demand.decodes:  # nothing is handed over
            no, zero = np.zeros(w.ready.shape, np.bool_), np.zeros(w.ready.shape)
            nothing = zero + np.inf
            return DecodeCosts(cached, blocks, no, no, local_ttft_s, nothing, alone_us, zero, zero)
        full = fleet.batch_full | (blocks > w.blocks_available)
        # Blocks that decode does not cache are sent, in the gap before the second token.
        num_bytes = uncached * w.token_bytes
        near_us, far_us = (
            np.rint((num_bytes / _BYTES_PER_S[same] + HANDOFF_S[same]) * 1e6 + rest_us)
            for same in (True, False)
        )
        may = is_mixed
        if demand.local_prefill_max_tokens > 0:
            always = uncached <= demand.local_prefill_max_tokens
            # One step computes it with what waits there, and delays no stream for too long.
            step_tokens = w.queued_tokens + uncached
            is_short = fleet.step_s + step_tokens / fleet.rate <= demand.max_itl_s
            is_short &= step_tokens <= w.chunk_tokens
            may = is_mixed | always | is_short
            near_us[always & ~is_mixed] = far_us[always & ~is_mixed] = np.inf
        local_us = np.where(may, alone_us, np.inf)
        local_full = is_mixed & (prefill.ahead >= fleet.window)
        return DecodeCosts(
            cached, blocks, full, local_full, local_ttft_s, local_us, alone_us, near_us, far_us
        )

    def full(self, refused: Set[str]) -> tuple[Flags, Flags]:
        """Workers that accept no prompt, and those that accept no sequence now.

        `refused`: workers that have just said so, or are reserved for another request.
        """
        p_full, d_full = self.prefill.full, self.decode.full
        if not refused:
            return p_full, d_full
        is_refused = self.snapshot.flags(refused)
        return p_full | is_refused, d_full | is_refused

    def pair_costs(self, p: Any, d: Any, need_room: bool = True) -> tuple[Any, Any]:
        """Cost of each pair of rows, which broadcast, and whether the second computes the prompt.

        A pair of a worker and itself hands nothing over.
        """
        host, decode = self.snapshot.columns.host, self.decode
        rest_us = np.where(host[p] == host[d], decode.near_us[d], decode.far_us[d])
        handed_over = self.prompt_us[p] + np.where(p == d, np.inf, rest_us)
        local = self.local_us(need_room)[d]
        return np.minimum(local, handed_over), local < handed_over

    @property
    def prompt_us(self) -> Column:
        """Cost of the prompt on each worker that hands it over."""
        us: Column = self.prefill.us + self.prefill.others_us
        return us

    def local_us(self, need_room: bool) -> Column:
        """Cost of the whole request on each worker, infinite where it is ruled out."""
        decode = self.decode
        return (
            np.where(decode.local_full, np.inf, decode.local_us) if need_room else decode.local_us
        )

    def on_prefill(self, row: int, refused: Set[str] = frozenset()) -> Estimate:
        """The request's prompt on one worker, with the reason if it has no room."""
        worker, costs, no_room = self.snapshot.workers[row], self.prefill, ""
        ahead, window = int(costs.ahead[row]), self.fleet.window[row]
        if worker.incarnation in refused:
            no_room = _REFUSED
        elif ahead >= window:
            no_room = f"has {ahead} tokens to compute first and is given at most {window:.0f} ahead"
        elif costs.full[row]:
            no_room = _blocks_missing(worker, costs.blocks[row])
        return self._estimate(worker, no_room, costs.cached[row], ahead)

    def on_decode(self, row: int, refused: Set[str] = frozenset()) -> Estimate:
        """The request's tokens on one worker, with the reason if it has no room."""
        worker, costs, no_room = self.snapshot.workers[row], self.decode, ""
        d = self.snapshot.columns
        if worker.incarnation in refused:
            no_room = _REFUSED
        elif self.demand.decodes and self.fleet.batch_full[row]:
            no_room = f"has {d.busy[row]:.0f} sequences for a batch of {worker.record.max_batch}"
        elif costs.full[row]:
            no_room = _blocks_missing(worker, costs.blocks[row])
        tpot_s = float(self.fleet.tpot_s[row])
        return self._estimate(worker, no_room, costs.cached[row], int(d.queued_tokens[row]), tpot_s)

    def _estimate(
        self, worker: WorkerView, no_room: str, cached: float, queued: int, tpot_s: float = 0.0
    ) -> Estimate:
        no_room = no_room and f"{worker.incarnation} {no_room}"
        uncached = self.demand.num_tokens - int(cached)
        return Estimate(worker, no_room, int(cached), uncached, queued, tpot_s)

    def room_ms(self) -> tuple[Column, Column]:
        """How soon each worker has room for the prompt, and for the sequence: 0 if it has, infinite
        if never.

        Only comparable between workers: by the share of its sequences that must end, because when
        they do cannot be predicted, and by the time of a step.
        """
        w = self.snapshot.columns
        # A prefill worker without held blocks is full of prompts that go first.
        prefill = np.where(w.blocks_held > 0, _room_ms(w, self.prefill.blocks, 0.0), 0.0)
        prefill[~w.ready] = np.inf
        if not self.demand.decodes:
            return prefill, np.zeros(len(w.ready))
        excess = (w.busy + 1 - w.max_busy) / np.maximum(1, w.busy)
        decode = _room_ms(w, self.decode.blocks, excess)
        decode[~w.ready] = np.inf
        return prefill, decode


def _room_ms(workers: WorkerColumns, blocks: Column, excess: Any) -> Column:
    """`excess`: share of the sequences that exceeds the batch."""
    missing = (blocks - workers.blocks_available) / np.maximum(1, workers.blocks_held)
    share = np.maximum(0, np.maximum(excess, missing))
    room_ms = share * np.where(workers.step_ms > 0, workers.step_ms, _STEP_MS)
    return np.where(blocks > workers.blocks_total, np.inf, room_ms)


@lru_cache(maxsize=1)
def costs_of(snapshot: Snapshot, demand: Demand) -> Costs:
    """The costs; admission and placement share them unless the fleet changes between."""
    return Costs(snapshot, demand)


@lru_cache(maxsize=1)
def _fleet_costs(snapshot: Snapshot) -> FleetCosts:
    return FleetCosts(snapshot)


def _blocks_missing(worker: WorkerView, needed: float) -> str:
    available = worker.load.blocks_free + worker.load.blocks_cached
    return f"has {available} KV blocks available and {needed:.0f} are needed"


def _relative_step(sequences: Column) -> Column:
    """Duration of a step relative to one with a single sequence."""
    return (_STEP_BASE_SEQUENCES + sequences) / (_STEP_BASE_SEQUENCES + 1)


def _without_noise(rates: Column, usual: float) -> Column:
    """The usual rate for workers that have none, or one that differs from it by noise only."""
    is_usual = (rates == 0) | (abs(rates - usual) <= _NOISE * np.maximum(rates, usual))
    return np.where(is_usual, usual, rates)


def _median(values: Column, default: float) -> float:
    """The median, or the lower one of two."""
    if not values.size:
        return default
    return float(values[0] if values.size == 1 else np.sort(values)[(values.size - 1) // 2])
