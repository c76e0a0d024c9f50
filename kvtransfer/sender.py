"""The prefill side of one handoff: queue finished chunks, send them in order, commit or abort."""

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
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    TransferFailed,
)
from baton.v1 import handoff_pb2, prefill_pb2
from kvtransfer.links import LinkPool, PairLink
from kvtransfer.pool import Digest, Slots
from kvtransfer.waiting import Deadline, uninterrupted

log = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class TransferStats:
    """What a handoff took. `transfer_s` runs from the first put to the acknowledged Commit;
    `wait_s` was spent waiting for the link's turn and the receiver, `wire_s` moving bytes."""

    num_bytes: int
    transfer_s: float
    wait_s: float
    wire_s: float
    chunks: int
    transport: str
    transport_kind: int


@dataclass(frozen=True)
class _Chunk:
    first_token: int
    slots: Slots


@dataclass(frozen=True)
class _Commit:
    num_tokens: int
    first_token_id: int


class HandoffSender:
    """Opens handoffs over a worker's links. `step_timeout_s` caps every single wait."""

    def __init__(self, links: LinkPool, tracer: Tracer, *, step_timeout_s: float = 10.0) -> None:
        self.links, self.tracer, self.step_timeout_s = links, tracer, step_timeout_s

    def open(
        self,
        target: prefill_pb2.HandoffTarget,
        handoff_id: str,
        num_tokens: int,
        timeout_s: float,
        parent: Context | None = None,
    ) -> Handoff:
        """One handoff, as an async context manager that aborts what was not committed.

        `num_tokens` is the length of the whole sequence, cached tokens included; `timeout_s` is the
        request's time left; `parent` is the span that `kv.transfer` belongs to.
        """
        return Handoff(self, target, handoff_id, num_tokens, Deadline(timeout_s), parent)


class Handoff:
    """One sequence's KV on its way. Its blocks must be held until commit or abort returned."""

    def __init__(
        self,
        sender: HandoffSender,
        target: prefill_pb2.HandoffTarget,
        handoff_id: str,
        num_tokens: int,
        deadline: Deadline,
        parent: Context | None,
    ) -> None:
        self._links, self._tracer = sender.links, sender.tracer
        self._cap_s = sender.step_timeout_s
        self._target, self._id, self._num_tokens = target, handoff_id, num_tokens
        self._deadline, self._parent = deadline, parent
        self._metadata = telemetry.inject(parent)
        # Bounded by the sequence: every entry announces at least one of its tokens.
        self._queue: asyncio.Queue[_Chunk | _Commit] = asyncio.Queue()
        self._digest = Digest()
        self._granted: tuple[int, ...] = ()
        self._wait_s = self._wire_s = 0.0
        self._chunks = 0
        self._start_ns = 0
        self._link: PairLink | None = None
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
            if self._link is not None:
                self._links.release(self._link)
                self._link = None

    def send(self, first_token: int, local: Slots) -> None:
        """Queues blocks that are complete, starting at position `first_token`; returns at once.

        Every call continues where the last one ended, at first the target's cached tokens; all but
        the last end at a block's end. Raises InvalidRequest, and once the transfer has failed, why.
        """
        local.check(self._links.pool.block_size, self._links.pool.num_blocks)
        if self._task.done():
            self._raise_failure()
        self._queue.put_nowait(_Chunk(first_token, local))

    async def commit(self, num_tokens: int, first_token_id: int) -> TransferStats:
        """Waits until all is sent and the decode worker has verified it.

        Raises TransferFailed, KvCorrupted, Stale, KvMismatch, Unavailable, Overloaded,
        DeadlineExceeded.
        """
        self._queue.put_nowait(_Commit(num_tokens, first_token_id))
        stats = await asyncio.shield(self._task)
        self._ended = True
        return stats

    async def abort(self, reason: str) -> None:
        """Gives up, unless committed. When it returns nothing more is written, and the decode
        worker has been told, if it could be reached."""
        if not self._ended:
            self._ended = True
            await uninterrupted(self._abort(reason))

    def _raise_failure(self) -> NoReturn:
        if self._task.cancelled():
            raise Cancelled("the handoff was aborted")
        self._task.result()
        raise InvalidRequest("the handoff was committed already")

    async def _abort(self, reason: str) -> None:
        self._task.cancel()  # a put that runs is finished first
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            if (failure := self._task.exception()) is None:
                return  # committed after all, though nobody waited for it
            reason = f"{type(failure).__name__}: {failure}"
        if self._link is None:
            return  # the decode worker never heard of us; its lease or the router frees it
        request = handoff_pb2.AbortRequest(
            handoff_id=self._id,
            reservation_token=self._target.reservation_token,
            incarnation=self._links.incarnation,
            reason=reason,
        )
        try:
            with rpc.translated():
                await self._link.stub.Abort(
                    request, timeout=_ABORT_TIMEOUT_S, metadata=self._metadata
                )
        except BatonError as error:
            log.warning("abort of handoff %s was not heard, its lease ends it: %s", self._id, error)

    async def _run(self) -> TransferStats:
        try:
            async with asyncio.timeout(self._deadline.left_s(float("inf"))):
                self._link = link = await self._links.acquire(self._target, self._deadline)
                rest = self._num_tokens - self._target.cached_tokens
                if link.transport.one_sided and rest:
                    self._granted = await self._ready(link, self._target.cached_tokens, rest)
                while isinstance(item := await self._queue.get(), _Chunk):
                    await self._send_chunk(link, item)
                return await self._send_commit(link, item)
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed during the KV transfer") from error

    async def _send_chunk(self, link: PairLink, chunk: _Chunk) -> None:
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self._deadline.left_s(self._cap_s)):
                await link.turn.acquire()
        except TimeoutError as error:
            raise TransferFailed(f"the link to decode {link.peer} was not free in time") from error
        try:
            # Between Ready and the end of the put the receiver counts on us: no stopping there.
            await uninterrupted(self._put(link, chunk, start))
        finally:
            link.turn.release()

    async def _put(self, link: PairLink, chunk: _Chunk, start: float) -> None:
        slots = chunk.slots
        if link.transport.one_sided:
            ids = self._part_of_grant(chunk)
        else:
            ids = await self._ready(link, chunk.first_token, slots.num_tokens)
        self._wait_s += time.perf_counter() - start
        self._start_ns = self._start_ns or time.time_ns()
        remote = Slots(ids, slots.num_tokens)
        with self._links.judging(link, self._deadline):
            timeout_s = self._deadline.left_s(self._cap_s)
            stats = await link.put(slots, remote, self._digest, timeout_s)
        self._wire_s += stats.wire_s
        self._chunks += 1

    def _part_of_grant(self, chunk: _Chunk) -> tuple[int, ...]:
        """The granted blocks that a chunk goes to. Raises InvalidRequest outside of the grant."""
        block_size, cached = self._links.pool.block_size, self._target.cached_tokens
        first = (chunk.first_token - cached) // block_size
        ids = self._granted[first : first + len(chunk.slots.block_ids)]
        sent = self._digest.num_bytes // self._links.pool.token_bytes
        if chunk.first_token != cached + sent or len(ids) != len(chunk.slots.block_ids):
            raise InvalidRequest(f"no blocks are granted at token {chunk.first_token}")
        return ids

    async def _ready(self, link: PairLink, first_token: int, num_tokens: int) -> tuple[int, ...]:
        request = handoff_pb2.ReadyRequest(
            handoff_id=self._id,
            reservation_token=self._target.reservation_token,
            incarnation=self._links.incarnation,
            epoch=link.epoch,
            first_token=first_token,
            num_tokens=num_tokens,
        )
        response = await self._call(link, link.stub.Ready, request)
        return tuple(response.block_ids)

    async def _send_commit(self, link: PairLink, commit: _Commit) -> TransferStats:
        request = handoff_pb2.CommitRequest(
            handoff_id=self._id,
            reservation_token=self._target.reservation_token,
            incarnation=self._links.incarnation,
            epoch=link.epoch,
            num_tokens=commit.num_tokens,
            num_bytes=self._digest.num_bytes,
            checksum=self._digest.value,
            first_token_id=commit.first_token_id,
        )
        start = time.perf_counter()
        await self._call(link, link.stub.Commit, request)
        self._wait_s += time.perf_counter() - start
        return self._finished(link)

    def _finished(self, link: PairLink) -> TransferStats:
        end_ns = time.time_ns()
        start_ns = self._start_ns or end_ns
        stats = TransferStats(
            num_bytes=self._digest.num_bytes,
            transfer_s=(end_ns - start_ns) / 1e9,
            wait_s=self._wait_s,
            wire_s=self._wire_s,
            chunks=self._chunks,
            transport=link.transport.name,
            transport_kind=link.transport.kind,
        )
        self._record(stats, start_ns, end_ns)
        return stats

    def _record(self, stats: TransferStats, start_ns: int, end_ns: int) -> None:
        attributes: dict[str, str | int | float | bool] = {
            "baton.handoff_id": self._id,
            "bytes": stats.num_bytes,
            "tokens": stats.num_bytes // self._links.pool.token_bytes,
            "transport": stats.transport,
            "wait_ms": stats.wait_s * 1e3,
            "wire_ms": stats.wire_s * 1e3,
            "gb_per_s": stats.num_bytes / 1e9 / stats.wire_s if stats.wire_s else 0.0,
            "chunks": stats.chunks,
        }
        parent = self._parent if self._parent is not None else Context()
        telemetry.record(self._tracer, "kv.transfer", parent, start_ns, end_ns, attributes)

    async def _call(self, link: PairLink, method: Callable[..., Any], request: Any) -> Any:
        """One control call on the link, within the deadline."""
        with self._links.judging(link, self._deadline), rpc.translated():
            timeout_s = self._deadline.left_s(self._cap_s)
            return await method(request, timeout=timeout_s, metadata=self._metadata)
