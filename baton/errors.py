"""Every error Baton raises on purpose, as one tree.

`baton.net.rpc` holds the one table between these classes and gRPC status codes, in both directions,
so that an error keeps its meaning across processes. This module imports neither gRPC nor tensors.
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
    """A value from outside as error messages show it: it may be megabytes or deeply nested.

    Whatever holds them, sets are shown as lists and mappings as dicts.
    """
    if isinstance(value, Set):
        value = list(value)
    elif isinstance(value, Mapping):
        value = dict(value)
    return _repr.repr(value)[:MAX_QUOTED_CHARS]


class BatonError(Exception):
    """Base of all errors; `str()` names the cause and, where there is one, the fix.

    `retryable` says whether the same request may work later, at this or another router.
    """

    retryable = False


class InvalidRequest(BatonError):
    """The request can never work as it is. `field` names the part that is wrong."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field

    def renamed(self, field: str) -> Self:
        """A copy that names the field as the caller's protocol does."""
        named = copy.copy(self)
        named.field = field
        return named


class ContextOverflow(InvalidRequest):
    """Prompt and output do not fit in the context, which holds `max_context` tokens."""

    def __init__(self, message: str, field: str = "", max_context: int = 0) -> None:
        super().__init__(message, field)
        self.max_context = max_context


class ModelNotFound(BatonError):
    """The cluster does not serve the model that was asked for."""


class Unauthenticated(BatonError):
    """The caller's API key is missing or unknown."""


class RetryableError(BatonError):
    """The same request may work later. `retry_after_s` is the server's advice, 0 if it has none."""

    retryable = True

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(RetryableError):
    """There is no room now: no free blocks, a full queue, a deadline that cannot be met."""


class Unavailable(RetryableError):
    """No process is there to do it: no worker of a role, a process that is gone or draining."""


class DeadlineExceeded(BatonError, TimeoutError):
    """The request's deadline passed."""


class Cancelled(BatonError):
    """The caller cancelled the request."""


class Stale(BatonError):
    """A lease, incarnation or epoch names something that no longer exists."""


class KvMismatch(BatonError):
    """Two workers' KV caches are not compatible; the message names both sides."""


class TransferFailed(BatonError):
    """KV bytes did not arrive; nothing was scheduled, the request can be run elsewhere."""


class KvCorrupted(TransferFailed):
    """KV bytes arrived short or changed; they were discarded."""


class InternalError(BatonError):
    """A bug or an unknown failure."""


# They end a task or the process, and never become an answer to a caller.
ENDINGS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


def as_exception(error: BaseException) -> Exception:
    """The error itself, or a RuntimeError that a panic in a Rust library caused.

    A panic is no Exception, so `except Exception` lets it pass and a request would get no answer:
    catch BaseException behind ENDINGS.
    """
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class ConfigError(BatonError, argparse.ArgumentTypeError):
    """A setting or command-line option is wrong. Raised at start, never in service.

    argparse shows one that the parser of an argument raises, with the argument's name.
    """


class CheckpointError(ConfigError):
    """A model directory cannot be used; the file, and the tensor if there is one, are named."""
