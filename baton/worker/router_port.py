"""A worker's port for routers: their connections, what they are told, how their loss is seen."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from baton.errors import BatonError, InvalidRequest, Overloaded, Unavailable
from baton.log_format import RateLimit
from baton.net import http_server, tls
from baton.net.connection import CLOSE_S, MessageConnection, count_fields, failure_of
from baton.v1 import worker_pb2
from baton.v1.dispatch_pb2 import RouterMessage, WorkerMessage
from baton.worker.metrics import CacheWatcher, LoadTracker

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.05  # between two load reports at least
HELLO_TIMEOUT_S = 10.0  # for a router's first message, and the TLS handshake before it
ROUTER_SILENCE_S = 15.0  # without a message from a router it is lost
MIN_HEARTBEAT_S = 0.05
BEAT_S = 1.0  # at most; in these silence is counted, also where a router wants no heartbeats
MAX_ROUTERS = 256  # connections at a time
MAX_HELLO_BYTES = 4096  # of a router's first message
MAX_PARTS = 4096  # of a message: requests, cancels and traces
MAX_UNFINISHED_BYTES = 64 << 20  # of messages that have not come as a whole, over all connections
TURN_S = 0.005  # that parts of messages may take in one turn of the loop


class Worker(Protocol):
    """What the port serves."""

    load_tracker: LoadTracker

    @property
    def incarnation(self) -> str:
        """The name of this run of the process."""

    def report(self) -> worker_pb2.LoadReport:
        """Load and state now, but for the cache."""

    @property
    def max_message_bytes(self) -> int:
        """Largest message of a router."""

    def take(self, router: RouterConnection, message: RouterMessage) -> Iterator[None]:
        """Handles what a router sends, a part at a step; what is wrong with a part of it fails that
        part alone."""

    def lost(self, router: RouterConnection) -> None:
        """A router is gone, and what runs for it is to be freed."""


class RouterPort:
    """Accepts routers from `open` to `aclose`."""

    def __init__(self, worker: Worker, connection: type[RouterConnection] | None = None) -> None:
        self.worker = worker
        self._connection = connection or RouterConnection
        self.routers: set[RouterConnection] = set()
        self.log = RateLimit(log)
        # What is left of messages that were taken, in turn.
        self._left: deque[tuple[RouterConnection, Iterator[None]]] = deque()
        self._turn_ends = 0.0  # time.perf_counter(), while one is under way
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None

    def listen(self, host: str, port: int) -> int:
        """Takes the port, 0 for a free one, and returns it; connections wait there until `open`.

        Raises ConfigError where it is in use.
        """
        self._listener = http_server.listen(host, port, "routers", "--router-port")
        bound: int = self._listener.getsockname()[1]
        return bound

    async def open(self) -> None:
        """Takes connections."""
        assert self._listener is not None
        credentials = tls.current()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: self._connection(self),
            sock=self._listener,
            ssl=credentials.context() if credentials.serves else None,
            ssl_handshake_timeout=HELLO_TIMEOUT_S if credentials.serves else None,
        )

    async def aclose(self) -> None:
        """Sends what is on its way, with a last report, and ends all connections."""
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()
        routers = tuple(self.routers)
        for router in routers:
            router.leave()
        if routers:
            await asyncio.wait([router.closed for router in routers], timeout=2 * CLOSE_S)

    def handle(self, router: RouterConnection, parts: Iterator[None]) -> None:
        """Handles a message's parts: at once, as far as there is time in this turn of the loop."""
        self._left.append((router, parts))
        self._go_on()

    def _go_on(self) -> None:
        now = time.perf_counter()
        if not self._turn_ends:
            self._turn_ends = now + TURN_S
            asyncio.get_running_loop().call_soon(self._next_turn)
        while self._left and now < self._turn_ends:
            router, parts = self._left[0]
            with router.failing():
                for _ in () if router.transport.is_closing() else parts:
                    if (now := time.perf_counter()) >= self._turn_ends:
                        self._left.rotate(-1)
                        return
            self._left.popleft()
            router.handled()

    def _next_turn(self) -> None:
        self._turn_ends = 0.0
        if self._left:
            self._go_on()


class RouterConnection(MessageConnection[RouterMessage, WorkerMessage]):
    """One router. It is told of the load at changes, and of nothing as a heartbeat."""

    received, sent = RouterMessage, WorkerMessage

    def __init__(self, port: RouterPort) -> None:
        super().__init__()
        self.name = ""  # until it has said hello
        self._port = port
        self.max_frame_bytes = MAX_HELLO_BYTES
        self._heartbeat_s = BEAT_S
        self._wants_heartbeats = False
        self._sent_at = 0.0
        self._beats_unheard = 0
        self._busy = self._paused = False  # while a message is handled, and nothing is read then
        self._cache: CacheWatcher | None = None
        self._reported: worker_pb2.LoadReport | None = None
        self._report_after = 0.0
        self._reporting: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses whoever is no router of this cluster."""
        super().connection_made(transport)
        self._port.routers.add(self)
        if len(self._port.routers) > MAX_ROUTERS:
            self.fail(Overloaded(f"{MAX_ROUTERS} routers are connected"))
        elif why := tls.why_no_router(transport.get_extra_info("peercert")):
            self._refuse(InvalidRequest(why))
        else:
            late = InvalidRequest(f"no hello came in {HELLO_TIMEOUT_S:.0f} s")
            self._timer = self._loop.call_later(HELLO_TIMEOUT_S, self._refuse, late)

    def connection_lost(self, exc: Exception | None) -> None:
        """What runs for the router is freed."""
        super().connection_lost(exc)
        self._port.routers.discard(self)
        for timer in (self._timer, self._reporting):
            if timer is not None:
                timer.cancel()
        if self._cache is not None:
            self._cache.close()
            self._port.worker.lost(self)

    def data_received(self, data: bytes) -> None:
        """Takes messages; of what does not come to an end, all connections together keep little."""
        super().data_received(data)
        routers = self._port.routers
        if sum(router.num_unfinished for router in routers) > MAX_UNFINISHED_BYTES:
            most = max(routers, key=lambda router: router.num_unfinished)
            most.fail(Overloaded("too many bytes have come of messages that are not whole"))

    def parse(self, frame: bytes) -> RouterMessage:
        """Refuses many parts before memory is taken for each."""
        if count_fields(frame, MAX_PARTS) > MAX_PARTS:
            raise InvalidRequest(f"a message has over {MAX_PARTS} parts")
        return super().parse(frame)

    @property
    def busy(self) -> bool:
        return self._busy

    def take(self, message: RouterMessage) -> None:
        """The first message says hello."""
        self._beats_unheard = 0
        if self._cache is None:
            self._begin(message)
        self._busy = True
        self._port.handle(self, self._port.worker.take(self, message))
        if self._busy:
            self._paused = True
            self.transport.pause_reading()

    def handled(self) -> None:
        """The message that was taken is handled as a whole."""
        self._busy = False
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()
            self.data_received(b"")

    def flush(self) -> None:
        self._sent_at = self._loop.time()
        super().flush()

    def fail(self, error: BatonError) -> None:
        if not self.closed.done():
            who = self.name or self.transport.get_extra_info("peername")
            self._port.log.warning("router %s is cut off: %s", who, error)
        super().fail(error)

    def failed(self, handoff_id: str, error: BaseException) -> None:
        """Tells why a sequence or prompt was not done."""
        self.outgoing.failures.append(failure_of(error, handoff_id))

    def leave(self) -> None:
        """Ends the connection behind what is on its way."""
        if self._cache is not None:
            self._report()
        self.close()

    def _begin(self, message: RouterMessage) -> None:
        if not message.HasField("hello"):
            raise InvalidRequest("the first message must have a hello")
        assert self._timer is not None
        self._timer.cancel()
        self.name = message.hello.router_id
        self.max_frame_bytes = self._port.worker.max_message_bytes
        if heartbeat_ms := message.hello.heartbeat_ms:
            self._wants_heartbeats = True
            self._heartbeat_s = min(max(MIN_HEARTBEAT_S, heartbeat_ms / 1000), BEAT_S)
        self._timer = self._loop.call_later(self._heartbeat_s, self._beat)
        self._cache = CacheWatcher(self._port.worker.load_tracker, self._changed)
        self.outgoing.incarnation = self._port.worker.incarnation
        self._report()

    def _beat(self) -> None:
        """Reports, unless something was sent a moment ago; and counts how long nothing came.

        In beats, not by the clock: a worker that was stopped itself must not find routers silent.
        """
        self._beats_unheard += 1
        if self._beats_unheard * self._heartbeat_s > ROUTER_SILENCE_S:
            self.fail(Unavailable(f"it said nothing for {ROUTER_SILENCE_S:.0f} s"))
            return
        if self._wants_heartbeats and self._loop.time() > self._sent_at + self._heartbeat_s / 4:
            self._report()
        self._timer = self._loop.call_later(self._heartbeat_s, self._beat)

    def _changed(self) -> None:
        """There is something to report; at most so often."""
        if self._reporting is None:
            self._reporting = self._loop.call_at(self._report_after, self._report_change)

    def _report_change(self) -> None:
        self._reporting = None
        self._report()

    def _report(self) -> None:
        """Adds what has changed to the message that leaves; nothing, where nothing has."""
        assert self._cache is not None
        report, outgoing = self._port.worker.report(), self.outgoing
        cache = self._cache.event()
        if cache is not None or report != self._reported:
            self._reported = report
            outgoing.report.CopyFrom(report)
            if cache is not None:
                outgoing.report.cache.CopyFrom(cache)
        self._report_after = self._loop.time() + REPORT_INTERVAL_S

    def _refuse(self, error: BatonError) -> None:
        who = self.transport.get_extra_info("peername")
        self._port.log.warning("refused %s: %s", who, error)
        self.outgoing.failures.append(failure_of(error))
        self.close()
