"""One HTTP exchange on plain ASGI: its body in, its answer out, and errors in OpenAI's format.

The one table between `baton.errors` and HTTP statuses is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

from baton import errors
from baton.errors import Cancelled, InvalidRequest
from baton.gateway.api import Error, ErrorDetails
from router.frontend import Caller, Unread

log = logging.getLogger(__name__)

Header = tuple[bytes, bytes]
# ASGI's.
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]

JSON_TYPE: Header = (b"content-type", b"application/json")
# Where the server puts its `Connection` and uvicorn's cycle of the request into the scope.
CONNECTION, CYCLE = "baton.connection", "baton.cycle"
EVENTS_TYPE: Header = (b"content-type", b"text/event-stream; charset=utf-8")
NO_CACHE: Header = (b"cache-control", b"no-cache")
TIMEOUT_HEADER = "x-request-timeout"
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86400.0
CLIENT_GONE = 499  # nginx's; no client reads it
_TRACEPARENT = re.compile(rb"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class ClientGone(Cancelled):
    """The client has closed its connection: an answer would not be read."""


class HttpExchange:
    """A request and the way to answer it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._connection, self._cycle = scope[CONNECTION], scope[CYCLE]
        self._unread = Unread()
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self.started = False

    @property
    def caller(self) -> Caller:
        """Key, trace and deadline. Raises InvalidRequest for a time that is none."""
        headers = self._headers
        metadata: list[tuple[str, str | bytes]] = [
            (name.decode(), headers[name].decode("latin-1"))
            for name in (b"traceparent", b"tracestate")
            if name in headers
        ]
        if (key := headers.get(b"authorization")) is not None:
            metadata.append(("authorization", key))
        return Caller(tuple(metadata), self._time_left_s())

    def header(self, name: bytes) -> bytes:
        """A request header's value; empty where there is none."""
        return self._headers.get(name, b"")

    def id_headers(self, request_id: str = "", trace_id: str = "") -> list[Header]:
        """Response headers that name the request and its trace."""
        found = _TRACEPARENT.fullmatch(self.header(b"traceparent"))
        headers = [(b"x-request-id", request_id.encode())] if request_id else []
        if found:
            headers += [(b"x-trace-id", found[1]), (b"traceparent", found[0])]
        elif trace_id:
            headers.append((b"x-trace-id", trace_id.encode()))
        return headers

    async def body(self, most_bytes: int, dropped_bytes: int) -> bytes | None:
        """The request's body; None when it is larger. Raises ClientGone when the client leaves.

        Of a larger one so much is read all the same, and dropped: a client that still sends when
        its connection is closed does not see the answer.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left while it sent its request")
            size += len(part := message.get("body", b""))
            if size > most_bytes:
                parts.clear()
                if size > dropped_bytes or not message.get("more_body", False):
                    return None
                continue
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts) if len(parts) > 1 else part

    def start(self, status: int, headers: list[Header]) -> None:
        """Sends status and headers."""
        self.started = True
        self._send_now({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes) -> None:
        """Sends a part of the body. Raises Cancelled where the client leaves too much unread."""
        self._unread.add(self._connection.unread_bytes, len(data))
        self._send_now({"type": "http.response.body", "body": data, "more_body": True})

    def end(self, data: bytes) -> None:
        """Sends the last part of the body."""
        self._connection.ends_answer()
        self._send_now({"type": "http.response.body", "body": data, "more_body": False})

    def answer(
        self, status: int, body: bytes, headers: list[Header], kind: Header = JSON_TYPE
    ) -> None:
        """Sends all of an answer."""
        length = (b"content-length", b"%d" % len(body))
        self.start(status, [kind, length, *headers])
        self.end(body)

    @contextlib.asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancels what runs inside, and raises ClientGone, when the client hangs up.

        Leave it without waiting for anything after the answer's last part.
        """
        task, gone = asyncio.current_task(), False
        assert task is not None

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        watching = asyncio.create_task(watch(), name="http client")
        try:
            yield
        except asyncio.CancelledError:
            if gone and not task.uncancel():
                raise ClientGone("the client has gone") from None
            raise
        finally:
            watching.cancel()

    def _send_now(self, message: MutableMapping[str, Any]) -> None:
        """Sends at once: what the client does not read stays in the connection's write buffer."""
        self._connection.unpause()
        if self._connection.is_closing:
            self._cycle.disconnected = True  # which uvicorn learns a moment later: it drops this
        try:
            self._send(message).send(None)
        except StopIteration:
            return
        raise RuntimeError("the server waits though its connection is not paused")

    def _time_left_s(self) -> float | None:
        text = self._headers.get(TIMEOUT_HEADER.encode())
        if text is None:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not MIN_TIMEOUT_S <= seconds <= MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"{TIMEOUT_HEADER} must be seconds between {MIN_TIMEOUT_S} and {MAX_TIMEOUT_S:.0f}",
                TIMEOUT_HEADER,
            )
        return seconds


class HttpError(Exception):
    """An error of HTTP alone, such as a body that is too large."""

    def __init__(self, status: int, message: str, headers: tuple[Header, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


_INVALID = "invalid_request_error"
# (status, type, code) of each error; the first match wins.
_STATUSES: list[tuple[type[Exception], tuple[int, str, str | None]]] = [
    (errors.InvalidRequest, (400, _INVALID, None)),
    (errors.ModelNotFound, (404, _INVALID, "model_not_found")),
    (errors.Unauthenticated, (401, "authentication_error", "invalid_api_key")),
    (errors.Overloaded, (429, "rate_limit_error", "rate_limit_exceeded")),
    (errors.Unavailable, (503, "service_unavailable_error", "unavailable")),
    (errors.DeadlineExceeded, (504, "timeout_error", "deadline_exceeded")),
    (errors.Cancelled, (CLIENT_GONE, "cancelled_error", "cancelled")),
    (errors.BatonError, (500, "server_error", None)),
]


@dataclass(frozen=True)
class Failure:
    """An error as a caller gets it."""

    status: int
    headers: tuple[Header, ...]
    body: bytes  # {"error": {…}}


def failure_of(error: Exception) -> Failure:
    """Status, headers and body for `error`; an unexpected one is logged."""
    text, param = str(error), None
    headers: tuple[Header, ...] = ()
    if isinstance(error, HttpError):
        status, kind, code, headers = error.status, _INVALID, None, error.headers
    elif isinstance(error, errors.BatonError):
        status, kind, code = next(row for cls, row in _STATUSES if isinstance(error, cls))
        if isinstance(error, errors.ModelNotFound):
            param = "model"
        elif isinstance(error, errors.InvalidRequest):
            param = error.field or None
        elif isinstance(error, errors.Unauthenticated):
            headers = ((b"www-authenticate", b"Bearer"),)
        elif isinstance(error, errors.RetryableError):
            # Retry-After has whole seconds; OpenAI's clients prefer the other one.
            headers = ((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))),)
            if error.retry_after_s > 0:
                headers += ((b"retry-after-ms", b"%d" % (error.retry_after_s * 1000)),)
    else:
        status, kind, code = 500, "server_error", None
        log.error("unexpected error in an HTTP request", exc_info=error)
        text = f"unexpected {type(error).__name__}: {error}"
    body = msgspec.json.encode(Error(ErrorDetails(text, kind, param, code)))
    return Failure(status, headers, body)
