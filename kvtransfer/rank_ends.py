"""The ends of a link between two workers: one for each pair of ranks that hold common heads.

A rank that has a KV pool of its own holds some heads of all blocks. Each sender gives each receiver
the heads that both hold, in the same blocks. Control messages (`Ready`, `Commit`) are about the
link alone. With one pool at both ends the link has a single pair.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Generic, TypeAlias, TypeVar

import xxhash

from baton.config import kv_heads_of
from baton.errors import TransferFailed
from kvtransfer.checksum import Checksum
from kvtransfer.deadline import Deadline
from kvtransfer.interface import ReceivingEnd, SendingEnd, Transport
from kvtransfer.pairing import rank_pairs
from kvtransfer.pool import KvPool
from kvtransfer.remote_pool import RemotePool

RankPool: TypeAlias = KvPool | RemotePool
E = TypeVar("E", SendingEnd, ReceivingEnd)


def local_pool(pools: Sequence[RankPool]) -> KvPool:
    """The first rank's pool, which is always in this process; its block ids are those of all."""
    pool = pools[0]
    assert isinstance(pool, KvPool)
    return pool


class LinkChecksum:
    """The checksum of the bytes that a link moves: of one pair its own, else that of all values."""

    def __init__(self, parts: Sequence[Checksum]) -> None:
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


class RankEnds(Generic[E]):
    """One worker's ends of all pairs, and for each the heads of a pool that it moves.

    Pairs of a one-sided transport move at the same time. Two-sided ones take turns, in the same
    order at both ends: each needs staging memory, and pairs that each held a part of it could wait
    for one another forever.
    """

    def __init__(self, pools: Sequence[RankPool], ends: Sequence[E], transport: Transport) -> None:
        self.pools, self.transport = pools, transport
        self.ends: Sequence[E] = ends
        others = len(ends) - 1
        self._threads: ThreadPoolExecutor | None = None
        if transport.one_sided and others:
            self._threads = ThreadPoolExecutor(others, "kv-rank")

    def new_checksum(self) -> LinkChecksum:
        """The checksum of one handoff, which both ends compute."""
        return LinkChecksum([pool.new_checksum() for pool in self.pools])

    def abort(self) -> None:
        """Makes what runs fail early if possible; called from any thread."""
        for end in self.ends:
            end.abort()

    def close_ends(self) -> None:
        """Frees the ends; nothing runs any more."""
        close_all(self.ends)
        if self._threads is not None:
            self._threads.shutdown()

    def each_pair(self, call: Callable[..., None], *arguments: Sequence[Any]) -> None:
        """Runs `call` for each pair; the calling thread takes the first one, because waking a
        thread takes as long as a copy of some hundred KiB. The first failure aborts all others and
        is raised."""
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


def close_all(ends: Iterable[SendingEnd | ReceivingEnd]) -> None:
    """Frees ends on which nothing runs."""
    for end in ends:
        end.close()


def listen(
    transport: Transport, pools: Sequence[RankPool], senders: int, num_kv_heads: int
) -> tuple[list[RankPool], list[ReceivingEnd]]:
    """Each pair's pool and receiving end, for a worker of `senders` pools.

    Raises OSError, RuntimeError.
    """
    pairs = rank_pairs(senders, len(pools), num_kv_heads)
    parts = [_part(pools, pair.receiver, pair.heads, num_kv_heads) for pair in pairs]
    ends = list[ReceivingEnd]()
    try:
        for part in parts:
            if isinstance(part, RemotePool):
                ends.append(part.listen(transport))
            else:
                ends.append(transport.listen(part))
    except BaseException:
        close_all(ends)
        raise
    return parts, ends


def joined_endpoint(ends: Sequence[ReceivingEnd]) -> bytes:
    """What `connect` needs: the endpoints of all pairs."""
    if len(ends) == 1:
        return ends[0].endpoint
    return json.dumps([end.endpoint.decode("latin-1") for end in ends]).encode()


def connect(
    transport: Transport, pools: Sequence[RankPool], receivers: int, num_kv_heads: int,
    endpoint: bytes, timeout_s: float,
) -> tuple[list[RankPool], list[SendingEnd]]:  # fmt: skip
    """Each pair's pool and sending end, to a worker of `receivers` pools. Raises TransferFailed."""
    deadline = Deadline(timeout_s)
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
    ends = list[SendingEnd]()
    try:
        for part, one in zip(parts, endpoints, strict=True):
            if isinstance(part, RemotePool):
                ends.append(part.connect(transport, one, deadline.remaining_s))
            else:
                ends.append(transport.connect(part, one, deadline.remaining_s))
    except BaseException:
        close_all(ends)
        raise
    return parts, ends


def _part(pools: Sequence[RankPool], rank: int, heads: range, num_kv_heads: int) -> RankPool:
    """The given heads of the model in a rank's pool."""
    first = kv_heads_of(rank, len(pools), num_kv_heads).start
    return pools[rank].with_heads(range(heads.start - first, heads.stop - first))
