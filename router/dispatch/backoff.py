"""Which failed attempts are followed by another, and after how long."""

from __future__ import annotations

import random

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    KvMismatch,
    RetryableError,
    Stale,
    TransferFailed,
)
from router.dispatch.request_state import Story

_BACKOFF_S = (0.02, 1.0)
# What a worker says of itself or of its peer, never of the request.
_PLACE_ELSEWHERE = (RetryableError, TransferFailed, Stale, Cancelled, KvMismatch, InternalError)


def is_retryable(error: BatonError, story: Story) -> bool:
    """Whether another attempt may succeed. A limit of a call or a worker is not the deadline."""
    if isinstance(error, DeadlineExceeded):
        return story.ask.time_left_s > 0
    return isinstance(error, _PLACE_ELSEWHERE)


def backoff_s(failures: int) -> float:
    """How long to wait after so many failures in a row."""
    longest: float = min(_BACKOFF_S[1], _BACKOFF_S[0] * 4 ** (failures - 1))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
