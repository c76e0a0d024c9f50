"""Which pair runs a request: filter, score, pick, as plain functions over a snapshot.

A prefill worker is chosen by the tokens it has to compute first, a decode worker by the blocks it
has left: prefill is bound by compute, decode by memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from baton.errors import Overloaded, Unavailable
from router.snapshot import Snapshot, WorkerView

RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class Pair:
    """A choice of workers."""

    prefill: WorkerView
    decode: WorkerView


def pick(snapshot: Snapshot, num_tokens: int, excluded: Collection[str] = ()) -> Pair:
    """The best pair for a sequence of `num_tokens`, leaving out the workers named in `excluded`.

    Raises Unavailable when a role has no usable worker, Overloaded when no decode worker has room.
    """
    prefill = _usable("prefill", snapshot.prefill, excluded)
    decode = _usable("decode", snapshot.decode, excluded)
    roomy = [worker for worker in decode if has_room(worker, num_tokens)]
    if not roomy:
        raise Overloaded(
            f"no decode worker has KV blocks for {num_tokens} tokens now", RETRY_AFTER_S
        )
    pairs = [Pair(p, d) for p in prefill for d in roomy if p.record.kv == d.record.kv]
    if not pairs:
        raise Unavailable("no prefill and decode worker have compatible KV caches", RETRY_AFTER_S)
    return min(pairs, key=score)


def has_room(worker: WorkerView, num_tokens: int) -> bool:
    """Whether a decode worker has blocks for the sequence and its next token."""
    needed = num_tokens // worker.record.kv.block_size + 1
    return worker.blocks_available >= needed


def score(pair: Pair) -> tuple[float, float, float, str, str]:
    """Lower is better: prompt tokens in front, then decode's load by sequences and by blocks."""
    load = pair.decode.load
    busy = load.running + load.waiting + pair.decode.assigned_tokens / 1e6
    blocks_share = load.blocks_held / max(1, load.blocks_total)
    names = (pair.prefill.incarnation, pair.decode.incarnation)  # a stable choice among equals
    return (pair.prefill.queue_tokens, busy, blocks_share, *names)


def _usable(
    role: str, workers: tuple[WorkerView, ...], excluded: Collection[str]
) -> list[WorkerView]:
    """READY workers; one that just failed this request is taken again only if there is no other."""
    ready = [worker for worker in workers if worker.ready]
    if not ready:
        states = ", ".join(f"{w.incarnation} is {w.state}" for w in workers) or "none registered"
        raise Unavailable(f"no {role} worker is ready ({states})", RETRY_AFTER_S)
    return [worker for worker in ready if worker.incarnation not in excluded] or ready
