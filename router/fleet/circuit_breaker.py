"""Circuit breakers: which workers and pairs are left alone for a while because calls to them fail.

A breaker opens after a few failures in a row, or when too large a share of the recent calls failed.
It stays open for a cool-down, which doubles each time, and then lets one call at a time through as
a probe. This module is pure: it knows neither workers nor calls, only names and how calls ended.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import takewhile

Key = str | tuple[str, str]  # a worker's incarnation, or those of a (prefill, decode) pair

FAILURES_IN_A_ROW = 3
RECENT_CALLS = 20
RECENT_S = 60.0  # older calls say nothing of now
FAILED_SHARE = 0.5
CALLS_FOR_A_SHARE = 5  # fewer calls have no share worth judging
COOL_DOWN_S = (1.0, 30.0)  # the first, and the longest
PROBE_S = 5.0  # a probe whose end nobody told is forgotten then


class HealthBook:
    """Breakers by key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._breakers: dict[Key, _Breaker] = {}

    def sent(self, key: Key) -> None:
        """A call is on its way: the probe, if the breaker waits for one."""
        if breaker := self._breakers.get(key):
            breaker.sent(self._clock())

    def succeeded(self, key: Key) -> None:
        """A call ended well."""
        self._breaker(key).succeeded(self._clock())

    def failed(self, key: Key, reason: str) -> None:
        """A call failed, and this worker or pair is to blame."""
        self._breaker(key).failed(self._clock(), reason)

    def verdict(self, key: Key) -> str:
        """Empty when it is usable now, else why not."""
        breaker = self._breakers.get(key)
        return breaker.verdict(self._clock()) if breaker else ""

    def shut(self) -> dict[Key, str]:
        """Everybody who is not usable now, and why."""
        now = self._clock()
        verdicts = {key: breaker.verdict(now) for key, breaker in self._breakers.items()}
        return {key: why for key, why in verdicts.items() if why}

    def failed_at(self, key: Key) -> float:
        """When a call failed last, by the book's clock."""
        breaker = self._breakers.get(key)
        return breaker.failed_at if breaker else -math.inf

    def retain(self, incarnations: Collection[str]) -> None:
        """Forgets everybody else and their pairs, also those who failed after they had left."""
        self._breakers = {
            key: breaker
            for key, breaker in self._breakers.items()
            if all(name in incarnations for name in ((key,) if isinstance(key, str) else key))
        }

    def _breaker(self, key: Key) -> _Breaker:
        return self._breakers.setdefault(key, _Breaker())


@dataclass
class _Breaker:
    """Closed, open until a time, and from then on half-open until a probe has ended."""

    recent: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=RECENT_CALLS))
    open_until: float | None = None  # None: closed
    probe_until: float | None = None  # a probe is under way, and counts as one until then
    cool_down_s: float = 0.0  # the latest
    closed_at: float = -math.inf
    failed_at: float = -math.inf
    why: str = ""

    def sent(self, now: float) -> None:
        """Also in the cool-down, when there was nobody else: that call is a probe as well."""
        if self.open_until is not None and not self._probing(now):
            self.probe_until = now + PROBE_S

    def succeeded(self, now: float) -> None:
        if self.open_until is None:
            self.recent.append((now, True))
        elif self._probing(now) or now >= self.open_until:
            self.open_until = self.probe_until = None
            self.closed_at = now
            self.recent.clear()
        # Else a call that began before the breaker opened: it says nothing of what came then.

    def failed(self, now: float, reason: str) -> None:
        self.failed_at = now
        if self.open_until is None:
            self.recent.append((now, False))
            if why := self._outlying(now):
                grows = now - self.closed_at < COOL_DOWN_S[1]  # it has not been well for long
                self._open(now, f"{why}, the last with: {reason}", grows)
        elif self._probing(now):
            self._open(now, f"its probe failed with: {reason}", grows=True)
        # Else a call that began before the breaker opened: many end at once when a worker dies.

    def verdict(self, now: float) -> str:
        if self.open_until is None or (now >= self.open_until and not self._probing(now)):
            return ""
        return self.why

    def _open(self, now: float, why: str, grows: bool) -> None:
        shortest_s, longest_s = COOL_DOWN_S
        self.cool_down_s = min(longest_s, 2 * self.cool_down_s) if grows else shortest_s
        self.cool_down_s = max(shortest_s, self.cool_down_s)
        self.open_until, self.probe_until, self.why = now + self.cool_down_s, None, why

    def _outlying(self, now: float) -> str:
        """Why the recent calls are too bad; empty when they are not."""
        recent = [well for at, well in self.recent if now - at <= RECENT_S]
        failures = recent.count(False)
        in_a_row = sum(1 for _ in takewhile(lambda well: not well, reversed(recent)))
        if in_a_row >= FAILURES_IN_A_ROW:
            return f"its last {in_a_row} calls failed"
        if len(recent) >= CALLS_FOR_A_SHARE and failures >= FAILED_SHARE * len(recent):
            return f"{failures} of its last {len(recent)} calls failed"
        return ""

    def _probing(self, now: float) -> bool:
        return self.probe_until is not None and now < self.probe_until
