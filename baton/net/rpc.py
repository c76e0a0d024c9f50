"""What every gRPC client and server here has in common: options, status codes, graceful stop.

The one table between `baton.errors` and gRPC status lives here. Retry advice and bad fields travel
as google.rpc RetryInfo and BadRequest details, as clients of any language expect.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc._cython import cygrpc
from grpc.aio import _server

from baton import config, errors
from baton.log_format import RateLimit
from baton.net import tls

log = logging.getLogger(__name__)

Authorize = Callable[[str, Any], None]  # of a method and a call's context

MAX_MESSAGE_BYTES = 16 << 20
_MIN_REQUEST_BYTES = 2 << 20  # taken however short the context is: several prompts may come at once
_REQUEST_BYTES_PER_TOKEN = 16  # of the context; "151643, " has 8
# Of a process's port. Calls beyond the last are refused before their request is read.
MAX_CONNECTIONS = 4096
MAX_CALLS_OF_A_CONNECTION = 2048
MAX_CALLS = 8192
RECEIVE_S = 60.0  # for a request to come as a whole
SEND_S = 10.0  # for a caller to take what is left of its output, and the status behind it
# For calls on a connection whose client was asked to open another one. A longer stream breaks, and
# the SDK goes on with it elsewhere.
LONGEST_CALL_S = 3600.0

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

_NEVER = (1 << 31) - 1
# Else gRPC ends a connection on which nothing was called for half an hour, and with it the link
# of a pair of workers.
_NEVER_IDLE = ("grpc.client_idle_timeout_ms", _NEVER)
# For a connection that only gRPC watches, to a process that may hang: how long one may take to be
# made, and the answer to any ping. gRPC's 20 s and 60 s would hold calls that another address, or a
# new connection, could answer; its keepalive time-out waits behind a ping that is under way. In 5 s
# a worker was lost three times over (`--silence`).
_UNWATCHED = [("grpc.min_reconnect_backoff_ms", 5_000), ("grpc.http2.ping_timeout_ms", 5_000)]
# For a connection whose one stream has heartbeats: gRPC's own pings, for life and for throughput,
# add half to the cost of a message that comes alone.
_WATCHED = {"grpc.keepalive_time_ms": _NEVER, "grpc.http2.bdp_probe": 0}
_MOST_CALLS_A_TURN = 32
_CALL_TASK = "_schedule_rpc_coro"  # of grpc.aio
_STATUS_DETAILS = "grpc-status-details-bin"
_TOO_LARGE = "message larger than max"  # in gRPC's text, of what is sent or received
_MAX_TEXT_BYTES = 1000  # of a status: metadata of more than 8 KiB may be refused by its receiver

# First match wins when turning an error into a code; the last of equals wins the other way.
_CODES: list[tuple[type[errors.BatonError], grpc.StatusCode]] = [
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.ModelNotFound, grpc.StatusCode.NOT_FOUND),
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled, grpc.StatusCode.CANCELLED),
    (errors.KvMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Stale, grpc.StatusCode.ABORTED),
    (errors.KvCorrupted, grpc.StatusCode.DATA_LOSS),
    (errors.TransferFailed, grpc.StatusCode.INTERNAL),
    (errors.InternalError, grpc.StatusCode.INTERNAL),
]
_ERRORS = {code: cls for cls, code in _CODES}
# An error that shares its code with others travels with its name.
_NAMED = {cls.__name__: cls for cls, code in _CODES if _ERRORS[code] is not cls}
_DOMAIN = "baton"
_ARITY = {False: "unary", True: "stream"}


def max_request_bytes(max_context: int) -> int:
    """Largest request that is read, in any protocol; `max_context` 0 is not known."""
    most = max_context * _REQUEST_BYTES_PER_TOKEN or MAX_MESSAGE_BYTES
    return min(max(most, _MIN_REQUEST_BYTES), MAX_MESSAGE_BYTES)


def _options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        *OPTIONS,
    ]


def code_of(error: BaseException) -> grpc.StatusCode:
    """The status code a caller sees for `error`."""
    for cls, code in _CODES:
        if isinstance(error, cls):
            return code
    return grpc.StatusCode.INTERNAL


def error_class(code: int) -> type[errors.BatonError]:
    """The error that a status code's number stands for."""
    return next((cls for one, cls in _ERRORS.items() if one.value[0] == code), errors.InternalError)


def error_of(rpc_error: grpc.RpcError) -> errors.BatonError:
    """The error that a failed call stands for, with its retry advice and bad field."""
    code, text = rpc_error.code(), rpc_error.details() or ""
    if code is grpc.StatusCode.CANCELLED and text == code.name:
        # gRPC's own word where a server that stops drops a call which no handler has seen.
        return errors.Unavailable("the server stopped before it took the call")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in text:
        return errors.InvalidRequest(text)  # gRPC's own refusal, which no other try would change
    retry_after_s, field, name = _read_details(rpc_error.trailing_metadata() or ())
    cls = _NAMED.get(name) or _ERRORS.get(code, errors.InternalError)
    if issubclass(cls, errors.RetryableError):
        return cls(text, retry_after_s)
    if cls is errors.InvalidRequest:
        return cls(text, field)
    if code not in _ERRORS:
        return errors.InternalError(f"{code.name}: {text}")
    return cls(text)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raises `BatonError` instead of `grpc.RpcError` from the calls made inside."""
    try:
        yield
    except grpc.RpcError as rpc_error:
        raise error_of(rpc_error) from rpc_error


def authorize_role(method: str, context: Any) -> None:
    """Raises Unauthenticated where the caller's certificate is not of a role that may call it."""
    if why := tls.why_refused(method, context.auth_context()):
        raise errors.Unauthenticated(why)


def server(
    authorize: Authorize = authorize_role,
    shared: bool = False,
    max_request_bytes: Callable[[], int] = lambda: MAX_MESSAGE_BYTES,
    reconnect_s: float = 0.0,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """An asyncio server with our options, for which no port is open yet.

    Unless its port is `shared` with other processes, one that is in use is an error at once.
    What a handler of it raises becomes the call's status. Callers for whom `authorize(method,
    context)` raises are refused before their request is read, requests larger than
    `max_request_bytes` before they are parsed.

    `reconnect_s`: age of a connection from which on its client opens another one for new calls,
    perhaps to another process behind the same address; those that run on it may end there. 0: none.
    max_message_bytes: limit of a message of a stream, for handlers that parse bytes themselves.
    """
    options = [
        *_options(max_message_bytes),
        ("grpc.so_reuseport", int(shared)),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_concurrent_streams", MAX_CALLS_OF_A_CONNECTION),
    ]
    if reconnect_s:
        options += [
            ("grpc.max_connection_age_ms", int(reconnect_s * 1000)),
            ("grpc.max_connection_age_grace_ms", int(LONGEST_CALL_S * 1000)),
        ]
    translator = _Translator(authorize, max_request_bytes)
    return _Server(options, translator)  # type: ignore[return-value]  # stubs know its base alone


class _Server(_server.Server):
    """grpc.aio's, with another way to take calls."""

    def __init__(self, options: Sequence[tuple[str, Any]], translator: _Translator) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = _Acceptor(self._loop, None, (), (translator,), options, MAX_CALLS)


class _Acceptor(cygrpc.AioServer):  # type: ignore[misc]
    """Takes the calls that have come by one turn of the event loop together.

    grpc.aio asks its core for one call, and for the next a turn or two later. While turns are long,
    calls pile up where neither admission nor a metric sees them, until the core cancels them after
    30 s.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._requested: deque[asyncio.Future[Any]] = deque()

    async def _request_call(self) -> Any:
        while len(self._requested) < _MOST_CALLS_A_TURN:
            call = asyncio.ensure_future(super()._request_call())
            # When the server stops, those that have not come fail, and are not awaited.
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._requested.append(call)
        return await self._requested.popleft()


def _set_status(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> None:
    """Gives the current call, which must return now, the status of `error`.

    Not by `context.abort`: the context would keep its exception, whose traceback keeps the context
    and with it the request, until a full garbage collection.
    """
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL and not isinstance(error, errors.BatonError):
        log.exception("unexpected error in an RPC", exc_info=error)
        text = f"unexpected {type(error).__name__}: {error}"
    else:
        text = str(error)
    text = text.encode(errors="replace")[:_MAX_TEXT_BYTES].decode(errors="ignore")
    context.set_code(code)
    context.set_details(text)
    if details := _write_details(code, error, text):
        context.set_trailing_metadata(details)


def _end_in_time() -> None:
    """Called within a handler that ends: its call does not outlive it by more than `SEND_S`.

    The status waits behind output, and a caller may give no window for that while it stays
    connected.
    """
    handler = weakref.ref(asyncio.current_task())  # which is freed with its call
    asyncio.get_running_loop().call_later(SEND_S, _let_go, handler)


def _let_go(handler: weakref.ref[Any]) -> None:
    """Cancels a call by its handler's task, if it has not ended.

    grpc.aio has no way to do so. Its core cancels a call that nothing refers to, and who does is
    the call's other task, which watches that of the handler, and the server until its next call.
    """
    if (ended := handler()) is None:
        return
    for task in asyncio.all_tasks():
        coroutine = task.get_coro()
        if getattr(coroutine, "__name__", "") == _CALL_TASK:
            variables = itertools.chain(*map(gc.get_referents, gc.get_referents(coroutine)))
            if any(one is ended for one in variables):
                task.cancel()
    ended.cancel()


class _Malformed(errors.InvalidRequest):
    """Bytes that are no message of the method's request type."""


class _Translator(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Gives what the handlers of a server raise as a status, and checks callers and requests.

    gRPC by itself reads and parses a request, up to 16 MiB of it on the event loop, before any
    handler sees the caller, and waits for it without end. For a malformed one it would answer
    UNKNOWN and log a traceback; here a line is logged now and then.
    """

    def __init__(self, authorize: Authorize, max_request_bytes: Callable[[], int]) -> None:
        self._authorize = authorize
        self._max_request_bytes = max_request_bytes
        self._handlers: dict[str, Any] = {}
        self._log = RateLimit(log)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The handler of a method, wrapped; None for a method that no service has."""
        method = handler_call_details.method
        if (handler := self._handlers.get(method)) is None:
            handler = await continuation(handler_call_details)
            if handler is not None:
                handler = self._handlers[method] = self._wrapped(handler, method)
        return handler

    def _wrapped(self, handler: Any, method: str) -> Any:
        """One that gets its requests as a stream of bytes, and so reads and parses them itself."""
        response_arity = _ARITY[handler.response_streaming]
        behaviour = getattr(handler, f"{_ARITY[handler.request_streaming]}_{response_arity}")

        def parsed(raw: bytes) -> Any:
            if len(raw) > (most := self._max_request_bytes()):
                raise errors.InvalidRequest(f"the request has {len(raw)} bytes, of at most {most}")
            try:
                return handler.request_deserializer(raw)
            except DecodeError:
                text = f"the request of {method} is not a message of its type"
                raise _Malformed(text) from None

        async def all_parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for raw in requests:
                yield parsed(raw)

        async def take(requests: Any, context: Any) -> Any:
            self._authorize(method, context)
            if handler.request_streaming:
                return all_parsed(requests) if handler.request_deserializer else requests
            try:
                async with asyncio.timeout(RECEIVE_S):
                    return parsed(await anext(aiter(requests)))
            except TimeoutError:
                text = f"the request did not come within {RECEIVE_S:.0f} s"
                raise errors.DeadlineExceeded(text) from None
            except StopAsyncIteration:
                raise _Malformed(f"the call of {method} has no request") from None

        async def respond(requests: Any, context: Any) -> Any:
            with self._answering(context):
                return await behaviour(await take(requests, context), context)

        async def stream(requests: Any, context: Any) -> AsyncIterator[Any]:
            with self._answering(context):
                request = await take(requests, context)
                async with contextlib.aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        yield response

        # A method that answers with a stream may also write to its context.
        wrapped = stream if inspect.isasyncgenfunction(behaviour) else respond
        kind = {"request_streaming": True, f"stream_{response_arity}": wrapped}
        return handler._replace(request_deserializer=None, **kind)

    @contextlib.contextmanager
    def _answering(self, context: Any) -> Iterator[None]:
        """Makes what is raised inside the call's status."""
        try:
            yield
        except errors.ENDINGS:
            raise
        except BaseException as error:
            self._failed(context, errors.as_exception(error))
        finally:
            _end_in_time()

    def _failed(self, context: Any, error: Exception) -> None:
        if context.code():  # generated code has set it, for a method that is not implemented
            return
        _set_status(context, error)
        if isinstance(error, _Malformed):
            self._log.warning("%s (from %s)", error, context.peer())


def channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    kind: Any = grpc.aio,
    role: str = "",
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    watched: bool = False,
) -> Any:
    """A channel with our options, of asyncio or `kind` grpc, with this process's credentials.

    What is called must be the cluster's process of that `role`; without one, the address's host.
    Each channel has a connection of its own: where one has fallen silent, another may work. One to
    a role stays connected, also while nothing is called. `watched`: the caller watches whether the
    other end answers; gRPC does not.
    """
    credentials = credentials or tls.current().of_client()
    options = [*([_NEVER_IDLE] if role else []), *_UNWATCHED, *_options(max_message_bytes)]
    if watched:
        options = [*(dict(options) | _WATCHED).items()]
    options.append(("grpc.use_local_subchannel_pool", 1))
    if credentials is None:
        return kind.insecure_channel(address, options=options)
    name = f"{role}.{tls.DOMAIN}" if role else tls.current().server_name
    named = [("grpc.ssl_target_name_override", name)] if name else []
    return kind.secure_channel(address, credentials, options=[*options, *named])


def bearer(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that shows this key; none without one. Raises ConfigError.

    With a key that no header can hold, grpc.aio would send nothing, and wait without end.
    """
    if not api_key:
        return ()
    config.check_api_key(api_key)
    return (("authorization", f"Bearer {api_key}"),)


def _write_details(
    code: grpc.StatusCode, error: BaseException, text: str
) -> tuple[tuple[str, bytes], ...]:
    details: list[Any] = []
    if isinstance(error, errors.RetryableError) and error.retry_after_s > 0:
        details.append(error_details_pb2.RetryInfo())
        details[-1].retry_delay.FromMilliseconds(int(error.retry_after_s * 1000))
    if isinstance(error, errors.InvalidRequest) and error.field:
        details.append(error_details_pb2.BadRequest())
        details[-1].field_violations.add(field=error.field, description=text)
    if (name := type(error).__name__) in _NAMED:
        details.append(error_details_pb2.ErrorInfo(reason=name, domain=_DOMAIN))
    if not details:
        return ()
    status = status_pb2.Status(code=code.value[0], message=text)
    for detail in details:
        status.details.add().Pack(detail)
    return ((_STATUS_DETAILS, status.SerializeToString()),)


def _read_details(metadata: Any) -> tuple[float, str, str]:
    """(retry_after_s, field, error's name) out of a failed call's trailing metadata."""
    retry_after_s, field, name = 0.0, "", ""
    for key, value in metadata:
        if key != _STATUS_DETAILS:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            retry, bad = error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
            elif detail.Unpack(bad) and bad.field_violations:
                field = bad.field_violations[0].field
            elif detail.Unpack(info) and info.domain == _DOMAIN:
                name = info.reason
    return retry_after_s, field, name
