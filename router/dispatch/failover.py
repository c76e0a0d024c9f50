"""Failover: which failed attempts are followed by another, after how long, and waiting for workers.

A request that was admitted waits for workers that are gone, but only for so long.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    KvMismatch,
    Overloaded,
    RetryableError,
    Stale,
    TransferFailed,
    Unavailable,
)
from router.dispatch.request_state import RequestState

_BACKOFF_S = (0.02, 1.0)
# What a worker reports of itself or of its peer, never of the request.
_WORKER_ERRORS = (RetryableError, TransferFailed, Stale, Cancelled, KvMismatch, InternalError)


def is_retryable(error: BatonError, state: RequestState) -> bool:
    """Whether another attempt may succeed. A limit of a call or a worker is not the deadline."""
    if isinstance(error, DeadlineExceeded):
        return state.request.time_left_s > 0
    return isinstance(error, _WORKER_ERRORS)


def backoff_s(failures: int) -> float:
    """How long to wait after so many failures in a row."""
    longest: float = min(_BACKOFF_S[1], _BACKOFF_S[0] * 4 ** (failures - 1))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter


class NoWorkerTimeout:
    """Around the wait for a place: a role may have no worker for at most `limit_s` in a row.

    Workers that are full are waited for without a limit: the request's own deadline ends that.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timeout = asyncio.timeout(None)
        self._missing: Unavailable | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            assert self._missing is not None, "only a missing worker starts the clock"
            raise self._missing from None

    @contextlib.contextmanager
    def placing(self) -> Iterator[None]:
        """Around the choice of a pair: turns Unavailable into Overloaded, which is waited for."""
        try:
            yield
        except Unavailable as error:
            if self._missing is None:
                self._timeout.reschedule(asyncio.get_running_loop().time() + self._limit_s)
            self._missing = error
            raise Overloaded(str(error), error.retry_after_s) from error
        except Overloaded:
            self._found()
            raise
        else:
            self._found()

    def _found(self) -> None:
        if self._missing is not None:
            self._timeout.reschedule(None)
            self._missing = None
