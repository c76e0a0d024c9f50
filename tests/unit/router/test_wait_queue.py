"""The wait queue: order, bounds, passing and its end, no lost wake-up, nothing left behind."""

import asyncio
import math
import random

import pytest

from baton.errors import Overloaded, Unavailable
from router.admission import wait_queue as wait_queue_module
from router.admission.wait_queue import (
    MOST_REFUSED,
    MOST_TRYING,
    PASSING_S,
    RETRY_AFTER_S,
    DrainRate,
    QueueEntry,
    WaitQueue,
)


class Fleet:
    """Room for so many tokens; changed whenever it changes. Knows who asked, and when."""

    def __init__(self, room=0):
        self.room = room
        self.changed = asyncio.Event()
        self.tried = []
        self.placed = []
        self.now = 50.0

    def attempt(self, entry):
        async def attempt():
            self.tried.append(entry.request_id)
            await asyncio.sleep(0)
            if entry.num_tokens > self.room:
                raise Overloaded("no room")
            self.room -= entry.num_tokens
            self.placed.append(entry.request_id)
            return entry.request_id

        return attempt

    def give(self, tokens):
        self.room += tokens
        self.tell()

    def tell(self):
        self.changed.set()
        self.changed = asyncio.Event()

    def place(self, queue, finish, tokens=1, name=None, **fields):
        entry = QueueEntry(finish, tokens, name or f"at {finish}", **fields)
        return queue.place(entry, self.attempt(entry), lambda: self.changed)


@pytest.fixture
def fleet():
    return Fleet()


@pytest.fixture
def queue(fleet):
    return WaitQueue(100, clock=lambda: fleet.now)


@pytest.fixture
async def standing(queue, fleet):
    """standing(finish, tokens) starts a task that waits; none is left at the end."""
    tasks = []

    async def stand(finish, tokens=1, name=None, **fields):
        tasks.append(asyncio.create_task(fleet.place(queue, finish, tokens, name, **fields)))
        await settled()
        return tasks[-1]

    yield stand
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await settled()
    assert queue.depth == 0 and (queue._waking is None or queue._waking.done())


async def settled():
    for _ in range(50):
        await asyncio.sleep(0)


async def test_with_nobody_waiting_it_is_asked_at_once(queue, fleet):
    fleet.room = 1
    assert await fleet.place(queue, 1.0) == "at 1.0"
    assert queue.depth == 0


async def test_the_earliest_virtual_finish_goes_first(queue, fleet, standing):
    for finish in (5.0, 1.0, 3.0, 2.0, 4.0):
        await standing(finish)
    assert queue.depth == 5
    for _ in range(5):
        fleet.give(1)
        await settled()
    assert fleet.placed == [f"at {finish}.0" for finish in (1, 2, 3, 4, 5)]


async def test_equals_go_in_the_order_they_came(fleet, standing):
    for name in "abc":
        await standing(1.0, name=name)
    fleet.give(3)
    await settled()
    assert fleet.placed == ["a", "b", "c"]


async def test_a_newcomer_with_an_early_virtual_finish_need_not_wait_for_changes(fleet, standing):
    await standing(5.0, tokens=10)
    fleet.room = 5  # of which nobody tells
    await standing(1.0, tokens=5)
    assert fleet.placed == ["at 1.0"]


async def test_one_more_than_fit_is_refused_with_a_time(fleet, standing):
    queue = WaitQueue(2, clock=lambda: fleet.now)
    waiting = [asyncio.create_task(fleet.place(queue, finish)) for finish in (1.0, 2.0)]
    await settled()
    shortest, longest = RETRY_AFTER_S
    with pytest.raises(Overloaded, match="2 requests are waiting already") as caught:
        await fleet.place(queue, 0.0)
    assert shortest <= caught.value.retry_after_s <= longest
    accepted = QueueEntry(0.0, 1, "accepted")
    again = queue.place(accepted, fleet.attempt(accepted), lambda: fleet.changed, accepted=True)
    waiting.append(asyncio.create_task(again))
    await settled()
    fleet.give(3)
    await asyncio.gather(*waiting)
    assert fleet.placed == ["accepted", "at 1.0", "at 2.0"]


async def test_other_errors_end_the_wait(queue, fleet, standing):
    first = await standing(1.0)

    async def broken():
        raise Unavailable("nobody there")

    with pytest.raises(Unavailable):
        await queue.place(QueueEntry(0.0, 1, "broken"), broken, lambda: fleet.changed)
    fleet.give(1)
    assert await first == "at 1.0"


async def test_small_ones_pass_a_large_one_only_until_its_patience_ends(fleet, standing):
    await standing(1.0, tokens=10, name="large")
    await standing(2.0, tokens=1, name="small")
    fleet.give(1)
    await settled()
    assert fleet.placed == ["small"]
    fleet.now += PASSING_S + 0.1
    await standing(3.0, tokens=1, name="late")
    fleet.give(5)
    await settled()
    assert fleet.placed == ["small"]  # room gathers
    fleet.give(5)
    await settled()
    assert fleet.placed == ["small", "large"]
    fleet.give(1)
    await settled()
    assert fleet.placed == ["small", "large", "late"]


async def test_one_change_costs_a_bounded_number_of_tries(fleet, standing):
    for finish in range(50):
        await standing(float(finish), tokens=10)
    fleet.tried.clear()
    fleet.tell()
    await settled()
    assert fleet.tried == [f"at {finish}.0" for finish in range(MOST_REFUSED)]


async def test_tries_run_one_at_a_time(queue, fleet, monkeypatch):
    monkeypatch.setattr(wait_queue_module, "SLOW_TRY_S", 60.0)
    running, most = 0, 0

    async def attempt():
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        if fleet.room < 1:
            raise Overloaded("no room")

    async def tokenized(finish):
        await queue.place(QueueEntry(finish, 1, "x"), attempt, lambda: fleet.changed)

    first = asyncio.create_task(tokenized(0.0))
    await settled()
    rest = [asyncio.create_task(tokenized(float(finish))) for finish in range(20)]
    await settled()
    fleet.give(100)
    await asyncio.gather(first, *rest)
    assert most == 1


async def test_while_workers_think_the_next_are_asked_up_to_a_bound(queue, fleet):
    """A worker answers after a step of its engine; one answer after the other would be too slow."""
    enough, answer, asked, placed = asyncio.Event(), asyncio.Event(), [], []

    async def tokenized(finish):
        async def attempt():
            if fleet.room < 1:
                raise Overloaded("no room")
            asked.append(finish)
            if len(asked) == MOST_TRYING:
                enough.set()
            await answer.wait()
            placed.append(finish)

        await queue.place(QueueEntry(float(finish), 1, "x"), attempt, lambda: fleet.changed)

    tasks = [asyncio.create_task(tokenized(finish)) for finish in range(2 * MOST_TRYING)]
    await settled()
    fleet.give(1000)
    async with asyncio.timeout(30):
        await enough.wait()
        await asyncio.sleep(0.05)
        assert asked == list(range(MOST_TRYING))
        answer.set()
        await asyncio.gather(*tasks)
    assert placed == sorted(placed) and len(placed) == 2 * MOST_TRYING


async def test_a_try_that_hangs_does_not_hold_up_the_others(queue, fleet, monkeypatch):
    monkeypatch.setattr(wait_queue_module, "SLOW_TRY_S", 0.02)
    blocker = asyncio.create_task(fleet.place(queue, 1.0, tokens=10))
    await settled()
    silent = asyncio.Event()

    async def hang():
        if not silent.is_set():
            await silent.wait()
            raise Overloaded("no room there after all")
        return "placed"

    hanging = asyncio.create_task(queue.place(QueueEntry(0.5, 1, "h"), hang, lambda: fleet.changed))
    await settled()
    other = asyncio.create_task(fleet.place(queue, 0.7))
    fleet.give(1)
    assert await other == "at 0.7"
    fleet.tell()
    await settled()
    silent.set()
    async with asyncio.timeout(15):
        assert await hanging == "placed"  # the changed that came meanwhile is not lost on it
    blocker.cancel()
    await asyncio.gather(blocker, return_exceptions=True)


@pytest.mark.parametrize("during_try", [False, True])
async def test_a_cancelled_request_leaves_and_the_next_goes_on(queue, fleet, during_try):
    stuck = asyncio.Event()
    blocked = False

    async def attempt():
        if blocked:
            await stuck.wait()
        raise Overloaded("no room")

    first = asyncio.create_task(
        queue.place(QueueEntry(0.0, 1, "c"), attempt, lambda: fleet.changed)
    )
    second = asyncio.create_task(fleet.place(queue, 1.0))
    await settled()
    blocked = during_try
    fleet.give(1)
    await settled()
    first.cancel()
    assert await second == "at 1.0"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert queue.depth == 0


async def test_a_change_during_a_failing_try_is_not_lost(queue, fleet):
    async def attempt():
        found = fleet.room > 0
        fleet.give(1)  # room comes after the look, before the refusal
        await asyncio.sleep(0)
        if not found:
            raise Overloaded("no room")
        return "placed"

    async with asyncio.timeout(30):
        assert (
            await queue.place(QueueEntry(0.0, 1, "x"), attempt, lambda: fleet.changed) == "placed"
        )


@pytest.mark.parametrize("seed", range(8))
async def test_with_random_cancels_everybody_else_is_placed(seed):
    """Room goes round for ever; nobody may be forgotten, whoever gives up at whatever moment."""
    dice, fleet = random.Random(seed), Fleet(room=8)
    queue = WaitQueue(1000)

    async def one(number):
        await asyncio.sleep(dice.random() * 0.02)
        entry = QueueEntry(dice.random(), dice.choice([1, 1, 1, 4, 8]), str(number))
        await queue.place(entry, fleet.attempt(entry), lambda: fleet.changed)
        try:
            await asyncio.sleep(dice.random() * 0.002)
        finally:
            fleet.give(entry.num_tokens)

    tasks = [asyncio.create_task(one(number)) for number in range(200)]
    doomed = dice.sample(tasks, 60)
    for task in doomed:
        await asyncio.sleep(dice.random() * 0.001)
        task.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() or task.exception() is None for task in tasks)
    assert all(not task.cancelled() for task in set(tasks) - set(doomed))
    assert queue.depth == 0
    await settled()
    assert queue._waking is None or queue._waking.done()
    assert fleet.room == 8


async def test_a_large_one_gets_its_turn_among_small_ones_that_never_end(fleet, monkeypatch):
    """Small ones with earlier finishes come for ever, each holding its room a while."""
    monkeypatch.setattr(wait_queue_module, "PASSING_S", 0.05)
    fleet.room, queue = 4, WaitQueue(1000)
    begun = asyncio.get_running_loop().time()

    async def small():
        while True:
            now = asyncio.get_running_loop().time() - begun
            await fleet.place(queue, now + 0.1)
            await asyncio.sleep(0.002)
            fleet.give(1)

    others = [asyncio.create_task(small()) for _ in range(12)]
    await asyncio.sleep(0.05)
    try:
        async with asyncio.timeout(30):
            assert await fleet.place(queue, 0.3, tokens=4, name="large") == "large"
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def test_tokens_before_a_virtual_finish(queue, fleet, standing):
    for finish, tokens in ((1.0, 100), (2.0, 10), (3.0, 1)):
        await standing(finish, tokens=tokens)
    assert [queue.tokens_before(finish) for finish in (0.5, 1.0, 2.5, 9.0)] == [0, 100, 110, 111]
    assert queue.drain_rate() == 0.0  # nothing measured, nothing known
    assert queue.drain_rate(assumed=111.0) == 111.0


async def test_the_measured_rate_counts_before_an_assumed_one(queue, fleet, standing):
    for finish in range(12):
        await standing(float(finish), tokens=10)
    for _ in range(10):
        fleet.now += 0.5
        fleet.give(10)
        await settled()
    assert queue.drain_rate(assumed=1e9) == pytest.approx(20, rel=0.4)
    fleet.give(20)
    await settled()
    assert queue.depth == 0
    before = queue.drain_rate(1e9)
    fleet.now += 1000.0  # nobody waits: this tells nothing
    assert queue.drain_rate(1e9) == before == pytest.approx(20, rel=0.5)
    await standing(1.0, tokens=20)
    fleet.now += 100.0
    assert queue.drain_rate(1e9) < 2.0  # nothing has moved since


async def test_slack_is_the_least_of_later_targets_unless_the_tenant_is_new(queue, fleet, standing):
    await standing(1.0, tokens=100, tenant="a", first_token_by=fleet.now + 9.0)
    await standing(2.0, tokens=100, tenant="b", first_token_by=fleet.now + 4.0)
    await standing(3.0, tokens=100, tenant="a", first_token_by=fleet.now + 7.0)
    await standing(4.0, tokens=100, tenant="a", first_token_by=fleet.now + 3.9)  # late already
    slack = [
        queue.slack_s(finish, tenant, 100.0) for finish, tenant in ((0, "a"), (0, "b"), (2.5, "a"))
    ]
    assert slack == pytest.approx([2.0, 2.0, 4.0])
    assert queue.slack_s(0, "a", 100.0, safety=1.5) == pytest.approx(1.0)
    assert queue.slack_s(0, "a") == math.inf  # no rate is known
    assert queue.slack_s(3.5, "a", 100.0) == queue.slack_s(0, "c", 100.0) == math.inf


class Drained:
    """A drain rate on a clock of its own, over a fleet with `queued` tokens in flight."""

    def __init__(self, busy=True):
        self.now, self.queued = 0.0, 0
        self.rate = DrainRate(lambda: self.now, lambda: self.queued)
        self.rate.waiting(busy)

    def place(self, tokens, every_s, times=1):
        for _ in range(times):
            self.now += every_s
            self.rate.placed(tokens)


def test_the_drain_rate_counts_waiting_time_only():
    one = Drained()
    assert one.rate.value(0) == 0.0
    one.place(50, 0.1, times=100)
    assert one.rate.value(50) == pytest.approx(500, rel=0.05)
    one.rate.waiting(False)
    one.now += 1000.0
    assert one.rate.value(50) == pytest.approx(500, rel=0.05)
    one.rate.waiting(True)
    one.place(10, 0.1, times=400)
    assert one.rate.value(10) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("every_s", [0.01, 1.0, 30.0, 600.0])
def test_however_rarely_the_queue_moves_its_rate_is_work_by_time(every_s):
    one = Drained()
    one.place(300, every_s, times=2000 if every_s < 1 else 40)
    for share in (0.0, 0.5, 0.99):
        one.now = one.now + share * every_s
        assert one.rate.value(300, 1e9) == pytest.approx(300 / every_s, rel=0.2)


def test_a_large_prompt_changes_nothing_before_its_time_has_shown():
    one = Drained()
    one.place(100, 0.1, times=200)
    one.queued += 20_000  # it computes for 20 s, and nothing is placed meanwhile
    one.rate.placed(20_000)
    for _ in range(19):
        one.now += 1.0
        assert one.rate.value(100, 1000.0) == pytest.approx(1000, rel=0.1)
    one.now, one.queued = one.now + 1.0, 0
    one.place(100, 0.1, times=10)
    assert one.rate.value(100, 1000.0) == pytest.approx(1000, rel=0.2)


def test_a_large_prompt_at_the_front_changes_nothing_while_room_for_it_gathers():
    one = Drained()
    one.place(100, 0.1, times=200)
    one.now += 19.0
    assert one.rate.value(20_000, 1000.0) == pytest.approx(1000, rel=0.1)
    assert one.rate.value(100, 1000.0) < 300  # a small one would have gone


def test_a_first_moment_is_no_measurement():
    one = Drained()
    one.place(10_000, 0.001)
    assert one.rate.value(1) == 0.0
    assert one.rate.value(1, assumed=7.0) == 7.0
