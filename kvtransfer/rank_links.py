"""One handoff's link between all ranks of two workers: who sends which heads to whom.

A rank that has a KV pool of its own holds some heads of all blocks. Each sender gives each receiver
the heads that both hold, in the same blocks, over a link of the pair's own; control (`Ready`,
`Commit`) knows of one link. With one pool at both ends that is a link between the two.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeAlias

import xxhash

from baton.config import kv_heads_of
from baton.errors import TransferFailed
from kvtransfer import copier
from kvtransfer.digest import Digest
from kvtransfer.interface import Link, Listener, Transport
from kvtransfer.pairing import rank_pairs
from kvtransfer.pool import KvPool, Slots
from kvtransfer.remote_pool import RemotePool

RankPool: TypeAlias = KvPool | RemotePool


def own_pool(pools: Sequence[RankPool]) -> KvPool:
    """The first rank's, which is always here; its blocks are those of all."""
    pool = pools[0]
    assert isinstance(pool, KvPool)
    return pool


class PairDigest:
    """The checksums of what each pair moves; `value` of one pair is its own, else that of all."""

    def __init__(self, parts: Sequence[Digest]) -> None:
        self.parts = parts

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def value(self) -> int:
        """64 bits."""
        values = [part.value for part in self.parts]
        if len(values) == 1:
            return values[0]
        return xxhash.xxh3_64_intdigest(b"".join(one.to_bytes(8, "little") for one in values))


class _Ends:
    """The same end of all pairs: the part of a pool that each moves, and its own end.

    Pairs of a one-sided transport move at the same time. Two-sided ones take turns, in the same
    order at both ends: each needs staging memory, and those that wait for one another's would wait
    for ever.
    """

    def __init__(self, pools: Sequence[RankPool], ends: Sequence[Any], at_once: bool) -> None:
        self._pools, self._ends, others = pools, ends, len(ends) - 1
        self._threads = ThreadPoolExecutor(others, "kv-rank") if at_once and others else None

    def new_digest(self) -> PairDigest:
        """The checksum of one handoff, which both ends compute."""
        return PairDigest([pool.new_digest() for pool in self._pools])

    def abort(self) -> None:
        for end in self._ends:
            end.abort()

    def close(self) -> None:
        for end in self._ends:
            end.close()
        if self._threads is not None:
            self._threads.shutdown()

    def each(self, call: Callable[..., None], *arguments: Sequence[Any]) -> None:
        """`call` for each pair, of which the calling thread takes one: each that is woken takes as
        long as a copy of some hundred KiB. What fails first is raised, and no other goes on then.
        """
        first, *others = zip(*arguments, strict=True)
        if self._threads is None:
            for of_pair in (first, *others):
                call(*of_pair)
            return
        failures = list[Exception]()

        def run(of_pair: tuple[Any, ...]) -> None:
            try:
                call(*of_pair)
            except Exception as error:
                failures.append(error)
                self.abort()

        running = [self._threads.submit(run, of_pair) for of_pair in others]
        run(first)
        wait(running)
        if failures:
            raise failures[0]


class RankLink(_Ends, Link):
    """The sender's end: `put` moves each pair's heads of the same blocks."""

    def put(self, local: Slots, remote: Slots, digest: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s

        def put(link: Link, part: Digest) -> None:
            link.put(local, remote, part, _left_s(deadline))

        self.each(put, self._ends, digest.parts)


class RankListener(_Ends, Listener):
    """The receiver's end. Raises RuntimeError."""

    def __init__(self, pools: Sequence[RankPool], ends: Sequence[Any], at_once: bool) -> None:
        super().__init__(pools, ends, at_once)
        # What no one-sided sender writes is on another host.
        self._readers = [copier.copier(pool) for pool in pools if isinstance(pool, KvPool)]
        if at_once:  # on a GPU, what reads these heads is compiled now, and not at the first Commit
            self.digest(Slots((), 0))

    def accept(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for listener in self._ends:  # the sender connects them in this order
            listener.accept(_left_s(deadline))

    def sender_pidfd(self) -> int | None:
        found: int | None = self._ends[0].sender_pidfd()  # one process sends for all ranks
        return found

    def receive(
        self, slots: Slots, digest: Any, timeout_s: float, posted: Callable[[], None]
    ) -> None:
        deadline, first = time.monotonic() + timeout_s, threading.Lock()

        def receive(listener: Listener, part: Digest) -> None:
            on_posted = posted if first.acquire(blocking=False) else _nothing
            listener.receive(slots, part, _left_s(deadline), on_posted)

        self.each(receive, self._ends, digest.parts)

    def digest(self, slots: Slots) -> PairDigest:
        """Of what the slots hold now. Raises TransferFailed."""
        found = list[Digest | None]([None] * len(self._readers))

        def compute(at: int) -> None:
            found[at] = self._readers[at].digest(slots)

        self.each(compute, range(len(found)))
        return PairDigest([one for one in found if one is not None])


def listen(
    transport: Transport, pools: Sequence[RankPool], senders: int, num_kv_heads: int
) -> RankListener:
    """The receiving end for a worker of so many pools. Raises OSError, RuntimeError."""
    pairs = rank_pairs(senders, len(pools), num_kv_heads)
    parts = [_part(pools, pair.receiver, pair.heads, num_kv_heads) for pair in pairs]
    ends = list[Listener]()
    try:
        for part in parts:
            if isinstance(part, RemotePool):
                ends.append(part.listen(transport))
            else:
                ends.append(transport.listen(part))
        listener = RankListener(parts, ends, transport.one_sided)
    except BaseException:
        for end in ends:
            end.close()
        raise
    endpoints = [end.endpoint for end in ends]
    several = json.dumps([one.decode("latin-1") for one in endpoints]).encode()
    listener.endpoint = several if len(pairs) > 1 else endpoints[0]
    return listener


def connect(
    transport: Transport, pools: Sequence[RankPool], receivers: int, num_kv_heads: int,
    endpoint: bytes, timeout_s: float,
) -> RankLink:  # fmt: skip
    """The sending end, to a worker of so many pools. Raises TransferFailed."""
    deadline = time.monotonic() + timeout_s
    pairs = rank_pairs(len(pools), receivers, num_kv_heads)
    endpoints = [endpoint]
    if len(pairs) > 1:
        try:
            endpoints = [one.encode("latin-1") for one in json.loads(endpoint)]
        except (ValueError, AttributeError, TypeError) as error:
            raise TransferFailed(f"{transport.name}: no endpoints of ranks: {error}") from error
    if len(endpoints) != len(pairs):
        raise TransferFailed(f"{transport.name}: {len(endpoints)} endpoints, not {len(pairs)}")
    parts = [_part(pools, pair.sender, pair.heads, num_kv_heads) for pair in pairs]
    ends = list[Link]()
    try:
        for part, one in zip(parts, endpoints, strict=True):
            place = one, _left_s(deadline)
            if isinstance(part, RemotePool):
                ends.append(part.connect(transport, *place))
            else:
                ends.append(transport.connect(part, *place))
    except BaseException:
        for end in ends:
            end.close()
        raise
    return RankLink(parts, ends, transport.one_sided)


def _part(pools: Sequence[RankPool], rank: int, heads: range, num_kv_heads: int) -> RankPool:
    """A rank's pool, of which these of the model's heads are meant."""
    first = kv_heads_of(rank, len(pools), num_kv_heads).start
    return pools[rank].part(range(heads.start - first, heads.stop - first))


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _nothing() -> None:
    """Only the first pair's bytes are waited for before the sender begins."""
