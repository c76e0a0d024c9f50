"""The wait queue: requests without room on workers, bounded and in order of virtual finish time.

When it is full, each tenant has its share of it: a tenant with less takes the place of the last
entry of the tenant with the most.

The first entry tries again at each change of the fleet. Later entries may pass it where it finds no
room (a large request must not keep small ones from room that it cannot use), but on all workers
only for PASSING_S: after that one worker or pair is reserved for it, so that room gathers there
until it fits, and others pass it elsewhere only. So neither long nor short requests starve.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from baton.errors import Overloaded
from router.queueing.drain_rate import Clock, DrainRate
from router.request import Demand, PendingPrompt, TenantShare

# How long the first entry may be passed on all workers, from when it first found no room.
PASSING_S = 1.0
# Tries without success at one change, which bounds the load on a full fleet; after that only
# entries try that need at most half of the smallest one that found no room.
MAX_REFUSED = 4
# A longer try has found room as far as the router can see, and waits for the worker's answer, which
# takes a step of its engine: other entries must not wait for it.
SLOW_TRY_S = 0.002
MAX_TRYING = 16  # at a time: a try may not see what others are about to reserve
RETRY_AFTER_S = (0.5, 30.0)

T = TypeVar("T")
# Names the workers to reserve for a request that was passed for too long, given those that are
# reserved for it already. None: it never has room, so others may pass it. Empty: it soon has room,
# so they may not.
ReserveWorkers = Callable[[frozenset[str]], frozenset[str] | None]


class NoWorker(Overloaded):
    """No worker can serve the request at all: others need not wait behind it."""


class QueueFull(Overloaded):
    """The request may not wait: it is refused at once, as it would be at its arrival."""


@dataclass(eq=False)
class _Waiter:
    """An entry, and the handshake between its request's task and the task that wakes entries."""

    demand: Demand
    reserve_workers: ReserveWorkers
    accepted: bool  # admitted before it came here: it cannot be displaced
    tried_at: int | None  # number of the fleet's change at which it tried last
    no_worker: bool  # result of its last try; it takes no room from others
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    trying: bool = False
    slow: bool = False  # the waking task did not wait for the end of this try
    left: bool = False
    refused_since: float = math.inf  # when it first found no room as the first entry
    passable: bool | None = None  # whether others may pass it while it finds no room

    def __post_init__(self) -> None:
        self.pending: PendingPrompt = self.demand.pending
        self.num_tokens = self.demand.num_tokens


class WaitQueue:
    """Requests that wait for room. Event-loop thread only."""

    def __init__(
        self,
        capacity: int,
        in_flight: Callable[[], int] = lambda: 0,
        clock: Clock = time.monotonic,
        has_room: Callable[[Demand, frozenset[str]], bool] = lambda demand, reserved: True,
    ) -> None:
        """`in_flight` returns the prompt tokens that workers have and have not computed yet;
        `has_room`, whether a try may find room on workers that are not reserved: entries that found
        none try again only then."""
        self._capacity = capacity
        self._num_changes = 0  # of the fleet
        self._clock, self._has_room = clock, has_room
        self._waiting: list[_Waiter] = []
        self._woken = asyncio.Event()  # the fleet or the entries have changed
        self._waking: asyncio.Task[None] | None = None  # runs while anything waits
        self._counts, self._shares = Counter[str](), dict[str, float]()  # of tenants with entries
        self._reserved_for: _Waiter | None = None
        self._reserved = frozenset[str]()  # incarnations of the workers reserved for it
        self._rate = DrainRate(clock, in_flight)

    @property
    def depth(self) -> int:
        return len(self._waiting)

    def fleet_changed(self) -> None:
        """Lets each entry try again."""
        self._num_changes += 1
        self._woken.set()

    def reserved_for_others(self, pending: PendingPrompt) -> frozenset[str]:
        """Incarnations of workers that are reserved for another request."""
        waiter = self._reserved_for
        return self._reserved if waiter and waiter.pending is not pending else frozenset()

    def tokens_before(self, pending: PendingPrompt) -> int:
        """Tokens of the entries that go before this prompt."""
        finish = pending.virtual_finish
        return sum(w.num_tokens for w in self._waiting if w.pending.virtual_finish <= finish)

    def drain_rate(self, assumed: float = 0.0) -> float:
        """Tokens a second that leave the queue for a worker; `assumed` until that is measured.

        0 if nothing is known; then no time can be predicted either.
        """
        first = min(self._waiting, key=_virtual_finish, default=None)
        return self._rate.value(first.num_tokens if first else 0, assumed)

    def ttft_slack_s(
        self, pending: PendingPrompt, assumed_rate: float = 0.0, safety: float = 1.0
    ) -> float:
        """Delay that the entries after a prompt can bear and still meet their TTFT targets.

        Infinite where no entry depends on it. Entries that are late already do not count, and a
        tenant without entries may go first, as that is its share. `safety`: factor by which things
        may take longer than expected.
        """
        rate, waiting = self.drain_rate(assumed_rate), self._in_order()
        tenant, finish = pending.owner.tenant, pending.virtual_finish
        if rate <= 0 or all(waiter.pending.owner.tenant != tenant for waiter in waiting):
            return math.inf
        now, needed_s, slack_s = self._clock(), 0.0, math.inf
        for waiter in waiting:
            needed_s += waiter.num_tokens / rate
            left_s = waiter.demand.first_token_by - now
            if waiter.pending.virtual_finish > finish and needed_s <= left_s:
                slack_s = min(slack_s, left_s - needed_s * safety)
        return slack_s

    def check_room(self, owner: TenantShare) -> None:
        """Raises QueueFull when the queue is full and no other tenant exceeds its share of it.

        The error's time is when half of the queue should be placed.
        """
        if self.depth >= self._capacity and self._displaced_by(owner) is None:
            raise self._full(f"{self._capacity} requests are waiting already")

    def _full(self, why: str) -> QueueFull:
        (shortest, longest), rate = RETRY_AFTER_S, self.drain_rate()
        half_s = sum(one.num_tokens for one in self._waiting) / rate / 2 if rate else 0.0
        return QueueFull(why, min(longest, max(shortest, half_s)))

    def _displaced_by(self, owner: TenantShare) -> _Waiter | None:
        """The entry that gives way to one more of a tenant when the queue is full: the last one of
        the tenant with the most by its share, unless the two would then change places.
        """
        counts, tenant = self._counts, owner.tenant
        if not counts:
            return None
        most = max(counts, key=lambda name: counts[name] / self._shares[name])
        if (counts[tenant] + 1) / owner.share > (counts[most] - 1) / self._shares[most]:
            return None
        for waiter in reversed(self._in_order()):
            if waiter.pending.owner.tenant == most and not (waiter.trying or waiter.accepted):
                return waiter
        return None

    async def place(
        self,
        demand: Demand,
        attempt: Callable[[], Awaitable[T]],
        reserve_workers: ReserveWorkers = lambda reserved: reserved,
        *,
        accepted: bool = False,
    ) -> T:
        """Returns the result of `attempt` once it finds room; it is tried at once if none waits.

        `attempt` raises Overloaded if there is no room; any other error ends the wait. Raises
        QueueFull itself when the queue is full or the entry is displaced by another tenant's,
        unless the request was `accepted` before. The caller limits the time by cancelling.
        """
        tried_at, no_worker = None, False
        if not self._waiting:
            tried_at = self._num_changes
            try:
                return await attempt()
            except Overloaded as error:
                no_worker = isinstance(error, NoWorker)  # it waits
        if not accepted and self.depth >= self._capacity:
            if (displaced := self._displaced_by(demand.pending.owner)) is None:
                raise self._full(f"{self._capacity} requests are waiting already")
            self._leave(displaced)
            displaced.turn.set()
        waiter = _Waiter(demand, reserve_workers, accepted, tried_at, no_worker)
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
                    self._rate.record_placed(demand.num_tokens)
                    return result
        finally:
            self._leave(waiter)

    def _in_order(self) -> list[_Waiter]:
        """Entries by virtual finish time, which changes while they wait, then by arrival."""
        self._waiting.sort(key=_virtual_finish)
        return self._waiting

    def _join(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        owner = waiter.pending.owner
        self._counts[owner.tenant] += 1
        self._shares[owner.tenant] = owner.share
        self._rate.set_busy(self._waits_for_room)
        self._woken.set()
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake_entries(), name="wait queue")

    def _refused(self, waiter: _Waiter, no_worker: bool) -> None:
        if waiter.no_worker is not no_worker:
            waiter.no_worker, waiter.refused_since = no_worker, math.inf
            self._rate.set_busy(self._waits_for_room)
        if not no_worker and min(self._waiting, key=_virtual_finish) is waiter:
            waiter.refused_since = min(waiter.refused_since, self._clock())
        waiter.trying = False
        waiter.tried.set()
        if waiter.slow:
            self._woken.set()  # there may have been a change meanwhile

    def _leave(self, waiter: _Waiter) -> None:
        """Removes an entry; idempotent."""
        if waiter.left:
            return
        self._waiting.remove(waiter)
        tenant = waiter.pending.owner.tenant
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant], self._shares[tenant]
        if self._reserved_for is waiter:
            self._reserved_for, self._reserved = None, frozenset()
        waiter.left = True
        waiter.tried.set()
        self._woken.set()
        self._rate.set_busy(self._waits_for_room)

    @property
    def _waits_for_room(self) -> bool:
        return any(not waiter.no_worker for waiter in self._waiting)

    async def _wake_entries(self) -> None:
        """Runs while anything waits: a round at each change of the fleet or of the entries."""
        while self._waiting:
            self._woken.clear()  # before the tries, so that no change is missed
            await self._round(self._num_changes)
            if self._waiting:
                await self._woken.wait()

    async def _round(self, change: int) -> None:
        """Lets entries try in order, each once for one change, until enough have found no room.

        Workers are reserved for the first entry that has waited for too long.
        """
        refused, trying, smallest = list[_Waiter](), 0, math.inf
        overdue = blocked = False  # blocked: others may not pass an entry that found no room
        no_worker: Counter[Hashable] = Counter()  # tries, by the workers that are needed
        for waiter in (waiters := tuple(self._in_order())):
            workers = waiter.demand.needed_workers
            if waiter.left or (waiter.no_worker and no_worker[workers] >= MAX_REFUSED):
                continue
            if not waiter.no_worker:  # such an entry tries in any case: workers may be back
                if len(refused) >= MAX_REFUSED:
                    if waiter.num_tokens > smallest / 2:
                        continue
                    blocked = blocked or not self._may_pass(refused[0])
                if blocked:
                    continue
            if waiter.tried_at != change and not waiter.trying:
                await self._try(waiter, change, is_first=waiter is waiters[0])
            if waiter.left:
                continue
            if waiter.trying:
                trying += 1
                if trying >= MAX_TRYING:
                    return
                continue
            if waiter.no_worker:
                no_worker[workers] += 1
                continue
            refused.append(waiter)
            smallest = min(smallest, waiter.num_tokens)
            if not overdue and self._clock() - waiter.refused_since > PASSING_S:
                overdue = True
                blocked = blocked or not self._reserve_workers(waiter)

    async def _try(self, waiter: _Waiter, change: int, is_first: bool) -> None:
        """Lets an entry try, unless it has tried before and no worker seems to have room."""
        untried = waiter.tried_at is None or waiter.no_worker
        waiter.tried_at, reserved = change, self.reserved_for_others(waiter.pending)
        if untried or self._has_room(waiter.demand, reserved):
            await _let_try(waiter)
        elif is_first:
            waiter.refused_since = min(waiter.refused_since, self._clock())

    def _reserve_workers(self, waiter: _Waiter) -> bool:
        """Reserves workers for an entry; returns whether others may still pass it."""
        reserved = self._reserved if self._reserved_for is waiter else frozenset[str]()
        names = waiter.reserve_workers(reserved)
        self._reserved_for, self._reserved = waiter, names or frozenset()
        waiter.passable = names != frozenset()
        return waiter.passable

    @staticmethod
    def _may_pass(first: _Waiter) -> bool:
        """Whether others may pass the first entry, however many behind it have no room either."""
        if first.passable is None:
            first.passable = first.reserve_workers(frozenset()) != frozenset()
        return first.passable


async def _let_try(waiter: _Waiter) -> None:
    """Lets an entry try and waits for the result for up to SLOW_TRY_S."""
    waiter.trying, waiter.slow = True, False
    waiter.tried.clear()
    waiter.turn.set()
    try:
        async with asyncio.timeout(SLOW_TRY_S):
            await waiter.tried.wait()
    except TimeoutError:
        waiter.slow = waiter.trying


_virtual_finish = attrgetter("pending.virtual_finish")
