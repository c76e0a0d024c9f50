"""Serves the service over HTTP in the router's process, on the router's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton import tls
from baton.errors import ConfigError, Unavailable
from baton.gateway.http_exchange import (
    CONNECTION,
    CYCLE,
    HttpError,
    HttpExchange,
    Receive,
    Scope,
    Send,
    failure_of,
)
from baton.gateway.routes import App
from router.frontend import GenerationService
from router.main import Frontend

log = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections: they, not we, should hang up
_STOP_GRACE_S = 2  # for the last bytes of streams that ended while the router drained

MAX_CONNECTIONS = 4096  # and at most half of the files that the process may open
MAX_REQUESTS = 2048  # that generate, waiting or running
MAX_PIPELINED = 16  # requests behind the one that is being answered
MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 << 10  # of a request, and everything else of it that is not its body
HEADERS_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 65.0  # endpoints that read a body say so earlier
LINGER_S = 5.0  # for what comes after the answer, or is not read by the client
UNREAD_S = 60.0  # for the end of an answer that was cut because the client did not read
_PIECE = 16 << 10  # bytes parsed before limits are looked at
_CHUNK = 512  # body chunks of that size or more have their framing for free
_RETRY_AFTER_S = 1.0


def frontend(host: str, port: int, shared: bool = False) -> Frontend:
    """HTTP at `host`:`port`, perhaps `shared` with other processes, for `router.main.run`.

    Listens at once, so that a port in use is a ConfigError before anything has begun; where it is
    `shared` only once it serves: siblings take connections until then.
    """
    listener = None if shared else listen(host, port)
    return lambda service: serving(service, listener or listen(host, port, shared))


def listen(host: str, port: int, shared: bool = False) -> socket.socket:
    """A socket for `serving`; port 0 takes a free one. Raises ConfigError when it is taken."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6  # "::" takes IPv4 too
        listener = socket.create_server(
            address, family=family, backlog=_BACKLOG, dualstack_ipv6=both, reuse_port=shared
        )
        # Connections inherit it: without, a stream's second chunk waits for a delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise ConfigError(
            f"cannot listen on {host}:{port} for HTTP: {reason}; "
            "stop what uses it or choose another port with --http-port"
        ) from error
    return listener


@contextlib.asynccontextmanager
async def serving(service: GenerationService, listener: socket.socket) -> AsyncIterator[None]:
    """Takes connections while inside; at the end what is being answered may finish."""
    config = uvicorn.Config(
        App(service),
        http=Connection,
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_STOP_GRACE_S,
    )
    config.load()
    if tls.current().serves:
        config.ssl = tls.current().context()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # Not `server.serve()`: that takes the process's signals, which are the router's.
    await server.startup(sockets=[listener])

    def leave() -> None:
        for one in server.servers:
            one.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()

    service.on_leave.append(leave)
    ticking = asyncio.create_task(server.main_loop(), name="http")
    host, port = listener.getsockname()[:2]
    log.info("HTTP%s at %s:%d", "S" if config.ssl else "", host, port)
    try:
        yield
    finally:
        server.should_exit = True
        await ticking
        await server.shutdown(sockets=[listener])


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits to what a client may send, and to how long that may take."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes it, or refuses one too many."""
        super().connection_made(transport)
        self._expected = "request"  # what comes next, or headers or body; empty: all has come
        self._timed = ""  # what the timer is for
        self._timer: asyncio.TimerHandle | None = None
        self._bytes_left, self._headers_left = MAX_HEADER_BYTES, MAX_HEADERS
        self._unread = False  # by the client, of what it was sent
        if len(self.connections) > min(
            MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        ):
            self._refuse(Unavailable("too many connections", _RETRY_AFTER_S))
        else:
            self._expect("request", HEADERS_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._expect("", 0.0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses piece by piece, as long as the request keeps its limits."""
        self._unset_keepalive_if_required()
        self._expected = self._expected or "request"
        rest = memoryview(data)
        try:
            while rest and not self.transport.is_closing():
                piece, rest = rest[:_PIECE], rest[_PIECE:]
                self._bytes_left -= len(piece)
                self.parser.feed_data(piece)
                if self._bytes_left < 0:
                    raise _OverLimit("bytes")
        except httptools.HttpParserUpgrade:
            pass  # to nothing: it is answered as any other
        except (httptools.HttpParserError, _OverLimit) as error:
            self._refuse(_parse_error(error))
        if self._expected != self._timed and not self.transport.is_closing():
            body = self._expected == "body"
            self._expect(self._expected, BODY_TIMEOUT_S if body else HEADERS_TIMEOUT_S)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._expected = "headers"
        self._bytes_left, self._headers_left = MAX_HEADER_BYTES, MAX_HEADERS

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers, which would replace those that were acted on, are dropped."""
        self._headers_left -= 1
        if self._headers_left < 0:
            raise _OverLimit("headers")
        if self._expected == "headers":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Answers that there are too many where there are."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _OverLimit("pipelined requests")
        many = self.parser.get_method() == b"POST" and len(self.tasks) >= MAX_REQUESTS
        self.app = _busy if many else self.config.loaded_app
        self._expect("", 0.0)
        self._expected = "body"
        super().on_headers_complete()
        self.scope[CYCLE] = self.cycle  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        """A part of a body: its own limit is the endpoint's."""
        self._bytes_left += len(body) + len(body) // _CHUNK * 8
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of a request has come."""
        self._expected, self._bytes_left = "", MAX_HEADER_BYTES
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is out; what is left of its request is not waited for."""
        super().on_response_complete()
        if self._unread or self.transport.is_closing():
            self._hang_up(UNREAD_S)
        elif self._expected == "body" and self.cycle.response_complete:
            self._expect("body", LINGER_S)

    @property
    def is_closing(self) -> bool:
        """Nothing can be written any more."""
        return self.transport.is_closing()

    @property
    def unread_bytes(self) -> int:
        """What was written and is not on its way to the client yet."""
        return self.transport.get_write_buffer_size()

    def unpause(self) -> None:
        """Writes do not wait for the client: `HttpExchange` bounds what it leaves unread."""
        self.flow.resume_writing()

    def ends_answer(self) -> None:
        """The last part of an answer comes; of the connection's last, where much is unread."""
        self._unread = self.unread_bytes > HIGH_WATER_LIMIT

    def timeout_keep_alive_handler(self) -> None:
        """Nothing new has come for long."""
        self._hang_up()

    def _expect(self, what: str, seconds: float) -> None:
        """Starts the time that is left for what is to come next."""
        if self._timer is not None:
            self._timer.cancel()
        self._timed = what
        self._timer = self.loop.call_later(seconds, self._too_late, seconds) if what else None

    def _too_late(self, seconds: float) -> None:
        if self.transport.is_closing():
            return
        if self.flow.read_paused or (self._expected != "body" and self._answering):
            self._expect(self._timed, seconds)  # the client is not the slow side
        elif self._expected == "request":
            self._hang_up()
        else:
            self._refuse(HttpError(408, f"the {self._expected} took more than {seconds:.0f} s"))

    @property
    def _answering(self) -> bool:
        """Whether an answer is not complete, other than one that waits for its request's body."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return bool(self.pipeline) or self._expected != "body" or self.cycle.response_started

    def _refuse(self, error: Exception) -> None:
        """Sends the reason, unless that would land within another answer, and hangs up."""
        if not self._answering and not (self._expected == "body" and self.cycle.response_complete):
            failure = failure_of(error)
            headers = [
                *self.server_state.default_headers,
                *failure.headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(failure.body)),
                (b"connection", b"close"),
            ]
            lines = b"".join(b"%s: %s\r\n" % header for header in headers)
            self.transport.write(STATUS_LINE[failure.status] + lines + b"\r\n" + failure.body)
        self._hang_up()

    def _hang_up(self, linger_s: float = LINGER_S) -> None:
        """Closes, also when the client does not read what it was sent."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(linger_s, self.transport.abort)


class _OverLimit(Exception):
    """A request is over a limit."""


def _parse_error(error: Exception) -> HttpError:
    """The answer to a request that cannot be parsed, or has too much of something."""
    cause = error if isinstance(error, _OverLimit) else error.__context__
    if isinstance(cause, _OverLimit):
        limits = f"{MAX_HEADERS} headers, {MAX_HEADER_BYTES >> 10} KiB without its body"
        return HttpError(431, f"too many {cause} in the request: at most {limits}")
    return HttpError(400, f"the request is not HTTP: {error}")


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers requests for which there is no room."""
    failure = failure_of(Unavailable("too many requests at a time", _RETRY_AFTER_S))
    exchange = HttpExchange(scope, receive, send)
    exchange.answer(failure.status, failure.body, list(failure.headers))
