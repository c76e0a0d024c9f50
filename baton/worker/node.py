"""A worker's process and its life: bind, load, warm up, register, serve, drain, leave.

A worker is registered as STARTING while it loads and becomes READY only after a warm-up, so that
no request meets a cold model. SIGTERM drains: no new work, what runs may finish, and what has not
finished in time is given back to its router, which places it elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import torch

from baton.config import WorkerConfig, full_name, host_id, split_address
from baton.cuda import CudaArea
from baton.engine import build, cpu_affinity
from baton.engine.build import Loaded
from baton.engine.engine import Engine
from baton.engine.rank_executor import RemoteRanks
from baton.engine.step_report import StepReport
from baton.errors import (
    ConfigError,
    InternalError,
    InvalidRequest,
    TransferFailed,
    Unavailable,
)
from baton.generation.structured_output import GrammarCompiler
from baton.log_format import audit
from baton.net import rpc
from baton.net.message_stream import MAX_MESSAGE_BYTES
from baton.net.metrics_server import serving
from baton.net.server import Health, bind, run_service, settle, stop_on_signals
from baton.registry import EtcdRegistry, LeasedKey, Membership
from baton.registry.membership import ROLES
from baton.shared_memory import SharedMemoryArea
from baton.telemetry import tracing
from baton.telemetry.tracing import Telemetry
from baton.text import text_fingerprint
from baton.v1 import common_pb2, worker_pb2
from baton.v1.dispatch_pb2 import RouterMessage
from baton.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from baton.worker import dispatch_service, hardware, rank_hosts
from baton.worker.adapters import Adapters
from baton.worker.dispatch_service import DispatchService, RouterStream
from baton.worker.messages import ModelLimits
from baton.worker.metrics import LoadTracker, WorkerMetrics
from kvtransfer import copier, transports
from kvtransfer.interface import Transport
from kvtransfer.pool import KvPool
from kvtransfer.rank_ends import RankPool
from kvtransfer.remote_pool import RemotePool

log = logging.getLogger(__name__)

T = TypeVar("T")
_ROLES = {name: role for role, name in ROLES.items()}
STOP_GRACE_S = 2.0
CLOSE_GRACE_S = 5.0  # for what ends right after the last transfer
REGISTRY_TIMEOUT_S = 5.0
RECORD_WAIT_S = 1.0  # for the record of a worker that a router knows already to arrive here
_BYTES_OF_A_REQUEST = 4  # sent by a router, for one that it got: texts have become tokens
STALL_MIN_S = 30.0  # no shorter step counts as stalled
STALL_STEPS = 50  # mean steps that a step may take


class Part(ABC):
    """What a worker does for routers: runs prompts and hands them over, or runs sequences.

    Every worker has both parts over one engine, always; its role only says what routers prefer it
    for.
    """

    def __init__(
        self, node: Node, loaded: Loaded, pools: list[RankPool], usable: list[Transport]
    ) -> None:
        """The model is loaded, and the node has its engine; `usable` are the transports."""
        self.node = node

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        """Adds its own services to a server; their full names."""
        return []

    @abstractmethod
    def dispatch(self, router: RouterStream, message: RouterMessage) -> Iterator[None]:
        """Handles a router's message; may yield between its parts."""

    @abstractmethod
    def lost(self, router: RouterStream) -> None:
        """A router's connection has ended: cancels its sequences and prompts."""

    @abstractmethod
    def on_step(self, report: StepReport) -> None:
        """Handles a step's report, on the event loop."""

    def pairs(self) -> list[worker_pb2.PairStatus]:
        """Status of the KV links on which this worker sends."""
        return []

    @abstractmethod
    async def idle(self) -> None:
        """Returns when nothing runs any more."""

    @abstractmethod
    async def close(self) -> None:
        """Cancels what still runs and frees all resources."""


class Node(WorkerServiceServicer):
    """One worker process, its engine, and what it answers about itself."""

    def __init__(
        self,
        config: WorkerConfig,
        registry: EtcdRegistry,
        trace: Telemetry,
        parts: Sequence[type[Part]],
    ) -> None:
        self.config, self.telemetry, self.tracer = config, trace, trace.tracer
        self.load_tracker = LoadTracker()
        self.metrics = WorkerMetrics(config)
        self.engine: Engine
        self.limits: ModelLimits
        self.grammars: GrammarCompiler
        self.record = common_pb2.WorkerRecord(
            incarnation=config.incarnation,
            role=_ROLES[config.role],
            pid=os.getpid(),
            # One of several hosts has no memory that another could map as a whole.
            host_id=host_id() if config.nnodes == 1 else config.incarnation,
            state=common_pb2.WORKER_STATE_STARTING,
            model=config.served_name,
            version=config.model_version,
        )
        self.members: Membership  # all workers of the cluster
        self.parts: list[Part] = []  # of `_part_types`, once the model is loaded
        self._part_types = parts
        self._registry = registry
        self._registration: LeasedKey
        self._stop = asyncio.Event()
        self._drained = asyncio.Event()
        self._stepped = asyncio.Event()
        self._failed = asyncio.Event()  # nothing that runs can finish any more
        self._failure: Exception | None = None  # the loss of a report
        self.left_work = False  # a thread may never end: the process must not wait for it
        self._health = Health()
        self._dispatch = DispatchService(self)
        self.adapters: Adapters

    async def run(self, load: Callable[[RemoteRanks], tuple[Loaded, list[KvPool]]]) -> None:
        """From binding to leaving; returns when it has drained.

        Raises ConfigError when it cannot begin, Unavailable when the registry does not answer, and
        InternalError when the engine failed.
        """
        loop = asyncio.get_running_loop()
        stop_on_signals(self._stop.set)
        server, address = bind(
            self.config.host, self.config.port, max_message_bytes=MAX_MESSAGE_BYTES
        )
        self.record.address = self.config.advertise or address
        host, _ = split_address(self.record.address)
        async with (
            self._health.probed(self.config.host, self.config.health_port),
            self._registry.register(self.record) as self._registration,
            self._registry.watch() as self.members,
        ):
            others = await self._unless(
                self._stop, rank_hosts.connected(self.config, self._registry)
            )
            if others is not None:
                addresses, connections = others
                remote_ranks = RemoteRanks()
                if connections:
                    remote_ranks = RemoteRanks(rank_hosts.advertised_host(self.config), connections)
                loaded, pools = await asyncio.to_thread(load, remote_ranks)
            if others is None or self._stop.is_set():
                log.info("stopped while loading")
                return
            self.engine = loaded.engine(lambda report: self._call(loop, self._on_step, report))
            self.engine.ended.add_done_callback(lambda _: self._call(loop, self._fail))
            self.metrics.observe_engine(
                self.load, loaded.runner, loaded.draft, loaded.layout.groups
            )
            self.limits = ModelLimits.from_loaded(loaded)
            eos_token_ids = loaded.model_config.eos_token_ids
            self.grammars = GrammarCompiler(loaded.path, self.limits.vocab_size, eos_token_ids)
            kv = self.config.transport, self.config.kv_host
            usable = transports.usable(pools[0], host, *kv)
            if addresses:  # one of a host reaches only the ranks of that host
                usable = [transport for transport in usable if not transport.one_sided]
                drain = partial(self._call, loop, self._stop.set)
                await asyncio.to_thread(rank_hosts.watch_for_drain, addresses, drain)
            remote = [RemotePool(partial(one.connect, rank_hosts.KV)) for one in addresses]
            every_pool: list[RankPool] = [*pools, *remote]
            self.parts += [kind(self, loaded, every_pool, usable) for kind in self._part_types]
            self.engine.start()
            async with contextlib.AsyncExitStack() as ending:  # whatever happens, in reverse
                ending.push_async_callback(asyncio.to_thread, self.engine.stop)
                ending.push_async_callback(server.stop, STOP_GRACE_S)
                ending.push_async_callback(self._leave)
                await self._describe(loaded, usable, every_pool)
                self.adapters = Adapters(
                    self.engine, loaded, self._publish_adapters, self.metrics.adapter_load
                )
                for name, directory in loaded.settings.adapters.items():
                    await self.adapters.load(name, directory)
                await self.adapters.load_as(self.members.records.values())
                await self._serve(server)

    def load(self) -> worker_pb2.Load:
        """The load now, also while a step hangs and nothing is reported, or without any step: what
        an idle worker did seconds ago must not turn requests away."""
        load = worker_pb2.Load()
        load.CopyFrom(self.load_tracker.load)
        load.prefill_share = self.load_tracker.prefill_share(time.time())
        load.step_age_ms = self.engine.step_age_s * 1e3
        return load

    @property
    def incarnation(self) -> str:
        return self.record.incarnation

    def report(self) -> worker_pb2.LoadReport:
        """Load, state and links now."""
        return worker_pb2.LoadReport(load=self.load(), state=self.record.state, pairs=self.pairs())

    def pairs(self) -> list[worker_pb2.PairStatus]:
        """Status of the KV links on which this worker sends."""
        return [pair for part in self.parts for pair in part.pairs()]

    def lost(self, router: RouterStream) -> None:
        """A router's connection has ended: cancels its sequences and prompts."""
        for part in self.parts:
            part.lost(router)

    async def idle(self) -> None:
        """Returns when nothing runs any more, where no new work comes."""
        for part in self.parts:
            await part.idle()

    @property
    def max_message_bytes(self) -> int:
        """Largest message of a router: what callers may send, and what it becomes."""
        return _BYTES_OF_A_REQUEST * rpc.max_request_bytes(self.limits.max_context)

    def take(self, router: RouterStream, message: RouterMessage) -> Iterator[None]:
        """Handles a router's message, a part at a step."""
        for trace_id in message.keep_traces:
            self.telemetry.keep(trace_id)
            yield
        for part in self.parts:
            yield from part.dispatch(router, message)

    async def find(self, incarnation: str) -> common_pb2.WorkerRecord:
        """The registry's record of another worker. Raises TransferFailed when it has none."""
        record = await self.members.find(incarnation, RECORD_WAIT_S)
        if record is None or incarnation == self.incarnation:
            raise TransferFailed(f"the registry has no other worker {incarnation}")
        return record

    def refuse_if_draining(self) -> None:
        """Raises Unavailable when new work is not taken any more."""
        if self._stop.is_set():
            raise Unavailable(f"worker {self.record.incarnation} {self.why_leaving}")

    @property
    def why_leaving(self) -> str:
        """Why it gives its work back, after "the worker": it drains, or its engine has failed."""
        failure = self._engine_failure()
        return "is draining" if failure is None else f"ends: {failure}"

    def _engine_failure(self) -> BaseException | None:
        if self._failure is not None:
            return InternalError(f"a step's report was lost: {self._failure}")
        return self.engine.ended.exception() if self.engine.ended.done() else None

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(record=self.record, load=self.load(), pairs=self.pairs())

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        audit("worker drained", worker=self.incarnation, caller=context.peer())
        self._stop.set()
        await self._drained.wait()
        return worker_pb2.DrainResponse()

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: Any
    ) -> worker_pb2.LoadAdapterResponse:
        adapter = await self.adapters.load(request.name, Path(request.directory))
        return worker_pb2.LoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: Any
    ) -> worker_pb2.UnloadAdapterResponse:
        await self.adapters.unload(request.name, request.wait_ms / 1e3 or self.config.drain_s)
        return worker_pb2.UnloadAdapterResponse()

    async def SetRole(self, request: Any, context: Any) -> worker_pb2.SetRoleResponse:
        """Raises InvalidRequest for an unknown role, Unavailable where the worker is leaving."""
        if request.role not in ROLES:
            raise InvalidRequest(f"there is no role {request.role}", "role")
        self.refuse_if_draining()
        previous, self.record.role = self.record.role, request.role
        audit(
            "role changed",
            worker=self.incarnation,
            role=ROLES[request.role],
            before=ROLES[previous],
            caller=context.peer(),
        )
        registered = await self._register()
        return worker_pb2.SetRoleResponse(previous=previous, registered=registered)

    async def _unless(self, event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
        """What it returns; None, and it is cancelled, when the event is set before."""
        running, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else None
        finally:
            running.cancel()
            waiting.cancel()

    async def _describe(
        self, loaded: Loaded, usable: list[Transport], pools: Sequence[RankPool]
    ) -> None:
        record, device = self.record, loaded.runner.pool.device
        record.hardware.CopyFrom(await asyncio.to_thread(hardware.describe, device))
        record.text_fingerprint = text_fingerprint(loaded.path)
        record.kv.CopyFrom(loaded.descriptor)
        record.kv.model = full_name(record.model, record.version)
        record.kv.checksum_version = pools[0].new_checksum().version
        record.kv_pools = len(pools)
        record.transports.extend(transport.kind for transport in usable)
        record.blocks_total = loaded.layout.num_blocks
        record.max_context = loaded.max_context
        record.max_batch = loaded.settings.max_batch
        record.max_adapters = loaded.settings.lora_slots

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
            self._stepped.set()
            for part in self.parts:
                part.on_step(report)
        except Exception as error:
            if self._failure is None:
                log.critical("a step's report was lost", exc_info=error)
                self._failure = error
                self._fail()

    def _fail(self) -> None:
        """Ends the worker, also while it drains."""
        self._failed.set()
        self._stop.set()

    async def _serve(self, server: grpc.aio.Server) -> None:
        add_WorkerServiceServicer_to_server(self, server)
        self._dispatch.add_to(server)
        services = [name for part in self.parts for name in part.add_to(server)]
        self._health.add_to(server, [*services, "baton.v1.WorkerService", dispatch_service.NAME])
        await server.start()
        settle()
        load = await asyncio.wrap_future(self.engine.load())
        self.load_tracker.load.CopyFrom(worker_pb2.Load(**vars(load)))
        await self._enter(common_pb2.WORKER_STATE_READY)
        name, role = self.record.incarnation, ROLES[self.record.role]
        log.info("%s worker %s ready at %s", role, name, self.record.address)
        # What was loaded everywhere before routers knew this worker.
        loading = asyncio.create_task(self.adapters.load_as(self.members.records.values()))
        watching = asyncio.create_task(self._watch_for_stalls())
        try:
            await self._stop.wait()
        finally:
            loading.cancel()
            watching.cancel()
        drain_s = self.config.drain_s
        if not self._failed.is_set():
            log.info("draining for at most %.0f s", drain_s)
        await self._enter(common_pb2.WORKER_STATE_DRAINING)
        try:
            async with asyncio.timeout(drain_s):
                await self._unless(self._failed, self.idle())
        except TimeoutError:
            log.warning("not idle after %.0f s: giving the rest back", drain_s)
        if (failure := self._engine_failure()) is not None:
            raise failure from self._failure

    async def _publish_adapters(self, adapters: list[common_pb2.Adapter]) -> None:
        del self.record.adapters[:]
        self.record.adapters.extend(adapters)
        await self._register()

    async def _enter(self, state: common_pb2.WorkerState) -> None:
        self.record.state = state
        self.load_tracker.wake()
        await self._health.set(state == common_pb2.WORKER_STATE_READY)
        if not await self._register():
            log.warning("the registry does not answer; routers get this state from us")

    async def _register(self) -> bool:
        """Gives the registry the record; False where it gets it later, as it does not answer."""
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                await self._registration.update(self.record)
        except (TimeoutError, Unavailable):
            return False
        return self._registration.connected

    async def _leave(self) -> None:
        """Frees everything, then ends routers' connections and answers Drain calls."""
        try:
            async with asyncio.timeout(self.config.transfer_timeout_s + CLOSE_GRACE_S):
                for part in self.parts:
                    await part.close()
        except TimeoutError:
            log.error("a step or a transfer does not end: leaving without it")
            self.left_work = True
        finally:
            await self._dispatch.aclose()
            self._drained.set()

    async def _watch_for_stalls(self) -> None:
        """A worker whose step takes far longer than steps take is not healthy until it ends."""
        while True:
            stall_s = max(STALL_MIN_S, STALL_STEPS * self.load_tracker.mean_step_s)
            if (left_s := stall_s - self.engine.step_age_s) > 0:
                await asyncio.sleep(left_s)
                continue
            self._stepped.clear()
            log.error("the engine's step has been running for %.0f s", self.engine.step_age_s)
            await self._health.set(False, alive=False)
            await self._stepped.wait()
            log.warning("the engine's step has ended")
            await self._health.set(self.record.state == common_pb2.WORKER_STATE_READY)


def run(config: WorkerConfig, parts: Sequence[type[Part]]) -> int:
    """Runs one worker until it has drained; 0. Raises ConfigError when it cannot begin."""
    return run_service(_run(config, parts))


async def _run(config: WorkerConfig, parts: Sequence[type[Part]]) -> int:
    service = f"baton-{config.role}"
    instance = {"service.instance.id": config.incarnation}
    trace = tracing.setup(service, config.otlp, instance, config.trace_sample, config.otlp_logs)
    registry = EtcdRegistry(config.registry)
    node = Node(config, registry, trace, parts)
    failure: BaseException | None = None
    try:
        async with serving(node.metrics.render, config.host, config.metrics_port):
            await node.run(partial(_load, config))
    except BaseException as error:
        failure = error
        raise
    finally:
        if node.left_work and failure is not None:
            log.critical("the worker has failed", exc_info=failure)
        await registry.close()
        await asyncio.to_thread(trace.close)
        if node.left_work:  # the event loop's and the interpreter's end wait for all threads
            logging.shutdown()
            os._exit(0 if failure is None else 1)
    return 0


def _load(
    config: WorkerConfig, remote_ranks: RemoteRanks | None = None
) -> tuple[Loaded, list[KvPool]]:
    """Everything slow, on a thread: the event loop keeps the worker's lease meanwhile."""
    settings = config.engine
    if config.role == "prefill":  # it gives sequences away with their first token
        settings = replace(settings, speculative_model="")
    areas = list[SharedMemoryArea | CudaArea | None]()

    def allocate(num_bytes: int, device: torch.device) -> SharedMemoryArea | CudaArea | None:
        # What several ranks use lies where all of them can map it, whatever the transport.
        transport = config.transport if settings.tp == 1 else "auto"
        areas.append(shareable_memory(device, num_bytes, transport))
        return areas[-1]

    with cpu_affinity.pinned_to(settings.cpus):
        loaded = build.load(settings, allocate, remote_ranks=remote_ranks)
        for area in areas:
            if isinstance(area, SharedMemoryArea) and not settings.simulate:
                area.touch()  # KV of simulated models is small; leave the memory free
        pools = [KvPool(one, area) for one, area in zip(loaded.runner.pools, areas, strict=True)]
        for pool in pools:
            copier.prepare(pool)
        build.warm_up(loaded)
    return loaded, pools


def shareable_memory(
    device: torch.device, num_bytes: int, transport: str
) -> SharedMemoryArea | CudaArea | None:
    """Zeroed memory for a KV pool, where workers of its machine can write; None where they cannot.

    It is freed with the process: what another one has open may be written until then. Raises
    ConfigError when `transport` needs it.
    """
    if device.type == "cpu":
        return SharedMemoryArea(num_bytes)
    if transport in ("auto", "cuda_ipc"):
        try:
            return CudaArea(num_bytes, device)
        except OSError as error:
            if transport == "cuda_ipc":
                raise ConfigError(f"--transport cuda_ipc: {error}") from error
            log.warning("other processes cannot write into this GPU's KV: %s", error)
    return None
