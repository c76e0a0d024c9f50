"""A whole worker in this process: real engine, real gRPC, real transfers, registry in memory."""

import asyncio
import json
import os
import socket
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from baton.config import EngineConfig, RegistryConfig, WorkerConfig, host_id
from baton.errors import Unavailable
from baton.net import rpc
from baton.net.failures import error_of
from baton.net.message_stream import MAX_MESSAGE_BYTES, MessageStream
from baton.telemetry.tracing import Telemetry
from baton.v1 import common_pb2, handoff_pb2, prefill_pb2, worker_pb2_grpc
from baton.v1.dispatch_pb2 import RouterMessage, WorkerMessage
from baton.worker import node
from decode_worker.worker import DecodePart
from kvtransfer import shared_pool
from kvtransfer.control import Control
from prefill_worker.worker import PrefillPart
from tests.memory_registry import MemoryRegistry
from tests.unit.engine.checkpoints import make_checkpoint
from tests.waiting import WAIT_S

BLOCK_SIZE, BLOCKS = 16, 16
PATIENCE_S = WAIT_S
CONNECT = "/baton.v1.DispatchService/Connect"


class OpenSpans(SpanProcessor):
    """Which spans have begun and not ended, and what those that have were called and told."""

    def __init__(self):
        self.open = []
        self.ended = []
        self._attributes = []

    def on_start(self, span, parent_context=None):
        self.open.append(span.name)

    def on_end(self, span):
        self.open.remove(span.name)
        self.ended.append(span.name)
        self._attributes.append((span.name, dict(span.attributes)))

    def of(self, name):
        """The attributes of all spans of a name."""
        return [attributes for ended, attributes in self._attributes if ended == name]


class Worker:
    """One worker; as a context it is READY inside, and drained, clean and gone afterwards."""

    def __init__(self, role, directory, store, **settings):
        engine = EngineConfig(
            model=str(directory), dtype="float32", device="cpu", block_size=BLOCK_SIZE,
            kv_blocks=settings.pop("kv_blocks", BLOCKS), chunk_tokens=32, threads=1,
            prefix_cache=settings.pop("prefix_cache", True),
            max_batch=settings.pop("max_batch", 64),
        )  # fmt: skip
        defaults = {"drain_s": 10.0, "transport": "shm", "incarnation": f"{role}-0"}
        self.config = WorkerConfig(role, engine, RegistryConfig(), **{**defaults, **settings})
        self.spans = OpenSpans()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(self.spans)
        self.store = store
        trace = Telemetry(provider.get_tracer("test"))
        self.node = node.Node(self.config, store, trace, (PrefillPart, DecodePart))
        self._area = None

    @property
    def prefilling(self):
        """Its part that runs prompts."""
        return self.node.parts[0]

    @property
    def decoding(self):
        """Its part that runs sequences."""
        return self.node.parts[1]

    def knows_prefill(self, incarnation):
        """Another process of this host is registered as a prefill worker."""
        role = common_pb2.WORKER_ROLE_PREFILL
        record = common_pb2.WorkerRecord(incarnation=incarnation, role=role, host_id=host_id())
        self.store.put(record)

    async def run(self):
        """The node's whole life."""
        try:
            await self.node.run(self.load)
        finally:
            if self._area is not None:
                self._area.close()

    def load(self, remote_ranks):
        assert not remote_ranks.connections
        loaded, pools = node._load(self.config, remote_ranks)
        self._area = pools[0].area
        return loaded, pools

    def stop(self):
        """As SIGTERM does."""
        self.node._stop.set()

    def hold_engine(self):
        """The engine's thread does nothing until the event is set."""
        gate = threading.Event()
        self.node.engine.submit(gate.wait)
        return gate

    def hold_grammars(self):
        """No grammar is compiled until the event is set."""
        gate = threading.Event()
        self.node.grammars._submit(gate.wait)
        return gate

    async def __aenter__(self):
        self.life = asyncio.create_task(self.run())
        ready = asyncio.create_task(self.ready())
        both = {ready, self.life}
        done, _ = await asyncio.wait(both, timeout=PATIENCE_S, return_when="FIRST_COMPLETED")
        if ready not in done:
            ready.cancel()
            self.life.result()  # why it did not become READY
        self.channel = rpc.channel(self.node.record.address)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.handoff = Control(self.node.record.address)
        return self

    async def __aexit__(self, kind, error, traceback):
        self.stop()
        await self.handoff.close()
        await self.channel.close()
        await asyncio.wait_for(self.life, PATIENCE_S)
        assert error is not None or not self.spans.open

    async def ready(self):
        """Returns when the registry has this worker as READY."""
        async with self.store.watch() as membership:
            async for records in membership.changes():
                record = records.get(self.config.incarnation)
                if record is not None and record.state == common_pb2.WORKER_STATE_READY:
                    return

    async def blocks(self):
        """The engine's load, after its block pool has passed every check."""
        await asyncio.wrap_future(self.node.engine.submit(self.node.engine._blocks.check))
        return await asyncio.wrap_future(self.node.engine.load())

    async def clean(self):
        """Whether no block is held or quarantined, once all that runs has ended."""
        if self.config.role == "decode":
            self.decoding._handoffs.check()
        await asyncio.wait_for(self.node.idle(), PATIENCE_S)
        load = await self.blocks()
        return load.blocks_held == load.blocks_quarantined == 0


class Paced:
    """Runs one engine step for each `allow.release()`; `begun` is set when one waits."""

    def __init__(self, worker):
        self.allow, self.begun = threading.Semaphore(0), threading.Event()
        self._runner = worker.node.engine._runner
        worker.node.engine._runner = self

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def launch(self, plan):
        self.begun.set()
        assert self.allow.acquire(timeout=PATIENCE_S)
        return self._runner.launch(plan)

    async def waits(self):
        """Returns when a step waits."""
        assert await asyncio.to_thread(self.begun.wait, PATIENCE_S)


class Prompt:
    """What a prefill worker sends of one prompt, until its end."""

    def __init__(self, router, handoff_id):
        self.events = asyncio.Queue()
        self._router, self._handoff_id = router, handoff_id

    async def read(self):
        """The next event; None behind the last. Raises why the prompt failed."""
        event = await asyncio.wait_for(self.events.get(), PATIENCE_S)
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self):
        self._router.stream.outgoing.cancel.append(self._handoff_id)

    async def all(self):
        """All events up to the last."""
        events = []
        while True:
            events.append(await self.read())
            if events[-1].HasField("committed") or events[-1].first_token.finish_reason:
                return events


class Router:
    """A router's stream to a worker; `messages` has those with events."""

    def __init__(self, worker, router_id="router", heartbeat_ms=0):
        self.router_id = router_id
        self.heartbeat_ms = heartbeat_ms
        self.messages = []
        self.reports = asyncio.Queue()
        self._worker = worker
        self._queues = {}
        self._answers = {}
        self.prompts = {}
        self._answered = asyncio.Event()
        self._heartbeats = asyncio.Queue()

    async def __aenter__(self):
        self.channel = rpc.channel(
            self._worker.node.record.address, max_message_bytes=MAX_MESSAGE_BYTES
        )
        metadata = [("baton-router-id", self.router_id)]
        if self.heartbeat_ms:
            metadata.append(("baton-heartbeat-ms", str(self.heartbeat_ms)))
        self.call = self.channel.stream_stream(CONNECT)(metadata=metadata)
        self.stream = MessageStream(self.call, WorkerMessage, RouterMessage)
        self.ended = asyncio.create_task(self._run())
        await asyncio.wait_for(self._answered.wait(), PATIENCE_S)
        return self

    async def __aexit__(self, *_):
        self.stream.close()
        self.call.cancel()
        await asyncio.wait([self.ended], timeout=PATIENCE_S)
        _ = self.ended.cancelled() or self.ended.exception()
        await self.channel.close()

    async def _run(self):
        with rpc.translated():
            await self.stream.run(self._take_all())
        raise Unavailable("the worker closed the stream")

    async def _take_all(self):
        async for message in self.stream.messages():
            self._take(message)

    async def reserve(self, spec, local=0, interval=0):
        """Reserves; `local` is the most tokens decode computes by itself."""
        return await asyncio.wait_for(self.reserving(spec, local, interval), PATIENCE_S)

    def reserving(self, spec, local=0, interval=0):
        """The answer to come."""
        answer = self._answers[spec.handoff_id] = asyncio.get_running_loop().create_future()
        self.stream.outgoing.reserve.add(
            sequence=spec, local_prefill_max_tokens=local, stream_interval=interval
        )
        return answer

    def prefill(self, spec, target):
        """Has a prompt run."""
        prompt = self.prompts[spec.handoff_id] = Prompt(self, spec.handoff_id)
        self.stream.outgoing.prefill.add(sequence=spec, target=target)
        return prompt

    async def cancel(self, *handoff_ids):
        """Returns once their blocks are freed, or quarantined."""
        self.stream.outgoing.cancel.extend(handoff_ids)
        handoffs = self._worker.decoding._handoffs

        def freeing():
            """Tasks other than receives, which go on after a handoff is quarantined."""
            transfers = [one.transfer for one in handoffs._handoffs.values() if one.transfer]
            return handoffs._tasks.difference(*(one.receives for one in transfers))

        await until(lambda: not freeing() and not handoffs._handoffs.keys() & set(handoff_ids))

    async def event(self, handoff_id):
        """The sequence's next event; raises its failure."""
        event = await asyncio.wait_for(self._queue(handoff_id).get(), PATIENCE_S)
        if isinstance(event, Exception):
            raise event
        return event

    async def tokens(self, handoff_id):
        """All tokens up to the last one."""
        tokens = []
        while True:
            event = await self.event(handoff_id)
            assert not event.abort_reason, event.abort_reason
            tokens += event.token_ids
            if event.finish_reason:
                return tokens

    async def heartbeat(self):
        """Waits for the next message without anything in it."""
        await asyncio.wait_for(self._heartbeats.get(), PATIENCE_S)

    async def report(self):
        """The next report of load."""
        return await asyncio.wait_for(self.reports.get(), PATIENCE_S)

    def _take(self, message):
        self._answered.set()
        if message.events:
            self.messages.append(message)
        if not message.ByteSize():
            self._heartbeats.put_nowait(message)
        if message.HasField("report"):
            self.reports.put_nowait(message.report)
        for answer in message.reserved:
            self._answer(answer.handoff_id, answer)
        for event in message.prefill:
            self.prompts[event.handoff_id].events.put_nowait(event)
        for event in message.events:
            self._queue(event.handoff_id).put_nowait(event)
        for failure in message.failures:
            self._answer(failure.handoff_id, error_of(failure))

    def _answer(self, handoff_id, answer):
        if prompt := self.prompts.get(handoff_id):
            prompt.events.put_nowait(answer)
        elif not isinstance(answer, Exception):
            self._answers[handoff_id].set_result(answer)
        elif not self._answers[handoff_id].done():
            self._answers[handoff_id].set_exception(answer)
        else:
            self._queue(handoff_id).put_nowait(answer)

    def _queue(self, handoff_id):
        return self._queues.setdefault(handoff_id, asyncio.Queue())


@dataclass
class Pair:
    """A prefill and a decode worker, and a router's connections to both."""

    prefill: Worker
    decode: Worker
    router: Router
    prompts: Router

    def send(self, wanted, reserved):
        """The running prompt for what was reserved."""
        return self.prompts.prefill(wanted, target(self.decode, reserved))

    async def start(self, wanted):
        """Reserves, and returns the running prompt."""
        return self.send(wanted, await self.router.reserve(wanted))

    async def clean(self):
        return await self.prefill.clean() and await self.decode.clean()


@asynccontextmanager
async def pair_of(directory, cls=Pair, transport="shm", drain_s=10.0, **decode):
    """A pair whose link is open; settings are those of both, of prefill and of decode."""
    store = MemoryRegistry()
    async with (
        Worker("decode", directory, store, transport=transport, **decode) as receiver,
        Worker("prefill", directory, store, transport=transport, drain_s=drain_s) as sender,
        Router(receiver) as router,
        Router(sender) as prompts,
    ):
        pair = cls(sender, receiver, router, prompts)
        await until(sender.node.pairs)
        yield pair
        assert await (receiver.clean() if sender.life.done() else pair.clean())


async def until(seen):
    """Returns when what is seen, which sends no event, is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not seen():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def offer_of(decode, incarnation):
    """A prefill worker's Offer, over all that the decode worker has."""
    record = decode.node.record
    return handoff_pb2.OfferRequest(
        incarnation=incarnation,
        target_incarnation=record.incarnation,
        kv=record.kv,
        transports=record.transports,
    )


def join(endpoint, pid):
    """That process is given the memory of a link's receiver, as it would ask for it itself."""
    secret = bytes.fromhex(json.loads(endpoint)["secret"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(shared_pool._path(secret)))
        pidfd = os.pidfd_open(pid)
        socket.send_fds(connection, [secret], [pidfd])
        for descriptor in (pidfd, *socket.recv_fds(connection, 1, 2)[1]):
            os.close(descriptor)


async def granted(decode, router, name="a", pid=0):
    """Reserves, and a prefill process "writer" (`pid`; 0: this one) gets the grant, and sends no
    KV; returns what its messages name."""
    reserved = await router.reserve(spec(name, prompt(20)))
    names = {"handoff_id": name, "reservation_token": reserved.reservation_token}
    names["incarnation"] = "writer"
    decode.knows_prefill("writer")
    offer = await decode.handoff.call(offer_of(decode, "writer"), PATIENCE_S)
    await asyncio.to_thread(join, offer.endpoint, pid or os.getpid())
    ready = handoff_pb2.ReadyRequest(**names, epoch=offer.epoch, num_tokens=20)
    await decode.handoff.call(ready, PATIENCE_S)
    return names


def asked(worker, method, times=1):
    """Set when the engine has been asked `times` times for `method`."""
    engine, event = worker.node.engine, asyncio.Event()
    ask, left = getattr(engine, method), times

    def counted(*args):
        nonlocal left
        left -= 1
        if left == 0:
            event.set()
        return ask(*args)

    setattr(engine, method, counted)
    return event


def prompt(num_tokens, start=0):
    """Token ids; equal starts give equal prefixes."""
    return [(start + 7 * i) % 250 + 3 for i in range(num_tokens)]


def spec(handoff_id, token_ids, max_tokens=4, **fields):
    """Greedy, to exactly `max_tokens`."""
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    fields = {"prompt_tokens": len(token_ids), "sampling": sampling, **fields}
    return common_pb2.SequenceSpec(handoff_id=handoff_id, token_ids=token_ids, **fields)


def matching(handoff_id, token_ids, regex, **fields):
    """Its output has to match."""
    output = common_pb2.StructuredOutput(regex=regex)
    sampling = common_pb2.SamplingParams(max_tokens=16, structured_output=output)
    return spec(handoff_id, token_ids, sampling=sampling, **fields)


def target(decode, reserved):
    """Where a prefill worker is to hand over what was reserved."""
    return prefill_pb2.HandoffTarget(
        incarnation=decode.node.record.incarnation,
        reservation_token=reserved.reservation_token,
        cached_tokens=reserved.cached_tokens,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny checkpoint."""
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "LlamaForCausalLM", tokenizer=True)
    return path


@pytest.fixture
def store():
    return MemoryRegistry()


@pytest.fixture
async def decode(directory, store):
    async with Worker("decode", directory, store) as worker:
        yield worker


@pytest.fixture
async def router(decode):
    """A router's stream; after the test the decode worker holds nothing."""
    async with Router(decode) as router:
        yield router
        assert await decode.clean()
