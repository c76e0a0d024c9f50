"""All errors that Baton raises on purpose.

    BatonError
    ├─ InvalidRequest
    │  └─ ContextOverflow
    ├─ ModelNotFound
    ├─ Unauthenticated
    ├─ RetryableError
    │  ├─ Overloaded
    │  └─ Unavailable
    ├─ DeadlineExceeded
    ├─ Cancelled
    ├─ Stale
    ├─ KvMismatch
    ├─ TransferFailed
    │  └─ KvCorrupted
    ├─ InternalError
    └─ ConfigError
       └─ CheckpointError

`baton.net.rpc` maps these classes to gRPC status codes and back, `baton.net.http_errors` to HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import reprlib
from collections.abc import Mapping, Set
from typing import Self

MAX_QUOTED_CHARS = 200
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = MAX_QUOTED_CHARS


def quoted(value: object) -> str:
    """A caller's value for an error message, truncated: it may be megabytes or deeply nested.

    Sets are shown as lists and mappings as dicts.
    """
    if isinstance(value, Set):
        value = list(value)
    elif isinstance(value, Mapping):
        value = dict(value)
    return _repr.repr(value)[:MAX_QUOTED_CHARS]


class BatonError(Exception):
    """Base of all errors; `str()` names the cause and the fix, if there is one.

    `retryable`: the same request may succeed later, at this or another router.
    """

    retryable = False


class InvalidRequest(BatonError):
    """The request is invalid. `field` names the wrong part."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field

    def renamed(self, field: str) -> Self:
        """A copy with the field's name in the caller's protocol."""
        named = copy.copy(self)
        named.field = field
        return named


class ContextOverflow(InvalidRequest):
    """Prompt and output exceed the context of `max_context` tokens."""

    def __init__(self, message: str, field: str = "", max_context: int = 0) -> None:
        super().__init__(message, field)
        self.max_context = max_context


class ModelNotFound(BatonError):
    """The cluster does not serve the requested model. `field` names it in the request."""

    def __init__(self, message: str, field: str = "model") -> None:
        super().__init__(message)
        self.field = field


class Unauthenticated(BatonError):
    """The caller's API key is missing or unknown."""


class RetryableError(BatonError):
    """The request may succeed later. `retry_after_s` is the server's advice, 0 if none."""

    retryable = True

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(RetryableError):
    """No capacity now: no free blocks, a full queue, a deadline that cannot be met."""


class Unavailable(RetryableError):
    """No process can serve it: no worker of a role, or a process that ended or drains."""


class DeadlineExceeded(BatonError, TimeoutError):
    """The request's deadline passed."""


class Cancelled(BatonError):
    """The caller cancelled the request."""


class Stale(BatonError):
    """A lease, incarnation or epoch that no longer exists."""


class KvMismatch(BatonError):
    """KV caches of two workers are incompatible; the message names both sides."""


class TransferFailed(BatonError):
    """KV did not arrive; nothing was scheduled, and the request can run elsewhere."""


class KvCorrupted(TransferFailed):
    """KV arrived incomplete or changed, and was discarded."""


class InternalError(BatonError):
    """A bug or an unknown failure."""


# Exceptions that end a task or the process, and are never reported to a caller.
ENDINGS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


def without_frames(error: BaseException) -> None:
    """Drops the frames that an error and its causes were raised in.

    A frame that refers to the error keeps all of a request until a garbage collection, and those of
    a thousand choices take one a tenth of a second.
    """
    left: BaseException | None = error
    while left is not None and left.__traceback__ is not None:
        left.__traceback__ = None
        left = left.__cause__ or left.__context__


def as_exception(error: BaseException) -> Exception:
    """The error, or a RuntimeError for a panic in a Rust library.

    A panic is no Exception: after ENDINGS catch BaseException, or a request would get no answer.
    """
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class ConfigError(BatonError, argparse.ArgumentTypeError):
    """A wrong setting or command-line option. Raised at the start, never while serving.

    If an argument's parser raises it, argparse shows it with the argument's name.
    """


class CheckpointError(ConfigError):
    """A model directory cannot be used; the message names the file and tensor."""
