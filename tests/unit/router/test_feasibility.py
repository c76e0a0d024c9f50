"""Who is refused because it cannot make it; and that those who are not, do: overload, simulated."""

import asyncio
import dataclasses
import heapq
import itertools
import math
import random

import pytest

from baton.errors import Overloaded
from baton.sampling import SamplingParams
from baton.v1 import common_pb2, worker_pb2
from router.admission.fair_queue import FairQueue, Flow
from router.admission.feasibility import DOUBT, SAFETY, check, first_token_by, prefill_rate
from router.admission.wait_queue import RETRY_AFTER_S, QueueEntry, WaitQueue
from router.dispatch.request_state import TokenizedRequest
from router.fleet.snapshot import AssignedPrompt, Snapshot, WorkerView
from router.placement import placement
from router.placement.cost_model import PlacementRequest

NOW = 500.0
RATE = 1000.0


def worker(name, rate=RATE, queue=0, state="READY"):
    kv = common_pb2.KvDescriptor(block_size=16, dtype="float32")
    record = common_pb2.WorkerRecord(
        incarnation=name, kv=kv, max_context=1 << 20, host_id="h", chunk_tokens=256
    )
    load = worker_pb2.Load(
        blocks_total=1 << 20, blocks_free=1 << 20, prefill_tokens_per_s=rate, step_ms=1.0
    )
    assigned = (AssignedPrompt(queue, 0.0),) if queue else ()
    return WorkerView(record, load, state, "", assigned)


def fleet(*prefill):
    return Snapshot(prefill or (worker("p"),), (worker("d"),))


def tokenized(tokens=100, target_s=0.0, timeout_s=600.0, virtual_finish=NOW, tenant="t"):
    return TokenizedRequest(
        request_id="r", prompt=tuple(itertools.repeat(1, tokens)), params=SamplingParams(),
        stop=(), include_stop=False, cache_salt="", deadline=NOW + timeout_s,
        tenant=tenant, virtual_finish=virtual_finish, ttft_target_s=target_s,
    )  # fmt: skip


@pytest.fixture
async def queue_of():
    """queue_of(*entries) is a wait queue with these entries."""
    tasks = []

    async def start(*entries):
        made = WaitQueue(1000, clock=lambda: NOW)
        changed = asyncio.Event()

        async def full():
            raise Overloaded("full")

        for entry in entries:
            tasks.append(asyncio.create_task(made.place(entry, full, lambda: changed)))
            for _ in range(20):
                await asyncio.sleep(0)
        assert made.depth == len(entries)
        return made

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_the_target_is_the_earlier_of_deadline_and_target():
    assert first_token_by(tokenized(), NOW) == NOW + 600
    assert first_token_by(tokenized(target_s=2.0), NOW) == NOW + 2
    assert first_token_by(tokenized(target_s=9.0, timeout_s=3.0), NOW) == NOW + 3


def test_the_rate_is_that_of_all_ready_workers_together():
    assert prefill_rate(fleet()) == RATE
    assert prefill_rate(fleet(worker("a"), worker("b", 3 * RATE))) == 4 * RATE
    assert prefill_rate(fleet(worker("a"), worker("b", 0))) == 2 * RATE
    assert prefill_rate(fleet(worker("a"), worker("b", state="SILENT"))) == RATE
    assert prefill_rate(fleet(worker("a", 0))) == 0.0


async def test_what_makes_it_may_enter(queue_of):
    check(tokenized(100, target_s=0.2), fleet(worker("p", queue=10)), await queue_of(), NOW)


async def test_without_a_target_only_the_deadline_counts(queue_of):
    standing = await queue_of(QueueEntry(NOW - 1, 10_000, "x"))
    check(tokenized(100), fleet(), standing, NOW)
    with pytest.raises(Overloaded):
        check(tokenized(100, timeout_s=5.0), fleet(), standing, NOW)


async def test_the_queue_in_front_counts_and_what_is_behind_does_not(queue_of):
    standing = await queue_of(QueueEntry(NOW - 1, 2000, "x"), QueueEntry(NOW + 1, 50_000, "y"))
    check(tokenized(100, target_s=3.0), fleet(), standing, NOW)
    with pytest.raises(Overloaded, match="2000 tokens go first at 1000 tokens/s") as caught:
        check(tokenized(100, target_s=2.0), fleet(), standing, NOW)
    assert caught.value.retry_after_s == pytest.approx(2.1 * SAFETY - 2.0, rel=0.1)


async def test_the_advice_is_bounded(queue_of):
    shortest, longest = RETRY_AFTER_S
    standing = await queue_of(QueueEntry(NOW - 1, 10**9, "x"))
    with pytest.raises(Overloaded) as caught:
        check(tokenized(100, target_s=1.0), fleet(), standing, NOW)
    assert caught.value.retry_after_s == longest
    busy = fleet(worker("p", queue=900))
    with pytest.raises(Overloaded) as caught:
        check(tokenized(100, target_s=1.0 * SAFETY - 0.001), busy, await queue_of(), NOW)
    assert caught.value.retry_after_s == shortest


async def test_an_idle_fleet_refuses_only_what_is_beyond_doubt(queue_of):
    """Its rate may be wrong, and it would never measure again."""
    check(tokenized(1000, target_s=SAFETY / DOUBT + 0.05), fleet(), await queue_of(), NOW)
    with pytest.raises(Overloaded):
        check(tokenized(1000, target_s=SAFETY / DOUBT - 0.05), fleet(), await queue_of(), NOW)
    with pytest.raises(Overloaded):
        check(tokenized(1000, target_s=0.9), fleet(worker("p", queue=1)), await queue_of(), NOW)


async def test_nothing_is_refused_while_nothing_is_known(queue_of):
    standing = await queue_of(QueueEntry(NOW - 1, 10**9, "x"))
    check(tokenized(1000, target_s=0.1), fleet(worker("p", 0)), standing, NOW)


async def test_a_virtual_finish_is_no_time_while_nothing_is_known(queue_of):
    check(
        tokenized(100, timeout_s=10.0, virtual_finish=NOW + 30),
        fleet(worker("p", 0)),
        await queue_of(),
        NOW,
    )
    with pytest.raises(Overloaded, match=r"expected in 37.50 s .* fair share gives it 30.00 s"):
        check(
            tokenized(100, timeout_s=10.0, virtual_finish=NOW + 30),
            fleet(worker("p", queue=1)),
            await queue_of(),
            NOW,
        )


async def test_a_newcomer_must_not_break_its_own_tenants_target(queue_of):
    later = QueueEntry(NOW + 1, 1000, "x", tenant="t", first_token_by=NOW + 1.05)
    standing = await queue_of(later)
    busy = fleet(worker("p", queue=1))
    with pytest.raises(Overloaded, match=r"earlier request of its tenant .* takes 0.13 s"):
        check(tokenized(100, target_s=5.0), busy, standing, NOW)
    check(tokenized(100, target_s=5.0, tenant="other"), busy, standing, NOW)
    check(tokenized(100, target_s=5.0, virtual_finish=NOW + 2), busy, standing, NOW)


async def test_who_goes_on_behind_another_stream_has_its_deadline_only(queue_of):
    later = QueueEntry(NOW + 1, 1000, "x", tenant="t", first_token_by=NOW + 1.05)
    standing = await queue_of(QueueEntry(NOW - 1, 5000, "y"), later)
    again = dataclasses.replace(tokenized(100, target_s=1.0), resumed=(1, 2))
    check(again, fleet(), standing, NOW)
    with pytest.raises(Overloaded):
        check(dataclasses.replace(again, deadline=NOW + 3), fleet(), standing, NOW)


class Router:
    """A fleet of one rate and the queue before it, on a clock of their own: what `check` sees."""

    def __init__(self):
        self.now = 0.0
        self.fair_queue = FairQueue(lambda: self.now)
        self.waiting = []  # (finish, number, job), served in this order, some tokens at a time
        self.depth = 0

    def tokens_before(self, finish):
        return sum(job.left for d, _, job in self.waiting if d <= finish)

    def drain_rate(self, assumed=0.0):
        return RATE

    def slack_s(self, finish, tenant, assumed_rate=0.0, safety=1.0):
        if all(job.tenant != tenant for _, _, job in self.waiting):
            return math.inf
        needed, slack = 0.0, math.inf
        for d, _, job in sorted(self.waiting, key=lambda entry: entry[:2]):
            needed += job.left / RATE
            left = job.first_token_by - self.now
            if d > finish and needed <= left:
                slack = min(slack, left - needed * safety)
        return slack


class Job:
    def __init__(self, at, tokens, tenant):
        self.at, self.tokens, self.tenant = at, tokens, tenant
        self.left, self.first_token_by, self.done = float(tokens), math.inf, 0.0
        self.refused = None


def run(jobs, target_s, noise):
    router, coming, numbers = Router(), sorted(jobs, key=lambda job: -job.at), itertools.count()
    dice = random.Random(7)
    while coming or router.waiting:
        if not router.waiting:
            router.now = max(router.now, coming[-1].at)
        while coming and coming[-1].at <= router.now:
            enter(router, coming.pop(), target_s, numbers)
        if router.waiting:
            serve(router, dice.uniform(1 - noise, 1 + noise))
    return router


def enter(router, job, target_s, numbers):
    prompt = router.fair_queue.add(Flow(job.tenant), job.tokens / RATE)
    asked = tokenized(job.tokens, target_s, tenant=job.tenant, virtual_finish=prompt.virtual_finish)
    asked = TokenizedRequest(**{**asked.__dict__, "deadline": router.now + 600})
    router.depth = len(router.waiting)
    try:
        check(asked, fleet(worker("p", queue=1)), router, router.now)
    except Overloaded as error:
        job.refused = error.retry_after_s
        router.fair_queue.remove(prompt)
        return
    job.first_token_by, job.prompt = router.now + target_s, prompt
    router.waiting.append((prompt.virtual_finish, next(numbers), job))


def serve(router, pace):
    first = min(router.waiting, key=lambda entry: entry[:2])
    job = first[2]
    chunk = min(job.left, 100)
    router.now += chunk / RATE / pace
    job.left -= chunk
    if not job.left:
        router.waiting.remove(first)
        router.fair_queue.remove(job.prompt)
        job.done = router.now


@pytest.mark.parametrize("sizes", [[200], [50, 50, 50, 1000], [20, 400]])
@pytest.mark.parametrize("tenants", [["a"], ["a", "b"]])
def test_at_five_times_the_capacity_who_may_enter_makes_it(sizes, tenants):
    target_s, until, dice, at, jobs = 3.0, 40.0, random.Random(5), 0.0, []
    rate = 5 * RATE / (sum(sizes) / len(sizes))
    while (at := at + dice.expovariate(rate)) < until:
        jobs.append(Job(at, dice.choice(sizes), dice.choice(tenants)))
    router = run(jobs, target_s, noise=0.15)
    accepted = [job for job in jobs if job.refused is None]
    ttft = sorted(job.done - job.at for job in accepted)
    # Between two floods a tenant's first request goes before the other's admitted ones.
    assert ttft[int(0.99 * len(ttft))] <= target_s * (1.3 if len(tenants) > 1 else 1.0)
    assert sum(job.tokens for job in accepted) > 0.8 * RATE * until  # capacity is not wasted
    for size in sizes:
        done = sum(job.tokens == size for job in accepted)
        assert done > 0.02 * sum(job.tokens == size for job in jobs)  # nobody is shut out
    shortest, longest = RETRY_AFTER_S
    assert all(shortest <= job.refused <= longest for job in jobs if job.refused is not None)
    assert not router.waiting


class Served:
    """Requests that `check` predicts and the real queue and placement place, on a fleet that is
    simulated: prefill in chunks, then so many decode slots or KV blocks held for a while."""

    def __init__(self, workers=1, slots=0, blocks=1 << 20, hold_s=0.0):
        self.now, self.rate, self.hold_s = NOW, RATE, hold_s
        self.slots, self.blocks, self.held, self.running = slots, blocks, 0, 0
        self.queues = [[] for _ in range(workers)]
        self.changed, self.dice = asyncio.Event(), random.Random(5)
        self.wait_queue = WaitQueue(
            10**6, lambda: self.now, lambda: sum(j.tokens for j in self.in_flight)
        )
        self.jobs, self.tasks, self.events, self.numbers = [], [], [], itertools.count()

    @property
    def in_flight(self):
        return [job for queue in self.queues for job in queue]

    def at(self, seconds, act):
        heapq.heappush(self.events, (seconds, next(self.numbers), act))

    async def run(self):
        while self.events:
            seconds, _, act = heapq.heappop(self.events)
            self.now = max(self.now, NOW + seconds)
            act()
            for _ in range(12):
                await asyncio.sleep(0)
        await asyncio.gather(*self.tasks)

    def snapshot(self):
        prefill = [worker(f"{n}", self.rate) for n in range(len(self.queues))]
        for n, queue in enumerate(self.queues):
            prefill[n].load.queue_tokens = int(sum(job.left for job in queue))
            sent = tuple(AssignedPrompt(job.tokens, job.virtual_finish) for job in queue)
            prefill[n] = dataclasses.replace(prefill[n], assigned=sent)
        decode = worker("d", self.rate)
        decode.record.max_batch, decode.load.running = self.slots, self.running
        decode.load.blocks_free = max(0, self.blocks - self.held)
        return Snapshot(tuple(prefill), (decode,))

    def come(self, tokens):
        job = Job(self.now, tokens, "t")
        job.virtual_finish, wanted = self.now, PlacementRequest((1,) * tokens, self.now, "", 16)
        asked = tokenized(tokens, timeout_s=1e7, virtual_finish=self.now)
        job.predicted = check(asked, self.snapshot(), self.wait_queue, self.now, wanted)
        self.jobs.append(job)

        async def attempt():
            choice = placement.pick(self.snapshot(), wanted)
            self.running, self.held = self.running + 1, self.held + tokens // 16 + 1
            if choice.decode_prefills:
                self.at(self.now - NOW + tokens / self.rate, lambda: self.first_token(job))
                return
            queue = self.queues[int(choice.prefill.incarnation)]
            queue.append(job)
            if len(queue) == 1:
                self.compute(queue)

        entry = QueueEntry(self.now, tokens, "r", "t")
        placing = self.wait_queue.place(entry, attempt, lambda: self.changed)
        self.tasks.append(asyncio.create_task(placing))

    def compute(self, queue):
        job, chunk = queue[0], min(256, queue[0].left)

        def computed():
            job.left -= chunk
            if not job.left:
                queue.remove(job)
                self.first_token(job)
            if queue:
                self.compute(queue)
            self.tell()

        self.at(self.now - NOW + chunk / self.rate, computed)

    def first_token(self, job):
        job.done = self.now
        held_s = self.hold_s * self.dice.uniform(0.7, 1.3)
        self.at(self.now - NOW + held_s, lambda: self.leave(job))

    def leave(self, job):
        self.running, self.held = self.running - 1, self.held - (job.tokens // 16 + 1)
        self.tell()

    def tell(self):
        self.changed.set()
        self.changed = asyncio.Event()


def poisson(rate, until, size=lambda dice: 100):
    """(when, tokens) of arrivals."""
    dice, at = random.Random(5), 0.0
    while (at := at + dice.expovariate(rate)) < until:
        yield at, size(dice)


def bursts(number, size, every_s):
    return ((n * every_s + i * 0.01, 100 + i) for n in range(number) for i in range(size))


def rarely_large(dice):
    return 8000 if dice.random() < 0.02 else 100


def mixed(dice):
    return int(math.exp(dice.uniform(math.log(16), math.log(4000))))


@pytest.mark.parametrize(
    ("served", "arrivals", "step_s", "known_s"),
    [
        # step_s: what one placement takes; known_s: when the router has seen a few of them
        pytest.param(Served, poisson(12, 30), 0.3, 0, id="steady"),
        pytest.param(lambda: Served(4), poisson(48, 5), 0.3, 0, id="steady-4-workers"),
        pytest.param(Served, bursts(3, 60, 20), 0.3, 0, id="bursts"),
        pytest.param(Served, poisson(6, 60, rarely_large), 8, 0, id="rarely-large"),
        pytest.param(Served, poisson(1.6, 90, mixed), 4, 0, id="mixed-sizes"),
        pytest.param(lambda: Served(4), poisson(6, 15, mixed), 4, 0, id="mixed-sizes-4-workers"),
        pytest.param(lambda: Served(slots=8, hold_s=4), poisson(3, 60), 1, 8, id="slots"),
        pytest.param(lambda: Served(slots=4, hold_s=120), poisson(0.06, 2000), 40, 300, id="gaps"),
        pytest.param(lambda: Served(slots=1, hold_s=60), poisson(0.04, 2000), 60, 400, id="lone"),
        pytest.param(
            lambda: Served(slots=16, hold_s=30), bursts(3, 60, 100), 20, 30, id="bursts-for-slots"
        ),
        pytest.param(
            lambda: Served(blocks=1000, hold_s=4), poisson(8, 30, rarely_large), 4, 4, id="blocks"
        ),
    ],
)
async def test_what_is_predicted_is_within_twice_of_what_happens(served, arrivals, step_s, known_s):
    one = served()
    for at, tokens in arrivals:
        one.at(at, lambda tokens=tokens: one.come(tokens))
    await one.run()
    known = [job for job in one.jobs if job.at >= NOW + known_s]
    assert len(known) > 30 and max(job.done - job.at for job in known) > 2 * step_s
    for job in known:
        took = job.done - job.at
        assert took / 2 - step_s <= job.predicted <= 2 * took + step_s, (job.at - NOW, took)


@pytest.mark.parametrize(
    ("name", "value", "served", "hertz", "until_s", "grace_s"),
    [
        ("rate", RATE / 4, Served, 12, 24, 6),
        ("rate", 4 * RATE, Served, 12, 24, 6),
        ("hold_s", 16, lambda: Served(slots=8, hold_s=4), 3, 90, 25),
        ("hold_s", 1, lambda: Served(slots=8, hold_s=4), 3, 60, 10),
    ],
)
async def test_a_change_of_speed_is_learnt_from_a_few_placements(
    name, value, served, hertz, until_s, grace_s
):
    """`grace_s` after it; whoever waits over the change cannot be told the truth."""
    one, changed_s = served(), until_s / 2
    for at, tokens in poisson(hertz, until_s):
        one.at(at, lambda tokens=tokens: one.come(tokens))
    one.at(changed_s, lambda: setattr(one, name, value))
    await one.run()
    after = [job for job in one.jobs if job.at >= NOW + changed_s + grace_s]
    assert len(after) > 30
    for job in after:
        took = job.done - job.at
        assert took / 2 - 1 <= job.predicted <= 2 * took + 1, (job.at - NOW, took)
