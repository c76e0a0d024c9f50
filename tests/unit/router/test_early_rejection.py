"""Who is refused because it cannot make it, that those who are not, do, and what explain says."""

import asyncio
import math
import random
from dataclasses import replace
from itertools import cycle, islice

import pytest

from baton.errors import Overloaded
from router.admission.early_rejection import DOUBT, SAFETY, check, why_refused
from router.placement.explain import explain
from router.placement.scoring import rank_all
from router.queueing.wait_queue import RETRY_AFTER_S, WaitQueue
from router.request import TenantShare

from .simulated import NOW, RATE, SimulatedFleet, placement_request, poisson, tokenized, worker
from .snapshots import fleet, needs, pending, queued
from .snapshots import worker as view


@pytest.fixture
async def queue_of():
    """queue_of(*entries) is a wait queue with these entries."""
    tasks = []

    async def start(*entries, capacity=1000):
        made = WaitQueue(capacity, clock=lambda: NOW)

        async def full():
            raise Overloaded("full")

        for entry in entries:
            tasks.append(asyncio.create_task(made.place(entry, full)))
            for _ in range(20):
                await asyncio.sleep(0)
        assert made.depth == len(entries)
        return made

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def checked(queue, *prefill, tokens=100, **fields):
    request = tokenized(tokens, **fields)
    snapshot = fleet(prefill or (worker("p"),), (worker("d"),))
    return check(request, placement_request(request), snapshot, queue, NOW)


def retry_after_s(queue, *prefill, **fields):
    with pytest.raises(Overloaded) as caught:
        checked(queue, *prefill, **fields)
    return caught.value.retry_after_s


BUSY, UNKNOWN = worker("p", queue=1), worker("p", 0)
EARLY, LATE = pending(NOW - 1, tenant="other"), pending(NOW + 1, tenant="other")
BEFORE, AFTER, HUGE = queued(EARLY, 2000), queued(LATE, 50_000), queued(EARLY, 10**9)
OWN = queued(pending(NOW + 1), 1000, first_token_by=NOW + 1.05)  # of its tenant, and urgent


@pytest.mark.parametrize(
    ("workers", "rate"),
    [
        ([worker("a")], RATE),
        ([worker("a"), worker("b", 3 * RATE)], 4 * RATE),
        ([worker("a"), worker("b", 0)], 2 * RATE),  # counts as the mean of the others
        ([worker("a"), worker("b", state="SILENT")], RATE),
        ([UNKNOWN], 0.0),
    ],
)
def test_the_prefill_rate_is_that_of_all_ready_workers(workers, rate):
    assert fleet(workers, [worker("d")]).prefill_rate == rate


@pytest.mark.parametrize(
    ("entries", "prefill", "fields", "why"),
    [
        ([], worker("p", queue=10), {"target_s": 0.2}, None),
        # Without a target only the deadline counts.
        ([queued(EARLY, 10_000)], worker("p"), {}, None),
        ([queued(EARLY, 10_000)], worker("p"), {"timeout_s": 5.0}, "wanted in 5.00 s"),
        ([], BUSY, {"tokens": 1000, "target_s": 9.0, "timeout_s": 1.1}, "wanted in 1.10 s"),
        # What is before it in the queue counts, and what is behind does not.
        ([BEFORE, AFTER], worker("p"), {"target_s": 3.0}, None),
        ([BEFORE, AFTER], worker("p"), {"target_s": 2.0}, "2000 tokens go first at 1000 tokens/s"),
        # An idle fleet may measure wrong, and refuses only what is beyond doubt.
        ([], worker("p"), {"tokens": 1000, "target_s": SAFETY / DOUBT + 0.05}, None),
        ([], worker("p"), {"tokens": 1000, "target_s": SAFETY / DOUBT - 0.05}, "expected in"),
        ([], BUSY, {"tokens": 1000, "target_s": 0.9}, "expected in"),
        # Nothing is refused while no rate is known; a virtual finish is no time then.
        ([HUGE], UNKNOWN, {"tokens": 1000, "target_s": 0.1}, None),
        ([], UNKNOWN, {"timeout_s": 10.0, "virtual_finish": NOW + 30}, None),
        (
            [],
            BUSY,
            {"timeout_s": 10.0, "virtual_finish": NOW + 30},
            "expected in 37.50 s .* fair share gives it 30.00 s",
        ),
        # A newcomer must not break its own tenant's target.
        ([OWN], BUSY, {"target_s": 5.0}, "earlier request of its tenant .* takes 0.13 s"),
        ([OWN], BUSY, {"target_s": 5.0, "tenant": "other"}, None),
        ([OWN], BUSY, {"target_s": 5.0, "virtual_finish": NOW + 2}, None),
        # What resumes another stream was accepted there: it is never refused for its time.
        ([BEFORE, OWN], worker("p"), {"target_s": 1.0, "timeout_s": 1.0, "has_ticket": True}, None),
        ([BEFORE, OWN], worker("p"), {"target_s": 1.0, "resumed": (1, 2)}, "wanted in 1.00 s"),
    ],
)
async def test_a_request_is_refused_exactly_when_it_cannot_make_it(
    queue_of, entries, prefill, fields, why
):
    queue = await queue_of(*entries)
    if why is None:
        checked(queue, prefill, **fields)
    else:
        with pytest.raises(Overloaded, match=why):
            checked(queue, prefill, **fields)


async def test_retry_advice_is_when_it_should_fit_within_bounds(queue_of):
    shortest, longest = RETRY_AFTER_S
    after_s = retry_after_s(await queue_of(BEFORE), target_s=2.0)
    assert after_s == pytest.approx(2.1 * SAFETY - 2.0, rel=0.1)
    assert retry_after_s(await queue_of(HUGE), target_s=1.0) == longest
    busy, target_s = worker("p", queue=900), SAFETY - 0.001
    assert retry_after_s(await queue_of(), busy, target_s=target_s) == shortest


# Under overload, in simulated time.


@pytest.mark.parametrize("sizes", [[200], [50, 50, 50, 1000], [20, 400]])
@pytest.mark.parametrize("tenants", [["a"], ["a", "b"]])
async def test_at_five_times_the_capacity_admitted_requests_meet_their_target(sizes, tenants):
    target_s, until, dice = 3.0, 20.0, random.Random(5)
    one = SimulatedFleet(fair=True, target_s=target_s, noise=0.15)
    rate = 5 * RATE / (sum(sizes) / len(sizes)) / len(tenants)
    for seed, tenant in enumerate(tenants):  # the second sends twice as much
        one.send(
            poisson(rate * (1 + seed), until, lambda _: dice.choice(sizes), seed),
            TenantShare(tenant),
        )
    await one.run()
    accepted = [job for job in one.jobs if job.refused is None]
    ttft = sorted(job.ttft for job in accepted)
    # Between two floods a tenant's first request goes before the other's admitted ones.
    assert ttft[int(0.99 * len(ttft))] <= target_s * (1.3 if len(tenants) > 1 else 1.0)
    assert sum(job.tokens for job in accepted) > 0.8 * RATE * until  # capacity is not wasted
    for size in sizes:
        done = sum(job.tokens == size for job in accepted)
        assert done > 0.02 * sum(job.tokens == size for job in one.jobs)  # no size is shut out
    for tenant in tenants:  # each has the same share
        share = sum(job.tokens for job in accepted if job.flow.tenant == tenant)
        assert share == pytest.approx(sum(job.tokens for job in accepted) / len(tenants), rel=0.1)
    shortest, longest = RETRY_AFTER_S
    assert all(shortest <= job.refused <= longest for job in one.jobs if job.refused is not None)


def bursts(number, size, every_s):
    return ((n * every_s + i * 0.01, 100 + i) for n in range(number) for i in range(size))


def rarely_large(dice):
    return 8000 if dice.random() < 0.02 else 100


def mixed(dice):
    return int(math.exp(dice.uniform(math.log(16), math.log(4000))))


STEADY, SLOTS = {}, {"slots": 8, "hold_s": 4}


@pytest.mark.parametrize(
    ("settings", "arrivals", "step_s", "known_s", "change"),
    [
        # step_s: what one placement takes; known_s: when the router has seen a few of them
        pytest.param(STEADY, poisson(12, 18), 0.3, 0, (), id="steady"),
        pytest.param({"workers": 4}, poisson(48, 5), 0.3, 0, (), id="steady-4-workers"),
        pytest.param(STEADY, bursts(3, 60, 20), 0.3, 0, (), id="bursts"),
        pytest.param(STEADY, poisson(6, 60, rarely_large), 8, 0, (), id="rarely-large"),
        pytest.param(STEADY, poisson(1.6, 90, mixed), 4, 0, (), id="mixed-sizes"),
        pytest.param({"workers": 4}, poisson(6, 15, mixed), 4, 0, (), id="mixed-sizes-4-workers"),
        pytest.param(SLOTS, poisson(3, 40), 1, 8, (), id="slots"),
        pytest.param({"slots": 4, "hold_s": 120}, poisson(0.06, 2000), 40, 300, (), id="gaps"),
        pytest.param({"slots": 1, "hold_s": 60}, poisson(0.04, 2000), 60, 400, (), id="lone"),
        pytest.param({"slots": 16, "hold_s": 30}, bursts(3, 60, 100), 20, 30, (), id="slot-bursts"),
        pytest.param(
            {"blocks": 1000, "hold_s": 4}, poisson(8, 30, rarely_large), 4, 4, (), id="blocks"
        ),
        # What waits over a change of speed cannot be predicted; a few placements teach it.
        pytest.param(STEADY, poisson(12, 24), 1, 18, (12, "rate", RATE / 4), id="slower"),
        pytest.param(STEADY, poisson(12, 24), 1, 18, (12, "rate", 4 * RATE), id="faster"),
        pytest.param(SLOTS, poisson(3, 90), 1, 70, (45, "hold_s", 16), id="longer-held"),
        pytest.param(SLOTS, poisson(3, 60), 1, 40, (30, "hold_s", 1), id="shorter-held"),
    ],
)
async def test_the_predicted_ttft_is_within_twice_of_the_real_one(
    settings, arrivals, step_s, known_s, change
):
    one = SimulatedFleet(**settings)
    one.send(arrivals)
    if change:
        changed_s, name, value = change
        one.at(changed_s, lambda: setattr(one, name, value))
    await one.run()
    known = [job for job in one.jobs if job.at >= NOW + known_s]
    assert len(known) > 30 and (change or max(job.ttft for job in known) > 2 * step_s)
    for job in known:
        within = job.ttft / 2 - step_s <= job.predicted <= 2 * job.ttft + step_s
        assert within, (job.at - NOW, job.ttft)


# Explain.

PROMPT = tuple(islice(cycle(range(20)), 20))


def explained(snapshot, queue, local=0, **fields):
    request = replace(tokenized(20, **fields), prompt=PROMPT)
    more = {"cache_salt": "s", "max_new_tokens": 7, "local_prefill_max_tokens": local}
    needed = needs(PROMPT, request.pending.virtual_finish, **more)
    refused = why_refused(request, needed, snapshot, queue, NOW)
    return explain(snapshot, needed, refused), rank_all(snapshot, needed)


async def test_explain_lists_every_pair_with_what_placement_computed(queue_of):
    queue = await queue_of()
    prefill = [view("p0", "STALLED"), view("p1", queue_tokens=60, caches=PROMPT, salt="s")]
    load = {"running": 2, "step_ms": 20, "host_id": "there"}
    snapshot = fleet(prefill, [view("d0", caches=PROMPT[:8], salt="s", **load)])
    response, (pair, stalled) = explained(snapshot, queue)
    best, left_out = response.candidates
    assert (best.prefill, best.decode, best.refused, best.same_host) == ("p1", "d0", "", False)
    assert best.ttft_ms == pytest.approx(pair.ttft_s * 1e3) and best.ttft_ms > 60
    assert best.tpot_ms == pytest.approx(pair.on_decode.tpot_s * 1e3) and best.tpot_ms > 20
    assert best.score == pytest.approx(pair.score_ms)
    assert (best.queue_tokens, best.prefill_cached_tokens, best.decode_cached_tokens) == (60, 16, 8)
    assert left_out.refused == stalled.refused == "p0 is STALLED"
    assert (response.refused, response.decode_prefills) == ("", False)
    assert (response.prompt_tokens, response.tenant) == (20, "t")


async def test_explain_says_what_keeps_a_request_from_running(queue_of):
    queue, cached = await queue_of(), view("d0", caches=PROMPT, salt="s")
    assert explained(fleet([view("p0")], [cached]), queue, local=16)[0].decode_prefills
    assert not explained(fleet([view("p0")], [cached]), queue)[0].decode_prefills
    silent, _ = explained(
        fleet([view("p0")], [replace(cached, state="SILENT", suspected=True)]), queue, local=16
    )
    assert not silent.decode_prefills and "d0 is SILENT" in silent.refused

    def refusal(snapshot, queue=queue, **fields):
        return explained(snapshot, queue, **fields)[0].refused

    full = fleet([view("p0", max_batch=1, running=2)], [view("d0", blocks_free=0)])
    assert "no room for 20 tokens" in refusal(full)
    assert "no prefill worker is ready" in refusal(fleet([], [view("d0")]))
    late = fleet([view("p0", queue_tokens=900, prefill_tokens_per_s=1000)], [view("d0")])
    assert "first token is expected in" in refusal(late, target_s=0.5)
    assert refusal(late, target_s=50.0) == ""
    free = fleet([view("p0")], [view("d0")])
    one, two = await queue_of(BEFORE, capacity=2), await queue_of(BEFORE, AFTER, capacity=2)
    assert "requests waiting for room: 1" in refusal(free, one)
    assert "2 requests are waiting already" in refusal(free, two, tenant="other")
