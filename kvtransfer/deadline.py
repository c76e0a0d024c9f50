"""Deadlines of KV transfers."""

from __future__ import annotations

import math
import time

from baton.errors import DeadlineExceeded

_EARLY_S = 0.002  # that an event loop's timer may fire before its time


class Deadline:
    """A point in time, passed down to every wait that it bounds."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def ended_wait(self) -> bool:
        """Whether a wait with all the time that was left may have ended by it, perhaps early."""
        return time.monotonic() >= self._end - _EARLY_S

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least one millisecond, for calls that take 0 for "no time-out"."""
        return max(self._end - time.monotonic(), 0.001)

    def left_s(self, cap_s: float = math.inf) -> float:
        """Seconds that one wait may take. Raises DeadlineExceeded if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed during the KV transfer")
        return min(left, cap_s)
