"""The cost model: what a request would find on each worker, and how long it takes there.

The cost of a pair is a sum of one number of each of its workers, so each number is computed once a
worker, in numpy columns. Rates are what workers measured of themselves; the median of its kind
replaces that of a worker without one.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from baton.v1 import common_pb2
from router.fleet.snapshot import (
    MAX_PREFILL_SHARE,
    Column,
    Flags,
    Rows,
    Snapshot,
    Table,
    WorkerColumns,
    WorkerView,
)
from router.request import Demand

_WINDOW_CHUNKS = 2  # queued on a prefill worker: one that runs and the next one
_LONG_WINDOWS = 2  # as many tokens of a prompt in work are worth waiting for
_WINDOW_S = 0.1  # or this much work, if chunks are short, so that none is missing between reports
_NOISE = 0.15  # rates that differ by no more count as equal
_TOKENS_PER_S, _STEP_MS = 1000.0, 10.0  # before any worker has measured anything
# A decode step reads all weights once, and each sequence's KV: reading the weights takes as long as
# this many sequences. Measured on CPUs: 14 ms with 1 sequence, 24 ms with 8, 63 ms with 32.
STEP_BASE_SEQUENCES = 8
# Cost of a handoff on one host and over the network: its control messages (Reserve, Prefill, Offer,
# Ready, Commit), and bytes a second. On one host a short prompt's first token comes 2 to 3 ms later
# than from decode itself; shared memory moves 4 to 9 GB/s. Those of the network are assumptions.
HANDOFF_S, _BYTES_PER_S = {True: 0.003, False: 0.005}, {True: 4e9, False: 1e9}
# The same in columns: on one host, over the network.
_HANDOFF_US = np.array([[HANDOFF_S[True]], [HANDOFF_S[False]]]) * 1e6
_BYTE_US = 1e6 / np.array([[_BYTES_PER_S[True]], [_BYTES_PER_S[False]]])
# A decode step delays all streams of the worker, also future ones: computing prompts there counts
# twice. So does what makes tokens of streams later than their SLO.
_DECODE_PRICE = _LATE_PRICE = 2
# Output tokens expected if the request does not limit them, and at most: many requests end before
# their limit, and TPOT must not outweigh everything else.
_NEW_TOKENS, _MAX_NEW_TOKENS = 64, 256
# A decode pool that becomes full preempts sequences, whose KV is computed again. The price rises
# with the square of the share in use: half a pool costs little.
_FULL_POOL_MS = 100.0

_PREFILL, _DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE
_MIXED = common_pb2.WORKER_ROLE_MIXED
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

    wait_us: Column
    us: Column  # until the prompt is computed, waiting included
    others_us: Column  # that streams of the worker wait for it


class DecodeCosts(NamedTuple):
    """The request's tokens on each worker.

    A pair costs `us` and `others_us` of PrefillCosts and the handoff's cost, or `local_us` if that
    is less: then the second worker computes the prompt itself. Either is infinite where it is ruled
    out. The cost is `alone_us` where a worker serves the request alone whatever its role.
    """

    local_ttft_us: Column
    local_us: Column
    alone_us: Column
    near_us: Column  # a handoff on one host, and the rest of the request
    far_us: Column  # the same between hosts


class Speeds:
    """How fast workers are, as far as it follows from what they have reported."""

    def __init__(self, reported: Table) -> None:
        w = reported.columns
        prefills, decodes = w.ready & (w.role != _DECODE), w.ready & (w.role != _PREFILL)
        usual_rate = _median(w.rate[prefills & (w.rate > 0)], _TOKENS_PER_S)
        rate = _without_noise(w.rate, usual_rate)
        # Rates of small steps say little: decode is never assumed to be the faster one.
        rate = np.where(w.role == _DECODE, np.minimum(rate, usual_rate), rate)
        self.token_us = 1e6 / rate
        # The queue is kept in the router, where it can be ordered, and not on the worker.
        self.window = np.maximum(w.chunk_tokens * _WINDOW_CHUNKS, rate * _WINDOW_S // 1)
        self.half_chunk = w.chunk_tokens // 2
        self.long_tokens = self.window * _LONG_WINDOWS
        self.is_mixed = w.role == _MIXED
        self.has_mixed = bool(self.is_mixed.any())

        # The measured step as it would be with one sequence; 0 if there is no measurement.
        single_ms = w.step_ms / _relative_step(np.maximum(w.running, 1))
        usual_ms = _median(single_ms[decodes & (single_ms > 0)], _STEP_MS)
        outdated = (single_ms > usual_ms) & (w.running == 0)  # measured with an earlier batch
        self.single_us = 1e3 * np.where(outdated, usual_ms, _without_noise(single_ms, usual_ms))
        self.block_share = 1 / np.maximum(w.blocks_total, 1)  # of the pool
        self.used_share = 1 - w.blocks_available * self.block_share


class FleetCosts:
    """The part of the costs that is the same for all requests on a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        w, self.speeds = snapshot.columns, _speeds(snapshot.table.reported)
        # Prompts are no streams yet.
        prompts = np.where(w.role == _DECODE, 0, w.num_assigned)
        self.streams = np.maximum(w.busy - prompts, 0) + 1
        self.step_us = self.speeds.single_us * _relative_step(self.streams)
        # Streams wait while prompts are computed.
        share, self.spared = w.prefill_share, np.zeros(w.ready.shape, np.bool_)
        if self.speeds.has_mixed:
            mixed = np.flatnonzero(self.speeds.is_mixed & w.ready)
            share, self.spared = _expected_shares(share, self.streams, mixed)
        self.tpot_us = self.step_us / (1 - share)
        self.batch_full = w.busy >= w.max_busy
        # The queue, and the rest of the current step, on average.
        self.wait_us = w.queued_tokens * self.speeds.token_us + self.step_us / 2


class Costs:
    """One request on all workers of a snapshot: their room first, and costs when they are read.

    cached: leading tokens · ahead: tokens to compute before its first · blocks: that it needs of
    the available ones · computes: whether a worker may compute the prompt of a sequence it takes.
    """

    def __init__(self, snapshot: Snapshot, demand: Demand) -> None:
        self.snapshot, self.demand, self.fleet = snapshot, demand, _fleet_costs(snapshot)
        workers = snapshot.columns
        size = workers.block_size
        # Each group of layers has a block table; one with a window needs no more than the window
        # and one block (a sequence's chunk is part of it), and a state what it needs of the pool.
        self._whole = workers.state_blocks + _in_groups(
            snapshot, (demand.num_tokens + size) // size, workers.window_tokens // size + 2
        )
        self.cached, self.blocks = np.zeros(len(workers.slot)), self._whole
        for block_size in {size for _, size, _ in snapshot.kvs.values()} - {0}:
            found = snapshot.index.leading(demand.hashes(block_size))
            if found is not None:
                self.cached = np.maximum(self.cached, found[workers.slot] * block_size)
                # Those shared with a running sequence are not needed again. Of the cached ones, as
                # many as the pool has unheld may be among the available ones and are counted so.
                held = _in_groups(snapshot, self.cached // size, workers.window_tokens // size)
                shared = held - workers.blocks_cached
                self.blocks = self._whole - np.maximum(shared, 0)
        # Tokens of prompts that compute this one's first tokens, and how many of them are left.
        self._in_work, self._left = np.zeros(len(workers.slot)), np.zeros(len(workers.slot))
        if demand.uses_cache and not snapshot.has_states:
            self._find_in_work()
        self.uncached = demand.num_tokens - self.cached
        self._find_room()

    def _find_in_work(self) -> None:
        """Counts tokens as cached that a worker computes for another prompt, if it takes several
        steps: prompts that share a step share no blocks."""
        demand, slots = self.demand, self.snapshot.columns.slot
        long_tokens = self.fleet.speeds.long_tokens
        for slot, tokens, given in self.snapshot.index.in_work(
            demand.cache_salt, demand.token_ids, long_tokens.min(initial=np.inf)
        ):
            here = (slots == slot) & (self.cached < tokens) & (given >= long_tokens)
            self._in_work[here] = given
            self._left[here] = np.minimum(tokens - self.cached[here], given)
            self.cached = np.where(here, tokens, self.cached)

    def _find_room(self) -> None:
        fleet, speeds, w, demand = self.fleet, self.fleet.speeds, self.snapshot.columns, self.demand
        # Other routers' prompts count fully: their virtual finish times are not known.
        self.ahead = (
            self.snapshot.table.assigned_before(demand.pending.virtual_finish) + w.others_tokens
        )
        # It waits for a prompt that computes its own tokens wherever it waits.
        window = speeds.window + self._in_work
        self.prefill_full = (self.blocks > w.blocks_freeable) | (self.ahead >= window)
        if speeds.has_mixed:
            # Each step with a part of a prompt delays all streams of a worker, and delays them too
            # long where the step exceeds their SLO.
            part_us = np.minimum(self.uncached, np.maximum(w.chunk_tokens, 1)) * speeds.token_us
            self._is_late = fleet.step_us + part_us > demand.max_itl_s * 1e6
            # Such a prompt waits for a worker with fewer streams, if those have the time for it.
            self.prefill_full |= self._is_late & fleet.spared & (fleet.streams > 1)
        self.decode_full = np.zeros(w.ready.shape, np.bool_)
        self.computes = speeds.is_mixed
        if not demand.decodes:  # nothing is handed over
            return
        self.decode_full = fleet.batch_full | (self.blocks > w.blocks_available)
        if demand.local_prefill_max_tokens > 0:
            # One step computes it with what waits there, and delays no stream for too long.
            step_tokens = w.queued_tokens + self.uncached
            step_us = fleet.step_us + step_tokens * speeds.token_us
            is_short = (step_us <= demand.max_itl_s * 1e6) & (step_tokens <= w.chunk_tokens)
            self.computes = self.computes | self._is_small | is_short

    @property
    def _is_small(self) -> Flags:
        """Where few enough tokens are uncached for decode workers to compute them always."""
        small: Flags = self.uncached <= self.demand.local_prefill_max_tokens
        return small

    @cached_property
    def prefill(self) -> PrefillCosts:
        fleet, speeds, w = self.fleet, self.fleet.speeds, self.snapshot.columns
        # A chunk of a later prompt may be running: on average half of it remains.
        running = np.maximum(np.minimum(w.queued_tokens - self.ahead, speeds.half_chunk), 0)
        # What is left of a prompt that computes this one's first tokens counts half: to compute
        # them again elsewhere delays others.
        done = self._in_work - self._left / 2
        before = np.maximum(self.ahead - done, 0) + running
        wait_us = np.rint(before * speeds.token_us)
        us = np.rint((before + self.uncached) * speeds.token_us)
        others_us = np.zeros(us.shape)
        if speeds.has_mixed:
            price = np.where(self._is_late, _LATE_PRICE, 1.0) * speeds.is_mixed
            others_us = np.rint(self.uncached * speeds.token_us * (fleet.streams - 1) * price)
        return PrefillCosts(wait_us, us, others_us)

    @cached_property
    def decode(self) -> DecodeCosts:
        fleet, demand, w, prefill = self.fleet, self.demand, self.snapshot.columns, self.prefill
        speeds, uncached, whole = fleet.speeds, self.uncached, self._whole
        compute_us, is_mixed = uncached * speeds.token_us, speeds.is_mixed
        used = np.maximum(np.minimum(speeds.used_share + whole * speeds.block_share, 1), 0)
        tokens = min(demand.max_new_tokens or _NEW_TOKENS, _MAX_NEW_TOKENS)
        late_us = np.maximum(fleet.tpot_us - demand.max_itl_s * 1e6, 0) * _LATE_PRICE * is_mixed
        rest_us = (fleet.tpot_us + late_us) * tokens + used * used * (_FULL_POOL_MS * 1e3)
        # Each sequence of decode's batch waits while it computes. The cost is never less than that
        # of a handoff: where nothing waits, prefill workers compute.
        here_us = (fleet.wait_us + compute_us * fleet.streams) * _DECODE_PRICE + _HANDOFF_US[1]
        local_ttft_us = fleet.wait_us + compute_us
        if speeds.has_mixed:
            ours_us = prefill.us + fleet.step_us / 2
            here_us = np.where(is_mixed, ours_us + prefill.others_us, here_us)
            local_ttft_us = np.where(is_mixed, ours_us, local_ttft_us)
        alone_us = np.rint(here_us + rest_us)
        if not demand.decodes:
            zero = np.zeros(w.ready.shape)
            return DecodeCosts(local_ttft_us, zero + np.inf, alone_us, zero, zero)
        # Blocks that decode does not cache, and the state, are sent in the gap before the second
        # token.
        sent = _in_groups(self.snapshot, uncached, w.window_tokens)
        sent /= w.full_groups + w.window_groups
        sent += w.state_blocks * w.block_size
        near_us, far_us = np.rint(sent * w.token_bytes * _BYTE_US + _HANDOFF_US + rest_us)
        if demand.local_prefill_max_tokens > 0:
            always = self._is_small & ~is_mixed
            near_us[always] = far_us[always] = np.inf
        local_us = np.where(self.computes, alone_us, np.inf)
        return DecodeCosts(local_ttft_us, local_us, alone_us, near_us, far_us)

    def full(self, refused: Set[str]) -> tuple[Flags, Flags]:
        """Workers that accept no prompt, and those that accept no sequence now.

        `refused`: workers that have just said so, or are reserved for another request.
        """
        p_full, d_full = self.prefill_full, self.decode_full
        if not refused:
            return p_full, d_full
        is_refused = self.snapshot.flags(refused)
        return p_full | is_refused, d_full | is_refused

    @property
    def local_full(self) -> Flags:
        """Workers with too much to compute to be given a prompt with a sequence."""
        full: Flags = self.fleet.speeds.is_mixed & self.prefill_full
        return full

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
        local_us = self.decode.local_us
        return np.where(self.local_full, np.inf, local_us) if need_room else local_us

    def on_prefill(self, row: int, refused: Set[str] = frozenset()) -> Estimate:
        """The request's prompt on one worker, with the reason if it has no room."""
        worker, no_room = self.snapshot.workers[row], ""
        ahead, window = int(self.ahead[row]), self.fleet.speeds.window[row]
        if worker.incarnation in refused:
            no_room = _REFUSED
        elif ahead >= window:
            no_room = f"has {ahead} tokens to compute first and is given at most {window:.0f} ahead"
        elif self.blocks[row] > self.snapshot.columns.blocks_freeable[row]:
            no_room = _blocks_missing(worker, self.blocks[row])
        elif self.prefill_full[row]:
            no_room = "leaves prompts that would delay its streams to workers with fewer"
        return self._estimate(worker, no_room, self.cached[row], ahead)

    def on_decode(self, row: int, refused: Set[str] = frozenset()) -> Estimate:
        """The request's tokens on one worker, with the reason if it has no room."""
        worker, no_room = self.snapshot.workers[row], ""
        d = self.snapshot.columns
        if worker.incarnation in refused:
            no_room = _REFUSED
        elif self.demand.decodes and self.fleet.batch_full[row]:
            no_room = f"has {d.busy[row]:.0f} sequences for a batch of {worker.record.max_batch}"
        elif self.decode_full[row]:
            no_room = _blocks_missing(worker, self.blocks[row])
        tpot_s = float(self.fleet.tpot_us[row]) / 1e6
        return self._estimate(worker, no_room, self.cached[row], int(d.queued_tokens[row]), tpot_s)

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
        prefill = np.where(w.blocks_held > 0, _room_ms(w, self.blocks, 0.0), 0.0)
        prefill[~w.ready] = np.inf
        if not self.demand.decodes:
            return prefill, np.zeros(len(w.ready))
        excess = (w.busy + 1 - w.max_busy) / np.maximum(1, w.busy)
        decode = _room_ms(w, self.blocks, excess)
        decode[~w.ready] = np.inf
        return prefill, decode


def _in_groups(snapshot: Snapshot, count: Column, most: Column) -> Column:
    """The sum of a count over groups of layers; those with a window have at most `most`."""
    workers = snapshot.columns
    if not snapshot.has_windows:
        return count * workers.full_groups
    within = np.minimum(count, most)
    return count * workers.full_groups + within * workers.window_groups


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


@lru_cache(maxsize=1)
def _speeds(reported: Table) -> Speeds:
    return Speeds(reported)


def _expected_shares(share: Column, streams: Column, mixed: Rows) -> tuple[Column, Flags]:
    """The shares of their time that workers will spend on prompts, by those of the last seconds,
    and which workers are not needed for prompts.

    Of mixed workers, those with the fewest streams get prompts first. So they take all that the
    mixed workers together had, and streams gather on the others.
    """
    order = mixed[np.lexsort((-share[mixed], streams[mixed]))]
    before = np.arange(order.size) * MAX_PREFILL_SHARE
    expected = share.copy()
    expected[order] = np.clip(share[mixed].sum() - before, 0.0, MAX_PREFILL_SHARE)
    spared = np.zeros(share.shape, np.bool_)
    spared[order[1:]] = expected[order[1:]] == 0
    return expected, spared


def _blocks_missing(worker: WorkerView, needed: float) -> str:
    available = worker.load.blocks_free + worker.load.blocks_cached
    return f"has {available} KV blocks available and {needed:.0f} are needed"


def _relative_step(sequences: Column) -> Column:
    """Duration of a step relative to one with a single sequence."""
    return (STEP_BASE_SEQUENCES + sequences) / (STEP_BASE_SEQUENCES + 1)


def _without_noise(rates: Column, usual: float) -> Column:
    """The usual rate for workers that have none, or one that differs from it by noise only."""
    is_usual = (rates == 0) | (abs(rates - usual) <= _NOISE * np.maximum(rates, usual))
    return np.where(is_usual, usual, rates)


def _median(values: Column, default: float) -> float:
    """The median, or the lower one of two."""
    if not values.size:
        return default
    return float(values[0] if values.size == 1 else np.sort(values)[(values.size - 1) // 2])
