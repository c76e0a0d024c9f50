"""The router of a simulation: its own admission, queueing and placement, over simulated workers.

`early_rejection`, `FairQueue`, `WaitQueue` and `scoring` are the router's own. This module is the
path of a request between them and the workers, as in `router.dispatch`, without failures.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.bench.request import Demand as TraceRequest
from baton.config import RouterLimits
from baton.errors import Overloaded
from baton.generation.sampling_params import SamplingParams
from baton.simulator.fleet import SimulatedFleet
from baton.simulator.prompt import Prompt
from baton.simulator.worker import SimulatedSequence, SimulatedWorker
from baton.v1 import fleet_pb2
from router.admission import early_rejection
from router.fleet.kv_index import AssignedPrompt
from router.placement import room, scoring
from router.placement.scoring import Pair
from router.queueing.fair_queue import FairQueue
from router.queueing.wait_queue import WaitQueue
from router.request import Demand, RequestState, TenantShare, TokenizedRequest

_ASSUMED_RATE = 1000.0  # tokens a second, before any is measured, as in `router.admission`
_TENANT = TenantShare("default")


@dataclass(frozen=True)
class Costs:
    """What a request costs beside the workers' steps, in seconds and bytes a second."""

    router_s: float = 0.002  # from a request to its workers, and from there to its caller
    handoff_s: float = 0.003  # messages of a handoff
    bytes_per_s: float = 4e9  # of a prefill worker's link


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """A request of the load, and what became of it. Times are the loop's."""

    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    refused: str = ""  # why
    predicted_ttft_s: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    cached_tokens: int = 0
    path: str = ""  # "handed over", "decode computed it"

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrived_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None without any."""
        steps = self.output_tokens - 1
        return (self.last_at - self.first_at) / steps if steps else None


@dataclass(eq=False, slots=True)
class _Attempt:
    """A request that is placed: the sequences on its workers."""

    name: str
    request: SimulatedRequest
    prompt: Prompt
    demand: Demand
    on_end: Callable[[], None]
    deadline: asyncio.TimerHandle | None = None
    assigned_to: str = ""
    # With their workers, which count it as a request of theirs.
    sequences: list[tuple[str, SimulatedSequence]] = field(default_factory=list)
    has_ended: bool = False


class SimulatedRouter:
    """Runs requests over a fleet; a task of each places it.

    counts: since the start, as a router has them · ended: the latest requests.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        limits: RouterLimits,
        costs: Costs,
    ) -> None:
        self.fleet = fleet
        self._limits, self._max_itl_s, self._costs = limits, limits.max_itl_s, costs
        self._loop = asyncio.get_running_loop()
        self.fair_queue = FairQueue(self._loop.time)
        self.wait_queue = WaitQueue(
            limits.max_queue,
            lambda: fleet.snapshot().tokens_in_flight,
            self._loop.time,
            lambda demand, reserved: room.has_room(fleet.snapshot(), demand, reserved),
        )
        fleet.listeners.append(self.wait_queue.fleet_changed)
        self.counts = fleet_pb2.RouterCounts()
        self.running = 0
        self.ended: deque[SimulatedRequest] = deque(maxlen=512)
        self._links: dict[str, float] = {}  # when each prefill worker's link is free again
        self._params: dict[int, SamplingParams] = {}

    def receive(self, found: TraceRequest, on_end: Callable[[], None]) -> SimulatedRequest:
        """Takes a request, which arrives now; `on_end` is called at its end."""
        prompt = Prompt(found, self.fleet.spec.block_size)
        request = SimulatedRequest(self._loop.time(), len(prompt), max(1, found.new_tokens))

        def begin() -> None:
            self._loop.create_task(self._run(prompt, request, on_end))

        self._loop.call_later(self._costs.router_s / 2, begin)
        return request

    async def _run(
        self, prompt: Prompt, request: SimulatedRequest, on_end: Callable[[], None]
    ) -> None:
        """Admits a request and places it; a refused one says why."""
        snapshot, queue = self.fleet.snapshot(), self.wait_queue
        try:
            queue.check_room(_TENANT)
        except Overloaded as error:
            self.counts.turned_away += 1
            request.refused = str(error)
            on_end()
            return
        self.counts.admitted += 1
        self.counts.prompt_tokens += len(prompt)
        self.running += 1
        seconds = len(prompt) / (snapshot.prefill_rate or _ASSUMED_RATE)
        state = self._state(request, prompt)
        state.request.pending = self.fair_queue.add(_TENANT, seconds)
        demand = state.demand(self._limits.local_prefill_max_tokens, self._max_itl_s)
        attempt = _Attempt(str(self.counts.admitted), request, prompt, demand, on_end)
        try:
            request.predicted_ttft_s = early_rejection.check(
                state.request, demand, snapshot, queue, self._loop.time()
            )
            attempt.deadline = self._loop.call_at(
                state.request.deadline, self._expire, attempt, asyncio.current_task()
            )
            await self.wait_queue.place(
                demand,
                lambda: self._place(attempt),
                lambda reserved: room.soonest_room(self.fleet.snapshot(), demand, reserved),
            )
        except Overloaded as error:
            self._end(attempt, str(error))

    def _expire(self, attempt: _Attempt, placing: asyncio.Task[Any] | None) -> None:
        assert placing is not None
        placing.cancel()
        self._end(attempt, "its deadline passed")

    def _end(self, attempt: _Attempt, refused: str = "") -> None:
        """Counts the end of a request, once; `refused`: why it has no more tokens."""
        request = attempt.request
        if attempt.has_ended:
            return
        attempt.has_ended, request.refused = True, refused
        self._unassign(attempt)
        while attempt.sequences:
            name, sequence = attempt.sequences[-1]
            self._forget(attempt, name, sequence)
            if refused:
                self._worker(name).drop(sequence)
        self.fair_queue.remove(attempt.demand.pending)
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        self.running -= 1
        if refused:
            self.counts.ended["RESOURCE_EXHAUSTED"] += 1
            self.counts.refused += 1
        else:
            self.counts.ended["OK"] += 1
            self.counts.cached_tokens += request.cached_tokens
            self.counts.output_tokens += request.output_tokens
            self.ended.append(request)
        attempt.on_end()

    def _state(self, request: SimulatedRequest, prompt: Prompt) -> RequestState:
        tokens = request.output_tokens
        if tokens not in self._params:
            self._params[tokens] = SamplingParams(max_tokens=tokens)
        tokenized = TokenizedRequest(
            request_id="",
            prompt=prompt,
            params=self._params[tokens],
            stop=(),
            include_stop=False,
            cache_salt="",
            deadline=request.arrived_at + self._limits.default_timeout_s,
            tenant=_TENANT.tenant,
            ttft_target_s=self._limits.ttft_target_s,
        )
        return RequestState(tokenized, started=request.arrived_at, started_ns=0)

    async def _place(self, attempt: _Attempt) -> None:
        """Tries the decode workers that seem to have room, best first; Overloaded if none has."""
        full: set[str] = set()
        while True:
            taken = full | self.wait_queue.reserved_for_others(attempt.demand.pending)
            pair = scoring.pick(self.fleet.snapshot(), attempt.demand, full=taken)
            by = pair.on_decode if pair.decode_prefills else pair.on_prefill
            self._assign(attempt, by.worker.incarnation, by.uncached)
            sequence = self._sequence(attempt, attempt.request.output_tokens)
            started = await self._reserve(attempt, pair, sequence)
            if started is None:
                self._unassign(attempt)
                full.add(pair.decode.incarnation)
                continue
            attempt.request.cached_tokens = sequence.num_cached
            if started:
                attempt.request.path = "decode computed it"
                if not pair.decode_prefills:
                    self._unassign(attempt)
            else:
                attempt.request.path = "handed over"
                self._prefill(attempt, pair, sequence)
            return

    async def _reserve(
        self, attempt: _Attempt, pair: Pair, sequence: SimulatedSequence
    ) -> bool | None:
        name = pair.decode.incarnation
        self._count(attempt, name, sequence)
        answer: asyncio.Future[bool | None] = self._loop.create_future()

        def set_answer(started: bool | None) -> None:
            if not answer.done():  # its request's deadline may have passed
                answer.set_result(started)

        self._worker(name).reserve(sequence, pair.local_prefill_max_tokens, set_answer)
        started = await answer
        if started is None:
            self._forget(attempt, name, sequence)
        return started

    def _count(self, attempt: _Attempt, name: str, sequence: SimulatedSequence) -> None:
        attempt.sequences.append((name, sequence))
        self.fleet.count_request(name, 1)

    def _forget(self, attempt: _Attempt, name: str, sequence: SimulatedSequence) -> None:
        attempt.sequences.remove((name, sequence))
        self.fleet.count_request(name, -1)

    def _prefill(self, attempt: _Attempt, pair: Pair, decoding: SimulatedSequence) -> None:
        """Has the prompt computed, and its KV sent to the decode worker, which goes on then."""
        name = pair.prefill.incarnation
        if attempt.assigned_to != name:
            self._assign(attempt, name, pair.on_prefill.uncached)
        worker, costs = self._worker(name), self._costs
        prompt = self._sequence(attempt, 1, hands_over=True)
        self._count(attempt, name, prompt)
        first = prompt.on_token

        def hand_over() -> None:
            """The last chunk's KV is still to be sent, after what the link has to send before."""
            first()
            now, chunk = self._loop.time(), worker.chunk.tokens
            unsent = len(attempt.prompt) - decoding.num_cached
            before = max(0, unsent - chunk) * worker.spec.token_bytes / costs.bytes_per_s
            free = max(now, self._links.get(name, 0.0) + before)
            sent = free + min(unsent, chunk) * worker.spec.token_bytes / costs.bytes_per_s
            self._links[name] = sent
            self._loop.call_at(sent + costs.handoff_s, commit, now)

        def commit(first_at: float) -> None:
            if attempt.has_ended:
                return
            worker.release(prompt)
            self._forget(attempt, name, prompt)
            if decoding.new_tokens > 1:
                decoding.new_tokens -= 1
                self._worker(pair.decode.incarnation).resume(decoding, first_at)
            else:
                self._worker(pair.decode.incarnation).release(decoding)
                decoding.on_end()

        prompt.on_token = hand_over
        worker.add(prompt)

    def _sequence(
        self, attempt: _Attempt, new_tokens: int, hands_over: bool = False
    ) -> SimulatedSequence:
        pending = attempt.demand.pending
        return SimulatedSequence(
            attempt.prompt,
            self._loop.time() + pending.fair_wait_s,
            pending.seconds,
            new_tokens,
            lambda: self._first(attempt),
            lambda: self._last(attempt),
            hands_over,
        )

    def _first(self, attempt: _Attempt) -> None:
        self._unassign(attempt)
        attempt.request.first_at = self._loop.time() + self._costs.router_s / 2
        if not attempt.has_ended:
            self.fair_queue.remove(attempt.demand.pending, computed=True)

    def _last(self, attempt: _Attempt) -> None:
        attempt.request.last_at = self._loop.time() + self._costs.router_s / 2
        self._end(attempt)

    def _assign(self, attempt: _Attempt, name: str, num_tokens: int) -> None:
        self._unassign(attempt)
        attempt.assigned_to = name
        demand = attempt.demand
        prompt = AssignedPrompt(
            num_tokens, demand.pending.virtual_finish, demand.token_ids, demand.cache_salt
        )
        self.fleet.assign(name, attempt.name, prompt)

    def _unassign(self, attempt: _Attempt) -> None:
        if attempt.assigned_to:
            self.fleet.unassign(attempt.assigned_to, attempt.name)
            attempt.assigned_to = ""

    def _worker(self, name: str) -> SimulatedWorker:
        return self.fleet.members[name].worker
