"""The service that routers call: one stream for each router process, with requests one way and
tokens, failures and load reports the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from baton.errors import BatonError, InvalidRequest, Overloaded, Unavailable
from baton.log_format import RateLimit
from baton.net.failures import failure_of
from baton.net.message_stream import CLOSE_S, MessageStream
from baton.v1 import worker_pb2
from baton.v1.dispatch_pb2 import DESCRIPTOR, RouterMessage, WorkerMessage
from baton.worker.metrics import CacheWatcher, LoadTracker

log = logging.getLogger(__name__)

NAME: str = DESCRIPTOR.services_by_name["DispatchService"].full_name
REPORT_INTERVAL_S = 0.05  # minimum between two load reports
RIDE_S = 0.01  # more, in which a report is part of a message that is sent anyway
MIN_HEARTBEAT_S, MAX_HEARTBEAT_S = 0.05, 1.0
MAX_ROUTERS = 256  # streams at a time
MAX_PARTS = 4096  # of a message: requests, cancels and traces
TURN_S = 0.005  # for the parts of all messages in one turn of the event loop
# Kinds of fields in protobuf's encoding.
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_MAX_SHIFT = 63


class Worker(Protocol):
    """The worker behind the service."""

    load_tracker: LoadTracker

    @property
    def incarnation(self) -> str:
        """The name of this run of the process."""

    def report(self) -> worker_pb2.LoadReport:
        """Current load and state, without the cache."""

    @property
    def max_message_bytes(self) -> int:
        """Largest message of a router."""

    def take(self, router: RouterStream, message: RouterMessage) -> Iterator[None]:
        """Handles a router's message, one part a step; an invalid part fails alone."""

    def lost(self, router: RouterStream) -> None:
        """Frees what runs for a router whose stream has ended."""


class DispatchService:
    """Serves Connect until `aclose`."""

    def __init__(self, worker: Worker, stream: type[RouterStream] | None = None) -> None:
        self.worker = worker
        self._stream = stream or RouterStream
        self.routers: set[RouterStream] = set()
        self._log = RateLimit(log)
        self._turn = asyncio.Lock()  # of the stream whose message is handled; others wait in order
        self._turn_ends = 0.0  # time.perf_counter(); 0 until a part is handled in this turn
        self._closed = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """Without serialisers: a stream parses a message when it has checked the bytes."""
        connect = grpc.stream_stream_rpc_method_handler(self.connect)
        handler = grpc.method_handlers_generic_handler(NAME, {"Connect": connect})
        server.add_generic_rpc_handlers((handler,))

    async def connect(self, requests: Any, context: Any) -> None:
        """Serves a router until either end closes the stream; what it asked for is freed then.

        Raises Overloaded, Unavailable, InvalidRequest.
        """
        if self._closed:
            raise Unavailable(f"worker {self.worker.incarnation} is leaving")
        if len(self.routers) >= MAX_ROUTERS:
            raise Overloaded(f"{MAX_ROUTERS} routers are connected")
        router = self._stream(self.worker, context)
        self.routers.add(router)
        try:
            # Separately: a status after an unfinished first write would send them again, and fail.
            await context.send_initial_metadata(())
            await router.run(self._handle_all(router))
        except BatonError as error:
            self._log.warning("router %s is cut off: %s", router.name, error)
            raise
        finally:
            self.routers.discard(router)
            router.stop()
            router.ended.set_result(None)
            self.worker.lost(router)

    async def aclose(self) -> None:
        """Sends what is on its way and a last report, and ends all streams."""
        self._closed = True
        for router in self.routers:
            router.leave()
        left = [router.ended for router in self.routers]
        if left:
            await asyncio.wait(left, timeout=CLOSE_S)
        for router in self.routers:
            router.fail(Unavailable("the last messages were left unread"))

    async def _handle_all(self, router: RouterStream) -> None:
        async for message in router.messages():
            parts = self.worker.take(router, message)
            while not await self._handle_some(parts):
                pass

    async def _handle_some(self, parts: Iterator[None]) -> bool:
        """Handles parts for as long as there is time in this turn; returns whether all are done."""
        async with self._turn:
            if self._is_late():
                await asyncio.sleep(0)
            for _ in parts:
                if self._is_late():
                    await asyncio.sleep(0)  # streams that wait for `_turn` are next
                    return False
            return True

    def _is_late(self) -> bool:
        """Whether messages have used up their time in this turn of the event loop."""
        now = time.perf_counter()
        if not self._turn_ends:
            self._turn_ends = now + TURN_S
            asyncio.get_running_loop().call_soon(self._next_turn)
        return now >= self._turn_ends

    def _next_turn(self) -> None:
        self._turn_ends = 0.0


class RouterStream(MessageStream[RouterMessage, WorkerMessage]):
    """One router's stream, on which load and state are reported when they change.

    Where nothing changes, an empty message is a heartbeat, as often as the router wants.
    """

    def __init__(self, worker: Worker, context: Any) -> None:
        super().__init__(context, RouterMessage, WorkerMessage)
        self._worker = worker
        self.ended: asyncio.Future[None] = self._loop.create_future()
        metadata: Mapping[str, Any] = dict(context.invocation_metadata() or ())
        self.name = str(metadata.get("baton-router-id", context.peer()))
        self._heartbeat_s = _heartbeat_s(metadata.get("baton-heartbeat-ms", "0"))
        self._heartbeat: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        self._cache = CacheWatcher(worker.load_tracker, self._changed)
        self._reported: worker_pb2.LoadReport | None = None
        self._report_is_due = True
        self._report_after = 0.0
        self._reporting: asyncio.TimerHandle | None = None
        self.outgoing.incarnation = worker.incarnation  # and the first report
        if self._heartbeat_s:
            self._beat()

    def failed(self, handoff_id: str, error: BaseException) -> None:
        """Sends why a sequence or prompt was refused or has failed."""
        self.outgoing.failures.append(failure_of(error, handoff_id))

    def leave(self) -> None:
        """Ends the stream after pending messages and a last report."""
        self._report_is_due, self._report_after = True, 0.0
        _ = self.outgoing
        self.close()

    def stop(self) -> None:
        """The stream has ended: nothing is reported any more."""
        for timer in (self._heartbeat, self._reporting):
            if timer is not None:
                timer.cancel()
        self._cache.close()

    def parse(self, data: bytes) -> RouterMessage:
        """Refuses many parts before memory is allocated for each."""
        if len(data) > (most := self._worker.max_message_bytes):
            raise InvalidRequest(f"a message of {len(data)} bytes is too large, of at most {most}")
        if count_fields(data, MAX_PARTS) > MAX_PARTS:
            raise InvalidRequest(f"a message has over {MAX_PARTS} parts")
        return super().parse(data)

    def complete(self, message: WorkerMessage) -> None:
        """Adds load and state where they have changed, at most every REPORT_INTERVAL_S."""
        self._sent_at = self._loop.time()
        if not self._report_is_due or self._sent_at < self._report_after:
            return
        report, cache = self._worker.report(), self._cache.event()
        if cache is not None or report != self._reported:
            self._reported = report
            message.report.CopyFrom(report)
            if cache is not None:
                message.report.cache.CopyFrom(cache)
        self._report_is_due = False
        self._report_after = self._sent_at + REPORT_INTERVAL_S

    def _beat(self) -> None:
        """Reports, unless something was sent a moment ago."""
        if self._loop.time() > self._sent_at + self._heartbeat_s / 4:
            self._report_is_due = True
            _ = self.outgoing
        self._heartbeat = self._loop.call_later(self._heartbeat_s, self._beat)

    def _changed(self) -> None:
        """Load, state or cache may have changed: the next message has a report, or one of its own
        follows."""
        self._report_is_due = True
        if self._reporting is None:
            is_early = self._loop.time() < self._report_after
            when = self._report_after + RIDE_S if is_early else 0.0
            self._reporting = self._loop.call_at(when, self._report)

    def _report(self) -> None:
        self._reporting = None
        if self._report_is_due:
            self._report_after = 0.0  # uvloop's timers may fire up to half a millisecond early
            _ = self.outgoing


def _heartbeat_s(wanted_ms: str | bytes) -> float:
    """0 for none. Raises InvalidRequest for what is no number of milliseconds."""
    try:
        wanted_s = int(wanted_ms) / 1000
    except ValueError:
        raise InvalidRequest("baton-heartbeat-ms must be a number of milliseconds") from None
    return min(max(MIN_HEARTBEAT_S, wanted_s), MAX_HEARTBEAT_S) if wanted_s > 0 else 0.0


def count_fields(message: bytes, most: int) -> int:
    """The number of top-level fields in an encoded message, counted up to `most` + 1.

    A parsed field takes many times the memory of the bytes that an empty one has. Raises
    DecodeError where it is no message.
    """
    at, count = 0, 0
    try:
        while at < len(message) and count <= most:
            tag, at = _varint(message, at)
            kind = tag & 7
            if kind == _LENGTH_DELIMITED:
                size, at = _varint(message, at)
                at += size
            elif kind == _VARINT:
                _, at = _varint(message, at)
            else:
                at += _FIXED_BYTES[kind]
            count += 1
    except (IndexError, KeyError):
        raise DecodeError("truncated or unknown field") from None
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at that offset, and the offset of its end."""
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if shift > _MAX_SHIFT:
            raise DecodeError("a number is too long")
    return value | byte << shift, at + 1
