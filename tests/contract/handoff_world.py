"""A decode worker's blocks, reservations and receiver, with time and threads in the test's hands.

What is real: BlockPool, Planner and Engine, Reservations and their event streams, HandoffReceiver
over the memory transport, links and their bytes. What is not: the clock, which the test moves; the
engine's thread and the links' threads, whose work runs when the test says so; and the model, of
which a stand-in remains that checks what it reads. So every order of events can be tried, and comes
out the same when it is tried again.
"""

import asyncio
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from unittest import mock

import torch
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer

from baton.engine.blocks import BlockPool
from baton.engine.loop import Engine
from baton.engine.planner import Planner
from baton.engine.runner import SampledTokens
from baton.v1 import common_pb2, decode_pb2
from baton.v1 import handoff_pb2 as pb
from baton.worker.messages import ModelLimits
from decode_worker.reservations import DecodeSpans, Reservations
from kvtransfer import receiver
from kvtransfer.pool import Digest, KvPool, Slots
from kvtransfer.receiver import HandoffReceiver

from .kvtransfer_parts import MemoryTransport, answer

BLOCKS, BLOCK_SIZE = 10, 4
LEASE_S = 10.0
OUTPUT = 900  # tokens from here on are sampled, those below are prompts'
DESCRIPTOR = common_pb2.KvDescriptor(model_fingerprint="m", block_size=BLOCK_SIZE)
NOTHING = float("nan")  # in a slot that unverified bytes may have come into


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until `now` is changed."""

    now = 0.0

    def time(self):
        return self.now

    def tick(self):
        """Runs what is ready, once."""
        self.call_soon(self.stop)
        self.run_forever()


class Inline(Executor):
    """A link's thread whose work is done at once."""

    def __init__(self, *_, **__):
        pass

    def submit(self, work, *arguments):
        future = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


class CheckingRunner:
    """Stands for the model: the KV of a token is the token, and what is read must be that."""

    def __init__(self, pool, may_run):
        self.pool, self._may_run = pool, may_run
        self.wrong = []

    def run(self, plan):
        return {one.sequence.seq_id: sampled for one in plan.work if (sampled := self._run(one))}

    def scrub(self, blocks):
        self.pool[blocks] = 0

    def wait_for_writes(self, blocks=None):
        pass  # nothing runs here behind a step's back

    def _run(self, work):
        sequence = work.sequence
        if sequence.awaits_kv or not self._may_run(sequence.seq_id):
            self.wrong.append(f"{sequence.seq_id} was scheduled before its KV was verified")
        slots = [(sequence.block_ids[n // BLOCK_SIZE], n % BLOCK_SIZE) for n in range(work.start)]
        found = [content_of(self.pool, block)[slot] for block, slot in slots]
        if found != sequence.tokens[: work.start]:
            self.wrong.append(f"{sequence.seq_id} read {found}, not {sequence.tokens}")
        for n in range(work.start, work.start + work.count):
            self.pool[sequence.block_ids[n // BLOCK_SIZE], ..., n % BLOCK_SIZE, :] = float(
                sequence.tokens[n]
            )
        return SampledTokens((OUTPUT + sequence.num_tokens,)) if work.samples else None


async def find(incarnation):
    """The registry's record of a prefill process."""
    return common_pb2.WorkerRecord(incarnation=incarnation, host_id="another")


def content_of(pool, block):
    """The block's slots, as the tokens they stand for."""
    return pool[block, 0, 0, 0, :, 0].tolist()


def new_pool(num_blocks=BLOCKS):
    return torch.zeros(num_blocks, 1, 2, 1, BLOCK_SIZE, 1)


class World:
    """The decode worker. Nothing of it moves unless `tick`, `engine_turn` or `settle` is called."""

    def __init__(self, may_run):
        self.loop, self.transport, self.pool = Loop(), MemoryTransport(), new_pool()
        self.runner = CheckingRunner(self.pool, may_run)
        self.blocks = BlockPool(BLOCKS, BLOCK_SIZE)
        planner = Planner(self.blocks, chunk_tokens=8, max_batch=4)
        self.engine = Engine(self.runner, planner, frozenset(), 64, self._publish)
        self.queues = {}
        limits = ModelLimits(1000, 64, BLOCK_SIZE)
        self.reservations = Reservations(self.engine, limits, LEASE_S)
        record = common_pb2.WorkerRecord(incarnation="d", host_id="host", kv=DESCRIPTOR)
        self.receiver = HandoffReceiver(
            KvPool(self.pool), record, [self.transport], self.reservations, find
        )
        self.reservations.receiver = self.receiver
        self.calls, self.errors = set(), []
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        self.loop._default_executor = Inline()  # a real thread would not be at rest in time
        self._patch = mock.patch.object(receiver, "ThreadPoolExecutor", Inline)
        self._patch.start()

    def start(self, call):
        """Begins a call; `settle` ends it."""
        task = self.loop.create_task(call)
        self.calls.add(task)
        return task

    def tick(self, times):
        for _ in range(times):
            self.loop.tick()

    def engine_turn(self):
        """The engine does what it was asked for."""
        self.engine._inbox.run_all()

    def step(self):
        """The engine's thread goes around once."""
        self.engine.submit(self.engine._mark_stopping)
        self.engine._admit()
        self.engine._step()
        self.engine._stopping = False

    def settle(self):
        """Everything that can end without time passing ends."""
        for _ in range(100):
            self.tick(2)
            if self._quiet():
                break
            self.engine_turn()
        assert self._quiet(), f"stuck: {self.calls}"
        for call in self.calls:
            if not call.cancelled():
                call.result()
        self.calls.clear()

    def pass_time(self, seconds):
        self.loop.now += seconds
        self.settle()

    def listen(self, stream_id):
        """A router opens its stream, for the first time or again."""
        self.queues[stream_id] = self.reservations.listen(stream_id, "router")

    def hang_up(self, stream_id):
        self.reservations.hang_up(stream_id, self.queues.pop(stream_id))

    async def reserve(self, stream_id, spec, local):
        request = decode_pb2.ReserveRequest(
            stream_id=stream_id, sequence=spec, local_prefill_max_tokens=local
        )
        spans = DecodeSpans(NoOpTracer(), Context())
        return await self.reservations.reserve(request, "d", spans)

    def close(self):
        self.start(self.receiver.close())
        self.settle()
        self._patch.stop()
        self.loop.close()

    def _quiet(self):
        busy = (self.reservations._endings, self.receiver._tasks)
        return (
            all(call.done() for call in self.calls)
            and not any(busy)
            and self.engine._inbox._jobs.empty()
            and not self.loop._ready
        )

    def _publish(self, report):
        self.loop.call_soon(self.reservations.on_step, report)


@dataclass(eq=False)
class Handoff:
    """One request's handoff as its router and its prefill process know it."""

    name: str
    tokens: list
    cached: int
    token: str
    sequence: object  # the engine's: it knows the blocks
    writer: object = None
    epoch: int = 0  # of the attempt that runs
    granted: tuple = ()  # blocks that its writer may still write into
    corrupted: bool = False  # so said its last Commit's answer
    owes_abort: bool = False  # unless committed, it ends with an Abort that is answered
    withdrawn: bool = False  # decode has agreed to a resend that has not begun
    ready: object = None  # the call that asks for the grant
    attempt: int = 0  # what is answered to an earlier one is not listened to

    def stop_writing(self):
        """A call that is given up is cancelled at decode, before whatever is sent after it."""
        self.granted = ()
        self.attempt += 1
        if self.ready:
            self.ready.cancel()

    def fields(self):
        """Those that every message of its sender has."""
        return {
            "handoff_id": self.name,
            "reservation_token": self.token,
            "incarnation": self.writer.incarnation,
        }


class Writer:
    """A prefill process: its pool holds the right KV of one handoff at a time in its blocks."""

    def __init__(self, world, number):
        self.world, self.incarnation = world, f"p{number}"
        self.alive, self.noticed = True, False
        self.pool = KvPool(new_pool())
        self.epochs = []  # all it ever had; the last one is current
        self.link = None

    async def offer(self):
        request = pb.OfferRequest(
            incarnation=self.incarnation, target_incarnation="d", kv=DESCRIPTOR
        )
        request.transports.append(common_pb2.TRANSPORT_MEMORY)
        response = await answer(self.world.receiver, "Offer", request)
        self.link = self.world.transport.connect(self.pool, response.endpoint, 0, 1.0)
        self.epochs.append(response.epoch)

    def put(self, handoff, kind):
        """Writes into the granted blocks: all of it, the first block only, or wrong bytes."""
        rest = handoff.tokens[handoff.cached :]
        if kind == "part":
            rest = rest[:BLOCK_SIZE]
        local = self._hold(rest, NOTHING if kind == "wrong" else None)
        remote = Slots(handoff.granted[: len(local.block_ids)], len(rest))
        self.link.put(local, remote, Digest(), 1.0)

    def digest(self, handoff):
        """What the right KV comes to."""
        return self.pool.digest(self._hold(handoff.tokens[handoff.cached :]))

    def _hold(self, tokens, value=None):
        """The slots of the own pool that now hold the KV of `tokens`, or `value` for each."""
        for n, token in enumerate(tokens):
            content = float(token) if value is None else value
            self.pool.tensor[n // BLOCK_SIZE, ..., n % BLOCK_SIZE, :] = content
        return Slots(tuple(range(-(-len(tokens) // BLOCK_SIZE))), len(tokens))


def prompt(family, num_tokens):
    """Token ids; prompts of one family share their beginning, and no two positions are alike."""
    return [100 * family + n + 1 for n in range(num_tokens)]


def spec(name, tokens, max_tokens, time_left_s):
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return common_pb2.SequenceSpec(
        handoff_id=name,
        token_ids=tokens,
        prompt_tokens=len(tokens),
        sampling=sampling,
        time_left_ms=int(time_left_s * 1000),
    )
