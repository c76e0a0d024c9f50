"""The wait queue: order, bounds, passing and its end, no lost wake-up, nothing left behind."""

import asyncio
import math
import random

import pytest

from baton.errors import Overloaded, Unavailable
from router.queueing import wait_queue as wait_queue_module
from router.queueing.wait_queue import (
    MAX_REFUSED,
    MAX_TRYING,
    PASSING_S,
    RETRY_AFTER_S,
    NoWorker,
    WaitQueue,
)
from router.request import TenantShare
from tests.waiting import WAIT_S

from .snapshots import pending, queued


class Room:
    """Room for so many tokens, and a queue for it; knows which requests tried, and when."""

    def __init__(self, clock, room=0, capacity=1000, **fields):
        self.clock, self.room = clock, room
        self.tried, self.placed, self.tasks = [], [], []
        self.queue = WaitQueue(capacity, clock=clock, **fields)

    async def place(
        self,
        finish,
        tokens=1,
        name=None,
        *,
        accepted=False,
        tenant="t",
        reserve_workers=lambda names: names,
        **fields,
    ):
        name = name or finish

        async def attempt():
            self.tried.append(name)
            await asyncio.sleep(0)
            if tokens > self.room:
                raise Overloaded("no room")
            self.room -= tokens
            self.placed.append(name)
            return name

        demand = queued(pending(finish, tenant=tenant), tokens, **fields)
        return await self.queue.place(demand, attempt, reserve_workers, accepted=accepted)

    async def attempt(self, finish, attempt):
        """A request with an attempt of its own."""
        return await self.queue.place(queued(pending(finish), 1), attempt)

    async def add(self, placing):
        """Starts a request."""
        self.tasks.append(asyncio.create_task(placing))
        await settled()
        return self.tasks[-1]

    async def give(self, tokens):
        """Room appears; who was placed by it."""
        before = len(self.placed)
        self.change(tokens)
        await settled()
        return self.placed[before:]

    def change(self, tokens=0):
        self.room += tokens
        self.queue.fleet_changed()


@pytest.fixture
async def room_of(clock):
    """Makes queues; at the end no request and no task of them may be left."""
    made = []

    def make(*args, **fields):
        made.append(Room(clock, *args, **fields))
        return made[-1]

    yield make
    for room in made:
        for task in room.tasks:
            task.cancel()
        await asyncio.gather(*room.tasks, return_exceptions=True)
        await settled()
        assert room.queue.depth == 0 and (room.queue._waking is None or room.queue._waking.done())


@pytest.fixture
def room(room_of):
    return room_of()


async def settled():
    for _ in range(50):
        await asyncio.sleep(0)


async def test_entries_are_placed_by_virtual_finish_then_by_arrival(room):
    room.room = 1
    assert await room.place(9.0) == 9.0, "with none waiting it is tried at once"
    for finish, name in ((5.0, "e"), (1.0, "a"), (3.0, "c"), (3.0, "d"), (2.0, "b")):
        await room.add(room.place(finish, name=name))
    assert room.queue.depth == 5
    assert [await room.give(1) for _ in range(5)] == [["a"], ["b"], ["c"], ["d"], ["e"]]


async def test_an_entry_tries_again_only_where_there_may_be_room(room_of, clock):
    """It tries once in any case; without room it still becomes overdue, and workers are reserved
    for it."""
    seen, reserved = {"room": False}, []
    room = room_of(has_room=lambda demand, names: seen["room"])

    def reserve_workers(names):
        reserved.append(names)
        return frozenset("w")

    await room.add(room.place(1.0, reserve_workers=reserve_workers))
    await room.add(room.place(2.0))
    assert room.tried == [1.0, 2.0]
    assert await room.give(2) == [] and room.tried == [1.0, 2.0]
    clock.now += PASSING_S * 1.1
    await room.give(0)
    assert reserved and room.queue.reserved_for_others(pending(2.0)) == {"w"}
    seen["room"] = True
    assert await room.give(0) == [1.0, 2.0]


async def test_entries_that_no_worker_could_serve_keep_nobody_from_room(room, clock):
    """However many they are and however long they wait; few of them try at each change."""
    tries = []

    async def finds_no_worker():
        tries.append(1)
        raise NoWorker("no prefill worker")

    for _ in range(3 * MAX_REFUSED):
        entry = queued(pending(0.0), 1, decodes=False)
        await room.add(room.queue.place(entry, finds_no_worker))
    await room.add(room.place(5.0, tokens=9))
    clock.now += 10 * PASSING_S
    await room.give(0)
    tries.clear()
    assert await room.give(9) == [5.0]
    assert len(tries) == MAX_REFUSED
    assert await room.add(room.place(6.0, tokens=0)) and room.placed[-1] == 6.0


async def test_entries_of_an_adapter_that_no_worker_holds_leave_others_their_tries(room):
    lacking, tried = {"a", "b"}, []

    def needing(adapter):
        async def attempt():
            tried.append(adapter)
            if adapter in lacking:
                raise NoWorker(f"no worker holds {adapter}")

        return attempt

    for adapter in ("a",) * MAX_REFUSED + ("b",):
        entry = queued(pending(0.0), 1, adapter=adapter)
        await room.add(room.queue.place(entry, needing(adapter)))
    lacking.remove("b")
    tried.clear()
    await room.give(0)
    assert tried.count("b") == 1 and room.queue.depth == MAX_REFUSED


@pytest.mark.parametrize("passable", [True, False])
async def test_all_entries_that_no_worker_could_serve_learn_that_workers_are_back_though_full(
    room, clock, passable
):
    """Also behind an entry that may not be passed; afterwards they try as other entries do."""
    back, tried = [], []

    def waiting(name):
        async def attempt():
            tried.append(name)
            raise Overloaded("no room") if back else NoWorker("no decode worker")

        return attempt

    for name in range(10):
        await room.add(room.queue.place(queued(pending(10.0 + name), 100), waiting(name)))
    names = frozenset("w") if passable else frozenset()
    for finish in range(MAX_REFUSED):
        await room.add(room.place(float(finish), reserve_workers=lambda _: names, decodes=False))
    clock.now += 2 * PASSING_S
    await room.give(0)
    back.append(True)
    tried.clear()
    await room.give(0)
    assert tried == list(range(10))
    await room.give(0)
    assert tried == list(range(10)), "they wait for room as all others do"


async def test_a_newcomer_with_an_early_virtual_finish_need_not_wait_for_changes(room):
    await room.add(room.place(5.0, tokens=10))
    room.room = 5  # without an event
    await room.add(room.place(1.0, tokens=5))
    assert room.placed == [1.0]


async def test_a_tenant_fills_no_more_of_the_queue_than_its_share(room_of):
    """At a full queue one with less takes the place of the last one of the tenant with most; what
    was accepted before may always wait."""
    room = room_of(capacity=8)
    flood = [await room.add(room.place(at, tenant="flood", name=at)) for at in range(8)]
    more = [await room.add(room.place(9 + at, tenant="flood", accepted=True)) for at in range(2)]
    with pytest.raises(Overloaded, match="8 requests are waiting already") as refused:
        room.queue.check_room(TenantShare("flood"))
    shortest, longest = RETRY_AFTER_S
    assert shortest <= refused.value.retry_after_s <= longest
    room.queue.check_room(TenantShare("light"))
    light = [await room.add(room.place(20.0, tenant="light", name=f"l{at}")) for at in range(5)]
    late = await room.add(room.place(20.0, tenant="light"))
    assert [one.done() for one in (*flood, *more)] == [False] * 3 + [True] * 5 + [False] * 2
    for one in flood[3:]:
        with pytest.raises(Overloaded, match="took its place") as displaced:
            one.result()
        assert displaced.value.retry_after_s > 0
    assert late.done() and isinstance(late.exception(), Overloaded), "it has its half"
    room.queue.check_room(TenantShare("heavy", weight=2.0))
    assert room.queue.depth == 10 and not any(one.done() for one in light)
    assert len(await room.give(100)) == 10


async def test_other_errors_end_the_wait(room):
    first = await room.add(room.place(1.0))

    async def broken():
        raise Unavailable("no worker")

    with pytest.raises(Unavailable):
        await room.attempt(0.0, broken)
    assert await room.give(1) == [1.0] and first.done()


async def test_small_requests_pass_a_large_one_only_until_its_patience_ends(room):
    await room.add(room.place(1.0, tokens=10, name="large"))
    await room.add(room.place(2.0, tokens=1, name="small"))
    assert await room.give(1) == ["small"]
    room.clock.now += PASSING_S + 0.1
    await room.add(room.place(3.0, tokens=1, name="late"))
    assert await room.give(5) == []  # room gathers
    assert await room.give(5) == ["large"]
    assert await room.give(1) == ["late"]


@pytest.mark.parametrize("large", [1, 6])
async def test_large_requests_on_full_workers_stop_no_placement_and_are_placed(clock, large):
    """20 workers of 100 blocks, full of requests of one block; each large one needs 60 blocks.

    The clock is advanced by hand, 0.1 s at a time, in which about one request in 150 ends.
    """
    dice = random.Random(1)
    free, ends, tasks, placed = [0] * 20, [], [], []
    ends = [(dice.uniform(0, 15), worker, 1) for worker in range(20) for _ in range(100)]
    queue = WaitQueue(1 << 20, clock=clock)

    def place(finish, blocks, name):
        prompt = pending(finish)

        def reserve_workers(reserved):
            return reserved or frozenset({max(range(20), key=free.__getitem__)})

        async def attempt():
            reserved = queue.reserved_for_others(prompt)
            worker = max(set(range(20)) - reserved, key=free.__getitem__)
            if free[worker] < blocks:
                raise Overloaded("no room")
            free[worker] -= blocks
            ends.append((clock.now - begun + dice.uniform(0, 15), worker, blocks))
            placed.append(name)

        placing = queue.place(queued(prompt, blocks), attempt, reserve_workers)
        tasks.append(asyncio.create_task(placing))

    begun, by_second = clock.now, []
    for number in range(large):
        place(0.001 * number, 60, "large")
    for step in range(600):
        for number in range(20):
            place(1.0 + 20 * step + number, 1, "small")
        clock.now += 0.1
        over = [one for one in ends if one[0] <= clock.now - begun]
        ends = [one for one in ends if one[0] > clock.now - begun]
        for _, worker, blocks in over:
            free[worker] += blocks
        queue.fleet_changed()
        before = placed.count("small")
        while True:  # until nothing more is placed
            count = len(placed)
            await settled()
            if len(placed) == count:
                break
        if step % 10 == 0:
            by_second.append(0)
        by_second[-1] += placed.count("small") - before
        if placed.count("large") == large:
            break
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert placed.count("large") == large, f"after {clock.now - begun:.0f} s"
    assert min(by_second[:-1]) > 60, by_second  # about 133 a second end


async def test_a_request_that_never_has_room_stops_no_other(room):
    await room.add(room.place(1.0, tokens=100, name="huge", reserve_workers=lambda names: None))
    room.clock.now += PASSING_S + 0.1
    await room.give(0)
    await room.add(room.place(2.0, tokens=1, name="small"))
    assert await room.give(1) == ["small"]


async def test_one_change_costs_a_bounded_number_of_tries(room):
    for finish in range(50):
        await room.add(room.place(finish, tokens=10, name=str(finish)))
    room.tried.clear()
    await room.give(0)
    assert room.tried == [str(finish) for finish in range(MAX_REFUSED)]


@pytest.mark.parametrize(
    ("slow_s", "at_once"), [(60.0, 1), (wait_queue_module.SLOW_TRY_S, MAX_TRYING)]
)
async def test_tries_run_one_at_a_time_or_up_to_a_bound_while_workers_answer_slowly(
    room, monkeypatch, slow_s, at_once
):
    """A worker answers after a step of its engine; one answer after the other would be too slow."""
    monkeypatch.setattr(wait_queue_module, "SLOW_TRY_S", slow_s)
    enough, answer, asked, placed = asyncio.Event(), asyncio.Event(), [], []

    def trying(finish):
        async def attempt():
            if room.room < 1:
                raise Overloaded("no room")
            asked.append(finish)
            if len(asked) == at_once:
                enough.set()
            await answer.wait()
            placed.append(finish)

        return attempt

    for finish in range(2 * MAX_TRYING):
        await room.add(room.attempt(float(finish), trying(finish)))
    room.change(1000)
    async with asyncio.timeout(WAIT_S):
        await enough.wait()
        await asyncio.sleep(0.05)
        assert asked == list(range(at_once))
        answer.set()
        await asyncio.gather(*room.tasks)
    assert placed == sorted(placed) and len(placed) == 2 * MAX_TRYING


async def test_a_try_that_hangs_neither_holds_up_others_nor_misses_a_change(room, monkeypatch):
    monkeypatch.setattr(wait_queue_module, "SLOW_TRY_S", 0.02)
    await room.add(room.place(1.0, tokens=10))
    silent = asyncio.Event()

    async def hang():
        if not silent.is_set():
            await silent.wait()
            raise Overloaded("no room there after all")
        return "placed"

    hanging = await room.add(room.attempt(0.5, hang))
    other = await room.add(room.place(0.7))
    room.change(1)
    assert await other == 0.7
    room.change()
    await settled()
    silent.set()
    async with asyncio.timeout(WAIT_S):
        assert await hanging == "placed"


@pytest.mark.parametrize("seed", range(6))
async def test_with_random_cancels_all_others_are_placed(room_of, seed):
    """Room goes round; no request may be forgotten, whichever is cancelled at whatever moment."""
    dice, room = random.Random(seed), room_of(room=8)

    async def one():
        await asyncio.sleep(dice.random() * 0.02)
        tokens = dice.choice([1, 1, 1, 4, 8])
        await room.place(dice.random(), tokens)
        try:
            await asyncio.sleep(dice.random() * 0.002)
        finally:
            room.change(tokens)

    tasks = [asyncio.create_task(one()) for _ in range(200)]
    cancelled = dice.sample(tasks, 60)
    for task in cancelled:
        await asyncio.sleep(dice.random() * 0.001)
        task.cancel()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() or task.exception() is None for task in tasks)
    assert all(not task.cancelled() for task in set(tasks) - set(cancelled))
    assert room.room == 8


async def test_tokens_before_a_virtual_finish(room):
    for finish, tokens in ((1.0, 100), (2.0, 10), (3.0, 1)):
        await room.add(room.place(finish, tokens))
    before = [room.queue.tokens_before(pending(finish)) for finish in (0.5, 1.0, 2.5, 9.0)]
    assert before == [0, 100, 110, 111]
    assert room.queue.drain_rate() == 0.0  # nothing is measured
    assert room.queue.drain_rate(assumed=111.0) == 111.0


async def test_the_measured_rate_counts_before_an_assumed_one(room):
    queue = room.queue
    for finish in range(12):
        await room.add(room.place(finish, 10, str(finish)))
    for _ in range(10):
        room.clock.now += 0.5
        await room.give(10)
    assert queue.drain_rate(assumed=1e9) == pytest.approx(20, rel=0.4)
    await room.give(20)
    before = queue.drain_rate(1e9)
    room.clock.now += 1000.0  # none waits: this is no measurement
    assert queue.drain_rate(1e9) == before == pytest.approx(20, rel=0.5)
    await room.add(room.place(1.0, 20))
    room.clock.now += 100.0
    assert queue.drain_rate(1e9) < 2.0  # nothing has moved since


async def test_the_time_without_workers_is_no_measurement(room):
    """Of the first entry, too, which tried at once, and of those behind it."""

    async def attempt():
        if not room.room:
            raise NoWorker("no decode worker")

    for finish in range(3):
        await room.add(room.attempt(float(finish), attempt))
    room.clock.now += 25.0
    assert room.queue.drain_rate(assumed=1000.0) == 1000.0
    assert room.queue.drain_rate() == 0.0  # nothing is measured
    room.change(1)
    await settled()
    assert room.queue.depth == 0 and room.queue.drain_rate(assumed=1000.0) == 1000.0


async def test_slack_is_the_least_of_later_targets_unless_the_tenant_is_new(room):
    # The last one is late already.
    for finish, tenant, left_s in ((1, "a", 9.0), (2, "b", 4.0), (3, "a", 7.0), (4, "a", 3.9)):
        by = room.clock.now + left_s
        await room.add(room.place(finish, 100, tenant=tenant, first_token_by=by))
    slack_s = room.queue.ttft_slack_s
    first, last, other, new = (
        pending(finish, tenant=tenant)
        for finish, tenant in ((0, "a"), (3.5, "a"), (0, "b"), (0, "c"))
    )
    slack = [slack_s(one, 100.0) for one in (first, other, pending(2.5, tenant="a"))]
    assert slack == pytest.approx([2.0, 2.0, 4.0])
    assert slack_s(first, 100.0, safety=1.5) == pytest.approx(1.0)
    assert slack_s(first) == math.inf  # no rate is known
    assert slack_s(last, 100.0) == slack_s(new, 100.0) == math.inf
