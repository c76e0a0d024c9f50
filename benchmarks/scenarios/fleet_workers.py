"""Many workers of one role in one process, without engines. Not part of the product.

    python benchmarks/scenarios/fleet_workers.py 500 decode-worker --config …

What a router and etcd see of them is real: for each worker a gRPC server of its own, a record
under a lease of its own, load reports and heartbeats as often as workers send them, and a message
for each step. A step is a timer (`--simulate`), KV is counted but not moved, and decode
starts a sequence by the clock instead of a Commit. A first token is the time at which it is sent:
see `first_token_age_s`. /metrics has the number of messages sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvloop
from prometheus_client import generate_latest

from baton.cli.main import main
from baton.config import SimulatedSpeed, WorkerConfig, host_id, model_path, new_incarnation
from baton.net.message_stream import MAX_MESSAGE_BYTES
from baton.net.metrics_server import serving
from baton.net.server import EventLoop, bind, measure_lag, settle
from baton.registry import EtcdRegistry
from baton.telemetry.metrics import instruments
from baton.telemetry.metrics.prometheus import Gaps
from baton.text import text_fingerprint
from baton.v1 import common_pb2, prefill_pb2, worker_pb2
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.dispatch_pb2 import RouterMessage, WorkerMessage
from baton.v1.prefill_pb2 import PrefillRequest
from baton.worker import node
from baton.worker.dispatch_service import DispatchService, RouterStream
from baton.worker.metrics import LoadTracker

_BLOCK, _BLOCKS, _MAX_BATCH, _CONTEXT = 16, 4096, 64, 65536
_TOKEN_BYTES = 131072
_HANDOFF_S = 0.003
_FIRST_ID, _NUM_IDS = 1000, 1000
_AT_A_TIME = 50  # registrations
_MOST_MICROSECONDS = 1 << 30  # in a token id
_UNFINISHED = common_pb2.FINISH_REASON_UNSPECIFIED
_LENGTH = common_pb2.FINISH_REASON_LENGTH


def _microseconds() -> int:
    return time.monotonic_ns() // 1000 % _MOST_MICROSECONDS


def first_token_age_s(token_id: int) -> float:
    """Seconds since a worker of this machine sent it."""
    return (_microseconds() - token_id) % _MOST_MICROSECONDS / 1e6


SENT: Counter[str] = Counter()  # messages, by kind
LAG = Gaps(instruments.for_process("router")["baton.event_loop.lag"])


class Router(RouterStream):
    """A router's stream that counts the messages it sends."""

    def complete(self, message: WorkerMessage) -> None:
        super().complete(message)
        kinds = {"step": message.events, "prefill message": message.prefill}
        kind = next((kind for kind, of in kinds.items() if of), "")
        kind = kind or ("load report" if message.HasField("report") else "")
        SENT[kind or ("heartbeat" if not message.ByteSize() else "answer")] += 1


class Worker(ABC):
    """One worker; its role is a subclass."""

    role: common_pb2.WorkerRole
    max_message_bytes = MAX_MESSAGE_BYTES

    def __init__(self, name: str, fingerprint: str, config: WorkerConfig) -> None:
        self.speed = SimulatedSpeed.parse(config.engine.simulate)
        self.load_tracker = LoadTracker()
        self.load = self.load_tracker.load
        self.load.blocks_total = self.load.blocks_free = _BLOCKS
        self.load.prefill_tokens_per_s = self.speed.prefill_tokens_per_s
        self.load.chunk_tokens = int(0.06 * self.speed.prefill_tokens_per_s)
        self.load.step_ms = self.speed.step_s(0, 1) * 1e3
        self.server, address = bind(config.host, 0)
        self.dispatch = DispatchService(self, Router)
        self.dispatch.add_to(self.server)
        self.record = common_pb2.WorkerRecord(
            incarnation=new_incarnation(name),
            role=self.role,
            address=address,
            host_id=host_id(),
            pid=os.getpid(),
            state=common_pb2.WORKER_STATE_READY,
            model=config.served_name,
            version=config.model_version,
            text_fingerprint=fingerprint,
            kv=common_pb2.KvDescriptor(
                model_fingerprint="fleet", dtype="bfloat16", num_layers=32, parts=2, num_kv_heads=8,
                head_size=128, block_size=_BLOCK, layout_version=1, tensor_parallel=1,
            ),
            transports=[common_pb2.TRANSPORT_SHM],
            blocks_total=_BLOCKS,
            max_context=_CONTEXT,
            max_batch=_MAX_BATCH,
        )  # fmt: skip

    @property
    def incarnation(self) -> str:
        return self.record.incarnation

    def report(self) -> worker_pb2.LoadReport:
        return worker_pb2.LoadReport(load=self.load, state=self.record.state)

    @abstractmethod
    def take(self, router: RouterStream, message: RouterMessage) -> Iterator[None]:
        """Does what a router asks for."""

    def lost(self, router: RouterStream) -> None:  # noqa: B027 - the run is over
        """Nothing is freed."""

    def hold(self, blocks: int) -> None:
        """Holds blocks, or frees them."""
        self.load.blocks_free -= blocks
        self.load.blocks_held += blocks
        self.load_tracker.wake()


class PrefillWorker(Worker):
    role = common_pb2.WORKER_ROLE_PREFILL
    _free_at = 0.0  # when all prompts are computed

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def take(self, router: RouterStream, message: RouterMessage) -> Iterator[None]:
        for request in message.prefill:
            handoff_id = request.sequence.handoff_id
            self._tasks[handoff_id] = asyncio.create_task(self._prefill(router, request))
        for handoff_id in message.cancel:
            if task := self._tasks.get(handoff_id):
                task.cancel()
        yield

    async def _prefill(self, router: RouterStream, request: PrefillRequest) -> None:
        handoff_id = request.sequence.handoff_id
        loop, tokens = asyncio.get_running_loop(), len(request.sequence.token_ids)
        blocks = math.ceil(tokens / _BLOCK)
        waits_s = max(0.0, self._free_at - loop.time())
        self._free_at = loop.time() + waits_s + self.speed.step_s(tokens, 0)
        self.load.queue_tokens += tokens
        self.load.running += 1
        self.hold(blocks)
        try:
            await asyncio.sleep(self._free_at - loop.time())
            self.load.steps += 1
            started = prefill_pb2.PrefillStarted(queue_ms=waits_s * 1e3)
            router.outgoing.prefill.add(handoff_id=handoff_id, started=started)
            token = prefill_pb2.PrefillFirstToken(token_id=_microseconds())
            router.outgoing.prefill.add(handoff_id=handoff_id, first_token=token)
            await asyncio.sleep(_HANDOFF_S)
            committed = prefill_pb2.PrefillCommitted(
                transfer_bytes=tokens * _TOKEN_BYTES,
                transfer_ms=_HANDOFF_S * 1e3,
                transport=common_pb2.TRANSPORT_SHM,
            )
            router.outgoing.prefill.add(handoff_id=handoff_id, committed=committed)
        finally:
            del self._tasks[handoff_id]
            self.load.queue_tokens -= tokens
            self.load.running -= 1
            self.hold(-blocks)


@dataclass
class _Sequence:
    router: RouterStream
    num_blocks: int
    starts_at: float  # by the loop's clock
    left: int  # tokens to generate


class DecodeWorker(Worker):
    role = common_pb2.WORKER_ROLE_DECODE

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sequences: dict[str, _Sequence] = {}
        self._engine: asyncio.Task[None] | None = None

    def take(self, router: RouterStream, message: RouterMessage) -> Iterator[None]:
        for request in message.reserve:
            self._reserve(router, request)
        for handoff_id in message.cancel:
            self._end(handoff_id)
        yield

    def _reserve(self, router: RouterStream, request: ReserveRequest) -> None:
        spec = request.sequence
        tokens, new = len(spec.token_ids), spec.sampling.max_tokens
        started = tokens <= request.local_prefill_max_tokens
        blocks = math.ceil((tokens + new) / _BLOCK)
        ready_s = self.speed.step_s(tokens, 0) + (0.0 if started else _HANDOFF_S)
        starts_at = asyncio.get_running_loop().time() + ready_s
        left = new if started else new - 1
        self._sequences[spec.handoff_id] = _Sequence(router, blocks, starts_at, left)
        self.hold(blocks)
        if self._engine is None or self._engine.done():
            self._engine = asyncio.create_task(self._run())
        router.outgoing.reserved.add(
            handoff_id=spec.handoff_id, reservation_token="fleet", started=started
        )

    async def _run(self) -> None:
        """Steps while there are sequences: one message to each router that has some."""
        loop, load = asyncio.get_running_loop(), self.load
        while self._sequences:
            now = loop.time()
            batch = {name: one for name, one in self._sequences.items() if one.starts_at <= now}
            if not batch:
                await asyncio.sleep(min(one.starts_at for one in self._sequences.values()) - now)
                continue
            await asyncio.sleep(self.speed.step_s(0, len(batch)))
            load.running, load.steps = len(batch), load.steps + 1
            for name, one in batch.items():
                if name not in self._sequences:
                    continue  # cancelled meanwhile
                one.left -= 1
                one.router.outgoing.events.add(
                    handoff_id=name,
                    token_ids=[_FIRST_ID + one.left % _NUM_IDS],
                    finish_reason=_UNFINISHED if one.left else _LENGTH,
                )
                if not one.left:
                    self._end(name)
            self.load_tracker.wake()
        load.running = 0
        self.load_tracker.wake()

    def _end(self, handoff_id: str) -> None:
        if sequence := self._sequences.pop(handoff_id, None):
            self.hold(-sequence.num_blocks)


_ROLES = {"prefill": PrefillWorker, "decode": DecodeWorker}


async def _run(number: int, config: WorkerConfig) -> int:
    """Serves `number` workers until SIGTERM."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    fingerprint = text_fingerprint(model_path(config.engine.model))
    registry = EtcdRegistry(config.registry)
    workers = [
        _ROLES[config.role](f"{config.role}-{i}", fingerprint, config) for i in range(number)
    ]
    gate = asyncio.Semaphore(_AT_A_TIME)

    async def serve(worker: Worker) -> None:
        await worker.server.start()
        async with contextlib.AsyncExitStack() as registered:
            async with gate:
                await registered.enter_async_context(registry.register(worker.record))
            await stop.wait()
        await worker.dispatch.aclose()
        await worker.server.stop(None)

    def page(accept: str) -> tuple[str, bytes]:
        lines = [f'sent_total{{kind="{kind}"}} {count}\n' for kind, count in SENT.items()]
        return "text/plain", "".join(lines).encode() + generate_latest(LAG)

    settle()
    lagging = asyncio.create_task(measure_lag(LAG.record))
    async with serving(page, config.host, config.metrics_port or 0):
        await asyncio.gather(*map(serve, workers))
    lagging.cancel()
    await registry.close()
    return 0


def run(number: int, config: WorkerConfig, parts: Sequence[type[node.Part]]) -> int:
    """Stands in for `baton.worker.node.run`."""
    return uvloop.run(_run(number, config), loop_factory=EventLoop)


if __name__ == "__main__":
    setattr(node, "run", partial(run, int(sys.argv[1])))  # noqa: B010 - a function to mypy
    sys.exit(main(sys.argv[2:]))
