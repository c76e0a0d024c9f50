"""What every gRPC client and server here has in common: options, status codes, graceful stop.

The one table between `baton.errors` and gRPC status lives here. Retry advice and bad fields travel
as google.rpc RetryInfo and BadRequest details, as clients of any language expect.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import wraps
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from baton import errors

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
# Without SO_REUSEPORT a second server on the same port fails at once instead of sharing it.
SERVER_OPTIONS = [*OPTIONS, ("grpc.so_reuseport", 0)]

_STATUS_DETAILS = "grpc-status-details-bin"

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

T = TypeVar("T")


def code_of(error: BaseException) -> grpc.StatusCode:
    """The status code a caller sees for `error`."""
    for cls, code in _CODES:
        if isinstance(error, cls):
            return code
    return grpc.StatusCode.INTERNAL


def error_of(rpc_error: grpc.RpcError) -> errors.BatonError:
    """The error that a failed call stands for, with its retry advice and bad field."""
    code, text = rpc_error.code(), rpc_error.details() or ""
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


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """Ends the current call with the status of `error`."""
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL and not isinstance(error, errors.BatonError):
        log.exception("unexpected error in an RPC", exc_info=error)
        text = f"unexpected {type(error).__name__}: {error}"
    else:
        text = str(error)
    await context.abort(code, text, trailing_metadata=_write_details(code, error, text))
    raise AssertionError("abort returned")


def unary(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Wraps a servicer method that answers or writes, so that what it raises becomes its status."""

    @wraps(method)
    async def call(self: Any, request: Any, context: Any) -> T:
        try:
            return await method(self, request, context)
        except Exception as error:
            await abort(context, error)

    return call


def streaming(method: Callable[..., AsyncIterator[T]]) -> Callable[..., AsyncIterator[T]]:
    """Wraps a server-streaming servicer method so that what it raises becomes its status."""

    @wraps(method)
    async def call(self: Any, request: Any, context: Any) -> AsyncIterator[T]:
        responses = method(self, request, context)
        try:
            async for response in responses:
                yield response
        except Exception as error:
            await abort(context, error)
        finally:
            await responses.aclose()  # type: ignore[attr-defined]

    return call


def channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """An asyncio channel with our options; insecure unless credentials are given."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=OPTIONS)


def _write_details(
    code: grpc.StatusCode, error: BaseException, text: str
) -> tuple[tuple[str, bytes], ...]:
    details: list[any_pb2.Any] = []
    if isinstance(error, errors.RetryableError) and error.retry_after_s > 0:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    if isinstance(error, errors.InvalidRequest) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=str(error)
        )
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if (name := type(error).__name__) in _NAMED:
        details.append(_packed(error_details_pb2.ErrorInfo(reason=name, domain=_DOMAIN)))
    if not details:
        return ()
    status = status_pb2.Status(code=code.value[0], message=text, details=details)
    return ((_STATUS_DETAILS, status.SerializeToString()),)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


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
