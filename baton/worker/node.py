"""A worker's life: bind, load, warm up, register, serve, drain, leave.

A worker is registered as STARTING while it loads and becomes READY only after a warm-up, so that
no request meets a cold model. SIGTERM drains: no new work, what runs may finish, and what has not
finished in time is given back to its router, which places it elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import grpc

from baton import rpc
from baton.config import WorkerConfig, host_id
from baton.engine.backends import cpu
from baton.engine.build import Loaded
from baton.engine.loop import Engine, StepReport
from baton.errors import InternalError, TransferFailed, Unavailable
from baton.registry import Membership, Registration, Registry
from baton.server import Health, bind, settle
from baton.telemetry import Telemetry
from baton.text import text_fingerprint
from baton.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.worker import hardware
from baton.worker.metrics import LoadTracker, WorkerMetrics, load_proto

log = logging.getLogger(__name__)

_ROLES = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
}
STOP_GRACE_S = 2.0
CLOSE_GRACE_S = 5.0  # for what ends right after the last transfer
REGISTRY_TIMEOUT_S = 5.0
RECORD_WAIT_S = 1.0  # for the record of a worker that a router knows already to arrive here
WATCH_INTERVAL_S = 0.05
STALL_MIN_S = 30.0  # no shorter step counts as stalled
STALL_STEPS = 50  # mean steps that a step may take


class Role(Protocol):
    """What makes a worker a prefill or a decode worker."""

    transports: tuple[common_pb2.Transport, ...]

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        """Adds its services to a server; their full names."""

    def on_step(self, report: StepReport) -> None:
        """Handles a step's report, on the event loop."""

    def pairs(self) -> list[worker_pb2.PairStatus]:
        """Its links to other workers."""

    async def idle(self) -> None:
        """Returns when nothing runs any more."""

    async def close(self) -> None:
        """Gives up what still runs and frees everything."""


class StallDetector:
    """Notices when an engine step takes far longer than steps take, and when it has ended.

    Event-loop thread only.
    """

    def __init__(self, step_age_s: Callable[[], float], mean_step_s: Callable[[], float]) -> None:
        self._step_age_s, self._mean_step_s = step_age_s, mean_step_s
        self._stepped = asyncio.Event()

    def stepped(self) -> None:
        """A step has ended."""
        self._stepped.set()

    async def run(self, report: Callable[[bool], Awaitable[None]]) -> None:
        """Runs until cancelled; reports True when a step stalls and False when it has ended."""
        while True:
            while (left_s := self._limit_s - self._step_age_s()) > 0:  # noqa: ASYNC110 - exactly then
                await asyncio.sleep(left_s)
            self._stepped.clear()
            log.error("the engine's step has been running for %.0f s", self._step_age_s())
            await report(True)
            await self._stepped.wait()
            log.warning("the engine's step has ended")
            await report(False)

    @property
    def _limit_s(self) -> float:
        return max(STALL_MIN_S, STALL_STEPS * self._mean_step_s())


class Node:
    """One worker process. `run()` returns when it has drained."""

    def __init__(self, config: WorkerConfig, registry: Registry, trace: Telemetry) -> None:
        self.config = config
        self.load_tracker = LoadTracker()
        self.telemetry = trace
        self.role: Role
        self.engine: Engine
        self.record = common_pb2.WorkerRecord(
            incarnation=config.incarnation,
            role=_ROLES[config.role],
            pid=os.getpid(),
            host_id=host_id(),
            state=common_pb2.WORKER_STATE_STARTING,
            model=config.served_name,
        )
        self._registry = registry
        self._members: Membership
        self._stop = asyncio.Event()
        self._drained = asyncio.Event()
        self._failure: Exception | None = None  # that no request here can survive
        self._health = Health()
        self.metrics = WorkerMetrics(config)
        self._stall = StallDetector(
            lambda: self.engine.step_age_s, lambda: self.load_tracker.mean_step_s
        )

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._stop.is_set()

    async def run(
        self,
        load: Callable[[], Loaded],
        make_role: Callable[[Node, Loaded], Role],
    ) -> None:
        """From binding to leaving.

        Raises ConfigError when it cannot begin, Unavailable when the registry does not answer, and
        InternalError when the engine failed.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        server, address = bind(self.config.host, self.config.port)
        self.record.address = self.config.advertise or address
        async with (
            self._registry.register(self.record) as registration,
            self._registry.watch() as self._members,
        ):
            loaded = await asyncio.to_thread(load)
            if self.draining:
                log.info("stopped while loading")
                return
            self.engine = loaded.engine(lambda report: self._call(loop, self._on_step, report))
            self.engine.ended.add_done_callback(lambda _: self._call(loop, self._stop.set))
            self.metrics.observe_engine(self.load, loaded.runner)
            self.role = make_role(self, loaded)
            self.engine.start()
            async with contextlib.AsyncExitStack() as ending:  # whatever happens, in reverse
                ending.push_async_callback(asyncio.to_thread, self.engine.stop)
                ending.push_async_callback(server.stop, STOP_GRACE_S)
                ending.push_async_callback(self._leave)
                settings = loaded.settings
                place = partial(cpu.pin_thread, settings.cpus, settings.nice)
                await asyncio.wrap_future(self.engine.submit(place))
                await self._describe(loaded)
                await self._serve(server, registration)

    async def drain(self) -> None:
        """Starts draining and waits for its end."""
        self._stop.set()
        await self._drained.wait()

    def load(self) -> worker_pb2.Load:
        """The load now, also while a step hangs and nothing is reported."""
        load = worker_pb2.Load()
        load.CopyFrom(self.load_tracker.load)
        load.step_age_ms = self.engine.step_age_s * 1e3
        return load

    async def find(self, role: str, incarnation: str) -> common_pb2.WorkerRecord:
        """The registry's record of a worker. Raises TransferFailed when it has none."""
        record = await self._members.find(incarnation, RECORD_WAIT_S)
        if record is None or record.role != _ROLES[role]:
            raise TransferFailed(f"the registry has no {role} worker {incarnation}")
        return record

    def refuse_if_draining(self) -> None:
        """Raises Unavailable when new work is not taken any more."""
        if self.draining:
            raise Unavailable(f"worker {self.record.incarnation} is draining")

    async def _describe(self, loaded: Loaded) -> None:
        record, device = self.record, loaded.runner.pool.device
        record.hardware.CopyFrom(await asyncio.to_thread(hardware.describe, device))
        record.text_fingerprint = text_fingerprint(loaded.path)
        record.kv.CopyFrom(loaded.descriptor)
        record.transports.extend(self.role.transports)
        record.blocks_total = loaded.layout.num_blocks
        record.max_context = loaded.max_context
        record.max_batch = loaded.settings.max_batch
        record.chunk_tokens = loaded.settings.chunk_tokens

    def _call(self, loop: asyncio.AbstractEventLoop, run: Callable[..., None], *args: Any) -> None:
        """Runs a function on the event loop, from another thread, while the loop is open."""
        try:
            loop.call_soon_threadsafe(run, *args)
        except RuntimeError:
            log.debug("the event loop is closed: the engine's report is dropped")

    def _on_step(self, report: StepReport) -> None:
        """Handles a report. A lost one would leave its requests waiting: it ends the worker."""
        try:
            self.load_tracker.update(report)
            self.metrics.stepped(report)
            self._stall.stepped()
            self.role.on_step(report)
        except Exception as error:
            if self._failure is None:
                log.critical("a step's report was lost", exc_info=error)
                self._failure = error
                self._stop.set()

    async def _serve(self, server: grpc.aio.Server, registration: Registration) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(self), server)
        self._health.add_to(server, [*self.role.add_to(server), "baton.v1.WorkerService"])
        await server.start()
        settle()
        self.load_tracker.load.CopyFrom(load_proto(await asyncio.wrap_future(self.engine.load())))
        await self._enter(common_pb2.WORKER_STATE_READY, registration)
        record = self.record
        log.info("%s worker %s ready at %s", self.config.role, record.incarnation, record.address)
        watching = asyncio.create_task(self._stall.run(self._stalled))
        try:
            await self._stop.wait()
        finally:
            watching.cancel()
        # After a failure nothing that runs can finish.
        failed = self._failure is not None or self.engine.ended.done()
        drain_s = 0.0 if failed else self.config.drain_s
        log.info("draining for at most %.0f s", drain_s)
        await self._enter(common_pb2.WORKER_STATE_DRAINING, registration)
        await self._finish_work(drain_s)
        if self._failure is not None:
            raise InternalError(f"a step's report was lost: {self._failure}") from self._failure
        if failed:
            self.engine.ended.result()

    async def _enter(self, state: common_pb2.WorkerState, registration: Registration) -> None:
        self.record.state = state
        self.load_tracker.wake()
        await self._health.set(state == common_pb2.WORKER_STATE_READY)
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                await registration.update(self.record)
        except (TimeoutError, Unavailable):
            log.warning("the registry does not answer; routers get this state from Watch")

    async def _finish_work(self, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s):
                await self.role.idle()
        except TimeoutError:
            log.warning("not idle after %.0f s: giving the rest back", drain_s)

    async def _leave(self) -> None:
        """Frees everything, then ends the watches and answers Drain calls."""
        try:
            async with asyncio.timeout(self.config.transfer_timeout_s + CLOSE_GRACE_S):
                await self.role.close()
        except TimeoutError:
            log.error("a step or a transfer does not end: leaving without it")
        finally:
            self.load_tracker.close()
            self._drained.set()

    async def _stalled(self, stalled: bool) -> None:
        """A worker whose engine makes no progress is not healthy, though its RPCs answer."""
        await self._health.set(not stalled and self.record.state == common_pb2.WORKER_STATE_READY)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """WorkerService: what a worker answers about itself."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @rpc.unary
    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        """Its record, load and links."""
        node = self._node
        return worker_pb2.DescribeResponse(
            record=node.record, load=node.load(), pairs=node.role.pairs()
        )

    @rpc.streaming
    async def Watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchResponse]:
        """Load and cache changes, and heartbeats."""
        node, heartbeat_s = self._node, request.heartbeat_ms / 1000
        watch = node.load_tracker.watch(WATCH_INTERVAL_S, heartbeat_s)
        async with contextlib.aclosing(watch) as events:
            async for cache in events:
                yield worker_pb2.WatchResponse(
                    load=node.load(),
                    state=node.record.state,
                    cache=cache,
                    pairs=node.role.pairs(),
                )

    @rpc.unary
    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        """Drains; answers when nothing runs any more."""
        await self._node.drain()
        return worker_pb2.DrainResponse()

    @rpc.unary
    async def KeepTraces(
        self, request: worker_pb2.KeepTracesRequest, context: Any
    ) -> worker_pb2.KeepTracesResponse:
        """Exports traces that were not sampled."""
        for trace_id in request.trace_ids:
            self._node.telemetry.keep(trace_id)
        return worker_pb2.KeepTracesResponse()
