"""Token buckets: a rate a minute with bursts, and the exact time until the next amount fits."""

from __future__ import annotations

import time
from collections.abc import Callable

_ROUNDING = 1e-6  # a caller that comes back at the given time must not lack a millionth


class TokenBucket:
    """Refills at `per_minute` up to what `burst_s` seconds bring; infinite rates limit nothing."""

    def __init__(
        self, per_minute: float, burst_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_minute / 60
        self.size = self._per_s * burst_s
        self._clock = clock
        self._level = self.size
        self._at = clock()

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` fits, 0 if it does now; it must not exceed the bucket's size."""
        assert amount <= self.size, "it would never fit"
        self._refill()
        missing = amount - self._level
        return missing / self._per_s if missing > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Charges; the level may become negative."""
        self._refill()
        self._level -= amount

    def give(self, amount: float) -> None:
        """Returns what was not used."""
        self._refill()
        self._level = min(self.size, self._level + amount)

    def _refill(self) -> None:
        now = self._clock()
        if now > self._at and self._level < self.size:
            self._level = min(self.size, self._level + (now - self._at) * self._per_s)
        self._at = now
