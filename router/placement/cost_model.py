"""The cost model: what one request would find on each worker, room or not, and how long it takes.

Everything that depends on one worker alone is computed here, once a worker, so that looking at all
pairs costs no more than adding up. Rates are what workers measured of themselves; the median of its
kind stands in for a worker without a measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from baton.config import RouterLimits
from baton.prefix import hash_chain
from router.fleet.snapshot import Snapshot, WorkerView

_CHUNK_TOKENS = 512  # of a worker that does not report it
_WINDOW_CHUNKS = 2  # queued on a prefill worker: one that runs and one to go on with
_WINDOW_S = 0.1  # or so much work, where chunks are short: no gap while the router hears of room
_SPARE_SHARE = 8  # a batch is given an eighth more, so that a place is taken as soon as it is free
_NOISE = 0.15  # rates that differ by no more count as equal
_ELEMENT_BYTES = {"float32": 4, "int8": 1, "float8_e4m3fn": 1}
_SCALE_BYTES = {"int8": 4, "float8_e4m3fn": 4}
_TOKENS_PER_S, _STEP_MS = 1000.0, 10.0  # before any worker has measured anything
# A decode step reads all weights once and each sequence's KV: it takes as long as if so many
# sequences were there before the first. Measured on the CPU path: 14 ms with 1, 24 ms with 8,
# 63 ms with 32 sequences.
_STEP_BASE_SEQUENCES = 8


@dataclass(frozen=True)
class PlacementRequest:
    """What a request needs of a pair of workers, in tokens.

    Made once for an attempt, so that its prompt is hashed once however often it is placed.
    `local_prefill_max_tokens` is the router's setting: decode computes so few tokens by itself;
    0 is never.
    """

    token_ids: Sequence[int]  # prompt, then what earlier attempts delivered
    virtual_finish: float  # time.monotonic()
    cache_salt: str = ""
    new_tokens: int = 0  # at most so many outputs; 0: not known
    local_prefill_max_tokens: int = RouterLimits.local_prefill_max_tokens
    _chains: dict[int, list[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_tokens(self) -> int:
        """Tokens to compute where nothing is cached."""
        return len(self.token_ids)

    def chain(self, block_size: int) -> Sequence[int]:
        """The prompt's hash chain, computed at first use."""
        if block_size not in self._chains:
            self._chains[block_size] = hash_chain(self.token_ids, block_size, self.cache_salt)
        return self._chains[block_size]

    def cached_tokens(self, worker: WorkerView) -> int:
        """Leading tokens whose KV the worker seems to cache; never all, as the last is computed."""
        block_size = worker.record.kv.block_size
        if not block_size or not len(worker.cached):
            return 0
        usable = (self.num_tokens - 1) // block_size
        return min(usable, worker.cached.leading_blocks(self.chain(block_size))) * block_size


@dataclass(frozen=True)
class FleetRates:
    """Usual rates of the fleet's workers."""

    prefill_tokens_per_s: float
    step_ms: float  # with one sequence in the batch

    @classmethod
    def of(cls, snapshot: Snapshot) -> FleetRates:
        """Medians over the READY workers."""
        rates = [w.load.prefill_tokens_per_s for w in snapshot.prefill if w.ready]
        steps = [_lone_step_ms(w) for w in snapshot.decode if w.ready]
        return cls(_median(rates, _TOKENS_PER_S), _median(steps, _STEP_MS))


@dataclass(frozen=True)
class PrefillEstimate:
    """The request on a prefill worker."""

    worker: WorkerView
    no_room: str  # why it takes nothing now; empty when it does
    queue_tokens: int  # computed before the request's first
    cached: int  # leading tokens of the request's
    wait_s: float  # until its first chunk
    compute_s: float  # what is not cached


@dataclass(frozen=True)
class DecodeEstimate:
    """The request on a decode worker."""

    worker: WorkerView
    no_room: str
    busy: int  # sequences it has
    cached: int
    uncached: int  # tokens that are not cached
    chunk: int  # most tokens it computes in one step
    token_bytes: int  # of KV
    wait_s: float  # before it would compute them itself
    compute_s: float
    tpot_s: float  # with the request in its batch
    blocks_share: float  # of its pool in use with the request


def estimate_prefill(
    worker: WorkerView, request: PlacementRequest, rates: FleetRates
) -> PrefillEstimate:
    """The request on a prefill worker."""
    rate = _settled(worker.load.prefill_tokens_per_s, rates.prefill_tokens_per_s)
    chunk = _chunk(worker)
    ahead = worker.tokens_ahead(request.virtual_finish)
    # A chunk of what goes later may be running: on average half of it is still to come.
    running = min(worker.queue_tokens - ahead, chunk // 2)
    cached = request.cached_tokens(worker)
    return PrefillEstimate(
        worker=worker,
        no_room=_window_full(worker, ahead, max(_WINDOW_CHUNKS * chunk, int(rate * _WINDOW_S)))
        or _blocks_missing(worker, request, cached, idle=not worker.load.blocks_held),
        queue_tokens=ahead,
        cached=cached,
        wait_s=(ahead + max(0, running)) / rate,
        compute_s=(request.num_tokens - cached) / rate,
    )


def estimate_decode(
    worker: WorkerView, request: PlacementRequest, rates: FleetRates, full: Set[str]
) -> DecodeEstimate:
    """The request on a decode worker."""
    load = worker.load
    rate = _settled(load.prefill_tokens_per_s, rates.prefill_tokens_per_s)
    busy = max(load.running + load.waiting, worker.assigned_sequences)
    cached = request.cached_tokens(worker)
    uncached = request.num_tokens - cached
    tpot_s = _step_ms(worker, rates) / 1e3 * _relative_step(busy + 1)
    free = worker.blocks_available - _blocks_needed(worker, request.num_tokens)
    return DecodeEstimate(
        worker=worker,
        no_room=(f"{worker.incarnation} refused just now" if worker.incarnation in full else "")
        or _batch_full(worker, busy)
        or _blocks_missing(worker, request, cached),
        busy=busy,
        cached=cached,
        uncached=uncached,
        chunk=_chunk(worker),
        token_bytes=_token_bytes(worker),
        wait_s=load.queue_tokens / rate + tpot_s / 2,  # the step that runs, on average
        compute_s=uncached / rate,
        tpot_s=tpot_s,
        blocks_share=min(1.0, max(0.0, 1 - free / max(1, load.blocks_total))),
    )


# Filters: each gives the reason, or nothing.


def _window_full(worker: WorkerView, ahead: int, window: int) -> str:
    """The queue is kept in the router, where it can be ordered, and not on the worker."""
    if ahead < window:
        return ""
    return (
        f"{worker.incarnation} has {ahead} tokens to compute first "
        f"and is given no more than {window} ahead"
    )


def _batch_full(worker: WorkerView, busy: int) -> str:
    most = worker.record.max_batch
    if not most or busy < most + max(1, most // _SPARE_SHARE):
        return ""
    return f"{worker.incarnation} has {busy} sequences for a batch of {most}"


def _blocks_missing(
    worker: WorkerView, request: PlacementRequest, cached: int, *, idle: bool = False
) -> str:
    """Blocks for the sequence and its next token; an idle pool is as free as it ever gets."""
    needed = _blocks_needed(worker, request.num_tokens)
    # Blocks that are shared with a running sequence are not needed again. Of those that match, as
    # many as the pool keeps unheld may be among the available ones and are counted there.
    hits = cached // max(1, worker.record.kv.block_size)
    needed -= max(0, hits - worker.load.blocks_cached)
    if needed <= worker.blocks_available or idle:
        return ""
    return (
        f"{worker.incarnation} has {worker.blocks_available} KV blocks available "
        f"and {needed} are needed"
    )


def _blocks_needed(worker: WorkerView, num_tokens: int) -> int:
    return num_tokens // max(1, worker.record.kv.block_size) + 1


def _chunk(worker: WorkerView) -> int:
    return worker.record.chunk_tokens or _CHUNK_TOKENS


def _token_bytes(worker: WorkerView) -> int:
    kv = worker.record.kv
    row = kv.head_size * _ELEMENT_BYTES.get(kv.dtype, 2) + _SCALE_BYTES.get(kv.dtype, 0)
    token: int = 2 * kv.num_layers * kv.num_kv_heads * row
    return token


# Rates.


def _step_ms(worker: WorkerView, rates: FleetRates) -> float:
    """Its step with one sequence. What an idle worker measured may be of a batch long gone."""
    own = _lone_step_ms(worker)
    if own > rates.step_ms and not worker.load.running:
        return rates.step_ms
    return _settled(own, rates.step_ms)


def _lone_step_ms(worker: WorkerView) -> float:
    """What its measured step would be with one sequence; 0 when there is none measured."""
    return worker.load.step_ms / _relative_step(max(1, worker.load.running))


def _relative_step(sequences: int) -> float:
    """Time of a step by that of a step with one sequence."""
    return (_STEP_BASE_SEQUENCES + sequences) / (_STEP_BASE_SEQUENCES + 1)


def _settled(own: float, usual: float) -> float:
    """The worker's own rate, unless it has none or it differs from the usual one by noise only."""
    return usual if not own or abs(own - usual) <= _NOISE * max(own, usual) else own


def _median(values: Iterable[float], otherwise: float) -> float:
    known: Sequence[float] = [value for value in values if value > 0]
    return statistics.median_low(known) if known else otherwise
