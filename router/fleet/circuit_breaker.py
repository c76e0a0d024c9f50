"""Circuit breakers: workers and pairs that are ejected for a while because calls to them fail.

A breaker opens after a few failures in a row, or when too large a share of the recent calls failed.
It stays open for a cool-down, which doubles each time, and then lets one call at a time through as
a probe.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    KvMismatch,
    Overloaded,
    TransferFailed,
)
from router.fleet.snapshot import EJECTED, Snapshot

Key = str | tuple[str, str]  # a worker's incarnation, or those of a (prefill, decode) pair

FAILURES_IN_A_ROW = 3
RECENT_CALLS = 20
RECENT_S = 60.0  # older calls are outdated
FAILED_SHARE = 0.5
CALLS_FOR_A_SHARE = 5  # of fewer calls a share means nothing
COOL_DOWN_S = (1.0, 30.0)  # the first, and the longest
PROBE_S = 5.0  # a probe without an outcome is forgotten then
_PAIR_ERRORS = (TransferFailed, KvMismatch)  # each of the two may be fine with others
_REQUEST_ERRORS = (DeadlineExceeded, InvalidRequest, Overloaded)  # no fault of a worker


@dataclass
class CircuitBreaker:
    """Closed, open until a time, and from then on half-open until a probe has ended."""

    clock: Callable[[], float]
    key: Key
    failed_ever: dict[Key, CircuitBreaker]  # of all breakers
    not_closed: dict[Key, CircuitBreaker]  # of all breakers
    on_open: Callable[[Key, str], None]  # called with why it opens
    recent: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=RECENT_CALLS))
    open_until: float | None = None  # None: closed
    probe_until: float | None = None  # a probe is under way, and counts as one until then
    cool_down_s: float = 0.0  # the latest
    closed_at: float = -math.inf
    failed_at: float = -math.inf
    why: str = ""

    def sent(self) -> None:
        """A call is on its way: the probe, if the breaker is open and has none.

        Also in the cool-down, when there was no other worker: that call is a probe as well.
        """
        if self.open_until is not None and not self._probing():
            self.probe_until = self.clock() + PROBE_S

    def succeeded(self) -> None:
        now = self.clock()
        if self.open_until is None:
            self.recent.append((now, True))
        elif self._probing() or now >= self.open_until:
            self.open_until = self.probe_until = None
            self.closed_at = now
            self.not_closed.pop(self.key, None)
            self.recent.clear()
        # Else a call that began before the breaker opened: it says nothing of what came then.

    def failed(self, reason: str) -> None:
        """A call failed because of this worker or pair."""
        now = self.failed_at = self.clock()
        self.failed_ever.setdefault(self.key, self)
        if self.open_until is None:
            self.recent.append((now, False))
            if why := self._outlying(now):
                grows = now - self.closed_at < COOL_DOWN_S[1]  # it has not been well for long
                self._open(now, f"{why}, the last with: {reason}", grows)
        elif self._probing():
            self._open(now, f"its probe failed with: {reason}", grows=True)
        # Else a call that began before the breaker opened: many end at once when a worker dies.

    @property
    def why_open(self) -> str:
        """Why it is not usable now; empty when it is."""
        if self.open_until is None or (self.clock() >= self.open_until and not self._probing()):
            return ""
        return self.why

    def _open(self, now: float, why: str, grows: bool) -> None:
        shortest_s, longest_s = COOL_DOWN_S
        self.cool_down_s = min(longest_s, 2 * self.cool_down_s) if grows else shortest_s
        self.cool_down_s = max(shortest_s, self.cool_down_s)
        self.open_until, self.probe_until, self.why = now + self.cool_down_s, None, why
        self.not_closed[self.key] = self
        self.on_open(self.key, why)

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

    def _probing(self) -> bool:
        return self.probe_until is not None and self.clock() < self.probe_until


class CircuitBreakers:
    """A breaker for each worker and pair of which a call has failed. Event-loop thread only.

    Of others there is none: a large fleet has many thousands of pairs, and few that fail.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._breakers: dict[Key, CircuitBreaker] = {}
        self._not_closed: dict[Key, CircuitBreaker] = {}
        self.num_closed = 0  # times that a probe has closed one
        # Called with a key and why each time that its breaker opens, also after a failed probe.
        self.on_open: Callable[[Key, str], None] = lambda key, why: None

    def __getitem__(self, key: Key) -> CircuitBreaker:
        """The key's breaker; before its first failure a new one each time, which is not stored."""
        return self._breakers.get(key) or CircuitBreaker(
            self._clock, key, self._breakers, self._not_closed, self.on_open
        )

    def sent(self, key: Key) -> None:
        """A call is on its way."""
        if breaker := self._breakers.get(key):
            breaker.sent()

    def succeeded(self, key: Key) -> None:
        if breaker := self._breakers.get(key):
            was_closed = breaker.open_until is None
            breaker.succeeded()
            self.num_closed += not was_closed and breaker.open_until is None

    def failed_attempt(
        self, names: tuple[str, str], suspects: Set[str], error: BatonError
    ) -> Set[str]:
        """Counts a failed attempt on a pair against one of its workers, or against the pair.

        Returns the workers that the request avoids from now on; without suspects it is the decode
        worker. Errors of the request itself count against no worker.
        """
        if isinstance(error, _PAIR_ERRORS):
            suspects = frozenset(names)
        suspects = suspects or {names[1]}
        if not isinstance(error, _REQUEST_ERRORS):
            for key in suspects if len(suspects) == 1 else (names,):
                self[key].failed(str(error))
        return suspects

    def all_open(self) -> dict[Key, str]:
        """All that are not usable now, and why."""
        return {key: why for key, breaker in self._not_closed.items() if (why := breaker.why_open)}

    def retain(self, incarnations: Collection[str]) -> None:
        """Forgets all others and their pairs, also those that failed after they had left."""
        for breakers in (self._breakers, self._not_closed):
            for key in tuple(breakers):
                names = (key,) if isinstance(key, str) else key
                if not all(name in incarnations for name in names):
                    del breakers[key]

    def without_ejected(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with workers EJECTED and pairs excluded whose breakers are open.

        If that would leave nothing that serves, what failed longest ago is used: failures of the
        last pair must not make a dead cluster.
        """
        opened = self.all_open()
        judged = _without(snapshot, opened)
        if not snapshot.why_not_ready and judged.why_not_ready:
            for key in self._last_resort(snapshot, opened):
                opened.pop(key, None)
            judged = _without(snapshot, opened)
        return judged

    def _last_resort(self, snapshot: Snapshot, opened: Collection[Key]) -> tuple[Key, ...]:
        """The keys to allow although all are open: of the pair that failed longest ago, or, where
        workers serve alone, of the worker that did."""
        if not snapshot.num_usable:
            ready = [worker.incarnation for worker in snapshot.workers if worker.ready]
            return (min(ready, key=lambda name: self[name].failed_at),)
        failed_at = np.full(len(snapshot.rows), -np.inf)
        for name, row in snapshot.rows.items():
            if name in opened:
                failed_at[row] = self[name].failed_at
        latest = np.maximum.outer(failed_at, failed_at)
        for key in opened:
            if isinstance(key, tuple) and snapshot.rows.keys() >= set(key):
                at = snapshot.rows[key[0]], snapshot.rows[key[1]]
                latest[at] = max(latest[at], self[key].failed_at)
        latest[~snapshot.usable()] = np.inf
        p, d = np.unravel_index(latest.argmin(), latest.shape)
        names = snapshot.workers[p].incarnation, snapshot.workers[d].incarnation
        return *names, names


def _without(snapshot: Snapshot, opened: Mapping[Key, str]) -> Snapshot:
    if not opened:
        return snapshot
    views, rows = snapshot.workers, snapshot.rows
    ejected = [
        replace(view, state=EJECTED, reason=why)
        for key, why in opened.items()
        if isinstance(key, str) and key in rows and (view := views[rows[key]]).ready
    ]
    pairs = {key: why for key, why in opened.items() if isinstance(key, tuple)}
    return snapshot.replaced(ejected, {**pairs, **snapshot.excluded_pairs})
