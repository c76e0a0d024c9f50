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

    @property
    def took(self):
        return self.done - self.at


def serve(*arriving):
    """Runs jobs in chunks by their finishes."""
    now, order = 0.0, itertools.count()
    fair_queue, waiting = FairQueue(lambda: now), []
    coming = sorted(itertools.chain(*arriving), key=lambda job: -job.at)
    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1].at)
        while coming and coming[-1].at <= now:
            job = coming.pop()
            job.began = min([now, *(finish for finish, *_ in waiting)])
            prompt = fair_queue.add(job.flow, job.seconds, job.priority)
            job.virtual_finish, job.left = prompt.virtual_finish, job.seconds
            heapq.heappush(waiting, (job.virtual_finish, next(order), job, prompt))
        if waiting:
            _, _, job, prompt = waiting[0]
            chunk = min(job.left, CHUNK_S)
            now += chunk
            job.left -= chunk
            if job.left <= 1e-9:
                heapq.heappop(waiting)
                job.done = now
                fair_queue.remove(prompt)


def poisson(flow, a_second, sizes, seed, until=60.0):
    dice, at, jobs = random.Random(seed), 0.0, []
    while (at := at + dice.expovariate(a_second)) < until:
        jobs.append(Job(at, dice.choice(sizes), flow))
    return jobs


def p99(jobs):
    took = sorted(job.took for job in jobs)
    return took[int(0.99 * len(took))]


@pytest.fixture
def fair_queue(clock):
    return FairQueue(clock)


@pytest.fixture
def finish(fair_queue, clock):
    """The virtual finish of a prompt, seconds from now."""

    def add(flow, seconds, priority=0, *, computed=False):
        prompt = fair_queue.add(flow, seconds, priority)
        if computed:
            fair_queue.remove(prompt)
        return prompt.virtual_finish - clock.now

    return add


def test_a_lead_over_others_that_wait_is_used_up_and_comes_back_with_time(finish, clock):
    assert finish(B, 100.0) == pytest.approx(100.0), "with none waiting there is no lead"
    # 0.25 s of half the fleet each.
    begun = [finish(A, 0.25, computed=True) - 0.5 for _ in range(6)]
    assert begun == pytest.approx([-2.0, -1.5, -1.0, -0.5, 0.0, 0.0])
    clock.now += 1.0
    assert finish(A, 0.25) == pytest.approx(-0.5 + 0.5)


def test_prompts_of_one_tenant_follow_each_other_and_short_ones_pass(finish, clock):
    assert finish(A, 0.5) == pytest.approx(0.5)
    assert finish(A, 0.5) == pytest.approx(1.0)
    long = clock.now + finish(A, 1.3)
    clock.now += 1.0
    assert clock.now + finish(A, 0.04) < long


def test_idle_capacity_costs_nothing_and_a_rest_saves_no_more_than_the_lead(finish, clock):
    for _ in range(50):
        finish(A, 10.0, computed=True)
    assert finish(A, 1.0) == pytest.approx(1.0)
    virtual_clock = clock.now + 1.0  # it stands where A's prompt, which is late, should be done
    clock.now += 1000 * ACTIVE_S
    assert clock.now + finish(B, 1.0) == pytest.approx(virtual_clock - LEAD_S + 2.0)


def test_a_tenant_that_stays_away_is_forgotten(finish, clock):
    finish(A, 1.0, computed=True)
    assert finish(B, 1.0, computed=True) == pytest.approx(2.0)  # half of the fleet is A's
    clock.now += ACTIVE_S + 1
    assert finish(B, 1.0) == pytest.approx(1.0)


def test_removing_twice_is_removing_once_and_a_preview_adds_nothing(fair_queue, finish):
    first, _ = fair_queue.add(A, 1.0), fair_queue.add(A, 1.0)
    fair_queue.remove(first)
    fair_queue.remove(first)
    previews = [fair_queue.preview(flow, 1.0).virtual_finish for flow in (A, A, B, B)]
    added = fair_queue.add(A, 1.0).virtual_finish, fair_queue.add(B, 1.0).virtual_finish
    assert previews == [added[0], added[0], added[1], added[1]]


def test_priorities_order_one_tenants_requests_and_buy_no_other_tenants_share(finish):
    finish(B, 1.0, computed=True)
    finish(A, 1.0)
    low, normal, high = (finish(A, 1.0, p, computed=True) for p in (LOW, NORMAL, HIGH))
    assert 2.0 <= high < normal < low  # no more than its tenant's half
    # Without a priority of its own a request has its tenant's: four fifths of the fleet.
    assert finish(Flow("h", priority=HIGH), 1.0) < normal


@pytest.mark.parametrize("flood", [[0.1], [2.0], [0.05, 0.05, 1.0]])
@pytest.mark.parametrize(("a_second", "size"), [(0.3, 0.2), (1.0, 0.2), (0.2, 0.8)])
def test_a_flood_does_not_slow_a_light_tenant(flood, a_second, size):
    other = poisson(A, 3 / (sum(flood) / len(flood)), flood, seed=1)
    times = [n / a_second for n in range(int(60 * a_second))]
    alone, light = ([Job(at, size, B) for at in times] for _ in range(2))
    serve(alone)
    serve(other, light)
    assert p99(light) <= 1.5 * p99(alone) + 2 * CHUNK_S


def test_neither_short_nor_long_prompts_of_one_tenant_starve():
    short = poisson(A, 2.0, [0.05], seed=2)
    serve(poisson(A, 0.3, [5.0], seed=1), short)
    assert p99(short) < 2.0
    # Twice as much as can be done, half of it in short prompts: the long one gets its share.
    short, long = poisson(A, 40.0, [0.05], seed=2), Job(20.0, 2.0, A)
    serve(short, [long])
    backlog = sum(job.seconds for job in short if job.at <= 20.0 < job.done)
    assert long.took < 2 * (backlog + long.seconds) + LEAD_S


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
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
)
def test_waits_are_bounded_by_the_backlog_at_the_tenants_share(jobs):
    """And a virtual finish lies between the lead and that."""
    serve(jobs)
    for job in jobs:
        mine = job.flow.share * (0.25 if job.priority == LOW and job.flow.priority != LOW else 1.0)
        others = {other.flow.tenant: other.flow.share for other in jobs if other.flow != job.flow}
        share = mine / (mine + sum(others.values()))
        there = [other for other in jobs if other.at <= job.at <= other.done]
        own_s = sum(other.seconds for other in there if other.flow == job.flow)
        assert job.began - LEAD_S <= job.virtual_finish
        assert job.virtual_finish <= job.at + CHUNK_S + own_s / share + 1e-6
        most = sum(other.seconds for other in there) / share + 2 * LEAD_S
        passed = sum(o.seconds for o in jobs if job.at < o.at and o.done <= job.done)
        assert passed <= 2 * most * len({o.flow for o in jobs}) + CHUNK_S * len(jobs)
