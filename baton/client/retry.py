"""Retry decisions, without clock, network or randomness."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import BatonError, RetryableError, Unavailable

_ADVICE_JITTER = 0.25


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter, at another router address each time.

    A server's retry-after is the minimum wait, plus jitter, so that clients refused together do not
    return together. An overloaded router means waiting, because all routers share the workers; an
    unavailable one does not, because another may work. `max_attempts` includes the first, and every
    address gets at least one. Beyond it, requests are retried if a router gave a retry-after, and
    started streams are continued, until the deadline; without one, for `keep_trying_s` after the
    first failure or the last output. With `max_attempts=1` every address gets just one.
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

        `jitter`: random, in [0, 1). `failing_s`: seconds since the first failure. `begun`: whether
        messages were received. `time_left_s`: until the deadline; None: unlimited. Returns None
        if the error is final: not retryable, too many attempts, or no time left.
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
        if rounds := attempts // addresses:  # else an address is untried
            backoff_s = min(self.first_delay_s * 2.0 ** min(rounds - 1, 32), self.max_delay_s)
            wait_s = max(wait_s, backoff_s * (0.5 + jitter / 2))
        return None if time_left_s is not None and wait_s >= time_left_s else wait_s
