"""An HTTP/1.1 server on the process's event loop: one protocol object for each connection.

`serving` gives each request, as an `HttpExchange`, to a coroutine function that answers it, and
limits what clients may send and how long that may take. It knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import ipaddress
import logging
import re
import resource
import secrets
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from email.utils import formatdate
from http.client import responses
from typing import Any
from urllib.parse import unquote

import httptools

from baton.config import join_address
from baton.errors import (
    ENDINGS,
    as_exception,
    quoted,
    without_frames,
)
from baton.net import listening, tls
from baton.net.http_errors import (
    JSON_TYPE,
    Failure,
    Header,
    HttpError,
    ServerFull,
    failure_of,
)

log = logging.getLogger(__name__)

# Of a body that is read in parts, or not at all; more stays with the client.
MAX_WAITING_BYTES = 1 << 20
MIN_BODY_BYTES = 1 << 20  # of such a body must come in each BODY_TIMEOUT_S
MAX_PIPELINED = 16  # requests behind the one that is being answered
MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 << 10  # of a request, and everything else of it that is not its body
HEADERS_TIMEOUT_S = 10.0  # of a request, a new connection's first one, and of the TLS handshake
BODY_TIMEOUT_S = 60.0
KEEP_ALIVE_S = 75.0  # longer than clients keep idle connections: they, not we, should hang up
LINGER_S = 5.0  # for what comes after the answer, or is not read by the client
LEAVE_S = 5.0  # for one more request on an idle connection, before the server leaves
UNREAD_S = 60.0  # for the end of an answer that was cut because the client did not read
_STOP_TURNS, _STOP_TURN_S = 20, 0.1  # for the last bytes of answers, before the server ends
_ACCEPT_S = 0.02  # for connections that a busy loop has not taken yet: closing would reset them
_BACKLOG = 2048
# What the kernel holds of an answer beyond what the client takes; the rest waits here, where
# `HttpExchange.unread_bytes` counts it. Else a client that reads nothing has megabytes of room.
_MAX_NOT_SENT_BYTES = 16 << 10
_STALL_S = 1.0  # a timer that is later than this is no measure of the client
_LOOK_S = 1.0  # between two looks whether a client is there from whom nothing is read
_ESTABLISHED = 1  # TCP's state, in the first byte of TCP_INFO
# Headers that may come once. A proxy might have looked at one of them, and this server at another.
_SINGLE = frozenset((b"authorization", b"content-type", b"host", b"origin", b"x-api-key"))
_MAX_KEPT_UNREAD_BYTES = 64 << 10  # a connection with more at an answer's end is not kept
_HEADER_FRAME = len(b": \r\n")
_CHUNK = 512  # body chunks of that size or more have their framing for free
_CLOSE: Header = (b"connection", b"close")


class HttpExchange:
    """A request and the way to answer it. Event-loop thread only.

    Sending never waits for the client to read; `unread_bytes` is how much it has not read.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        method: str,
        path: str,
        headers: dict[bytes, bytes],
        *,
        query: bytes = b"",
        writable: asyncio.Event,
        chunked: bool = False,
        keep_alive: bool = False,
        on_end: Callable[[], None] = lambda: None,
        on_pause: Callable[[], None] = lambda: None,
    ) -> None:
        """`chunked` is whether the client knows chunks, which HTTP/1.0 has not.

        `on_pause` is called whenever no more of the body is read until the rest is taken.
        """
        self.method = method
        self.path = path
        self.request_id = secrets.token_hex(8)  # the server's own, from the beginning
        self.query = query  # behind the path's question mark, encoded
        self.keep_alive = keep_alive
        self.started = False  # to be answered
        self.is_counted = False  # among the application's requests, with its end
        self.answer_headers: dict[bytes, bytes] = {}  # of its answer, whatever that will be
        self.writable = writable  # while the client reads what it is sent
        self._transport = transport
        self.headers = headers  # of the request, by their names in lower case
        self._chunked = chunked
        self._on_end = on_end
        self._on_pause = on_pause
        self._head = b""  # of an answer in parts, until the first one is sent
        self._parts: list[bytes] = []  # of the request's body
        self._size = 0
        self._max_bytes = self._max_dropped_bytes = 1 << 62
        self._body_ended = asyncio.Event()
        self._part_came: asyncio.Event | None = None  # of a body that is read in parts
        self._is_whole = False  # the body is wanted in one piece
        self._is_paused = False
        self._waiting_bytes = self._size_seen = 0

    async def body(self, max_bytes: int, max_dropped_bytes: int) -> bytes | None:
        """The request's body; None when it is larger.

        max_dropped_bytes: of a larger body, read and dropped, because a client that still sends
        when its connection is closed does not see the answer.
        """
        self._max_bytes, self._max_dropped_bytes = max_bytes, max_dropped_bytes
        self._is_whole = True
        if not self._body_ended.is_set():
            self._continue()
            self.resume()
            await self._body_ended.wait()
        return b"".join(self._parts) if self._size <= max_bytes else None

    @contextlib.contextmanager
    def body_parts(self) -> Iterator[AsyncIterator[bytes]]:
        """The request's body as it comes, whatever its size; no more is read while parts wait.

        What of it comes after the block is dropped.
        """
        came = self._part_came = asyncio.Event()
        self._continue()
        try:
            yield self._body_parts(came)
        finally:
            self._max_bytes = -1
            self._parts.clear()
            self.resume()

    async def _body_parts(self, came: asyncio.Event) -> AsyncIterator[bytes]:
        while self._parts or not self._body_ended.is_set():
            if self._parts:
                whole = b"".join(self._parts)
                self._parts.clear()
                self._waiting_bytes = 0
                self.resume()
                yield whole
            else:
                came.clear()
                await came.wait()

    def has_progressed(self) -> bool:
        """Whether enough of a body that is read in parts has arrived since the last call."""
        more, self._size_seen = self._size - self._size_seen, self._size
        return self._part_came is not None and (self._is_paused or more >= MIN_BODY_BYTES)

    def _continue(self) -> None:
        if self._chunked and self.headers.get(b"expect", b"").lower() == b"100-continue":
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def resume(self) -> None:
        """Reads on where that was paused."""
        if self._is_paused and not self._transport.is_closing():
            self._transport.resume_reading()
        self._is_paused = False

    def feed(self, part: bytes) -> None:
        """Takes a part of the body, and no more than MAX_WAITING_BYTES before it is asked for."""
        self._size += len(part)
        if self._size <= self._max_bytes:
            self._parts.append(part)
            self._waiting_bytes += len(part)
            if self._part_came is not None:
                self._part_came.set()
            if self._waiting_bytes > MAX_WAITING_BYTES and not self._is_whole:
                self._is_paused = True
                self._transport.pause_reading()
                self._on_pause()
        else:
            self._parts.clear()
            if self._size > self._max_dropped_bytes:
                self._body_ended.set()

    def feed_end(self) -> None:
        """All of the body has come."""
        self._body_ended.set()
        if self._part_came is not None:
            self._part_came.set()
        self.resume()  # before a request behind it may pause reading

    async def drained(self, timeout_s: float) -> bool:
        """Waits while the client does not read; hangs up, and returns False, after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.writable.wait()
        except TimeoutError:
            self.abort()
            return False
        return True

    @property
    def unread_bytes(self) -> int:
        """The size of the connection's write buffer."""
        return self._transport.get_write_buffer_size()

    def answer(
        self, status: int, body: bytes, headers: Sequence[Header] = (), kind: Header = JSON_TYPE
    ) -> None:
        """Sends all of an answer."""
        if status != 204:
            headers = [kind, (b"content-length", b"%d" % len(body)), *headers]
        head = self._begin(status, headers)
        self._end(head if self.method == "HEAD" else head + body)

    def start(self, status: int, headers: Sequence[Header]) -> None:
        """Begins an answer in parts: status and headers leave with the first of them."""
        if self._chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._head = self._begin(status, headers)

    def write(self, part: bytes) -> None:
        """Sends a part, which must not be empty."""
        if self._chunked:
            part = b"%x\r\n%b\r\n" % (len(part), part)
        if self._head:
            part, self._head = self._head + part, b""
        self._send(part)

    def end(self, part: bytes) -> None:
        """Sends the last part, which must not be empty."""
        if self._chunked:
            part = b"%x\r\n%b\r\n0\r\n\r\n" % (len(part), part)
        self._end(self._head + part)

    def abort(self) -> None:
        """Hangs up in the middle of an answer, so that the client sees that it is not whole."""
        self._transport.abort()

    def _begin(self, status: int, headers: Sequence[Header]) -> bytes:
        self.started = True
        headers = [*headers, *self.answer_headers.items()]
        if _CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append(_CLOSE)
        return _head(status, headers)

    def _end(self, data: bytes) -> None:
        if self.unread_bytes > _MAX_KEPT_UNREAD_BYTES:
            self.keep_alive = False
        self._send(data)
        self._on_end()

    def _send(self, data: bytes) -> None:
        if not self._transport.is_closing():  # uvloop's transport raises then
            self._transport.write(data)


Answer = Callable[[HttpExchange], Coroutine[Any, Any, None]]
# Formats an error as the answer; without an exchange, that to a connection, or to what is no HTTP.
FailureAt = Callable[[HttpExchange | None, Exception], Failure]


_inherited: dict[int, socket.socket] = {}  # listening, by their ports


def inherit(descriptors: Iterable[int]) -> None:
    """Makes `listen` return these listening sockets of the parent process for their ports.

    What waits there is never lost: the process that follows this one has the same sockets.
    """
    for descriptor in descriptors:
        listener = socket.socket(fileno=descriptor)
        _inherited[listener.getsockname()[1]] = listener


def listen(
    host: str, port: int, purpose: str, option: str, *, shared: bool = False
) -> socket.socket:
    """A socket for `serving`, perhaps of a port `shared` with processes; port 0 takes a free one.

    It listens at once, so that a port in use is a ConfigError, which names `option`, before
    anything has begun.
    """
    if listener := _inherited.pop(port, None):
        return listener
    try:
        family, address = listening.resolve(host, port)
        both = family == socket.AF_INET6  # "::" takes IPv4 too
        listener = socket.create_server(
            address, family=family, backlog=_BACKLOG, dualstack_ipv6=both, reuse_port=shared
        )
        # Connections inherit it: without, a stream's second chunk waits for a delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_NOT_SENT_BYTES)
    except OSError as error:
        raise listening.refusal(host, port, error, option, purpose) from error
    return listener


@contextlib.asynccontextmanager
async def serving(
    answer: Answer,
    listener: socket.socket,
    max_connections: int,
    allowed_hosts: Collection[str] = (),
    *,
    plain: bool = False,
    failure_at: FailureAt = lambda exchange, error: failure_of(error),
) -> AsyncIterator[Port]:
    """Has every request answered while inside; at the end what is being answered may finish.

    A client that hangs up cancels its answer. There are at most `max_connections`, and at most half
    as many as the process may open files. On a loopback address, and with `allowed_hosts`, requests
    must be for this host or one of those: see `is_allowed_host`. `plain` is without TLS, also where
    this process has it.
    """
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    credentials = tls.Credentials() if plain else tls.current()
    host, number = listener.getsockname()[:2]
    checked = allowed_hosts or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    url = f"{'https' if credentials.serves else 'http'}://{join_address(host, number)}"
    port = Port(url, answer, min(max_connections, max_files // 2), failure_at)
    if checked and "*" not in allowed_hosts:
        port.allowed_hosts = {*allowed_hosts, socket.gethostname().lower()}
    if port.max_connections < max_connections:
        log.warning(
            "%s takes %d connections at most, not %d: the process may open %d files (ulimit -n)",
            url, port.max_connections, max_connections, max_files,
        )  # fmt: skip
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(port),
        sock=listener,
        backlog=_BACKLOG,
        ssl=credentials.context() if credentials.serves else None,
        ssl_handshake_timeout=HEADERS_TIMEOUT_S if credentials.serves else None,
    )
    port.on_leave = server.close
    try:
        yield port
    finally:
        port.leaves = True
        await asyncio.sleep(_ACCEPT_S)
        port.leave()
        listener.close()
        await port.ended()
        for connection in tuple(port.connections):
            connection.transport.abort()  # which cancels its task
        await port.ended()


@dataclass
class Port:
    """What the connections to one port share."""

    url: str
    answer: Answer
    max_connections: int
    failure_at: FailureAt
    allowed_hosts: Collection[str] | None = None  # beside this host's own names; None: any
    connections: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    on_leave: Callable[[], None] = lambda: None
    leaves: bool = False  # each answer says that its connection closes

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises HttpError for a request to another host's name.

        A web page may make its own name resolve to this address, and its browser would take our
        answers for those of the page's server (DNS rebinding).
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if self.allowed_hosts is not None and not is_allowed_host(host, self.allowed_hosts):
            raise HttpError(
                403,
                f"the host {quoted(host)} is not served here: call this server by its address, or "
                "start it with --allowed-hosts",
            )

    def leave(self) -> None:
        """Takes no connections any more, and closes each once what it asked is answered."""
        self.on_leave()
        self.leaves = True
        for connection in tuple(self.connections):
            connection.finish()

    async def hand_over(self) -> None:
        """Leaves the listening socket to another process; returns once all connections are closed.

        Where the client expects a connection to stay, its next request is answered here, and the
        answer says that the connection closes: a client never sends into one that is closing.
        """
        self.on_leave()
        self.leaves = True
        for connection in tuple(self.connections):
            connection.finish_with_next()
        while self.connections:
            await asyncio.wait([connection.closed for connection in self.connections])

    async def ended(self) -> None:
        """Returns once all that is open now has ended, or after a moment.

        The moment is a number of turns, of which a process that gets no processor has none.
        """
        for _ in range(_STOP_TURNS):
            ends = [*self.tasks, *(connection.closed for connection in self.connections)]
            if not ends:
                return
            await asyncio.wait(ends, timeout=_STOP_TURN_S)


def is_allowed_host(host: str, allowed: Collection[str]) -> bool:
    """Whether a Host header is an address, a name of this host, or one of the `allowed` names.

    Names below .internal are private networks', as Docker's for its host; no page has one.
    """
    name = re.sub(r":\d*$", "", host).rstrip(".").lower()
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    is_own = name in ("", "localhost") or name.endswith((".localhost", ".internal"))
    return is_own or name in allowed


class Connection(asyncio.Protocol):
    """A client's connection: parses its requests, and has them answered one after the other."""

    transport: asyncio.Transport

    def __init__(self, port: Port) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._exchanges: deque[HttpExchange] = deque()  # the first one is being answered
        self._answering: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._expected = "request"  # what comes next, or headers or body
        self._body_head = b""  # what a body follows that the parser will not see as one
        self._timed = ""  # what the timer is for
        self._timer: asyncio.TimerHandle | None = None
        self._bytes_left = MAX_HEADER_BYTES  # of what comes, which may have several requests
        self._head_left, self._headers_left = MAX_HEADER_BYTES, MAX_HEADERS
        self._looks = False  # for the client's end
        self._ends = False  # with what has been asked: what else comes is not read
        self.closed = self._loop.create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes it, or refuses one too many."""
        self.transport = transport
        self._port.connections.add(self)
        if len(self._port.connections) > self._port.max_connections:
            self._refuse(ServerFull("too many connections", 1.0))
        else:
            self._expect("request", HEADERS_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has closed the connection: cancels its request."""
        self.closed.set_result(None)
        self._expect("", 0.0)
        self._port.connections.discard(self)
        if self._exchanges and self._answering:
            self._answering.cancel()
        del self._parser, self._answering  # both refer to the connection, which is freed at once

    def data_received(self, data: bytes) -> None:
        """Parses what has come, a quarter MiB at most, and looks at the limits."""
        if self._ends:
            return
        try:
            self._bytes_left -= len(data)
            self._parse(data)
            if self._bytes_left < 0:
                raise _OverLimit("bytes")
        except (httptools.HttpParserError, _OverLimit) as error:
            if not self._ends:
                self._refuse(_parse_error(error))
            return
        expected = "" if self._expected == "request" and self._exchanges else self._expected
        if expected != self._timed:
            self._expect(expected, BODY_TIMEOUT_S if expected == "body" else HEADERS_TIMEOUT_S)

    def _parse(self, data: bytes) -> None:
        """Nothing is upgraded: a request that asks for that is answered as any other.

        Java's client asks for HTTP/2 with every request. The parser takes one as ended behind its
        headers; the headers about a body are given to it again, alone.
        """
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as ended:
                data = self._body_head + data[ended.args[0] :]
                self._body_head = b""

    def pause_writing(self) -> None:
        """The write buffer is full: the client does not read."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The client has read most of the write buffer."""
        self._writable.set()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._expected == "body":  # whose headers were taken already
            return
        self._url, self._headers = b"", {}
        self._expected = "headers"
        self._bytes_left = self._head_left = MAX_HEADER_BYTES
        self._headers_left = MAX_HEADERS

    def on_url(self, part: bytes) -> None:
        self._take(len(part))
        self._url += part

    def _take(self, num_bytes: int) -> None:
        """Counts parsed bytes that are not of a body."""
        self._head_left -= num_bytes
        if self._head_left < 0:
            raise _OverLimit("bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; one that is repeated is a list (RFC 9110, 5.2).

        Trailers, which would replace those that were acted on, are dropped.
        """
        self._headers_left -= 1
        if self._headers_left < 0:
            raise _OverLimit("headers")
        self._take(len(name) + len(value) + _HEADER_FRAME)
        if self._expected != "headers":
            return
        name = name.lower()
        if (before := self._headers.get(name)) is not None:
            if name in _SINGLE:
                raise HttpError(400, f"the request has more than one header {name.decode()}")
            value = before + b", " + value
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        """The request can be answered, or waits for those before it."""
        if self._expected == "body":
            return
        if len(self._exchanges) > MAX_PIPELINED:
            raise _OverLimit("pipelined requests")
        self._expect("", 0.0)
        is_1_1 = self._parser.get_http_version() == "1.1"
        url = httptools.parse_url(self._url)
        if self._parser.should_upgrade():
            self._body_head = _body_head(self._headers)
        self._expected = "body"
        exchange = HttpExchange(
            self.transport,
            self._parser.get_method().decode(),
            unquote(url.path.decode("ascii")),
            self._headers,
            query=url.query or b"",
            writable=self._writable,
            chunked=is_1_1,
            keep_alive=is_1_1 and self._parser.should_keep_alive() and not self._port.leaves,
            on_end=self._on_answered,
            on_pause=self._look,
        )
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._start()
        else:
            self.transport.pause_reading()
            self._look()

    def on_body(self, body: bytes) -> None:
        """A part of a body: its own limit is the application's."""
        self._bytes_left += len(body) + len(body) // _CHUNK * 8
        if self._exchanges:  # else it has been answered
            self._exchanges[-1].feed(body)

    def on_message_complete(self) -> None:
        """All of a request has come."""
        if self._body_head:  # only its headers have
            return
        self._expected, self._bytes_left = "request", MAX_HEADER_BYTES
        if self._exchanges:
            self._exchanges[-1].feed_end()
            self._ends = not self._exchanges[-1].keep_alive

    def _look(self) -> None:
        """Polls for the client's disconnect, which is not reported while nothing is read."""
        if not self._looks:
            self._looks = True
            self._loop.call_later(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._looks = False
        if self.transport.is_closing() or self.transport.is_reading():
            return
        info = self.transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, 1
        )
        if info[0] == _ESTABLISHED:
            self._look()
        else:
            self.transport.abort()

    def finish(self) -> None:
        """Closes it once what has been asked is answered, also what was not read yet."""
        if self._exchanges:
            self._exchanges[-1].keep_alive = False
        elif not self.transport.is_closing() and self._has_unread:  # closing would reset it
            self._expect(self._timed, LEAVE_S)
        else:
            self._hang_up()

    def finish_with_next(self) -> None:
        """Closes it behind the next answer that can say so, or where no request comes."""
        if not self._exchanges:
            if self._expected == "request":
                self._expect(self._timed, LEAVE_S)
        elif not self._exchanges[-1].started:
            self._exchanges[-1].keep_alive = False

    def _start(self) -> None:
        self._answering = self._loop.create_task(self._answer(self._exchanges[0]))
        self._port.tasks.add(self._answering)
        self._answering.add_done_callback(self._port.tasks.discard)

    async def _answer(self, exchange: HttpExchange) -> None:
        try:
            self._port.check_host(exchange.headers)
            await self._port.answer(exchange)
        except ENDINGS as end:
            without_frames(end)
            raise
        except BaseException as error:
            if exchange.started:
                log.exception("%s %s: the answer broke off", exchange.method, exchange.path)
                self._hang_up()
            else:
                failure = self._port.failure_at(exchange, as_exception(error))
                exchange.answer(failure.status, failure.body, failure.headers)
            without_frames(error)

    def _on_answered(self) -> None:
        """An answer is out; what is left of its request is not waited for."""
        exchange = self._exchanges.popleft()
        if not exchange.keep_alive:
            self._hang_up(UNREAD_S)
        elif self.transport.is_closing():
            return
        elif self._exchanges:
            self._start()
            if len(self._exchanges) == 1:
                self.transport.resume_reading()
        elif self._expected == "request":
            self._expect("next request", LEAVE_S if self._port.leaves else KEEP_ALIVE_S)
        elif self._expected == "body":
            exchange.resume()
            self._expect("body", LINGER_S)

    @property
    def _waits_for_us(self) -> bool:
        """Whether the client waits for an answer that does not wait for its request's body."""
        if self._expected == "body" and len(self._exchanges) == 1:
            return self._exchanges[0].started
        return bool(self._exchanges)

    @property
    def _has_unread(self) -> bool:
        """Whether the socket has unread bytes."""
        descriptor = self.transport.get_extra_info("socket").fileno()
        (waiting,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
        return bool(waiting)

    def _expect(self, what: str, seconds: float) -> None:
        """Starts the time that is left for what is to come next."""
        if self._timer is not None:
            self._timer.cancel()
        self._timed = "" if self.closed.done() else what
        due_s = self._loop.time() + seconds
        later = self._loop.call_at
        self._timer = later(due_s, self._too_late, seconds, due_s) if self._timed else None

    def _too_late(self, seconds: float, due_s: float) -> None:
        if self.transport.is_closing():
            self.transport.abort()  # the client does not read the end
        elif self._waits_for_us or (self._exchanges and self._exchanges[-1].has_progressed()):
            self._expect(self._timed, seconds)
        elif self._expected == "request":
            # It came while the loop was busy, or may come yet where a whole machine stood still.
            if self._has_unread or self._loop.time() > due_s + _STALL_S:
                self._expect(self._timed, LINGER_S)
            else:
                self._hang_up()
        else:
            self._refuse(HttpError(408, f"the {self._expected} took more than {seconds:.0f} s"))

    def _refuse(self, error: Exception) -> None:
        """Sends the reason, unless that would land within or behind an answer, and hangs up."""
        answered = self._expected == "body" and not self._exchanges
        if not answered and not self._waits_for_us:
            exchange = self._exchanges[0] if self._exchanges else None
            failure = self._port.failure_at(exchange, error)
            length = (b"content-length", b"%d" % len(failure.body))
            head = _head(failure.status, [*failure.headers, JSON_TYPE, length, _CLOSE])
            self.transport.write(head + failure.body)
        self._hang_up()

    def _hang_up(self, linger_s: float = LINGER_S) -> None:
        """Closes; abruptly if the client does not read what it was sent."""
        self._ends = True
        self.transport.close()
        self._expect("close", linger_s)


def _body_head(headers: Mapping[bytes, bytes]) -> bytes:
    """The head of a request with the same body, and nothing else; empty where there is none."""
    framing = b"transfer-encoding" if b"transfer-encoding" in headers else b"content-length"
    if not headers.get(framing, b"0").strip(b"0"):
        return b""
    return b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % (framing, headers[framing])


class _OverLimit(Exception):
    """A request is over a limit."""


def _parse_error(error: Exception) -> HttpError:
    """The answer to a request that cannot be parsed, or has too much of something."""
    cause = error if isinstance(error, _OverLimit) else error.__context__
    if isinstance(cause, HttpError):
        return cause
    if isinstance(cause, _OverLimit):
        limits = f"{MAX_HEADERS} headers, {MAX_HEADER_BYTES >> 10} KiB without its body"
        return HttpError(431, f"too many {cause} in the request: at most {limits}")
    return HttpError(400, f"the request is not HTTP: {error}")


def _head(status: int, headers: Iterable[Header]) -> bytes:
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"%b%b\r\n" % (_status_line(status, int(time.time())), lines)


@functools.lru_cache(maxsize=64)
def _status_line(status: int, now: int) -> bytes:
    """The first line of an answer, and its date."""
    date = formatdate(now, usegmt=True)
    return f"HTTP/1.1 {status} {responses.get(status, '')}\r\ndate: {date}\r\n".encode()
