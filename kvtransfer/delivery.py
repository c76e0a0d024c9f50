"""One attempt to bring a handoff's KV over one link: Ready, puts, Commit, or a withdrawal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton import rpc
from baton.errors import InvalidRequest, TransferFailed
from baton.v1 import handoff_pb2, prefill_pb2
from kvtransfer.aborts import Metadata
from kvtransfer.interface import PutStats
from kvtransfer.links import LinkPool
from kvtransfer.pair_link import PairLink
from kvtransfer.pool import Slots
from kvtransfer.waiting import Deadline, uninterrupted

_WITHDRAW_S = 2.0
_PUT_GRACE_S = 1.0  # for a put that is out of time to end by itself


@dataclass(frozen=True)
class Chunk:
    """Complete blocks; `first_token` is the position of their first token."""

    first_token: int
    slots: Slots


@dataclass(frozen=True)
class Commit:
    """Nothing follows."""

    num_tokens: int
    first_token_id: int


@dataclass(frozen=True)
class Order:
    """What is to be handed over, to whom and until when; `cap_s` caps every single wait."""

    handoff_id: str
    target: prefill_pb2.HandoffTarget
    num_tokens: int
    token_digest: bytes
    deadline: Deadline
    cap_s: float
    incarnation: str
    metadata: Metadata

    def abort_request(self, reason: str, resend: bool = False) -> handoff_pb2.AbortRequest:
        """Nothing more is written; with `resend`, not before another Ready."""
        return handoff_pb2.AbortRequest(
            handoff_id=self.handoff_id,
            reservation_token=self.target.reservation_token,
            incarnation=self.incarnation,
            reason=reason,
            resend=resend,
        )


class Outbox:
    """What a handoff has to say, in order; kept, so that it can be said again from the start."""

    def __init__(self) -> None:
        # Bounded by the sequence: every entry announces at least one of its tokens.
        self._items: list[Chunk | Commit] = []
        self._grown = asyncio.Event()
        self.complete = False

    def put(self, item: Chunk | Commit) -> None:
        """Adds the next one; a Commit completes it."""
        self._items.append(item)
        self.complete = isinstance(item, Commit)
        self._grown.set()

    async def item(self, index: int) -> Chunk | Commit:
        """The one at `index`, as soon as it is there. One reader at a time."""
        while index >= len(self._items):
            self._grown.clear()
            await self._grown.wait()
        return self._items[index]


class Delivery:
    """One attempt. `digest`, `chunks` and the seconds tell of it alone.

    `hidden_s` is the part of `wire_s` that was over while later chunks were computed.
    """

    def __init__(self, order: Order, links: LinkPool, link: PairLink) -> None:
        self.link, self.digest = link, links.pool.new_digest()
        self.chunks, self.start_ns = 0, 0
        self.wait_s = self.wire_s = self.hidden_s = 0.0
        self._order, self._links = order, links
        self._granted: tuple[int, ...] = ()
        self._last_put: asyncio.Future[PutStats] | None = None

    async def run(self, outbox: Outbox) -> None:
        """Says everything up to Commit, and returns when that was answered.

        Raises TransferFailed, KvCorrupted, Stale, InvalidRequest, DeadlineExceeded.
        """
        cached = self._order.target.cached_tokens
        if self.link.transport.one_sided and self._order.num_tokens > cached:
            self._granted = await self._ready(cached, self._order.num_tokens - cached)
        index = 0
        while isinstance(item := await outbox.item(index), Chunk):
            await self._send_chunk(item)
            if not outbox.complete:
                self.hidden_s = self.wire_s
            index += 1
        await self._commit(item)

    @property
    def writing(self) -> bool:
        """Whether a put goes on that did not end in time."""
        return self._last_put is not None and not self._last_put.done()

    def when_written(self, then: Callable[[], object]) -> None:
        """Calls `then` when that put has ended."""

        def ended(put: asyncio.Future[PutStats]) -> None:
            put.exception()  # it was given up long ago
            then()

        assert self._last_put is not None
        self._last_put.add_done_callback(ended)

    async def withdraw(self, reason: str) -> None:
        """Tells that all will be sent again. Raises BatonError when that cannot be."""
        request = self._order.abort_request(reason, resend=True)
        timeout_s = self._order.deadline.left_s(min(self._order.cap_s, _WITHDRAW_S))
        with rpc.translated():
            await self.link.stub.Abort(request, timeout=timeout_s, metadata=self._order.metadata)

    async def _send_chunk(self, chunk: Chunk) -> None:
        start = time.perf_counter()
        patience_s = self._order.deadline.left_s(self._order.cap_s)
        try:
            async with asyncio.timeout(patience_s):
                await self.link.turn.acquire()
        except TimeoutError as error:
            raise TransferFailed(
                f"the link to decode {self.link.peer} was not free in time"
            ) from error
        try:
            # Between Ready and the end of the put the receiver counts on us: no stopping there.
            await uninterrupted(self._put(chunk, start))
        finally:
            self.link.turn.release()

    async def _put(self, chunk: Chunk, start: float) -> None:
        slots = chunk.slots
        if self.link.transport.one_sided:
            ids = self._part_of_grant(chunk)
        else:
            ids = await self._ready(chunk.first_token, slots.num_tokens)
        self.wait_s += time.perf_counter() - start
        self.start_ns = self.start_ns or time.time_ns()
        remote = Slots(ids, slots.num_tokens)
        with self._links.judging(self.link, self._order.deadline):
            timeout_s = self._order.deadline.left_s(self._order.cap_s)
            put = asyncio.ensure_future(self.link.put(slots, remote, self.digest, timeout_s))
            self._last_put = put
            # A put sleeps until a GPU is done, which one that hangs never is.
            await asyncio.wait({put}, timeout=timeout_s + _PUT_GRACE_S)
            if not put.done():
                raise TransferFailed(f"a put to decode {self.link.peer} does not end")
            stats = put.result()
        self.wire_s += stats.wire_s
        self.chunks += 1

    def _part_of_grant(self, chunk: Chunk) -> tuple[int, ...]:
        """The granted blocks that a chunk goes to. Raises InvalidRequest outside of the grant."""
        pool, cached = self._links.pool, self._order.target.cached_tokens
        first = (chunk.first_token - cached) // pool.block_size
        ids = self._granted[first : first + len(chunk.slots.block_ids)]
        sent = self.digest.num_bytes // pool.token_bytes
        if chunk.first_token != cached + sent or len(ids) != len(chunk.slots.block_ids):
            raise InvalidRequest(f"no blocks are granted at token {chunk.first_token}")
        return ids

    async def _ready(self, first_token: int, num_tokens: int) -> tuple[int, ...]:
        request = handoff_pb2.ReadyRequest(
            handoff_id=self._order.handoff_id,
            reservation_token=self._order.target.reservation_token,
            incarnation=self._order.incarnation,
            epoch=self.link.epoch,
            first_token=first_token,
            num_tokens=num_tokens,
        )
        response = await self._call(self.link.stub.Ready, request)
        return tuple(response.block_ids)

    async def _commit(self, commit: Commit) -> None:
        request = handoff_pb2.CommitRequest(
            handoff_id=self._order.handoff_id,
            reservation_token=self._order.target.reservation_token,
            incarnation=self._order.incarnation,
            epoch=self.link.epoch,
            num_tokens=commit.num_tokens,
            num_bytes=self.digest.num_bytes,
            checksum=self.digest.value,
            first_token_id=commit.first_token_id,
            token_digest=self._order.token_digest,
        )
        start = time.perf_counter()
        await self._call(self.link.stub.Commit, request)
        self.wait_s += time.perf_counter() - start

    async def _call(self, method: Callable[..., Any], request: Any) -> Any:
        """One control call on the link, within the deadline."""
        with self._links.judging(self.link, self._order.deadline), rpc.translated():
            timeout_s = self._order.deadline.left_s(self._order.cap_s)
            return await method(request, timeout=timeout_s, metadata=self._order.metadata)
