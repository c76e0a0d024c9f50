"""Errors as HTTP answers, in OpenAI's format: the one table from `baton.errors` to statuses."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass

from baton import errors

log = logging.getLogger(__name__)

Header = tuple[bytes, bytes]
JSON_TYPE: Header = (b"content-type", b"application/json")
CONTEXT_OVERFLOW = "context_length_exceeded"  # OpenAI's; agents shorten their prompts then
CLIENT_GONE = 499  # nginx's; no client reads it


class HttpError(Exception):
    """An error of HTTP alone, such as a body that is too large."""

    def __init__(self, status: int, message: str, headers: tuple[Header, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class ServerFull(errors.Unavailable):
    """The server has as many connections, or requests, as it may."""


_INVALID, _SERVER = "invalid_request_error", "server_error"
# (status, type, code) of each error; the first match wins.
_STATUSES: list[tuple[type[Exception], tuple[int, str, str | None]]] = [
    (errors.ContextOverflow, (400, _INVALID, CONTEXT_OVERFLOW)),
    (errors.InvalidRequest, (400, _INVALID, None)),
    (errors.ModelNotFound, (404, _INVALID, "model_not_found")),
    (errors.Unauthenticated, (401, "authentication_error", "invalid_api_key")),
    (errors.Overloaded, (429, "rate_limit_error", "rate_limit_exceeded")),
    (errors.Unavailable, (503, "service_unavailable_error", "unavailable")),
    (errors.DeadlineExceeded, (504, "timeout_error", "deadline_exceeded")),
    (errors.Cancelled, (CLIENT_GONE, "cancelled_error", "cancelled")),
    (errors.BatonError, (500, _SERVER, None)),
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
        kind = _INVALID if error.status < 500 else _SERVER
        status, code, headers = error.status, None, error.headers
    elif isinstance(error, errors.BatonError):
        status, kind, code = next(row for cls, row in _STATUSES if isinstance(error, cls))
        if isinstance(error, errors.ModelNotFound):
            param = error.field
        elif isinstance(error, errors.InvalidRequest):
            param = error.field or None
            if isinstance(error, errors.ContextOverflow):  # clients look for OpenAI's words, too
                text = f"This model's maximum context length is {error.max_context} tokens. " + (
                    f"However, {text}"
                )
        elif isinstance(error, errors.Unauthenticated):
            headers = ((b"www-authenticate", b"Bearer"),)
        elif isinstance(error, errors.RetryableError):
            # Retry-After has whole seconds; OpenAI's clients prefer the other one.
            headers = ((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))),)
            if error.retry_after_s > 0:
                headers += ((b"retry-after-ms", b"%d" % (error.retry_after_s * 1000)),)
    else:
        status, kind, code = 500, _SERVER, None
        log.error("unexpected error in an HTTP request", exc_info=error)
        text = f"unexpected {type(error).__name__}: {error}"
    details = {"message": text, "type": kind, "param": param, "code": code}
    return Failure(status, headers, json.dumps({"error": details}, separators=(",", ":")).encode())
