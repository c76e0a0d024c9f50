"""Errors of `baton.errors` as Failure messages and back, for streams that carry several calls."""

from __future__ import annotations

import logging

from baton import errors
from baton.errors import BatonError, InternalError, InvalidRequest, RetryableError
from baton.v1 import dispatch_pb2

log = logging.getLogger(__name__)

_ERRORS = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, BatonError)
}


def failure_of(error: BaseException, handoff_id: str = "") -> dispatch_pb2.Failure:
    """An error as a message; other exceptions are logged and become an InternalError."""
    if not isinstance(error, BatonError):
        log.exception("unexpected error", exc_info=error)
        error = InternalError(f"unexpected {type(error).__name__}: {error}")
    failure = dispatch_pb2.Failure(
        handoff_id=handoff_id,
        error=type(error).__name__,
        text=str(error).encode(errors="replace").decode(),
    )
    if isinstance(error, RetryableError):
        failure.retry_after_ms = int(error.retry_after_s * 1000)
    if isinstance(error, InvalidRequest):
        failure.field = error.field
    return failure


def error_of(failure: dispatch_pb2.Failure) -> BatonError:
    """The error that a message stands for."""
    cls = _ERRORS.get(failure.error, InternalError)
    if issubclass(cls, RetryableError):
        return cls(failure.text, failure.retry_after_ms / 1000)
    if issubclass(cls, InvalidRequest):
        return cls(failure.text, failure.field)
    return cls(failure.text)
