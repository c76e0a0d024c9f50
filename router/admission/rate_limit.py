"""Rate limits: a token bucket for each of a tenant's limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from router.shared_state import LimitUsage

_ROUNDING = 1e-6  # a caller that returns at the given time must not find a millionth missing

Clock = Callable[[], float]


class RateLimit(NamedTuple):
    """A tenant's requests or tokens: at most at once, available now, and seconds until all are."""

    name: str
    limit: int
    remaining: int
    reset_s: float


class TokenBucket:
    """Refills at `per_minute` up to the amount of `burst_s` seconds; infinite rates limit nothing.

    `state` holds the amount spent and not refilled yet, and the time of that; zeros are a full
    bucket. Buckets of several processes may share it.
    """

    def __init__(
        self,
        per_minute: float,
        burst_s: float,
        clock: Clock = time.monotonic,
        state: memoryview[float] | None = None,
    ) -> None:
        self._per_s = per_minute / 60
        self.size = self._per_s * burst_s
        self._clock = clock
        self._state = LimitUsage().requests if state is None else state

    @property
    def level(self) -> float:
        """The amount available; negative where more was spent than there was."""
        return self.size - self._spent(self._clock())

    @property
    def is_unlimited(self) -> bool:
        return self._per_s == float("inf")

    def set_rate(self, per_minute: float, burst_s: float) -> None:
        """Changes the rate from now on; what was spent is refilled at the new rate."""
        self.spend(0.0)
        self._per_s = per_minute / 60
        self.size = self._per_s * burst_s

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount`, at most the bucket's size, is available; 0 if it is now."""
        missing = amount - self.level
        return missing / self._per_s if missing > _ROUNDING else 0.0

    def spend(self, amount: float) -> None:
        """Spends an amount, also more than is available; a negative amount is returned."""
        now = self._clock()
        self._state[0], self._state[1] = max(0.0, self._spent(now) + amount), now

    def _spent(self, now: float) -> float:
        spent, at = self._state
        return max(0.0, spent - (now - at) * self._per_s) if spent > 0 and now > at else spent
