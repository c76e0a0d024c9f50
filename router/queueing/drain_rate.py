"""How fast the fleet computes prompts while requests wait for it."""

from __future__ import annotations

import math
from collections.abc import Callable

# The drain rate covers this many seconds of waiting or, where that is longer, this many placements;
# after less waiting than the last number of seconds it is not known.
_MEMORY_S, _MEMORY_PLACED, _MIN_MEASURED_S = 5.0, 12, 0.5

Clock = Callable[[], float]


class DrainRate:
    """Tokens a second that the fleet computes while requests wait: work over waiting time.

    Both are discounted together, and only at placements, so the rate of a queue that moves twice a
    minute is as reliable as that of one that moves all the time. The work is between what has left
    the workers' queues and all that was placed: one large prompt changes nothing before its time
    has shown.
    """

    def __init__(self, clock: Clock, in_flight: Callable[[], int]) -> None:
        self._clock = clock
        self._in_flight = in_flight
        self._now = clock()
        self._queued = 0  # tokens in flight at `_now`
        self._busy = False
        self._done = 0.0  # tokens known to be computed
        self._placed = 0.0  # tokens that may be computed
        self._seconds = 0.0  # waiting time until the last placement
        self._since_s = 0.0  # waiting time since then

    def set_busy(self, busy: bool) -> None:
        """Sets whether any request waits from now on."""
        self._advance()
        if busy and not self._busy:
            self._placed += self._queued
        self._busy = busy

    def record_placed(self, num_tokens: int) -> None:
        """Counts a request that waited and was placed; its tokens may be in flight from now on."""
        self._advance()
        kept = max(math.exp(-self._since_s / _MEMORY_S), 1 - 1 / _MEMORY_PLACED)
        self._done = (self._done + num_tokens) * kept
        self._placed = self._placed * kept + num_tokens
        self._seconds = (self._seconds + self._since_s) * kept
        self._since_s = 0.0

    def value(self, next_tokens: int, assumed: float = 0.0) -> float:
        """Tokens a second, if the next request to be placed has `next_tokens`.

        `assumed` is returned as far as no measurement contradicts it.
        """
        self._advance()
        seconds = self._seconds + self._since_s
        if seconds < _MIN_MEASURED_S:
            return assumed
        least = self._done / seconds
        most = max(self._done, self._placed + next_tokens) / seconds
        return min(max(assumed or most, least), most)

    def _advance(self) -> None:
        """Counts tokens that have left the workers' queues as computed."""
        before, self._now = self._now, self._clock()
        queued, self._queued = self._queued, self._in_flight()
        if self._busy:
            self._since_s += self._now - before
            self._done += queued - self._queued
