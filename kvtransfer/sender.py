"""The prefill side of one handoff: queue finished chunks, send them in order, commit or abort.

Where only the transfer failed, it alone is done again: the KV is still here, and the decode worker
still holds its blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from baton import rpc, telemetry
from baton.errors import BatonError, Cancelled, DeadlineExceeded, InvalidRequest, TransferFailed
from baton.log_format import about
from baton.v1 import handoff_pb2, prefill_pb2
from kvtransfer.aborts import Metadata
from kvtransfer.deadline import Deadline, uninterrupted
from kvtransfer.interface import PutStats
from kvtransfer.links import LinkPool, PairLink
from kvtransfer.pool import Slots

log = logging.getLogger(__name__)

MAX_RESENDS = 2
_RESEND_ABORT_S = 2.0
_PUT_GRACE_S = 1.0  # for a put that is out of time to end by itself


@dataclass
class TransferStats:
    """What a handoff took. `transfer_s` runs from the first put to the acknowledged Commit.

    Of the attempt that succeeded: `wait_s` was spent waiting for the link's turn and the receiver,
    `wire_s` moving bytes, `hidden_s` of it while the prompt was still being computed. `resends`
    attempts failed before.
    """

    transport: str
    transport_kind: int
    num_bytes: int = 0
    transfer_s: float = 0.0
    wait_s: float = 0.0
    wire_s: float = 0.0
    hidden_s: float = 0.0
    chunks: int = 0
    resends: int = 0


class HandoffSender:
    """Opens handoffs over a worker's links. `step_timeout_s` caps every single wait.

    An abort waits for its first try, at most `abort_wait_s`; others follow in the background.
    """

    def __init__(
        self,
        links: LinkPool,
        tracer: Tracer,
        *,
        step_timeout_s: float = 10.0,
        abort_wait_s: float = 0.5,
    ) -> None:
        self.links, self.tracer = links, tracer
        self.step_timeout_s, self.abort_wait_s = step_timeout_s, abort_wait_s

    def open(
        self,
        target: prefill_pb2.HandoffTarget,
        handoff_id: str,
        num_tokens: int,
        timeout_s: float,
        parent: Context | None = None,
        token_digest: bytes = b"",
    ) -> Handoff:
        """One handoff, as an async context manager that aborts what was not committed.

        `num_tokens` is the length of the whole sequence, cached tokens included; `timeout_s` is the
        request's time left; `parent` is the span that `kv.transfer` belongs to; `token_digest` is
        that of the tokens whose KV is sent, and Commit fails where other ones were reserved.
        """
        names: dict[str, Any] = {
            "handoff_id": handoff_id,
            "reservation_token": target.reservation_token,
            "incarnation": self.links.incarnation,
        }
        deadline, trace = Deadline(timeout_s), telemetry.inject(parent)
        waits = deadline, self.step_timeout_s
        order = _Order(handoff_id, target, num_tokens, token_digest, *waits, trace, names)
        return Handoff(self, order, parent)


class Handoff:
    """The transfer of one sequence's KV. Its blocks must be held until commit or abort returned."""

    def __init__(self, sender: HandoffSender, order: _Order, parent: Context | None) -> None:
        self._links, self._tracer = sender.links, sender.tracer
        self._abort_wait_s = sender.abort_wait_s
        self._order, self._parent = order, parent
        trace_id = telemetry.trace_id_in(parent)
        self._about = about(trace_id=trace_id, handoff_id=order.handoff_id)
        self._queue = _SendQueue()
        self._resends = 0
        self._start_ns = 0
        self._link: PairLink | None = None
        self._address = ""  # of the decode worker, once it may have received a message of ours
        self._attempt: _Attempt | None = None
        self._task: asyncio.Task[TransferStats]
        self._ended = False

    async def __aenter__(self) -> Handoff:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        reason = f"{kind.__name__}: {error}" if kind else "not committed"
        try:
            await self.abort(reason)
        finally:
            self._release()

    def send(self, first_token: int, local: Slots) -> None:
        """Queues blocks that are complete, starting at position `first_token`; returns at once.

        Every call continues where the last one ended, at first the target's cached tokens; all but
        the last end at a block's end. Raises InvalidRequest, and once the transfer has failed, why.
        """
        local.check(self._links.pool.block_size, self._links.pool.num_blocks)
        if self._task.done():
            self._raise_failure()
        self._queue.put(_Chunk(first_token, local))

    def conclude(self, num_tokens: int, first_token_id: int) -> None:
        """Queues the Commit behind what is to be sent; returns at once."""
        self._queue.put(_Commit(num_tokens, first_token_id))

    async def commit(self, num_tokens: int, first_token_id: int) -> TransferStats:
        """`conclude`, and then `committed`."""
        self.conclude(num_tokens, first_token_id)
        return await self.committed()

    async def committed(self) -> TransferStats:
        """Returns when all is sent and the decode worker has verified it.

        Raises TransferFailed, KvCorrupted, Stale, KvMismatch, Unavailable, Overloaded,
        DeadlineExceeded.
        """
        stats = await asyncio.shield(self._task)
        self._ended = True
        return stats

    async def abort(self, reason: str) -> None:
        """Gives up, unless committed. When it returns nothing more is written, and the Abort was
        sent or is being sent in the background. A put that does not end in time is left to itself:
        its bytes are not used, and the Abort is sent when it has ended."""
        if not self._ended:
            self._ended = True
            await uninterrupted(self._abort(reason))

    def _raise_failure(self) -> NoReturn:
        if self._task.cancelled():
            raise Cancelled("the handoff was aborted")
        self._task.result()
        raise InvalidRequest("the handoff was committed already")

    async def _abort(self, reason: str) -> None:
        self._task.cancel()  # a put that runs is finished first, if it ends in time
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            if (failure := self._task.exception()) is None:
                return  # committed after all, though nothing awaited it
            reason = f"{type(failure).__name__}: {failure}"
        if not self._address:
            # Nothing was granted, and the router that reserved the blocks cancels them; if it is
            # gone itself, its broken event stream does.
            return
        request = handoff_pb2.AbortRequest(**self._order.names, reason=reason)
        if self._attempt is not None and self._attempt.writing:
            self._attempt.when_written(lambda: self._send_abort(request))
        else:
            await asyncio.wait({self._send_abort(request)}, timeout=self._abort_wait_s)

    def _send_abort(self, request: handoff_pb2.AbortRequest) -> asyncio.Future[None]:
        return self._links.aborts.send(self._address, request, self._order.metadata)

    async def _run(self) -> TransferStats:
        order = self._order
        try:
            async with asyncio.timeout(order.deadline.left_s(float("inf"))):
                self._link = await self._links.acquire(order.target, order.deadline)
                self._address = self._link.address
                while True:
                    self._attempt = attempt = _Attempt(order, self._links, self._link)
                    try:
                        await attempt.run(self._queue)
                        return self._finished(attempt)
                    except TransferFailed as failure:
                        await self._prepare_resend(attempt, failure)
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed during the KV transfer") from error

    async def _prepare_resend(self, attempt: _Attempt, failure: TransferFailed) -> None:
        """When it returns all can be sent again. Raises `failure` when it cannot.

        The decode worker has to agree first: that ends what this attempt was granted, and proves
        that the reservation is still there.
        """
        self._start_ns = self._start_ns or attempt.start_ns
        if self._resends == MAX_RESENDS or attempt.writing:
            raise failure
        self._resends += 1
        order = self._order
        log.warning("handoff %s is resent: %s", order.handoff_id, failure, extra=self._about)
        try:
            await attempt.withdraw(str(failure))
            self._release()
            self._link = await self._links.acquire(order.target, order.deadline, skip_backoff=True)
        except BatonError as error:
            why = "handoff %s cannot be resent: %s"
            log.warning(why, order.handoff_id, error, extra=self._about)
            raise failure from error

    def _release(self) -> None:
        if self._link is not None:
            self._links.release(self._link)
            self._link = None

    def _finished(self, attempt: _Attempt) -> TransferStats:
        end_ns = time.time_ns()
        start_ns = self._start_ns or attempt.start_ns or end_ns
        stats, stats.num_bytes = attempt.stats, attempt.digest.num_bytes
        stats.transfer_s, stats.resends = (end_ns - start_ns) / 1e9, self._resends
        attributes: dict[str, str | int | float | bool] = {
            "baton.handoff_id": self._order.handoff_id,
            "baton.resends": stats.resends,
            "bytes": stats.num_bytes,
            "tokens": stats.num_bytes // self._links.pool.token_bytes,
            "transport": stats.transport,
            "wait_ms": stats.wait_s * 1e3,
            "wire_ms": stats.wire_s * 1e3,
            "hidden_ms": stats.hidden_s * 1e3,
            "gb_per_s": stats.num_bytes / 1e9 / stats.wire_s if stats.wire_s else 0.0,
            "chunks": stats.chunks,
        }
        parent = self._parent if self._parent is not None else Context()
        telemetry.record(self._tracer, "kv.transfer", parent, start_ns, end_ns, attributes)
        return stats


@dataclass(frozen=True)
class _Chunk:
    """Complete blocks; `first_token` is the position of their first token."""

    first_token: int
    slots: Slots


@dataclass(frozen=True)
class _Commit:
    """The end: nothing follows."""

    num_tokens: int
    first_token_id: int


class _SendQueue:
    """Chunks and the Commit in order; kept, so that all can be sent again from the start."""

    def __init__(self) -> None:
        # Bounded by the sequence: every entry announces at least one of its tokens.
        self._items: list[_Chunk | _Commit] = []
        self._grown = asyncio.Event()
        self.complete = False

    def put(self, item: _Chunk | _Commit) -> None:
        """Adds the next one; a Commit completes it."""
        self._items.append(item)
        self.complete = isinstance(item, _Commit)
        self._grown.set()

    async def item(self, index: int) -> _Chunk | _Commit:
        """The one at `index`, as soon as it is there. One reader at a time."""
        while index >= len(self._items):
            self._grown.clear()
            await self._grown.wait()
        return self._items[index]


@dataclass(frozen=True)
class _Order:
    """What is to be handed over, to which worker and until when; `cap_s` caps every single wait.

    `names` are the fields that every message about it has.
    """

    handoff_id: str
    target: prefill_pb2.HandoffTarget
    num_tokens: int
    token_digest: bytes
    deadline: Deadline
    cap_s: float
    metadata: Metadata
    names: dict[str, Any]


class _Attempt:
    """One attempt over one link: Ready, puts, Commit, or a withdrawal.

    `stats` are its own.
    """

    def __init__(self, order: _Order, links: LinkPool, link: PairLink) -> None:
        self.link, self.digest = link, links.pool.new_digest()
        self.stats = TransferStats(link.transport.name, link.transport.kind)
        self.start_ns = 0
        self._order, self._links = order, links
        self._granted: tuple[int, ...] = ()
        self._last_put: asyncio.Future[PutStats] | None = None

    async def run(self, queue: _SendQueue) -> None:
        """Sends everything up to Commit, and returns when that was answered.

        Raises TransferFailed, KvCorrupted, Stale, InvalidRequest, DeadlineExceeded.
        """
        cached = self._order.target.cached_tokens
        if self.link.transport.one_sided and self._order.num_tokens > cached:
            self._granted = await self._ready(cached, self._order.num_tokens - cached)
        index = 0
        while isinstance(item := await queue.item(index), _Chunk):
            await self._send_chunk(item)
            if not queue.complete:
                self.stats.hidden_s = self.stats.wire_s
            index += 1
        await self._commit(item)

    @property
    def writing(self) -> bool:
        """Whether a put goes on that did not end in time."""
        return self._last_put is not None and not self._last_put.done()

    def when_written(self, then: Callable[[], object]) -> None:
        """Calls `then` when that put has ended."""

        def ended(put: asyncio.Future[PutStats]) -> None:
            put.exception()  # its result is not used any more
            then()

        assert self._last_put is not None
        self._last_put.add_done_callback(ended)

    async def withdraw(self, reason: str) -> None:
        """Announces that all will be sent again. Raises BatonError when that cannot be."""
        request = handoff_pb2.AbortRequest(**self._order.names, reason=reason, resend=True)
        timeout_s = self._order.deadline.left_s(min(self._order.cap_s, _RESEND_ABORT_S))
        with rpc.translated():
            await self.link.stub.Abort(request, timeout=timeout_s, metadata=self._order.metadata)

    async def _send_chunk(self, chunk: _Chunk) -> None:
        start = time.perf_counter()
        timeout_s = self._order.deadline.left_s(self._order.cap_s)
        try:
            async with asyncio.timeout(timeout_s):
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

    async def _put(self, chunk: _Chunk, start: float) -> None:
        slots = chunk.slots
        if self.link.transport.one_sided:
            ids = self._part_of_grant(chunk)
        else:
            ids = await self._ready(chunk.first_token, slots.num_tokens)
        self.stats.wait_s += time.perf_counter() - start
        self.start_ns = self.start_ns or time.time_ns()
        remote = Slots(ids, slots.num_tokens)
        with self._links.closing_on_failure(self.link, self._order.deadline):
            timeout_s = self._order.deadline.left_s(self._order.cap_s)
            put = asyncio.ensure_future(self.link.put(slots, remote, self.digest, timeout_s))
            self._last_put = put
            # A put waits for its GPU, which never answers if it hangs.
            await asyncio.wait({put}, timeout=timeout_s + _PUT_GRACE_S)
            if not put.done():
                raise TransferFailed(f"a put to decode {self.link.peer} does not end")
            stats = put.result()
        self.stats.wire_s += stats.wire_s
        self.stats.chunks += 1

    def _part_of_grant(self, chunk: _Chunk) -> tuple[int, ...]:
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
            **self._order.names,
            epoch=self.link.epoch,
            first_token=first_token,
            num_tokens=num_tokens,
        )
        response = await self._call(self.link.stub.Ready, request)
        return tuple(response.block_ids)

    async def _commit(self, commit: _Commit) -> None:
        request = handoff_pb2.CommitRequest(
            **self._order.names,
            epoch=self.link.epoch,
            num_tokens=commit.num_tokens,
            num_bytes=self.digest.num_bytes,
            checksum=self.digest.value,
            first_token_id=commit.first_token_id,
            token_digest=self._order.token_digest,
        )
        start = time.perf_counter()
        await self._call(self.link.stub.Commit, request)
        self.stats.wait_s += time.perf_counter() - start

    async def _call(self, method: Callable[..., Any], request: Any) -> Any:
        """One control call on the link, within the deadline."""
        order = self._order
        with self._links.closing_on_failure(self.link, order.deadline), rpc.translated():
            timeout_s = order.deadline.left_s(order.cap_s)
            return await method(request, timeout=timeout_s, metadata=order.metadata)
