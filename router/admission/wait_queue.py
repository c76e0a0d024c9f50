"""The line of requests that wait for room: in order of due, bounded, asked one after the other.

Who is first tries again at each news of the fleet. Those behind may pass it where it finds no room
(a large request must not keep small ones from room it cannot use), but only for so long: after that
nobody passes, so that room gathers until it fits. So short are not starved by long, nor long by
short.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from baton.errors import Overloaded

PATIENCE_S = 1.0  # how long the first lets others pass, from when it first found no room
MOST_REFUSED = 4  # tries without success for one news: bounds what a full fleet is asked
# A try that lasts longer has found room as far as the router knows and waits for the worker's word,
# which takes a step of its engine: the others must not stand there meanwhile.
SLOW_TRY_S = 0.002
MOST_TRYING = 16  # at a time: what is promised to one is not seen as taken by the next everywhere
RETRY_AFTER_S = (0.5, 30.0)
# Of the drain rate: what counts, in seconds of standing in line or, where that is longer, in
# placements; and how many seconds are too few to tell.
_MEMORY_S, _MEMORY_PLACED, _LEAST_S = 5.0, 12, 0.5

T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(frozen=True)
class Ticket:
    """Who stands in line, and for what."""

    due: float  # time.monotonic(): the earliest goes first
    num_tokens: int
    request_id: str
    tenant: str = ""
    promised: float = math.inf  # time.monotonic(): by then it was to have its first token


@dataclass(eq=False)
class _Waiter:
    """A ticket in the line, and the handshake between its owner and the one who calls it up."""

    ticket: Ticket
    news: Callable[[], asyncio.Event]
    asked: asyncio.Event | None  # the news it was last asked at
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    trying: bool = False
    slow: bool = False  # the caller has gone on without the outcome of this try
    left: bool = False
    refused_first: float = math.inf  # when it first found no room with nobody in front


class DrainRate:
    """Tokens a second that the fleet computes while requests wait: work by the time that it took.

    Both are forgotten together, and only at placements, so that a line that moves twice a minute
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
        """Whether somebody waits from now on."""
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

        `assumed` counts as far as nothing that was measured speaks against it.
        """
        self._advance()
        seconds = self._seconds + self._since_s
        if seconds < _LEAST_S:
            return assumed
        least = self._done / seconds
        most = max(self._done, self._placed + next_tokens) / seconds
        return min(max(assumed or most, least), most)

    def _advance(self) -> None:
        """What was in flight and no longer is, is done."""
        before, self._now = self._now, self._clock()
        queued, self._queued = self._queued, self._in_flight()
        if self._busy:
            self._since_s += self._now - before
            self._done += queued - self._queued


class Line:
    """Those who wait for room. Event-loop thread only."""

    def __init__(
        self,
        most: int,
        clock: Clock = time.monotonic,
        in_flight: Callable[[], int] = lambda: 0,
    ) -> None:
        """`most` may wait; `in_flight` tells the tokens that workers have and did not compute."""
        self._most = most
        self._clock = clock
        self._waiting: list[_Waiter] = []  # in order of due, then of arrival
        self._stirred = asyncio.Event()  # somebody came or went
        self._caller: asyncio.Task[None] | None = None  # calls waiters up while there are any
        self._rate = DrainRate(clock, in_flight)

    @property
    def depth(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def tokens_before(self, due: float) -> int:
        """Tokens of those who go before one that is due then."""
        end = bisect.bisect_right(self._waiting, due, key=_due)
        return sum(waiter.ticket.num_tokens for waiter in self._waiting[:end])

    def drain_rate(self, assumed: float = 0.0) -> float:
        """Tokens a second that leave the line for a worker; `assumed` until that is measured.

        0 where nothing is known: then nothing can be expected either.
        """
        first = self._waiting[0].ticket.num_tokens if self._waiting else 0
        return self._rate.value(first, assumed)

    def slack_s(
        self, due: float, tenant: str, assumed_rate: float = 0.0, safety: float = 1.0
    ) -> float:
        """Seconds by which later tickets can be put back and still keep their promises.

        Infinite where none of them depends on it. Those that are too late already do not count,
        and a tenant with nothing waiting is free to go first: that is its share. `safety` is the
        factor by which things may take longer than expected.
        """
        rate = self.drain_rate(assumed_rate)
        waiting = [waiter.ticket for waiter in self._waiting]
        if rate <= 0 or all(ticket.tenant != tenant for ticket in waiting):
            return math.inf
        now, needed_s, slack = self._clock(), 0.0, math.inf
        for ticket in waiting:
            needed_s += ticket.num_tokens / rate
            left_s = ticket.promised - now
            if ticket.due > due and needed_s <= left_s:
                slack = min(slack, left_s - needed_s * safety)
        return slack

    def check_room(self) -> None:
        """Raises Overloaded when so many wait that nobody else may."""
        if self.depth >= self._most:
            raise Overloaded(f"{self._most} requests are waiting already", self.retry_after_s)

    async def place(
        self,
        ticket: Ticket,
        attempt: Callable[[], Awaitable[T]],
        news: Callable[[], asyncio.Event],
        *,
        accepted: bool = False,
    ) -> T:
        """What `attempt` returns, once it finds room: called at once if nobody waits, else in turn.

        `news` gives the event that the next change sets. `attempt` raises Overloaded where there
        is no room; what else it raises ends the wait. Raises Overloaded itself when the line is
        full, unless the request was `accepted` before. The caller sets the time limit, by
        cancelling.
        """
        asked = None
        if not self._waiting:
            asked = news()
            with contextlib.suppress(Overloaded):
                return await attempt()
        if not accepted:
            self.check_room()
        waiter = self._join(ticket, news, asked)
        try:
            while True:
                await waiter.turn.wait()
                waiter.turn.clear()
                try:
                    result = await attempt()
                except Overloaded:
                    self._refused(waiter)
                else:
                    self._rate.placed(ticket.num_tokens)
                    return result
        finally:
            self._leave(waiter)

    def _join(
        self, ticket: Ticket, news: Callable[[], asyncio.Event], asked: asyncio.Event | None
    ) -> _Waiter:
        waiter = _Waiter(ticket, news, asked)
        bisect.insort(self._waiting, waiter, key=_due)
        self._rate.waiting(True)
        self._stirred.set()
        if self._caller is None or self._caller.done():
            self._caller = asyncio.create_task(self._call_up(), name="line")
        return waiter

    def _refused(self, waiter: _Waiter) -> None:
        if self._waiting[0] is waiter:
            waiter.refused_first = min(waiter.refused_first, self._clock())
        waiter.trying = False
        waiter.tried.set()
        if waiter.slow:
            self._stirred.set()  # there may have been news meanwhile

    def _leave(self, waiter: _Waiter) -> None:
        self._waiting.remove(waiter)
        waiter.left = True
        waiter.tried.set()
        self._stirred.set()
        self._rate.waiting(bool(self._waiting))

    async def _call_up(self) -> None:
        """Runs while somebody waits: at each news, and when somebody comes or goes, a round."""
        while self._waiting:
            self._stirred.clear()
            news = self._waiting[0].news()  # before the tries, so that none is missed
            await self._round(news)
            if self._waiting:
                await _either(news, self._stirred)

    async def _round(self, news: asyncio.Event) -> None:
        """Asks who waits, in order, each once for one news, until enough have found no room."""
        refused = trying = 0
        for waiter in tuple(self._waiting):
            if waiter.left:
                continue
            if waiter.asked is not news and not waiter.trying:
                waiter.asked = news
                await _let_try(waiter)
            if waiter.left:
                continue
            refused += not waiter.trying
            trying += waiter.trying
            impatient = self._clock() - waiter.refused_first > PATIENCE_S
            if impatient or refused >= MOST_REFUSED or trying >= MOST_TRYING:
                return

    @property
    def retry_after_s(self) -> float:
        """By then half of the line is expected to have gone."""
        shortest, longest = RETRY_AFTER_S
        rate = self.drain_rate()
        half_s = self.tokens_before(math.inf) / rate / 2 if rate else 0.0
        return min(longest, max(shortest, half_s))


async def _let_try(waiter: _Waiter) -> None:
    """Gives a waiter its turn and waits for the outcome, unless that takes too long."""
    waiter.trying, waiter.slow = True, False
    waiter.tried.clear()
    waiter.turn.set()
    try:
        async with asyncio.timeout(SLOW_TRY_S):
            await waiter.tried.wait()
    except TimeoutError:
        waiter.slow = waiter.trying


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    """Returns when one of the two is set."""
    tasks = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _due(waiter: _Waiter) -> float:
    return waiter.ticket.due
