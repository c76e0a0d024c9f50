"""The prefill side of one handoff: queue finished chunks, send them in order, commit or abort.

If only the transfer failed, only the transfer is repeated: the KV is still here, and the decode
worker still holds its blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import KW_ONLY, dataclass, replace
from types import TracebackType
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from baton.errors import BatonError, Cancelled, DeadlineExceeded, InvalidRequest, TransferFailed
from baton.kv_groups import KvGroups
from baton.log_format import about
from baton.net.tasks import uninterrupted, wait_at_most
from baton.telemetry import tracing
from baton.v1 import handoff_pb2, prefill_pb2
from kvtransfer.deadline import Deadline
from kvtransfer.outgoing import OutgoingLink, OutgoingLinks
from kvtransfer.pairing import Kind
from kvtransfer.pool import Slots

log = logging.getLogger(__name__)

MAX_RESENDS = 2
_RESEND_ABORT_S = 2.0
_PUT_GRACE_S = 1.0  # for a put to end by itself after its time-out


@dataclass
class TransferStats:
    """Size and times of a handoff. `transfer_s`: from the first put to the acknowledged Commit.

    Of the successful attempt: `wait_s` waiting for the link's turn and for the receiver, from when
    there was something to send, `wire_s` moving bytes, and `hidden_s` the part of `wire_s` while
    the prompt was still being computed.
    `resends`: failed attempts before.
    """

    transport: str
    kind: Kind  # of the transport
    num_bytes: int = 0
    transfer_s: float = 0.0
    wait_s: float = 0.0
    wire_s: float = 0.0
    hidden_s: float = 0.0
    chunks: int = 0
    resends: int = 0


@dataclass(eq=False)
class HandoffSender:
    """The transfer of one sequence's KV: an async context that aborts unless it was committed.

    The blocks of queued chunks must be held until it is left; where they were given up, it must be
    left without `conclude`, and what was sent is not used. `num_tokens`: token slots of the handoff
    (`KvGroups.handoff_end`), including cached ones · `timeout_s`: the request's remaining time ·
    `step_timeout_s`: limit of every single wait · `parent`: the parent of the spans `kv.link`
    (until blocks may be sent) and `kv.transfer` (from when there is something to send) ·
    `token_digest`: of the tokens whose KV is sent; Commit fails if other tokens were reserved ·
    `groups`: groups of layers that share the pool; None: one without a window · `abort_wait_s`:
    time that leaving waits for the first try of an Abort; others follow in the background.
    """

    links: OutgoingLinks
    tracer: Tracer
    target: prefill_pb2.HandoffTarget
    handoff_id: str
    num_tokens: int
    timeout_s: float
    _: KW_ONLY
    step_timeout_s: float
    parent: Context | None = None
    token_digest: bytes = b""
    groups: KvGroups | None = None
    abort_wait_s: float = 0.5

    def __post_init__(self) -> None:
        self._deadline = Deadline(self.timeout_s)
        self._groups = self.groups or KvGroups((0,), self.links.pool.block_size)
        self._names: dict[str, Any] = {  # fields of every message
            "handoff_id": self.handoff_id,
            "reservation_token": self.target.reservation_token,
            "incarnation": self.links.record.incarnation,
        }
        trace_id = tracing.trace_id_in(self.parent)
        self._about = about(trace_id=trace_id, handoff_id=self.handoff_id)
        # Kept for resends; slots and tokens, at least one.
        self._chunks: list[tuple[Slots, int]] = []
        self._first_token_id: int | None = None  # set when no more chunks come
        self._queued = asyncio.Event()
        self._link: OutgoingLink | None = None  # set when decode may have received a message
        self._put: asyncio.Future[float] | None = None  # the last put of this attempt
        self._stats: TransferStats  # of this attempt, like `_checksum` and `_sent`, in tokens
        self._resends = 0
        # Unix ns, 0 until then: sending may begin; there is a block to send; its put begins.
        self._linked_ns = self._start_ns = self._put_ns = 0
        self._task: asyncio.Task[TransferStats]
        self._committed = False

    async def __aenter__(self) -> HandoffSender:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Aborts, unless committed. When it returns, nothing more is written, and the Abort has
        been sent or is being sent in the background. A put that does not end in time is abandoned:
        its bytes are not used, and the Abort is sent when it has ended."""
        reason = f"{kind.__name__}: {error}" if kind else "not committed"
        try:
            if not self._committed:
                await uninterrupted(self._abort(reason))
        finally:
            if self._link is not None:
                self.links.release(self._link)

    def send(self, local: Slots, num_tokens: int | None = None) -> None:
        """Queues the slots (`handoff_slots`) of the next tokens; returns at once.

        The first token is that of `KvGroups.handoff_start`; all but the last chunk end at a block's
        end. num_tokens: by default as many as slots, as of one group. Raises InvalidRequest, and
        the transfer's error once it has failed.
        """
        local.check(self.links.pool.block_size, self.links.pool.num_blocks)
        if self._task.done():
            if self._task.cancelled():
                raise Cancelled("the handoff was aborted")
            self._task.result()
            raise InvalidRequest("the handoff was committed already")
        self._chunks.append((local, local.num_tokens if num_tokens is None else num_tokens))
        self._queued.set()

    def conclude(self, first_token_id: int) -> None:
        """Queues the Commit after the queued chunks; returns at once."""
        self._first_token_id = first_token_id
        self._queued.set()

    async def committed(self) -> TransferStats:
        """Returns when the decode worker has verified everything.

        Raises TransferFailed, KvCorrupted, Stale, KvMismatch, Unavailable, Overloaded,
        DeadlineExceeded.
        """
        stats = await asyncio.shield(self._task)
        self._committed = True
        return stats

    async def _abort(self, reason: str) -> None:
        self._task.cancel()  # a running put ends first, if it ends in time
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            if (failure := self._task.exception()) is None:
                return  # it was committed, though nothing awaited it
            reason = f"{type(failure).__name__}: {failure}"
        link, put = self._link, self._put
        if link is None:
            # Nothing was granted. The router that reserved the blocks cancels them, or the end of
            # its connection does.
            return
        request = handoff_pb2.AbortRequest(**self._names, reason=reason)

        def when_written(put: asyncio.Future[float]) -> None:
            put.exception()  # retrieved, and not used
            self.links.abort(link, request)
            self.links.release(link)

        if put is not None and not put.done():
            self._link = None  # released when the put has ended
            put.add_done_callback(when_written)
        else:
            tried = self.links.abort(link, request)
            await wait_at_most(self.abort_wait_s, tried.wait())

    async def _run(self) -> TransferStats:
        began_ns = time.time_ns()
        try:
            stats = await self._transfer()
        except BaseException as error:
            self._record(began_ns, error)
            raise
        self._record(began_ns)
        return stats

    async def _transfer(self) -> TransferStats:
        try:
            async with asyncio.timeout(self._deadline.left_s()):
                link = self._link = await self.links.acquire(self.target, self._deadline)
                while True:
                    try:
                        await self._attempt(link)
                        return self._finished()
                    except TransferFailed as failure:
                        link = self._link = await self._prepare_resend(link, failure)
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed during the KV transfer") from error

    async def _attempt(self, link: OutgoingLink) -> None:
        """Sends everything up to Commit, and returns when Commit was answered."""
        self._checksum, self._put, self._sent = link.new_checksum(), None, 0
        self._blocks_sent = 0
        self._stats = stats = TransferStats(link.transport.name, link.transport.kind)
        self._first = self._groups.handoff_start(self.target.cached_tokens, self.num_tokens)
        sent, granted = 0, tuple[int, ...]()
        if link.transport.one_sided and self.num_tokens > self._first:
            start = time.perf_counter()
            granted = await self._ready(link, self._first, self.num_tokens - self._first)
            if self._linked_ns:  # otherwise nothing was to be sent yet
                stats.wait_s += time.perf_counter() - start
        self._linked_ns = self._linked_ns or time.time_ns()
        while sent < len(self._chunks) or self._first_token_id is None:
            if sent == len(self._chunks):
                self._queued.clear()
                await self._queued.wait()
                continue
            await self._send_chunk(link, *self._chunks[sent], granted)
            if self._first_token_id is None:
                stats.hidden_s = stats.wire_s
            sent += 1
        request = handoff_pb2.CommitRequest(
            **self._names,
            epoch=link.epoch,
            num_tokens=self.num_tokens,
            num_bytes=self._checksum.num_bytes,
            checksum=self._checksum.value,
            first_token_id=self._first_token_id,
            token_digest=self.token_digest,
        )
        self._start_ns = self._start_ns or time.time_ns()
        start = time.perf_counter()
        await self._call(link, request)
        stats.wait_s += time.perf_counter() - start

    async def _send_chunk(
        self, link: OutgoingLink, slots: Slots, num_tokens: int, granted: tuple[int, ...]
    ) -> None:
        self._start_ns = self._start_ns or time.time_ns()
        start, timeout_s = time.perf_counter(), self._time_left_s()
        try:
            async with asyncio.timeout(timeout_s):
                await link.turn.acquire()
        except TimeoutError as error:
            raise TransferFailed(f"the link to decode {link.peer} was not free in time") from error
        try:
            if link.transport.one_sided:
                ids = granted[self._blocks_sent :][: len(slots.block_ids)]
                # Begun in this turn of the event loop: the next ones may come late.
                work = self._end_put(link, slots, *self._begin_put(link, slots, ids, start))
            else:
                work = self._ready_and_put(link, slots, num_tokens, start)
            # The receiver relies on this between Ready and the end of the put: no cancelling.
            await uninterrupted(work)
            self._sent += num_tokens
        finally:
            link.turn.release()

    async def _ready_and_put(
        self, link: OutgoingLink, slots: Slots, num_tokens: int, start: float
    ) -> None:
        ids = await self._ready(link, self._first + self._sent, num_tokens)
        await self._end_put(link, slots, *self._begin_put(link, slots, ids, start))

    def _begin_put(
        self, link: OutgoingLink, slots: Slots, ids: tuple[int, ...], start: float
    ) -> tuple[asyncio.Future[float], float]:
        """The put, and its time-out."""
        self._stats.wait_s += time.perf_counter() - start
        self._put_ns = self._put_ns or time.time_ns()
        with self.links.closing_on_failure(link, self._deadline):
            timeout_s, remote = self._time_left_s(), replace(slots, block_ids=ids)
            self._put = link.put(slots, remote, self._checksum, timeout_s)
        return self._put, timeout_s

    async def _end_put(
        self, link: OutgoingLink, slots: Slots, put: asyncio.Future[float], timeout_s: float
    ) -> None:
        with self.links.closing_on_failure(link, self._deadline):
            # A put on a GPU that hangs never ends.
            await asyncio.wait({put}, timeout=timeout_s + _PUT_GRACE_S)
            if not put.done():
                raise TransferFailed(f"a put to decode {link.peer} does not end")
            self._stats.wire_s += put.result()
        self._stats.chunks += 1
        self._blocks_sent += len(slots.block_ids)

    async def _prepare_resend(self, link: OutgoingLink, failure: TransferFailed) -> OutgoingLink:
        """The link over which everything can be sent again. Raises `failure` if that is impossible.

        The decode worker has to agree first: its answer ends this attempt's grant, and proves that
        the reservation still exists.
        """
        writing = self._put is not None and not self._put.done()
        if self._resends == MAX_RESENDS or writing:
            raise failure
        self._resends += 1
        handoff_id, reason = self.handoff_id, str(failure)
        log.warning("handoff %s is resent: %s", handoff_id, reason, extra=self._about)
        request = handoff_pb2.AbortRequest(**self._names, reason=reason, resend=True)
        try:
            timeout_s = min(self._time_left_s(), _RESEND_ABORT_S)
            await link.control.call(request, timeout_s)
            opened = await self.links.acquire(self.target, self._deadline, skip_backoff=True)
            self.links.release(link)
            return opened
        except BatonError as error:
            why = "handoff %s cannot be resent: %s"
            log.warning(why, handoff_id, error, extra=self._about)
            raise failure from error

    async def _ready(
        self, link: OutgoingLink, first_token: int, num_tokens: int
    ) -> tuple[int, ...]:
        request = handoff_pb2.ReadyRequest(
            **self._names, epoch=link.epoch, first_token=first_token, num_tokens=num_tokens
        )
        return tuple((await self._call(link, request)).block_ids)

    async def _call(self, link: OutgoingLink, request: Any) -> Any:
        with self.links.closing_on_failure(link, self._deadline):
            return await link.control.call(request, self._time_left_s())

    def _time_left_s(self) -> float:
        return self._deadline.left_s(self.step_timeout_s)

    def _finished(self) -> TransferStats:
        stats, stats.num_bytes = self._stats, self._checksum.num_bytes
        stats.transfer_s = (time.time_ns() - self._put_ns) / 1e9 if self._put_ns else 0.0
        stats.resends = self._resends
        return stats

    def _record(self, began_ns: int, error: BaseException | None = None) -> None:
        """Records the spans up to now; `error` ended the one that was not over."""
        parent, end_ns = self.parent or Context(), time.time_ns()
        if not self._linked_ns:
            tracing.record(self.tracer, "kv.link", parent, began_ns, end_ns, error=error)
            return
        stats = self._stats
        transport = {"transport": stats.transport}
        tracing.record(self.tracer, "kv.link", parent, began_ns, self._linked_ns, transport)
        if not self._start_ns:
            return  # there was nothing to send yet
        num_bytes = self._checksum.num_bytes
        attributes: dict[str, str | int | float | bool] = {
            "baton.handoff_id": self.handoff_id,
            "baton.resends": self._resends,
            "bytes": num_bytes,
            "tokens": self._sent,
            "transport": stats.transport,
            "rank_pairs": len(self._checksum.parts),
            "wait_ms": stats.wait_s * 1e3,
            "wire_ms": stats.wire_s * 1e3,
            "hidden_ms": stats.hidden_s * 1e3,
            "gb_per_s": num_bytes / 1e9 / stats.wire_s if stats.wire_s else 0.0,
            "chunks": stats.chunks,
        }
        if self._groups.slide and (slots := sum(slots.num_tokens for slots, _ in self._chunks)):
            # As much as it would be if all layers attended to all tokens.
            tokens = (self.num_tokens - self.target.cached_tokens) * len(self._groups)
            attributes["full_bytes"] = num_bytes // slots * tokens
        span = parent, self._start_ns, end_ns
        tracing.record(self.tracer, "kv.transfer", *span, attributes, error)
