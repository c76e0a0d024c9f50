"""When to try again: pure decisions, no clock, no network, no randomness."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import BatonError, RetryableError, Unavailable

_ADVICE_JITTER = 0.25


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter, at another router address each time.

    A server's advice is the shortest wait, and is stretched by chance, so that clients that were
    refused together do not come back together. What one router has no room for another has not
    either, as they share the workers; but one that is not available says nothing of the others.
    `max_attempts` counts the first one; every address gets at least one. However many attempts that
    takes, a request is sent again where a router said when it may work, and a stream that has begun
    goes on as soon as a router is back: until the deadline, or without one as long as no more than
    `keep_trying_s` have passed since the first failure or the last output. `max_attempts=1` turns
    all of it off.
    """

    max_attempts: int = 4
    first_delay_s: float = 0.1
    max_delay_s: float = 2.0
    keep_trying_s: float = 10.0

    def wait_s(
        self,
        error: BatonError,
        *,
        attempts: int,
        addresses: int,
        time_left_s: float | None,
        jitter: float,
        failing_s: float = 0.0,
        begun: bool = False,
    ) -> float | None:
        """Seconds until the next attempt, after `attempts` of them, at another router address.

        `jitter` in [0, 1) is random, `failing_s` how long it has failed, `begun` whether messages
        had come before. None means that the error is final: it cannot pass, there were enough
        attempts, or the wait would outlast `time_left_s` (None: unlimited).
        """
        if not isinstance(error, RetryableError):
            return None
        if attempts >= max(self.max_attempts, addresses):
            has_hope = error.retry_after_s > 0 or (begun and isinstance(error, Unavailable))
            if self.max_attempts == 1 or not has_hope:
                return None
            if time_left_s is None and failing_s >= self.keep_trying_s:
                return None
        wait_s = error.retry_after_s * (1 + _ADVICE_JITTER * jitter)
        if isinstance(error, Unavailable) and attempts < addresses:
            wait_s = 0.0
        if rounds := attempts // addresses:  # otherwise there is an address that was not tried
            backoff_s = min(self.first_delay_s * 2.0 ** min(rounds - 1, 32), self.max_delay_s)
            wait_s = max(wait_s, backoff_s * (0.5 + jitter / 2))
        return None if time_left_s is not None and wait_s >= time_left_s else wait_s
