"""Virtual finish times: shares, isolation, short and long, bounded waits; in a simulated server."""

import heapq
import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.v1 import common_pb2
from router.admission.fair_queue import ACTIVE_S, LEAD_S, FairQueue, Flow

LOW, NORMAL, HIGH = (
    common_pb2.PRIORITY_LOW,
    common_pb2.PRIORITY_NORMAL,
    common_pb2.PRIORITY_HIGH,
)
A, B = Flow("a"), Flow("b")


CHUNK_S = 0.05


@dataclass(eq=False)
class Job:
    at: float
    seconds: float
    flow: Flow
    priority: int = NORMAL
    virtual_finish: float = 0.0
    left: float = 0.0
    done: float = 0.0
    began: float = 0.0  # where the virtual clock stood when it came, at the latest
    refused: bool = False

    @property
    def took(self):
        return self.done - self.at


class Server:
    """Runs jobs by their finishes; `admit(server, job)` may refuse them as they come."""

    def __init__(self, admit=None):
        self.now = 0.0
        self.fair_queue = FairQueue(lambda: self.now)
        self.waiting = []
        self._order = itertools.count()
        self._admit = admit

    @property
    def flows(self):
        return [job.flow for _, _, job, _ in self.waiting]

    def run(self, jobs):
        coming = sorted(jobs, key=lambda job: job.at)
        coming.reverse()
        while coming or self.waiting:
            if not self.waiting:
                self.now = max(self.now, coming[-1].at)
            while coming and coming[-1].at <= self.now:
                self._take(coming.pop())
            if self.waiting:
                self._step()
        return jobs

    def _take(self, job):
        job.began = min([self.now, *(virtual_finish for virtual_finish, *_ in self.waiting)])
        prompt = self.fair_queue.add(job.flow, job.seconds, job.priority)
        job.virtual_finish, job.left = prompt.virtual_finish, job.seconds
        if self._admit and not self._admit(self, job):
            job.refused = True
            self.fair_queue.remove(prompt)
            return
        heapq.heappush(self.waiting, (job.virtual_finish, next(self._order), job, prompt))

    def _step(self):
        _, _, job, prompt = self.waiting[0]
        chunk = min(job.left, CHUNK_S)
        self.now += chunk
        job.left -= chunk
        if job.left <= 1e-9:
            heapq.heappop(self.waiting)
            job.done = self.now
            self.fair_queue.remove(prompt)


class Hands:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Hands()


@pytest.fixture
def fair_queue(clock):
    return FairQueue(clock)


def poisson(flow, a_second, sizes, seed, until=60.0, **fields):
    dice, at, jobs = random.Random(seed), 0.0, []
    while (at := at + dice.expovariate(a_second)) < until:
        jobs.append(Job(at, dice.choice(sizes), flow, **fields))
    return jobs


def at_most(count):
    """Refuses a job whose tenant has so many waiting."""

    def admit(server, job):
        return sum(flow == job.flow for flow in server.flows) < count

    return admit


def done_by(jobs, time):
    return sum(job.seconds for job in jobs if 0 < job.done <= time)


def p99(jobs):
    took = sorted(job.took for job in jobs)
    return took[int(0.99 * len(took))]


def test_who_has_nothing_waiting_is_first_by_its_lead(fair_queue, clock):
    fair_queue.add(B, 100.0)
    assert fair_queue.add(A, 0.5).virtual_finish == pytest.approx(
        clock.now - LEAD_S + 1.0
    )  # half is B's


def test_a_lead_over_nobody_is_none(fair_queue, clock):
    assert fair_queue.add(A, 0.5).virtual_finish == pytest.approx(clock.now + 0.5)
    assert fair_queue.add(A, 0.5).virtual_finish == pytest.approx(clock.now + 1.0)


def test_the_lead_is_used_up_and_comes_back_with_time(fair_queue, clock):
    fair_queue.add(B, 100.0)
    begun = []
    for _ in range(6):
        prompt = fair_queue.add(A, 0.25)
        fair_queue.remove(prompt)
        begun.append(prompt.virtual_finish - 0.5 - clock.now)
    assert begun == pytest.approx([-2.0, -1.5, -1.0, -0.5, 0.0, 0.0])
    clock.now += 1.0
    assert fair_queue.add(A, 0.25).virtual_finish == pytest.approx(clock.now - 0.5 + 0.5)


def test_a_short_prompt_that_comes_later_goes_before_its_tenants_own_long_one(fair_queue, clock):
    long = fair_queue.add(A, 1.3)
    clock.now += 1.0
    assert fair_queue.add(A, 0.04).virtual_finish < long.virtual_finish


def test_only_what_waits_counts(fair_queue, clock):
    """Idle capacity that was used is not paid for, and a rest saves up no more than the lead."""
    for _ in range(50):
        fair_queue.remove(fair_queue.add(A, 10.0))
    assert fair_queue.add(A, 1.0).virtual_finish == pytest.approx(clock.now + 1.0)
    clock.now += 1000 * ACTIVE_S
    late = fair_queue.add(B, 1.0)  # A's is late: the clock stands at its virtual_finish
    assert late.virtual_finish == pytest.approx(101.0 - LEAD_S + 2.0)


def test_a_tenant_that_stays_away_is_forgotten(fair_queue, clock):
    fair_queue.remove(fair_queue.add(A, 1.0))
    first = fair_queue.add(B, 1.0)
    fair_queue.remove(first)
    assert first.virtual_finish == pytest.approx(clock.now + 2.0)  # half of the fleet is A's
    clock.now += ACTIVE_S + 1
    assert fair_queue.add(B, 1.0).virtual_finish == pytest.approx(clock.now + 1.0)


def test_ending_twice_is_ending_once(fair_queue, clock):
    first, _ = fair_queue.add(A, 1.0), fair_queue.add(A, 1.0)
    fair_queue.remove(first)
    fair_queue.remove(first)
    assert fair_queue.add(A, 1.0).virtual_finish == pytest.approx(clock.now + 2.0)


def test_looking_changes_nothing(fair_queue):
    fair_queue.add(A, 1.0)
    looked = [fair_queue.preview(flow, 1.0).virtual_finish for flow in (A, A, B, B)]
    assert looked == [
        fair_queue.add(A, 1.0).virtual_finish,
        looked[0],
        fair_queue.add(B, 1.0).virtual_finish,
        looked[2],
    ]


def test_a_newcomer_goes_before_a_flood_that_is_late(fair_queue, clock):
    flood = [fair_queue.add(A, 1.0) for _ in range(100)]
    clock.now += 500.0
    assert fair_queue.add(B, 1.0).virtual_finish < flood[1].virtual_finish


def test_priorities_of_one_tenant(fair_queue):
    for _ in range(10):
        fair_queue.add(A, 1.0)
    finishes = {}
    for priority in (LOW, NORMAL, HIGH):
        prompt = fair_queue.add(A, 1.0, priority)
        finishes[priority] = prompt.virtual_finish
        fair_queue.remove(prompt)
    assert finishes[HIGH] < finishes[NORMAL] <= finishes[LOW]


def test_a_request_cannot_buy_other_tenants_share(fair_queue):
    fair_queue.remove(fair_queue.add(B, 1.0))
    fair_queue.add(A, 1.0)
    asked = {}
    for priority in (LOW, NORMAL, HIGH):
        prompt = fair_queue.add(A, 1.0, priority)
        asked[priority] = prompt.virtual_finish
        fair_queue.remove(prompt)
    assert asked[HIGH] < asked[NORMAL]  # of its own tenant's it goes first
    assert asked[HIGH] >= 100.0 + 2.0  # but has no more than its tenant's half
    assert asked[LOW] > asked[NORMAL]


def test_a_tenant_without_a_say_takes_its_own_priority(fair_queue, clock):
    fair_queue.remove(fair_queue.add(B, 1.0))
    prompt = fair_queue.add(Flow("h", priority=HIGH), 1.0)
    assert prompt.virtual_finish == pytest.approx(clock.now + 1.25)  # four fifths of the fleet


@pytest.mark.parametrize("waiting", [8, 64])
@pytest.mark.parametrize("sizes", [[0.1], [0.05, 0.05, 0.05, 1.0]])
def test_weights_are_honoured_while_all_want_more(sizes, waiting):
    rate = 5 / (sum(sizes) / len(sizes))
    one = poisson(Flow("one"), rate, sizes, seed=3)
    three = poisson(Flow("three", weight=3.0), rate, sizes, seed=4)
    Server(at_most(waiting)).run([*one, *three])
    ratio = done_by(three, 60.0) / done_by(one, 60.0)
    assert 2.1 < ratio < 4.3


@pytest.mark.parametrize("flood", [[0.1], [2.0], [0.05, 0.05, 1.0]])
@pytest.mark.parametrize(("a_second", "size"), [(0.3, 0.2), (1.0, 0.2), (0.2, 0.8)])
def test_a_flood_does_not_slow_a_light_tenant(flood, a_second, size):
    mean = sum(flood) / len(flood)
    other = poisson(A, 3 / mean, flood, seed=1)
    times = [n / a_second for n in range(int(60 * a_second))]
    alone, light = ([Job(at, size, B) for at in times] for _ in range(2))
    Server().run(alone)
    Server().run([*other, *light])
    assert p99(light) <= 1.5 * p99(alone) + 2 * CHUNK_S


def test_long_prompts_do_not_starve_short_ones_of_one_tenant():
    long = poisson(A, 0.3, [5.0], seed=1)
    short = poisson(A, 2.0, [0.05], seed=2)
    Server().run([*long, *short])
    assert p99(short) < 2.0


def test_short_prompts_do_not_starve_long_ones_of_one_tenant():
    """Twice as much as can be done, half of it in short prompts: the long one gets its prompt."""
    short = poisson(A, 40.0, [0.05], seed=2)
    long = Job(20.0, 2.0, A)
    Server().run([*short, long])
    backlog = sum(job.seconds for job in short if job.at <= 20.0 < job.done)
    assert long.took < 2 * (backlog + long.seconds) + LEAD_S


JOBS = st.lists(
    st.builds(
        Job,
        at=st.floats(0, 20),
        seconds=st.floats(0.01, 5),
        flow=st.sampled_from([A, B, Flow("w", weight=5.0), Flow("l", priority=LOW)]),
        priority=st.sampled_from([LOW, NORMAL, HIGH]),
    ),
    min_size=1,
    max_size=40,
)


@settings(deadline=None, max_examples=100)
@given(JOBS)
def test_everybody_is_served_within_what_waits_and_what_may_pass(jobs):
    """Nobody waits longer than for all that was there, and as much again of what came later."""
    Server().run(jobs)
    for job in jobs:
        there = sum(o.seconds for o in jobs if o.at <= job.at <= o.done)
        most = there / share_of(job, jobs) + 2 * LEAD_S
        passed = sum(o.seconds for o in jobs if job.at < o.at and o.done <= job.done)
        assert passed <= 2 * most * len({o.flow for o in jobs}) + CHUNK_S * len(jobs)


@settings(deadline=None, max_examples=100)
@given(JOBS)
def test_a_virtual_finish_lies_between_the_lead_and_the_backlog_at_the_tenants_share(jobs):
    Server().run(jobs)
    for job in jobs:
        assert job.virtual_finish >= job.began - LEAD_S
        own = sum(o.seconds for o in jobs if o.flow == job.flow and o.at <= job.at <= o.done)
        assert job.virtual_finish <= job.at + CHUNK_S + own / share_of(job, jobs) + 1e-6


def share_of(job, jobs):
    mine = job.flow.share * (0.25 if job.priority == LOW and job.flow.priority != LOW else 1.0)
    others = {other.flow.tenant: other.flow.share for other in jobs if other.flow != job.flow}
    return mine / (mine + sum(others.values()))
