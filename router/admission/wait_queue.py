"""The wait queue for room on workers: bounded, by virtual finish time, tried one by one.

When it is full, a tenant has the part of it that is its share: one with less takes the place of the
last entry of the one with most.

The first entry tries again at each change of the fleet. Those behind may pass it where it finds no
room (a large request must not keep small ones from room it cannot use), but only for so long on all
workers: after that one worker, or a pair, is kept for it, so that room gathers there until it fits,
and others pass it elsewhere only. So neither long nor short requests starve.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from baton.errors import Overloaded
from router.admission.fair_queue import Flow, PendingPrompt

# How long the first may be passed on all workers, from when it first found no room.
PASSING_S = 1.0
# Tries without success at one change, which bounds the load on a full fleet: after that only those
# try that need no more than half of the least that found no room.
MOST_REFUSED = 4
# A try that lasts longer has found room as far as the router knows and waits for the worker's
# answer, which takes a step of its engine: the others must not be held up meanwhile.
SLOW_TRY_S = 0.002
MOST_TRYING = 16  # at a time: not every try sees what the others are about to reserve
RETRY_AFTER_S = (0.5, 30.0)
# Of the drain rate: what counts, in seconds of waiting or, where that is longer, in placements;
# and how many seconds are too few to tell.
_MEMORY_S, _MEMORY_PLACED, _LEAST_S = 5.0, 12, 0.5

T = TypeVar("T")
Clock = Callable[[], float]
Earmark = Callable[[frozenset[str]], frozenset[str] | None]


class NoWorker(Overloaded):
    """No worker that could serve the request is there: others need not wait behind it."""


@dataclass(frozen=True)
class QueueEntry:
    """A request that waits for room."""

    pending: PendingPrompt  # the earliest virtual finish goes first
    num_tokens: int
    first_token_by: float = math.inf  # time.monotonic(): its TTFT target
    decodes: bool = True  # those that do not need other workers
    # The names of workers to keep for it, where others took their room for long; called with those
    # that are kept already. None: they can pass it, it never has room. Empty: they cannot, it soon
    # has.
    earmark: Earmark = lambda kept: kept


@dataclass(eq=False)
class _Waiter:
    """An entry in the queue, and the handshake between its owner and the task that wakes it."""

    entry: QueueEntry
    accepted: bool  # before it came: nobody displaces it
    tried_at: asyncio.Event | None  # the change at which it tried last
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    trying: bool = False
    slow: bool = False  # the waking task has gone on without the outcome of this try
    left: bool = False
    no_worker: bool = False  # at its last try: it takes no room from anyone
    refused_first: float = math.inf  # when it first found no room while first in the queue
    passable: bool | None = None  # while it finds no room: see `QueueEntry.earmark`


class DrainRate:
    """Tokens a second that the fleet computes while requests wait: work over time.

    Both are forgotten together, and only at placements, so that a queue that moves twice a minute
    has a rate as sure as that of one that moves all the time. The work lies between what has left
    the fleet's queues and all that was placed: one large prompt changes nothing before its time
    has shown.
    """

    def __init__(self, clock: Clock, in_flight: Callable[[], int]) -> None:
        self._clock = clock
        self._in_flight = in_flight
        self._now = clock()
        self._queued = 0  # tokens in flight at that time
        self._busy = False
        self._done = 0.0  # tokens known to be computed, and
        self._placed = 0.0  # those that may be, in
        self._seconds = 0.0  # of waiting until the last placement, and
        self._since_s = 0.0  # since then

    def waiting(self, busy: bool) -> None:
        """Whether any request waits from now on."""
        self._advance()
        if busy and not self._busy:
            self._placed += self._queued
        self._busy = busy

    def placed(self, num_tokens: int) -> None:
        """A request that waited was placed; from then on its tokens may be in flight."""
        self._advance()
        kept = max(math.exp(-self._since_s / _MEMORY_S), 1 - 1 / _MEMORY_PLACED)
        self._done = (self._done + num_tokens) * kept
        self._placed = self._placed * kept + num_tokens
        self._seconds = (self._seconds + self._since_s) * kept
        self._since_s = 0.0

    def value(self, next_tokens: int, assumed: float = 0.0) -> float:
        """Tokens a second, where the next to be placed has so many.

        `assumed` counts as far as no measurement contradicts it.
        """
        self._advance()
        seconds = self._seconds + self._since_s
        if seconds < _LEAST_S:
            return assumed
        least = self._done / seconds
        most = max(self._done, self._placed + next_tokens) / seconds
        return min(max(assumed or most, least), most)

    def _advance(self) -> None:
        """Counts what was in flight and no longer is as done."""
        before, self._now = self._now, self._clock()
        queued, self._queued = self._queued, self._in_flight()
        if self._busy:
            self._since_s += self._now - before
            self._done += queued - self._queued


class WaitQueue:
    """Requests that wait for room. Event-loop thread only."""

    def __init__(
        self,
        capacity: int,
        changed: Callable[[], asyncio.Event],
        in_flight: Callable[[], int] = lambda: 0,
        clock: Clock = time.monotonic,
    ) -> None:
        """`changed` gives the event that the fleet's next change sets, `in_flight` the prompt
        tokens that workers have and did not compute yet."""
        self._capacity = capacity
        self._changed = changed
        self._clock = clock
        self._waiting: list[_Waiter] = []
        self._stirred = asyncio.Event()  # an entry came or went
        self._waking: asyncio.Task[None] | None = None  # runs while anything waits
        self._counts, self._shares = Counter[str](), dict[str, float]()  # of tenants that wait
        self._owner: _Waiter | None = None  # for whom workers are kept, and
        self._kept = frozenset[str]()  # their names
        self._rate = DrainRate(clock, in_flight)

    @property
    def depth(self) -> int:
        return len(self._waiting)

    def kept_from(self, pending: PendingPrompt) -> frozenset[str]:
        """Names of workers that are kept for another request."""
        owner = self._owner
        return self._kept if owner and owner.entry.pending is not pending else frozenset()

    def tokens_before(self, pending: PendingPrompt) -> int:
        """Tokens of entries that go before that prompt."""
        finish, entries = pending.virtual_finish, (waiter.entry for waiter in self._waiting)
        return sum(e.num_tokens for e in entries if e.pending.virtual_finish <= finish)

    def drain_rate(self, assumed: float = 0.0) -> float:
        """Tokens a second that leave the queue for a worker; `assumed` until that is measured.

        0 where nothing is known: then no time can be predicted either.
        """
        first = min(self._waiting, key=_virtual_finish, default=None)
        return self._rate.value(first.entry.num_tokens if first else 0, assumed)

    def slack_s(
        self, pending: PendingPrompt, assumed_rate: float = 0.0, safety: float = 1.0
    ) -> float:
        """Seconds by which entries after it can be put back and still meet their TTFT targets.

        Infinite where none of them depends on it. Those that are too late already do not count,
        and a tenant with nothing waiting may go first: that is its share. `safety` is the factor
        by which things may take longer than expected.
        """
        rate = self.drain_rate(assumed_rate)
        waiting = [waiter.entry for waiter in self._in_order()]
        tenant, finish = pending.flow.tenant, pending.virtual_finish
        if rate <= 0 or all(entry.pending.flow.tenant != tenant for entry in waiting):
            return math.inf
        now, needed_s, slack = self._clock(), 0.0, math.inf
        for entry in waiting:
            needed_s += entry.num_tokens / rate
            left_s = entry.first_token_by - now
            if entry.pending.virtual_finish > finish and needed_s <= left_s:
                slack = min(slack, left_s - needed_s * safety)
        return slack

    def check_room(self, flow: Flow) -> None:
        """Raises Overloaded when the queue is full and another tenant has no more of it than its
        share; by the time it gives, half of it should go.
        """
        if self.depth >= self._capacity and self._displaced_by(flow) is None:
            raise self._full(f"{self._capacity} requests are waiting already")

    def _full(self, why: str) -> Overloaded:
        shortest, longest = RETRY_AFTER_S
        rate = self.drain_rate()
        tokens = sum(waiter.entry.num_tokens for waiter in self._waiting)
        half_s = tokens / rate / 2 if rate else 0.0
        return Overloaded(why, min(longest, max(shortest, half_s)))

    def _displaced_by(self, flow: Flow) -> _Waiter | None:
        """Who gives way to one more entry of a tenant, where the queue is full: the last one of the
        tenant that has most by its share, unless the two would change places by that.
        """
        counts, tenant = self._counts, flow.tenant
        if not counts:
            return None
        most = max(counts, key=lambda name: counts[name] / self._shares[name])
        if (counts[tenant] + 1) / flow.share > (counts[most] - 1) / self._shares[most]:
            return None
        for waiter in reversed(self._in_order()):
            if waiter.entry.pending.flow.tenant == most and not (waiter.trying or waiter.accepted):
                return waiter
        return None

    async def place(
        self, entry: QueueEntry, attempt: Callable[[], Awaitable[T]], *, accepted: bool = False
    ) -> T:
        """What `attempt` returns once it finds room: tried at once if none waits, else in order.

        `attempt` raises Overloaded where there is no room; what else it raises ends the wait.
        Raises Overloaded itself when the queue is full, or when it gives way to another tenant's,
        unless the request was `accepted` before. The caller sets the time limit, by cancelling.
        """
        tried_at = None
        if not self._waiting:
            tried_at = self._changed()
            try:
                return await attempt()
            except Overloaded:
                pass  # it waits
        if not accepted and self.depth >= self._capacity:
            if (displaced := self._displaced_by(entry.pending.flow)) is None:
                raise self._full(f"{self._capacity} requests are waiting already")
            self._leave(displaced)
            displaced.turn.set()
        waiter = _Waiter(entry, accepted, tried_at)
        self._join(waiter)
        try:
            while True:
                await waiter.turn.wait()
                waiter.turn.clear()
                if waiter.left:
                    raise self._full("another tenant, with fewer requests waiting, took its place")
                try:
                    result = await attempt()
                except Overloaded as error:
                    self._refused(waiter, isinstance(error, NoWorker))
                else:
                    self._rate.placed(entry.num_tokens)
                    return result
        finally:
            self._leave(waiter)

    def _in_order(self) -> list[_Waiter]:
        """By virtual finish, which changes while they wait; of equals, by arrival."""
        self._waiting.sort(key=_virtual_finish)
        return self._waiting

    def _join(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        flow = waiter.entry.pending.flow
        self._counts[flow.tenant] += 1
        self._shares[flow.tenant] = flow.share
        self._rate.waiting(True)
        self._stirred.set()
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake(), name="wait queue")

    def _refused(self, waiter: _Waiter, no_worker: bool) -> None:
        if waiter.no_worker is not no_worker:
            waiter.no_worker, waiter.refused_first = no_worker, math.inf
            self._rate.waiting(self._waits_for_room)
        if not no_worker and min(self._waiting, key=_virtual_finish) is waiter:
            waiter.refused_first = min(waiter.refused_first, self._clock())
        waiter.trying = False
        waiter.tried.set()
        if waiter.slow:
            self._stirred.set()  # there may have been a change meanwhile

    def _leave(self, waiter: _Waiter) -> None:
        """May be called again."""
        if waiter.left:
            return
        self._waiting.remove(waiter)
        tenant = waiter.entry.pending.flow.tenant
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant], self._shares[tenant]
        if self._owner is waiter:
            self._owner, self._kept = None, frozenset()
        waiter.left = True
        waiter.tried.set()
        self._stirred.set()
        self._rate.waiting(self._waits_for_room)

    @property
    def _waits_for_room(self) -> bool:
        return any(not waiter.no_worker for waiter in self._waiting)

    async def _wake(self) -> None:
        """Runs while anything waits: a round at each change, and when an entry comes or goes."""
        while self._waiting:
            self._stirred.clear()
            changed = self._changed()  # before the tries, so that none is missed
            await self._round(changed)
            if self._waiting:
                await _either(changed, self._stirred)

    async def _round(self, changed: asyncio.Event) -> None:
        """Lets entries try in order, each once for one change, until enough have found no room.

        The first of those that waited for too long gets workers of its own.
        """
        refused, trying, least, overdue = list[_Waiter](), 0, math.inf, False
        no_worker: Counter[bool] = Counter()  # tries, by `QueueEntry.decodes`
        for waiter in tuple(self._in_order()):
            if waiter.left or (
                waiter.no_worker and no_worker[waiter.entry.decodes] >= MOST_REFUSED
            ):
                continue
            if len(refused) >= MOST_REFUSED:
                if waiter.entry.num_tokens > least / 2:
                    continue
                if not self._may_pass(refused[0]):
                    return
            if waiter.tried_at is not changed and not waiter.trying:
                waiter.tried_at = changed
                await _let_try(waiter)
            if waiter.left:
                continue
            if waiter.trying:
                trying += 1
                if trying >= MOST_TRYING:
                    return
                continue
            if waiter.no_worker:
                no_worker[waiter.entry.decodes] += 1
                continue
            refused.append(waiter)
            least = min(least, waiter.entry.num_tokens)
            if not overdue and self._clock() - waiter.refused_first > PASSING_S:
                overdue = True
                if not self._keep_workers(waiter):
                    return

    def _keep_workers(self, waiter: _Waiter) -> bool:
        """Keeps workers for one that was passed for long; whether others may still pass it."""
        kept = self._kept if self._owner is waiter else frozenset[str]()
        names = waiter.entry.earmark(kept)
        self._owner, self._kept = waiter, names or frozenset()
        waiter.passable = names != frozenset()
        return waiter.passable

    @staticmethod
    def _may_pass(first: _Waiter) -> bool:
        """Whether others may pass the first one, however many wait behind it without room."""
        if first.passable is None:
            first.passable = first.entry.earmark(frozenset()) != frozenset()
        return first.passable


async def _let_try(waiter: _Waiter) -> None:
    """Lets a waiter try and waits for the outcome, unless that takes too long."""
    waiter.trying, waiter.slow = True, False
    waiter.tried.clear()
    waiter.turn.set()
    try:
        async with asyncio.timeout(SLOW_TRY_S):
            await waiter.tried.wait()
    except TimeoutError:
        waiter.slow = waiter.trying


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _virtual_finish(waiter: _Waiter) -> float:
    return waiter.entry.pending.virtual_finish
