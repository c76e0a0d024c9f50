"""Workers whose answers a test writes, on real ports, and a fleet over them.

Their model is plain: output token i of every request is 100 + i, up to max_tokens. So a stream is
right exactly when it counts up from 100 without a gap, whichever worker computed a part of it.
"""

import asyncio
import contextlib
import time
from functools import partial

from opentelemetry import trace
from opentelemetry.context import Context

from baton.config import ModelSource, RouterLimits
from baton.errors import Unavailable
from baton.generation.sampling_params import SamplingParams
from baton.net.server import bind
from baton.v1 import common_pb2, decode_pb2, prefill_pb2, worker_pb2
from baton.worker.dispatch_service import DispatchService, RouterStream
from baton.worker.metrics import LoadTracker
from router.dispatch.dispatch import Dispatch
from router.fleet.fleet import Fleet
from router.fleet.liveness import LivenessConfig
from router.generation_service import GenerationService
from router.models import Models, ModelVersion
from router.placement import room
from router.queueing.wait_queue import WaitQueue
from router.request import RequestState, TokenizedRequest
from router.telemetry.stats import RouterStats
from tests.memory_registry import MemoryRegistry
from tests.waiting import WAIT_S

PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE
READY, DRAINING = common_pb2.WORKER_STATE_READY, common_pb2.WORKER_STATE_DRAINING
LENGTH, UNFINISHED = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_UNSPECIFIED
FINGERPRINT = "f" * 64
TIMEOUT_S = WAIT_S


def token(sequence, ahead=0):
    """What the model says `ahead` tokens after a sequence, and whether that is the last."""
    index = len(sequence.token_ids) - sequence.prompt_tokens + ahead
    return 100 + index, LENGTH if index + 1 == sequence.sampling.max_tokens else UNFINISHED


def started(queue_ms=0.0, cached_tokens=0):
    message = prefill_pb2.PrefillStarted(queue_ms=queue_ms, cached_tokens=cached_tokens)
    return prefill_pb2.PrefillResponse(started=message)


def first_token(token_id, reason=UNFINISHED):
    message = prefill_pb2.PrefillFirstToken(token_id=token_id, finish_reason=reason)
    return prefill_pb2.PrefillResponse(first_token=message)


def prompt_logprobs(token_ids, start=1, end=None):
    """Token i has log-probability -i and rank i, and the likeliest is the next number."""
    found = list(enumerate(token_ids))[start:end]
    return common_pb2.PromptLogprobs(
        logprobs=[-float(at) for at, _ in found],
        ranks=[at for at, _ in found],
        top_ids=[token_id + 1 for _, token_id in found],
        top_logprobs=[-0.5] * len(found),
    )


def committed(num_bytes=1000):
    message = prefill_pb2.PrefillCommitted(
        transfer_bytes=num_bytes, transfer_ms=2.0, transport=common_pb2.TRANSPORT_SHM
    )
    return prefill_pb2.PrefillResponse(committed=message)


def says(*messages, then=None):
    """A script of a prompt: it sends these, and then fails or says no more."""

    async def script(request):
        for message in messages:
            yield message
        if then:
            raise then
        await asyncio.Event().wait()

    return script


class Stream(RouterStream):
    """Sends nothing while its worker is still."""

    def __init__(self, worker, context):
        super().__init__(worker, context)
        self._context = context
        self._raw = self
        worker.connected.put_nowait(None)

    async def read(self):
        return await self._context.read()

    async def write(self, data):
        await self._worker.awake.wait()
        await self._context.write(data)


class Worker:
    """What prefill and decode workers have in common."""

    role = PREFILL
    blocks_free = 100  # for sequences, unless it tells otherwise

    def __init__(self, name, **fields):
        kv = common_pb2.KvDescriptor(block_size=4, dtype=fields.pop("dtype", "float32"))
        self.record = common_pb2.WorkerRecord(
            **{
                "incarnation": name,
                "role": self.role,
                "state": READY,
                "model": "tiny",
                "version": "v1",
                "text_fingerprint": FINGERPRINT,
                "kv": kv,
                "max_context": 64,
                "blocks_total": 100,
                **fields,
            }
        )
        self.incarnation = name
        self.load = worker_pb2.Load(blocks_total=100, blocks_free=self.blocks_free)
        self.state = READY
        self.pairs = ()
        self.load_tracker = LoadTracker()
        self.connected = asyncio.Queue()  # one entry for each connection
        self.broken = asyncio.Queue()  # names of routers whose connections have ended
        self.kept = []  # trace ids
        self.tasks = {}  # by router and handoff id
        self.awake = asyncio.Event()
        self.awake.set()
        self.max_message_bytes = 1 << 20

    @property
    def routers(self):
        return self.service.routers

    async def start(self):
        """Serves, at the same port as before if there was one."""
        self.service = DispatchService(self, Stream)
        port = int(self.record.address.rpartition(":")[2] or 0)
        self.server, self.record.address = bind("127.0.0.1", port)
        self.service.add_to(self.server)
        await self.server.start()

    async def stop(self):
        """Breaks every connection at once, as a killed process does."""
        await self.server.stop(None)

    def stop_still(self):
        """From now on sends nothing, as a stopped process: its streams stay open."""
        self.awake.clear()

    def wake(self):
        """Goes on with what it was at."""
        self.awake.set()

    def tell(self, state=READY, pairs=(), **load):
        """Sends a changed load to all routers."""
        self.state, self.pairs = state, pairs
        self.load = worker_pb2.Load(
            **{"blocks_total": 100, "blocks_free": self.blocks_free, **load}
        )
        self.load_tracker.wake()

    def break_connections(self):
        """Ends all streams; new ones are served."""
        for router in self.routers:
            router.fail(Unavailable("it broke"))

    def report(self):
        return worker_pb2.LoadReport(load=self.load, state=self.state, pairs=self.pairs)

    def take(self, router, message):
        self.kept += message.keep_traces
        for request in (*message.reserve, *message.prefill):
            handoff_id = request.sequence.handoff_id
            task = asyncio.create_task(self._answer(router, handoff_id, request))
            self.tasks[router, handoff_id] = task
        for handoff_id in message.cancel:
            self._end(router, handoff_id)
            self.on_cancel(handoff_id)
        yield

    def lost(self, router):
        self.broken.put_nowait(router.name)
        for whose, handoff_id in list(self.tasks):
            if whose is router:
                self._end(router, handoff_id)
                self.release(handoff_id)

    def on_cancel(self, handoff_id):
        """A router cancels what it asked for."""

    def release(self, handoff_id):
        """Frees what a sequence holds."""

    async def _answer(self, router, handoff_id, request):
        self.requests.append(request)
        try:
            await self.answer(router, handoff_id, request)
        except Exception as error:
            router.failed(handoff_id, error)

    def _end(self, router, handoff_id):
        if task := self.tasks.pop((router, handoff_id), None):
            task.cancel()


class DecodeWorker(Worker):
    """Answers the n-th Reserve by the n-th script; decodes the n-th handoff by the n-th run."""

    role = DECODE

    def __init__(self, name, **fields):
        super().__init__(name, **fields)
        self.reserves = []
        self.runs = []
        self.requests = []
        self.held = set()  # handoff ids
        self.cancelled = asyncio.Queue()  # handoff ids, as routers named them

    async def answer(self, router, handoff_id, request):
        script = self.reserves.pop(0) if self.reserves else self.accept
        answer = await script(request)
        answer.handoff_id = handoff_id
        router.outgoing.reserved.append(answer)

    async def accept(self, request, cached_tokens=0):
        """Room for it."""
        self.held.add(request.sequence.handoff_id)
        return decode_pb2.ReserveResponse(
            reservation_token="secret",
            cached_tokens=cached_tokens,
        )

    async def accept_and_start(self, request):
        """The prompt is cached: no prefill worker is needed."""
        answer = await self.accept(request, cached_tokens=2)
        answer.started = True
        self.begin(request.sequence, 0)
        return answer

    def on_cancel(self, handoff_id):
        self.release(handoff_id)
        self.cancelled.put_nowait(handoff_id)

    def send(self, handoff_id, *token_ids, reason=UNFINISHED, abort="", step_failed=False):
        """One step's output of one sequence."""
        event = decode_pb2.SequenceEvent(
            handoff_id=handoff_id, token_ids=token_ids, finish_reason=reason, abort_reason=abort,
            step_failed=step_failed,
        )  # fmt: skip
        for router in self.routers:
            router.outgoing.events.append(event)

    def begin(self, sequence, ahead):
        """Decodes from `ahead` tokens after the sequence on."""
        (self.runs.pop(0) if self.runs else self.run_to_end)(sequence, ahead)

    def run_to_end(self, sequence, ahead, most=10_000):
        """Sends up to `most` tokens, one a step, the last one with its reason."""
        for step in range(ahead, ahead + most):
            token_id, reason = token(sequence, step)
            self.send(sequence.handoff_id, token_id, reason=reason)
            if reason:
                self.release(sequence.handoff_id)
                return

    def flood(self, sequence, ahead, tokens=500, top=0):
        """Sends tokens without an end, until the sequence is released: more than is ever read.

        Log-probabilities of `top` tokens each fill a connection sooner than text does.
        """
        likely = common_pb2.TokenLogprob(token_id=1, logprob=-1.0)
        position = common_pb2.PositionLogprobs(chosen=likely, top=[likely] * top)
        event = decode_pb2.SequenceEvent(
            handoff_id=sequence.handoff_id,
            token_ids=[token(sequence, ahead)[0]] * tokens,
            logprobs=[position] * tokens if top else [],
        )

        async def steps():
            while sequence.handoff_id in self.held:
                for router in self.routers:
                    router.outgoing.events.append(event)
                await asyncio.sleep(0.001)

        self.flooding = asyncio.create_task(steps())

    def release(self, handoff_id):
        self.held.discard(handoff_id)


class PrefillWorker(DecodeWorker):
    """Runs the n-th prompt by the n-th script, and the good one when there is none left.

    It keeps sequences once it tells of free blocks.
    """

    role, blocks_free = PREFILL, 0

    def __init__(self, name, decodes=(), **fields):
        super().__init__(name, **fields)
        self.decodes = decodes
        self.scripts = []
        self.ended = asyncio.Queue()  # handoff ids of prompts that have ended, however they did

    async def answer(self, router, handoff_id, request):
        if isinstance(request, decode_pb2.ReserveRequest):
            return await super().answer(router, handoff_id, request)
        script = self.scripts.pop(0) if self.scripts else self.good
        try:
            async with contextlib.aclosing(script(request)) as messages:
                async for message in messages:
                    router.outgoing.prefill.add(handoff_id=handoff_id).MergeFrom(message)
        finally:
            self.ended.put_nowait(handoff_id)

    async def accept(self, request, cached_tokens=0):
        """Room for a whole request: it computes the prompt, too."""
        answer = await super().accept(request, cached_tokens)
        answer.started = True
        self.begin(request.sequence, 0)
        return answer

    accept_and_start = accept

    async def good(self, request):
        """A prompt that goes well."""
        sequence, (token_id, reason) = request.sequence, token(request.sequence)
        yield started(queue_ms=3.0)
        tokens, new = sequence.token_ids, len(sequence.token_ids) == sequence.prompt_tokens
        if new and sequence.sampling.HasField("prompt_logprobs"):
            for start, end in ((1, 2), (2, None)):
                part = prompt_logprobs(tokens, start, end)
                yield prefill_pb2.PrefillResponse(prompt_logprobs=part)
        if not sequence.sampling.max_tokens:
            message = first_token(None, LENGTH)
            if sequence.sampling.embedding:
                message.first_token.pooled.extend([0.0, *map(float, tokens)])
            if sequence.sampling.classification:  # of three labels, or of label tokens
                message.first_token.pooled.extend(
                    sequence.sampling.label_token_ids or [float(len(tokens)), 1.0, 0.5]
                )
            yield message
            return
        yield first_token(token_id, reason)
        if not reason:
            self.commit(request)
            yield committed()

    def commit(self, request):
        """Hands over: the decode worker begins."""
        target = request.target
        decode = next(d for d in self.decodes if d.record.incarnation == target.incarnation)
        assert request.sequence.handoff_id in decode.held
        decode.begin(request.sequence, 1)


class Cluster:
    """A fleet and a dispatch over scripted workers, all in this process."""

    def __init__(
        self, prefill=1, decode=1, *, tracer=None, liveness=None, max_context=64, **limits
    ):
        longest = {"max_context": max_context}
        self.decodes = [DecodeWorker(f"d{i}", **longest) for i in range(decode)]
        self.prefills = [PrefillWorker(f"p{i}", self.decodes, **longest) for i in range(prefill)]
        self.store = MemoryRegistry()
        self.tracer = tracer or trace.NoOpTracer()
        self.limits = RouterLimits(local_prefill_max_tokens=4, **limits)
        # A slow machine is not silent.
        self.liveness = liveness or LivenessConfig(silence_s=TIMEOUT_S)
        self.registrations = {}
        self._stays = {}
        self.problems = []
        self._stack = contextlib.AsyncExitStack()

    @property
    def workers(self):
        return [*self.prefills, *self.decodes]

    async def __aenter__(self):
        asyncio.get_running_loop().set_exception_handler(self._on_problem)
        self._tasks_before = asyncio.all_tasks()
        membership = await self._stack.enter_async_context(self.store.watch())
        self.membership = membership
        self.fleet = Fleet(membership, "router", FINGERPRINT, self.liveness)
        self.wait_queue = WaitQueue(
            self.limits.max_queue,
            has_room=lambda demand, full: room.has_room(self.fleet.snapshot(), demand, full),
        )
        self.fleet.listeners.append(self.wait_queue.fleet_changed)
        self.dispatch = Dispatch(
            self.fleet, self.wait_queue, self.limits, self.tracer, RouterStats()
        )
        self._following = asyncio.create_task(self.fleet.follow())
        for worker in self.workers:
            await self.add(worker)
        await self.until(lambda s: len(self.fleet._members) == len(self.workers))
        await self.until(lambda s: all(view.state != "UNREACHABLE" for view in s.workers))
        return self

    async def __aexit__(self, *exc):
        members = self.fleet._members.values()
        kept = {view.incarnation: view for view in self.fleet._look().workers}
        assert kept == {view.incarnation: view for view in (m.view for m in members)}
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._stack.aclose()
        left = asyncio.all_tasks() - self._tasks_before - {asyncio.current_task()}
        if left:  # what workers were at ends in another moment
            _, left = await asyncio.wait(left, timeout=TIMEOUT_S)
        assert not left, f"tasks were left behind: {left}"
        assert not self.problems, f"errors that were not handled: {self.problems}"

    def models(self, admission=None, aliases=()):
        """The models of a router whose only one, "tiny", has these workers."""

        def new_version(name, version, text, membership):
            return ModelVersion(
                name, version, text, self.membership, self.fleet, self.wait_queue, self.dispatch
            )

        texts = [(ModelSource("", "tiny"), admission)]
        return Models(texts, new_version, aliases)

    def service(self, admission):
        """The service of that router."""
        models = self.models(admission, admission.config.api.model_aliases)
        limits, stats = admission.limits, self.dispatch.stats
        return GenerationService(models, admission.tenants, limits, stats, self.tracer)

    async def add(self, worker):
        """Starts a worker, which stops with the cluster, and registers it."""
        await worker.start()
        self._stack.push_async_callback(worker.stop)
        await self.join(worker)
        return worker

    async def join(self, worker):
        """Registers a worker."""
        stay = contextlib.AsyncExitStack()
        registering = self.store.register(worker.record)
        self.registrations[worker.record.incarnation] = await stay.enter_async_context(registering)
        self._stays[worker.record.incarnation] = stay
        self._stack.push_async_callback(stay.aclose)

    async def leave(self, worker):
        """Takes a worker out of the registry; its server stays."""
        await self._stays.pop(worker.record.incarnation).aclose()

    async def store_seen(self):
        """Gives the fleet time to take in what the registry says now."""
        await asyncio.sleep(3 * self.fleet._liveness.tick_s)

    def next_change(self):
        """An event that the fleet's next change sets."""
        changed = asyncio.Event()
        self.fleet.listeners.append(changed.set)
        return changed

    async def until(self, good):
        """Waits for a snapshot of the fleet that is good, and returns it."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                changed = self.next_change()
                if good(snapshot := self.fleet.snapshot()) and len(snapshot.workers):
                    return snapshot
                await changed.wait()

    async def until_state(self, worker, state):
        """Waits until the fleet sees a worker in a state; its view."""
        name = worker.record.incarnation
        snapshot = await self.until(
            lambda s: any((w.incarnation, w.state) == (name, state) for w in s.workers)
        )
        return next(view for view in snapshot.workers if view.incarnation == name)

    async def fill(self):
        """No worker has a block for a sequence, as far as the fleet sees."""
        for worker in self.decodes:
            worker.tell(blocks_free=0)
        await self.until(lambda s: not any(view.load.blocks_free for view in s.workers))

    def member(self, worker):
        return self.fleet.member(worker.record.incarnation)

    def subscribe(self, worker, handoff_id="h"):
        """Events and errors of one sequence, as a queue."""
        queue = asyncio.Queue()
        self.member(worker).subscribe(handoff_id, queue.put_nowait)
        return queue

    async def run(self, state):
        """The tokens and the reason of a whole request."""
        outputs = []
        async with asyncio.timeout(TIMEOUT_S):
            await self.dispatch.run(state, Context(), partial(_deliver, state, outputs.append))
        tokens = [token_id for token_ids, _ in outputs for token_id in token_ids]
        return tokens, outputs[-1][1]

    async def outputs(self, state):
        """A request's token ids and finish reason as they come; raises what ends it."""
        outputs = asyncio.Queue()
        deliver = partial(_deliver, state, outputs.put_nowait)
        running = asyncio.create_task(self.dispatch.run(state, Context(), deliver))
        running.add_done_callback(lambda _: outputs.put_nowait(None))
        try:
            while output := await outputs.get():
                yield output
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def until_waiting(self, count):
        """Waits until so many wait for room."""
        await seen(lambda: self.wait_queue.depth >= count)

    async def all_freed(self):
        """Waits until no decode worker holds blocks."""
        await seen(lambda: not any(decode.held for decode in self.decodes))

    def _on_problem(self, _, context):
        # gRPC's poller serves all loops, and may bring an event for that of an earlier test.
        if "PollerCompletionQueue" not in context["message"]:
            self.problems.append(context)


def _deliver(state, put, token_ids, logprobs, reason):
    state.deliver(token_ids)
    put((list(token_ids), reason))
    return False


async def received(queue):
    """The next item of a queue."""
    async with asyncio.timeout(TIMEOUT_S):
        return await queue.get()


async def seen(good):
    """Waits for something that sends no event."""
    async with asyncio.timeout(TIMEOUT_S):
        while not good():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def tokenized(prompt=(1, 2, 3), timeout_s=TIMEOUT_S, **fields):
    """A request of three tokens."""
    names = ("prompt_logprobs", "reasoning")
    given = {name: fields.pop(name) for name in names if name in fields}
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 5), seed=7, **given)
    values = {"request_id": "r", "stop": (), "include_stop": False, "cache_salt": "", **fields}
    return TokenizedRequest(
        prompt=prompt, params=params, deadline=time.monotonic() + timeout_s, **values
    )


def request_state(**fields):
    return RequestState(tokenized(**fields))


def counting(length, first=100):
    """What the model says, `length` tokens of it."""
    return list(range(first, first + length))
