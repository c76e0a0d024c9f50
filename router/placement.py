"""Which pair runs a request: filter, score, pick, as plain functions over a snapshot.

A prefill worker is chosen by the tokens it has to compute first, a decode worker by the blocks it
has left: prefill is bound by compute, decode by memory.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from baton.errors import Overloaded, Unavailable
from router.snapshot import Snapshot, WorkerView

RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class Pair:
    """A choice of workers."""

    prefill: WorkerView
    decode: WorkerView

    @property
    def names(self) -> Set[str]:
        """Both incarnations."""
        return {self.prefill.incarnation, self.decode.incarnation}


def pick(
    snapshot: Snapshot,
    num_tokens: int,
    failed: Set[str] = frozenset(),
    full: Set[str] = frozenset(),
) -> Pair:
    """The best pair for a sequence of `num_tokens`.

    Workers in `failed` are taken only if there are no others, decode workers in `full` not at all.
    Raises Unavailable when a role has no usable worker, Overloaded when no decode worker has room.
    """
    prefill, decode = _ready("prefill", snapshot.prefill), _ready("decode", snapshot.decode)
    pairs = [Pair(p, d) for p in prefill for d in decode if p.record.kv == d.record.kv]
    if not pairs:
        raise Unavailable(
            "no prefill and decode worker have compatible KV caches: "
            f"{_difference(prefill[0], decode[0])}",
            RETRY_AFTER_S,
        )
    asked = [pair for pair in pairs if pair.decode.incarnation not in full]
    roomy = [pair for pair in asked if has_room(pair.decode, num_tokens)]
    if not roomy:
        raise Overloaded(
            f"no decode worker has KV blocks for {num_tokens} tokens now", RETRY_AFTER_S
        )
    return min(roomy, key=lambda pair: (len(pair.names & failed), score(pair)))


def has_room(worker: WorkerView, num_tokens: int) -> bool:
    """Whether a decode worker has blocks for the sequence and its next token."""
    needed = num_tokens // worker.record.kv.block_size + 1
    return worker.blocks_available >= needed


def score(pair: Pair) -> tuple[int, int, float, str, str]:
    """Lower is better: prompt tokens in front, then decode's load by sequences and by blocks."""
    load = pair.decode.load
    busy = max(load.running + load.waiting, pair.decode.assigned_sequences)
    blocks_share = load.blocks_held / max(1, load.blocks_total)
    names = (pair.prefill.incarnation, pair.decode.incarnation)  # a stable choice among equals
    return (pair.prefill.queue_tokens, busy, blocks_share, *names)


def _ready(role: str, workers: tuple[WorkerView, ...]) -> list[WorkerView]:
    """READY workers, at least one."""
    ready = [worker for worker in workers if worker.ready]
    if not ready:
        states = "; ".join(map(_told, workers)) or "none registered"
        raise Unavailable(f"no {role} worker is ready ({states})", RETRY_AFTER_S)
    return ready


def _told(worker: WorkerView) -> str:
    reason = f": {worker.reason}" if worker.reason else ""
    return f"{worker.incarnation} is {worker.state}{reason}"


def _difference(prefill: WorkerView, decode: WorkerView) -> str:
    """Both sides and what differs between their KV caches."""
    mine, theirs = prefill.record.kv, decode.record.kv
    names = [field.name for field in mine.DESCRIPTOR.fields]
    differing = [name for name in names if getattr(mine, name) != getattr(theirs, name)]

    def side(worker: WorkerView) -> str:
        values = (f"{name}={str(getattr(worker.record.kv, name))[:16]}" for name in differing)
        return f"{worker.incarnation} has {' '.join(values)}"

    return f"prefill worker {side(prefill)}, decode worker {side(decode)}"
