"""A fleet in simulated time, under the router's own queues, early rejection and placement."""

import asyncio
import heapq
import itertools
import math
import random
from dataclasses import dataclass, replace

from baton.errors import Overloaded
from baton.generation.sampling_params import SamplingParams
from router.admission.early_rejection import check
from router.fleet.kv_index import AssignedPrompt
from router.placement import scoring
from router.queueing.fair_queue import FairQueue
from router.queueing.wait_queue import WaitQueue
from router.request import Demand, TenantShare, TokenizedRequest

from . import snapshots

NOW = 500.0  # when it begins
RATE = 1000.0  # tokens a second of one prefill worker


def worker(name, rate=RATE, queue=0, state="READY", **fields):
    """A worker with a large pool."""
    pool = {"blocks_total": 1 << 20, "blocks_free": 1 << 20, "block_size": 16}
    load = {"prefill_tokens_per_s": rate, "step_ms": 1.0, "chunk_tokens": 256}
    return snapshots.worker(name, state, tokens=queue, **{**pool, **load, **fields})


def tokenized(tokens=100, target_s=0.0, timeout_s=600.0, now=NOW, **fields):
    finish = fields.pop("virtual_finish", now)
    tenant = fields.setdefault("tenant", "t")
    values = {"pending": snapshots.pending(finish, finish - now, tenant), **fields}
    return TokenizedRequest(
        "r", (1,) * tokens, SamplingParams(max_tokens=16), (), False, "", now + timeout_s,
        ttft_target_s=target_s, **values,
    )  # fmt: skip


def placement_request(request):
    tokens = (*request.prompt, *request.resumed)
    return Demand(
        tokens, request.pending, max_new_tokens=16, local_prefill_max_tokens=32, max_itl_s=0.05
    )


def poisson(rate, until, size=lambda dice: 100, seed=5):
    """(when, tokens) of arrivals."""
    dice, at = random.Random(seed), 0.0
    while (at := at + dice.expovariate(rate)) < until:
        yield at, size(dice)


@dataclass(eq=False)
class Job:
    at: float
    tokens: int
    flow: TenantShare
    computed_by: float = 0.0  # as its worker has it
    predicted: float = 0.0
    refused: float | None = None  # seconds of its retry advice
    left: int = 0
    first_token_at: float = math.inf

    @property
    def ttft(self):
        return self.first_token_at - self.at


class SimulatedFleet:
    """Prefill in chunks, the earliest virtual finish first; then so many decode slots or KV blocks
    held for a while. Without `fair` requests are served in the order in which they come."""

    def __init__(
        self, workers=1, slots=0, blocks=1 << 20, hold_s=0.0, *, fair=False, target_s=0.0, noise=0.0
    ):
        self.now, self.rate, self.hold_s = NOW, RATE, hold_s
        self.slots, self.blocks, self.held, self.running = slots, blocks, 0, 0
        self.target_s, self.noise, self.queues = target_s, noise, [[] for _ in range(workers)]
        self.dice = random.Random(5)
        self.fair_queue = FairQueue(lambda: self.now) if fair else None
        self.wait_queue = WaitQueue(
            10**6,
            lambda: sum(job.tokens for queue in self.queues for job in queue),
            lambda: self.now,
        )
        self.jobs, self._tasks, self._events = [], [], []
        self._numbers = itertools.count()

    def at(self, time, act, *args):
        """Calls `act` so many seconds after the beginning."""
        heapq.heappush(self._events, (time, next(self._numbers), act, args))

    def send(self, arrivals, flow=TenantShare("t")):  # noqa: B008 - it is immutable
        """Requests of a tenant: (when, tokens)."""
        for time, tokens in arrivals:
            self.at(time, self._come, tokens, flow)

    async def run(self):
        while self._events:
            time, _, act, args = heapq.heappop(self._events)
            self.now = max(self.now, NOW + time)
            act(*args)
            for _ in range(12):
                await asyncio.sleep(0)
        await asyncio.gather(*self._tasks)

    def snapshot(self):
        prefill = []
        for number, queue in enumerate(self.queues):
            left = sum(job.left for job in queue)
            # It keeps no sequences.
            view = worker(str(number), self.rate, queue_tokens=left, max_batch=1, running=2)
            sent = tuple(AssignedPrompt(job.tokens, job.assigned_finish) for job in queue)
            prefill.append(replace(view, assigned=sent))
        pool = {"max_batch": self.slots, "running": self.running}
        decode = worker("d", self.rate, blocks_free=max(0, self.blocks - self.held), **pool)
        return snapshots.fleet(prefill, (decode,))

    def _come(self, tokens, flow):
        job = Job(self.now, tokens, flow, self.now, left=tokens)
        self.jobs.append(job)
        job.pending = snapshots.pending(self.now)
        if self.fair_queue:
            job.pending = self.fair_queue.add(flow, tokens / self.rate / len(self.queues))
        request = tokenized(
            tokens, self.target_s, 1e7, self.now, tenant=flow.tenant, pending=job.pending
        )
        needs = placement_request(request)
        try:
            job.predicted = check(request, needs, self.snapshot(), self.wait_queue, self.now)
        except Overloaded as error:
            job.refused = error.retry_after_s
            self._remove(job, computed=False)
            return

        async def attempt():
            pair = scoring.pick(self.snapshot(), needs)
            self.running, self.held = self.running + 1, self.held + tokens // 16 + 1
            if pair.decode_prefills:
                self._later(tokens / self.rate, self._first_token, job)
                return
            queue = self.queues[int(pair.prefill.incarnation)]
            job.assigned_finish = job.pending.virtual_finish
            job.computed_by = self.now + job.pending.fair_wait_s
            queue.append(job)
            if len(queue) == 1:
                self._compute(queue)

        first_token_by = self.now + (self.target_s or math.inf)
        entry = snapshots.queued(job.pending, tokens, first_token_by=first_token_by)
        self._tasks.append(asyncio.create_task(self.wait_queue.place(entry, attempt)))

    def _later(self, seconds, act, *args):
        self.at(self.now - NOW + seconds, act, *args)

    def _compute(self, queue):
        job = min(queue, key=lambda job: job.computed_by)
        chunk = min(256, job.left)

        def computed():
            job.left -= chunk
            if not job.left:
                queue.remove(job)
                self._first_token(job)
            if queue:
                self._compute(queue)
            self._change()

        self._later(chunk / self.rate / self.dice.uniform(1 - self.noise, 1 + self.noise), computed)

    def _remove(self, job, computed):
        if self.fair_queue:
            self.fair_queue.remove(job.pending, computed=computed)

    def _first_token(self, job):
        job.first_token_at = self.now
        self._remove(job, computed=True)
        self._later(self.hold_s * self.dice.uniform(0.7, 1.3), self._leave, job)

    def _leave(self, job):
        self.running, self.held = self.running - 1, self.held - (job.tokens // 16 + 1)
        self._change()

    def _change(self):
        self.wait_queue.fleet_changed()
