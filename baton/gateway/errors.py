"""The one table between `baton.errors` and HTTP, in OpenAI's shape."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass

from baton import errors
from baton.gateway.wire import Header

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx's; nobody reads it


class HttpError(Exception):
    """What only HTTP knows to be wrong, as a body that is too large."""

    def __init__(self, status: int, message: str, headers: tuple[Header, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


@dataclass(frozen=True)
class _Kind:
    status: int
    type: str
    code: str | None = None


_INVALID = "invalid_request_error"
# First match wins.
_KINDS: list[tuple[type[errors.BatonError], _Kind]] = [
    (errors.InvalidRequest, _Kind(400, _INVALID)),
    (errors.ModelNotFound, _Kind(404, _INVALID, "model_not_found")),
    (errors.Unauthenticated, _Kind(401, "authentication_error", "invalid_api_key")),
    (errors.Overloaded, _Kind(429, "rate_limit_error", "rate_limit_exceeded")),
    (errors.Unavailable, _Kind(503, "service_unavailable_error", "unavailable")),
    (errors.DeadlineExceeded, _Kind(504, "timeout_error", "deadline_exceeded")),
    (errors.Cancelled, _Kind(CLIENT_GONE, "cancelled_error", "cancelled")),
]
_INTERNAL = _Kind(500, "server_error")


@dataclass(frozen=True)
class Failure:
    """An error as a caller gets it."""

    status: int
    headers: tuple[Header, ...]
    body: bytes  # {"error": {…}}


def failure_of(error: Exception) -> Failure:
    """Status, headers and body that stand for `error`; one that nobody expected is logged."""
    kind, headers = _kind_of(error), _headers(error)
    text = str(error)
    if kind is _INTERNAL and not isinstance(error, errors.BatonError):
        log.error("unexpected error in an HTTP request", exc_info=error)
        text = f"unexpected {type(error).__name__}: {error}"
    told = {"message": text, "type": kind.type, "param": _param(error), "code": kind.code}
    return Failure(kind.status, headers, json.dumps({"error": told}).encode())


def _kind_of(error: Exception) -> _Kind:
    if isinstance(error, HttpError):
        return _Kind(error.status, _INVALID)
    return next((kind for cls, kind in _KINDS if isinstance(error, cls)), _INTERNAL)


def _param(error: Exception) -> str | None:
    if isinstance(error, errors.ModelNotFound):
        return "model"
    return (error.field or None) if isinstance(error, errors.InvalidRequest) else None


def _headers(error: Exception) -> tuple[Header, ...]:
    if isinstance(error, HttpError):
        return error.headers
    if isinstance(error, errors.Unauthenticated):
        return ((b"www-authenticate", b"Bearer"),)
    if not isinstance(error, errors.RetryableError):
        return ()
    # Retry-After has whole seconds; OpenAI's clients prefer the other one where it is there.
    whole = b"%d" % max(1, math.ceil(error.retry_after_s))
    if error.retry_after_s <= 0:
        return ((b"retry-after", whole),)
    return ((b"retry-after", whole), (b"retry-after-ms", b"%d" % (error.retry_after_s * 1000)))
