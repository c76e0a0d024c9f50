"""Virtual finish times: shares, isolation, short and long, bounded waits; in a simulated server."""

import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import common_pb2
from router.queueing.fair_queue import ACTIVE_S, LEAD_S, FairQueue
from router.request import PendingPrompt, TenantShare

LOW, NORMAL, HIGH = (
    common_pb2.PRIORITY_LOW,
    common_pb2.PRIORITY_NORMAL,
    common_pb2.PRIORITY_HIGH,
)
A, B = TenantShare("a"), TenantShare("b")
CHUNK_S = 0.05


@dataclass(eq=False)
class Job:
    at: float
    seconds: float
    flow: TenantShare
    priority: int = 0
    pending: PendingPrompt | None = None
    left: float = 0.0
    done: float = 0.0

    @property
    def took(self):
        return self.done - self.at


def serve(*arriving):
    """Runs jobs, the earliest virtual finish first; yields (chunk, its tenant, all that wait)."""
    now = 0.0
    fair_queue, waiting = FairQueue(lambda: now), []
    coming = sorted(itertools.chain(*arriving), key=lambda job: -job.at)
    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1].at)
        while coming and coming[-1].at <= now:
            job = coming.pop()
            job.pending, job.left = fair_queue.add(job.flow, job.seconds, job.priority), job.seconds
            waiting.append(job)
        job = min(waiting, key=lambda job: job.pending.virtual_finish)
        chunk = min(job.left, CHUNK_S)
        yield chunk, job.flow, {other.flow for other in waiting}
        now += chunk
        job.left -= chunk
        if job.left <= 1e-9:
            waiting.remove(job)
            job.done = now
            fair_queue.remove(job.pending, computed=True)


def served(*arriving):
    """Runs them to their end."""
    for _ in serve(*arriving):
        pass


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
def finish(fair_queue):
    """The virtual finish of a prompt, and its seconds from now."""

    def add(flow, seconds, priority=0, *, computed=False):
        prompt = fair_queue.add(flow, seconds, priority)
        found = prompt.virtual_finish, prompt.fair_wait_s
        if computed:
            fair_queue.remove(prompt, computed=True)
        return pytest.approx(found)

    return add


def test_prompts_of_one_tenant_follow_each_other_and_short_ones_pass(fair_queue):
    first, second = fair_queue.add(A, 0.5), fair_queue.add(A, 1.3)
    assert (first.virtual_finish, second.virtual_finish) == pytest.approx((0.5, 1.8))
    short = fair_queue.add(A, 0.04)
    assert (short.virtual_finish, second.virtual_finish) == pytest.approx((0.04, 1.84))
    fair_queue.remove(short)  # it is not computed
    assert second.virtual_finish == pytest.approx(1.8)


def test_a_tenant_that_comes_goes_before_others_with_a_prompt_of_the_lead_at_most(finish):
    assert finish(A, 1.0) == (1.0, 1.0), "with none waiting there is no lead"
    for size, ahead in ((0.3, 0.3), (5.0, LEAD_S)):
        flow = TenantShare(f"of {size}")
        virtual_finish, _ = finish(flow, size, computed=True).expected
        assert virtual_finish == pytest.approx(size - ahead)
        # It has used that up.
        assert finish(flow, 1.0, computed=True).expected[0] == pytest.approx(virtual_finish + 1.0)


def test_idle_capacity_costs_nothing_and_a_rest_saves_no_more_than_the_lead(finish):
    for _ in range(50):
        finish(A, 10.0, computed=True)
    assert finish(A, 10.0) == (510.0, 10.0)
    assert finish(B, 1.0) == (500.0, 1.0)  # half a second goes before it as well


def test_a_tenant_that_leaves_does_not_take_the_mean_back_with_it(fair_queue):
    heavy = TenantShare("h", weight=5.0)
    prompt = fair_queue.add(heavy, 0.01)
    fair_queue.add(TenantShare("l", priority=LOW), 1.0)  # at -4: its lead, by its share
    fair_queue.remove(prompt, computed=True)
    first, second = fair_queue.add(B, 1.0), fair_queue.add(B, 1.0)
    again = fair_queue.add(heavy, 1.0)
    assert first.virtual_finish < again.virtual_finish < second.virtual_finish


def test_a_tenant_that_stays_away_is_forgotten(finish, clock):
    finish(A, 1.0, computed=True)
    assert finish(B, 1.0, computed=True) == (2.0, 2.0)  # half of the fleet is A's
    clock.now += ACTIVE_S + 1
    assert finish(B, 1.0) == (3.0, 1.0)


def test_removing_twice_is_removing_once_and_a_preview_adds_nothing(fair_queue):
    first, second = fair_queue.add(A, 1.0), fair_queue.add(A, 1.0)
    for _ in range(2):
        fair_queue.remove(first, computed=True)
    assert second.virtual_finish == pytest.approx(2.0)
    previews = [fair_queue.preview(flow, 1.0).virtual_finish for flow in (A, A, B, B)]
    added = fair_queue.add(A, 1.0).virtual_finish, fair_queue.add(B, 1.0).virtual_finish
    assert previews == [added[0], added[0], added[1], added[1]]


def test_priorities_order_one_tenants_requests_and_buy_no_other_tenants_share(fair_queue):
    fair_queue.add(B, 1.0)
    high, normal, low = (fair_queue.add(A, 1.0, priority) for priority in (HIGH, NORMAL, LOW))
    finishes = [prompt.virtual_finish for prompt in (high, normal, low)]
    assert finishes == pytest.approx([0.0, 1.0, 5.0])  # a low one yields to other tenants, too
    later = fair_queue.add(A, 0.5, HIGH)
    assert later.virtual_finish < normal.virtual_finish < low.virtual_finish
    # Without a priority of its own a request has its tenant's: four times another's share.
    other = TenantShare("h", priority=HIGH)
    costs = [fair_queue.add(flow, 4.0).cost for flow in (other, A)]
    assert costs == [1.0, 4.0]


def test_a_burst_of_one_end_user_delays_no_other_of_its_tenant(fair_queue):
    """Users have turns: whoever comes waits for a few prompts of each other, not for all."""
    burst = [fair_queue.add(A, 1.0, user="burst") for _ in range(50)]
    nameless = fair_queue.add(A, 1.0)
    first, second = (fair_queue.add(A, 1.0, user="other") for _ in range(2))
    high = fair_queue.add(A, 1.0, HIGH, user="other")
    before = [
        sum(other.virtual_finish < prompt.virtual_finish for other in burst)
        for prompt in (nameless, first, second, high)
    ]
    assert before == [2, 3, 5, 2]  # no more than there are users, for each of its own prompts
    assert fair_queue.preview(A, 1.0, user="new").virtual_finish < burst[9].virtual_finish
    assert fair_queue.preview(A, 1.0, user="burst").virtual_finish > burst[-1].virtual_finish


@pytest.mark.parametrize("flood", [[0.1], [2.0], [0.05, 0.05, 1.0]])
@pytest.mark.parametrize(("a_second", "size"), [(0.3, 0.2), (1.0, 0.2), (0.2, 0.8)])
def test_a_flood_does_not_slow_a_light_tenant(flood, a_second, size):
    other = poisson(A, 3 / (sum(flood) / len(flood)), flood, seed=1)
    times = [n / a_second for n in range(1, int(60 * a_second))]
    alone, light = ([Job(at, size, B) for at in times] for _ in range(2))
    served(alone)
    served(other, light)
    assert p99(light) <= 1.5 * p99(alone) + 2 * CHUNK_S


def test_neither_short_nor_long_prompts_of_one_tenant_starve():
    short = poisson(A, 2.0, [0.05], seed=2)
    served(poisson(A, 0.3, [5.0], seed=1), short)
    assert p99(short) < 2.0
    # Twice as much as can be done, half of it in short prompts: the long one gets its share.
    short, long = poisson(A, 40.0, [0.05], seed=2), Job(20.0, 2.0, A)
    served(short, [long])
    backlog = sum(job.seconds for job in short if job.at <= 20.0 < job.done)
    assert long.took < 2 * (backlog + long.seconds) + LEAD_S


def jobs_of(until, most_s, most):
    """Lists of jobs that come until then."""
    job = st.builds(
        Job,
        at=st.floats(0, until),
        seconds=st.floats(0.01, most_s),
        flow=st.sampled_from([A, B, TenantShare("w", weight=5.0), TenantShare("l", priority=LOW)]),
        priority=st.sampled_from([0, HIGH]),
    )
    return st.lists(job, min_size=most // 2, max_size=most)


@given(st.one_of(jobs_of(20, 5, 40), jobs_of(5, 1, 80)))
def test_a_tenant_that_waits_gets_its_share_to_within_three_prompts(jobs):
    """Of the largest; its share is that among all tenants, whether they wait just now or not."""
    most = 3 * max(job.seconds for job in jobs) + CHUNK_S
    shares = sum(flow.share for flow in {job.flow for job in jobs})
    owed = dict[TenantShare, float]()  # since it began to wait
    for chunk, served_one, waiting in serve(jobs):
        owed = {
            flow: owed.get(flow, 0.0) + chunk * (flow.share / shares - (flow == served_one))
            for flow in waiting
        }
        assert max(owed.values()) <= most


@given(jobs_of(20, 5, 40), st.sampled_from([0, LOW]))
def test_waits_are_bounded_by_the_backlog_at_the_tenants_share(jobs, priority):
    for job in jobs:
        job.priority = job.priority or priority
    served(jobs)
    for job in jobs:
        mine = job.pending.share
        others = {other.flow.tenant: other.flow.share for other in jobs if other.flow != job.flow}
        share = mine / (mine + sum(others.values()))
        there = [other for other in jobs if other.at <= job.at <= other.done]
        most = sum(other.seconds for other in there) / share + 2 * LEAD_S
        passed = sum(o.seconds for o in jobs if job.at < o.at and o.done <= job.done)
        assert passed <= 2 * most * len({o.flow for o in jobs}) + CHUNK_S * len(jobs)
