"""The cost model: what one request would find on each worker, and how long it takes there.

Computed once for each worker, so that looking at all pairs only adds up. Rates are what workers
measured of themselves; the median of its kind stands in for a worker without a measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile

from baton.config import RouterLimits
from baton.prefix import hash_chain
from router.fleet.snapshot import Snapshot, WorkerView

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
_MOST_UNREADY = 16  # workers of a role


@dataclass(frozen=True)
class PlacementRequest:
    """What a request needs of a pair of workers, in tokens.

    Made once for an attempt, so that its prompt is hashed once however often it is placed. Decode
    computes up to `local_prefill_max_tokens` by itself; 0 is never.
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

    def cached_tokens(self, worker: WorkerView) -> int:
        """Leading tokens whose KV the worker seems to cache; never all, as the last is computed."""
        block_size = worker.record.kv.block_size
        if not block_size or not worker.cached:
            return 0
        if block_size not in self._chains:
            self._chains[block_size] = hash_chain(self.token_ids, block_size, self.cache_salt)
        usable = self._chains[block_size][: (self.num_tokens - 1) // block_size]
        leading = takewhile(worker.cached.__contains__, usable)
        return sum(1 for _ in leading) * block_size


@dataclass(frozen=True)
class Estimate:
    """The request on one worker; what has a default is a decode worker's."""

    worker: WorkerView
    no_room: str  # why it takes nothing now; empty when it does
    cached: int  # leading tokens of the request's
    uncached: int
    queue_tokens: int  # computed before the request's first
    wait_s: float  # until its first chunk
    compute_s: float  # what is not cached
    busy: int = 0  # sequences it has
    tpot_s: float = 0.0  # with the request in its batch
    blocks_share: float = 0.0  # of its pool in use with the request
    token_bytes: int = 0  # of KV


def estimates(
    snapshot: Snapshot, request: PlacementRequest, full: Set[str]
) -> tuple[list[Estimate], list[Estimate]]:
    """The request on each prefill and each decode worker; those in `full` have just refused.

    Of many workers that are not ready only some are considered: a registry may hold thousands that
    do not exist.
    """
    ready = [w for w in snapshot.prefill if w.ready]
    usual_rate = _median((w.load.prefill_tokens_per_s for w in ready), _TOKENS_PER_S)
    usual_ms = _median((_lone_step_ms(w) for w in snapshot.decode if w.ready), _STEP_MS)
    return (
        [_on_prefill(w, request, usual_rate) for w in _considered(snapshot.prefill)],
        [_on_decode(w, request, usual_rate, usual_ms, full) for w in _considered(snapshot.decode)],
    )


def chunk_tokens(worker: WorkerView) -> int:
    """Most prompt tokens that it computes in one step."""
    return worker.record.chunk_tokens or _CHUNK_TOKENS


def _on_prefill(worker: WorkerView, request: PlacementRequest, usual_rate: float) -> Estimate:
    rate = _settled(worker.load.prefill_tokens_per_s, usual_rate)
    chunk = chunk_tokens(worker)
    ahead = worker.tokens_ahead(request.virtual_finish)
    # A chunk of what goes later may be running: on average half of it is still to come.
    running = max(0, min(worker.queue_tokens - ahead, chunk // 2))
    cached = request.cached_tokens(worker)
    # The queue is kept in the router, where it can be ordered, and not on the worker.
    window = max(_WINDOW_CHUNKS * chunk, int(rate * _WINDOW_S))
    no_room = ""
    if ahead >= window:
        no_room = f"has {ahead} tokens to compute first and is given no more than {window} ahead"
    elif worker.load.blocks_held:  # an idle pool is as free as it ever gets
        no_room = _blocks_missing(worker, request, cached)
    uncached = request.num_tokens - cached
    return Estimate(
        worker=worker,
        no_room=no_room and f"{worker.incarnation} {no_room}",
        cached=cached,
        uncached=uncached,
        queue_tokens=ahead,
        wait_s=(ahead + running) / rate,
        compute_s=uncached / rate,
    )


def _on_decode(
    worker: WorkerView,
    request: PlacementRequest,
    usual_rate: float,
    usual_ms: float,
    full: Set[str],
) -> Estimate:
    load, most = worker.load, worker.record.max_batch
    rate = _settled(load.prefill_tokens_per_s, usual_rate)
    busy = max(load.running + load.waiting, worker.assigned_sequences)
    cached = request.cached_tokens(worker)
    lone_ms = _lone_step_ms(worker)
    if lone_ms > usual_ms and not load.running:  # it may be of a batch long gone
        lone_ms = usual_ms
    tpot_s = _settled(lone_ms, usual_ms) / 1e3 * _relative_step(busy + 1)
    if worker.incarnation in full:
        no_room = "refused just now"
    elif most and busy >= most + max(1, most // _SPARE_SHARE):
        no_room = f"has {busy} sequences for a batch of {most}"
    else:
        no_room = _blocks_missing(worker, request, cached)
    free = worker.blocks_available - _blocks_needed(worker, request)
    return Estimate(
        worker=worker,
        no_room=no_room and f"{worker.incarnation} {no_room}",
        cached=cached,
        uncached=request.num_tokens - cached,
        queue_tokens=load.queue_tokens,
        wait_s=load.queue_tokens / rate + tpot_s / 2,  # the step that runs, on average
        compute_s=(request.num_tokens - cached) / rate,
        busy=busy,
        tpot_s=tpot_s,
        blocks_share=min(1.0, max(0.0, 1 - free / max(1, load.blocks_total))),
        token_bytes=_token_bytes(worker),
    )


def _considered(workers: Sequence[WorkerView]) -> list[WorkerView]:
    unready = [worker for worker in workers if not worker.ready]
    return [*(worker for worker in workers if worker.ready), *unready[:_MOST_UNREADY]]


def _blocks_needed(worker: WorkerView, request: PlacementRequest) -> int:
    """For the sequence and its next token."""
    return request.num_tokens // max(1, worker.record.kv.block_size) + 1


def _blocks_missing(worker: WorkerView, request: PlacementRequest, cached: int) -> str:
    # Blocks that are shared with a running sequence are not needed again. Of those that match, as
    # many as the pool keeps unheld may be among the available ones and are counted there.
    hits = cached // max(1, worker.record.kv.block_size)
    needed = _blocks_needed(worker, request) - max(0, hits - worker.load.blocks_cached)
    available = worker.blocks_available
    if needed <= available:
        return ""
    return f"has {available} KV blocks available and {needed} are needed"


def _token_bytes(worker: WorkerView) -> int:
    """Of one token's KV: elements, and for one-byte types a float32 scale for each head."""
    kv = worker.record.kv
    element, scale = {"float32": (4, 0), "int8": (1, 4), "float8_e4m3fn": (1, 4)}.get(
        kv.dtype, (2, 0)
    )
    token: int = 2 * kv.num_layers * kv.num_kv_heads * (kv.head_size * element + scale)
    return token


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
