"""When to try again: pure decisions, no clock, no network, no randomness."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import BatonError, RetryableError, Unavailable

_ADVICE_JITTER = 0.25


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter, at the next router address each time.

    A server's advice is the shortest wait, and is stretched by chance, so that clients that were
    refused together do not come back together. What one router has no room for another has not
    either, as they share the workers; but one that is not available says nothing of the others.
    `max_attempts` counts the first one; every address gets at least one. A stream that has begun
    and broke goes on as soon as a router is back, however many attempts that takes, until its
    deadline, or for `reconnect_s` if it has none.
    """

    max_attempts: int = 4
    first_delay_s: float = 0.1
    max_delay_s: float = 2.0
    reconnect_s: float = 10.0

    def wait_s(
        self,
        error: BatonError,
        *,
        attempts: int,
        addresses: int,
        time_left_s: float | None,
        jitter: float,
        broken_s: float | None = None,
    ) -> float | None:
        """Seconds until the next attempt, after `attempts` of them, at the next router address.

        `jitter` in [0, 1) is random, `broken_s` how long ago a stream broke that had begun (None:
        it had not). None means that the error is final: it cannot pass, there were enough attempts,
        or the wait would outlast `time_left_s` (None: unlimited).
        """
        if not isinstance(error, RetryableError):
            return None
        if attempts >= max(self.max_attempts, addresses):
            reconnects = broken_s is not None and self.max_attempts > 1
            if not reconnects or not isinstance(error, Unavailable):
                return None
            if time_left_s is None and (broken_s or 0) >= self.reconnect_s:
                return None
        wait_s = error.retry_after_s * (1 + _ADVICE_JITTER * jitter)
        if isinstance(error, Unavailable) and attempts < addresses:
            wait_s = 0.0
        if rounds := attempts // addresses:  # otherwise there is an address that was not tried
            backoff_s = min(self.first_delay_s * 2.0 ** min(rounds - 1, 32), self.max_delay_s)
            wait_s = max(wait_s, backoff_s * (0.5 + jitter / 2))
        return None if time_left_s is not None and wait_s >= time_left_s else wait_s
