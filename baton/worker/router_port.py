"""A worker's port for routers: their connections, what they are told, how their loss is seen."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from typing import Protocol

from baton import http_server, tls
from baton.connection import CLOSE_S, MessageConnection, failure_of
from baton.errors import BatonError, InvalidRequest, Unavailable
from baton.v1 import worker_pb2
from baton.v1.dispatch_pb2 import RouterMessage, WorkerMessage
from baton.worker.metrics import CacheWatcher, LoadTracker

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.05  # between two load reports at least
HELLO_TIMEOUT_S = 10.0  # for a router's first message, and the TLS handshake before it
ROUTER_SILENCE_S = 15.0  # without a message from a router it is lost
MIN_HEARTBEAT_S = 0.05


class Worker(Protocol):
    """What the port serves."""

    load_tracker: LoadTracker

    @property
    def incarnation(self) -> str:
        """The name of this run of the process."""

    def report(self) -> worker_pb2.LoadReport:
        """Load and state now, but for the cache."""

    def take(self, router: RouterConnection, message: RouterMessage) -> None:
        """Handles what a router sends; what is wrong with a part of it fails that part alone."""

    def lost(self, router: RouterConnection) -> None:
        """A router is gone, and what runs for it is to be freed."""


class RouterPort:
    """Accepts routers from `open` to `aclose`."""

    def __init__(self, worker: Worker, connection: type[RouterConnection] | None = None) -> None:
        self.worker = worker
        self._connection = connection or RouterConnection
        self.routers: set[RouterConnection] = set()
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


class RouterConnection(MessageConnection[RouterMessage, WorkerMessage]):
    """One router. It is told of the load at changes, and of nothing as a heartbeat."""

    received, sent = RouterMessage, WorkerMessage

    def __init__(self, port: RouterPort) -> None:
        super().__init__()
        self.name = ""  # until it has said hello
        self._port = port
        self._heartbeat_s = math.inf
        self._sent_at = 0.0
        self._beats_unheard = 0
        self._cache: CacheWatcher | None = None
        self._reported: worker_pb2.LoadReport | None = None
        self._report_after = 0.0
        self._reporting: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses whoever is no router of this cluster."""
        super().connection_made(transport)
        self._port.routers.add(self)
        if why := tls.why_no_router(transport.get_extra_info("peercert")):
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

    def take(self, message: RouterMessage) -> None:
        """The first message says hello."""
        self._beats_unheard = 0
        if self._cache is None:
            self._begin(message)
        self._port.worker.take(self, message)

    def flush(self) -> None:
        self._sent_at = self._loop.time()
        super().flush()

    def fail(self, error: BatonError) -> None:
        if not self.closed.done():
            who = self.name or self.transport.get_extra_info("peername")
            log.warning("router %s is cut off: %s", who, error)
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
        if message.hello.heartbeat_ms:
            self._heartbeat_s = max(MIN_HEARTBEAT_S, message.hello.heartbeat_ms / 1000)
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
        if self._loop.time() > self._sent_at + self._heartbeat_s / 4:
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
        log.warning("refused %s: %s", self.transport.get_extra_info("peername"), error)
        self.outgoing.failures.append(failure_of(error))
        self.close()
