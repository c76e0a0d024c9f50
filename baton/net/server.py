"""What every server here offers beside its own services: a port, health and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import signal
import struct
import termios
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.config import join_address
from baton.errors import ConfigError
from baton.net import http_server, rpc, tls
from baton.net.http_errors import HttpError
from baton.net.http_server import HttpExchange

log = logging.getLogger(__name__)


def bind(
    host: str,
    port: int,
    authorize: rpc.Authorize = rpc.authorize_role,
    shared: bool = False,
    **limits: Any,
) -> tuple[grpc.aio.Server, str]:
    """A server, not started, and its host:port; port 0 takes a free one.

    It takes TLS where this process has a certificate. The port may be `shared` with processes of
    the same user that share it, too; `limits` are those of `rpc.server`. Raises ConfigError when it
    is taken, or would be open to others without TLS.
    """
    credentials = tls.current()
    credentials.check_exposed(host)
    server = rpc.server(authorize, shared, **limits)
    wanted = join_address(host, port)
    try:
        if credentials.serves:
            bound = server.add_secure_port(wanted, credentials.port())
        else:
            bound = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {wanted}: the port is in use or the address is not this machine's "
            "(choose another with --port)"
        ) from error
    return server, join_address(host, bound)


_GC_OBJECTS = 20_000  # made and not freed, before the youngest are looked at; Python's own is 700


def settle() -> None:
    """Keeps what was made at start, which stays, out of garbage collections from now on.

    Looking at all modules and classes again takes a full collection 50 to 100 ms, and no call is
    answered meanwhile. What a request makes is freed without a collection, so that these may be
    rare.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_OBJECTS)


_LAG_EVERY_S = 0.05
_MOST_PROBES = 16  # connections at a time


async def measure_lag(record: Callable[[float], None]) -> None:
    """Gives `record` again and again how late a timer ran, in seconds; until it is cancelled."""
    while True:
        due = time.monotonic() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        record(max(0.0, time.monotonic() - due))


class EventLoop(uvloop.Loop):
    """An event loop on which gRPC does not starve beside other work.

    gRPC's own thread writes one byte to a socket for each event, and a turn of the loop reads one.
    While turns are long, bytes pile up until that write blocks: from then on one event is delivered
    per turn, and every stream of the process crawls. Here a turn reads them all.
    """

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Adds a reader; gRPC's pending wake-ups are handled in one turn."""
        owner = getattr(getattr(callback, "func", None), "__self__", None)
        if type(owner).__name__ == "PollerCompletionQueue":
            callback = partial(_handle_all, fd, callback)
        super().add_reader(fd, callback, *args)


def run_service(main: Coroutine[Any, Any, int]) -> int:
    """Runs a process that serves; its exit status.

    Where it takes TLS, gRPC delays the end of the process by 2 s while a server is in memory.
    """
    try:
        return uvloop.run(main, loop_factory=EventLoop)
    finally:
        if tls.current().serves:
            gc.unfreeze()
            gc.collect()


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Calls `stop`, which begins the drain, at the first SIGINT, SIGTERM or SIGHUP.

    A second SIGINT or SIGTERM ends the process at once, even if its event loop hangs: it is that
    signal's own effect. SIGHUP, which a closed terminal may send several times, never does that,
    and where the process began with SIGHUP ignored, as under `nohup`, it stays ignored.
    """
    loop = asyncio.get_running_loop()

    def begin(number: signal.Signals) -> None:
        log.info("%s: stopping; SIGINT or SIGTERM now ends this process at once", number.name)
        for again in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(again)
            signal.signal(again, signal.SIG_DFL)
        if hangs_up:
            loop.add_signal_handler(signal.SIGHUP, lambda: None)
        stop()

    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])):
        loop.add_signal_handler(number, begin, number)


def _handle_all(wake_ups: Any, handle_events: Callable[[], None]) -> None:
    """Leaves gRPC one byte: it reads that and then handles all events that have come."""
    (waiting,) = struct.unpack("i", fcntl.ioctl(wake_ups, termios.FIONREAD, bytes(4)))
    if waiting > 1:
        wake_ups.recv(waiting - 1)
    handle_events()


class Health:
    """Whether the whole process is alive and takes work: grpc.health.v1, and HTTP for probes."""

    def __init__(self) -> None:
        self._servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self.serving: bool | None = None
        self.alive = True

    def add_to(self, server: grpc.aio.Server, services: Iterable[str]) -> None:
        """Adds health, and reflection over `services` (full names)."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    async def set(self, serving: bool, *, alive: bool = True) -> None:
        self.alive = alive
        if serving is self.serving:
            return
        self.serving = serving
        answer = health_pb2.HealthCheckResponse
        await self._servicer.set("", answer.SERVING if serving else answer.NOT_SERVING)

    @contextlib.asynccontextmanager
    async def probed(self, host: str, port: int | None, shared: bool = False) -> AsyncIterator[str]:
        """Answers `GET /health` and `/ready` at that port meanwhile; gives its URL. None: nowhere.

        Without TLS, which no kubelet speaks with a certificate; it reports nothing else. The port
        may be `shared` with processes of the same user. Raises ConfigError when it is taken.
        """
        if port is None:
            yield ""
            return
        listener = http_server.listen(host, port, "probes", "--health-port", shared=shared)
        async with http_server.serving(
            self._answer, listener, _MOST_PROBES, plain=True
        ) as listening:
            yield listening.url

    async def _answer(self, exchange: HttpExchange) -> None:
        states = {"/health": (self.alive, "alive"), "/ready": (self.serving, "ready")}
        if exchange.path not in states or exchange.method not in ("GET", "HEAD"):
            raise HttpError(404, "only GET /health and GET /ready are served here")
        good, name = states[exchange.path]
        body = name if good else f"not {name}"
        exchange.answer(200 if good else 503, body.encode(), kind=(b"content-type", b"text/plain"))
