"""Runs a router as a process: registry watch, servers, readiness, drain, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.trace import Tracer

from baton.config import ModelSource, RouterConfig, model_path, slo
from baton.errors import ConfigError, InvalidRequest
from baton.generation.generation_config import DEFAULTS, sampling_defaults
from baton.generation.structured_output import GrammarCompiler
from baton.net.metrics_server import serving
from baton.net.rpc import max_request_bytes
from baton.net.server import Health, bind, measure_lag, run_service, settle, stop_on_signals
from baton.net.tasks import wait_at_most
from baton.registry import EtcdRegistry, Membership, RouteTable
from baton.telemetry import tracing
from baton.telemetry.metrics.prometheus import Recorder
from baton.telemetry.tracing import Telemetry
from baton.text import load_tokenizer
from baton.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, inference_pb2_grpc, route_pb2_grpc
from router.admission.admission import Admission
from router.admission.resume_ticket import ResumeTickets
from router.admission.tenants import Tenants
from router.canary import Canaries
from router.dispatch.dispatch import Dispatch
from router.fleet.fleet import Fleet
from router.fleet.liveness import NOT_TRIED, LivenessConfig
from router.fleet.snapshot import UNREACHABLE
from router.generation_service import GenerationService
from router.grpc_service import FleetServicer, InferenceServicer, authorize_counted
from router.models import Models, ModelVersion
from router.placement import room
from router.queueing.wait_queue import WaitQueue
from router.route_service import RouteServicer
from router.shared_state import SharedState
from router.telemetry.access_log import AccessLog
from router.telemetry.metrics import RouterMetrics
from router.telemetry.stats import RouterStats
from router.telemetry.tail_sampling import SamplingPolicy

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
RECONNECT_S = 300.0  # clients' connections are renewed, so that they find new routers
_JOIN_S = 10.0  # limit on waiting for connections to the registered workers
_SERVICES = (
    "baton.v1.InferenceService",
    "baton.v1.FleetService",
    "baton.v1.RouteService",
)


# Serves generation over another protocol, from its start to the end of the drain.
ProtocolServer = Callable[[GenerationService], AbstractAsyncContextManager[None]]


def run(
    config: RouterConfig,
    protocols: Sequence[ProtocolServer] = (),
    shared: SharedState | None = None,
) -> int:
    """Runs one router until a signal stops it (`stop_on_signals`); returns 0.

    `shared`: set if other processes serve at the same ports, siblings or one that it replaces.
    Raises ConfigError if it cannot start.
    """
    return run_service(_run(config, protocols, shared))


async def _run(
    config: RouterConfig, protocols: Sequence[ProtocolServer], shared: SharedState | None
) -> int:
    limits = config.limits
    stop, leave = asyncio.Event(), asyncio.Event()
    stop_on_signals(stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, leave.set)
    tenants = Tenants(
        limits.tenants_file, admin_keys=config.admin_keys, api_keys=limits.api_keys, shared=shared
    )
    texts = _load_texts(config, tenants)
    service: GenerationService
    listen = partial(
        bind,
        config.host,
        config.port,
        lambda method, context: authorize_counted(service, method, context),
        max_request_bytes=lambda: max_request_bytes(service.max_context),
        reconnect_s=RECONNECT_S,
    )
    bound = None if shared else listen()
    instance = {"service.instance.id": config.incarnation}
    telemetry = tracing.setup(
        "baton-router", config.otlp, instance, config.trace_sample, config.otlp_logs
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, telemetry.close)
        registry = EtcdRegistry(config.registry)
        stack.push_async_callback(registry.close)
        service, membership, routes = await _started_service(
            config, registry, texts, tenants, telemetry.tracer, stop, stack
        )
        recorder = Recorder("router", instance)
        for work in _observe(config, service, recorder, telemetry, routes):
            _run_within(stack, work, "observation")
        service.metrics_page = recorder.render if config.router_processes == 1 else _no_page
        await _workers_connected(membership, service.models, shared)
        server, address = bound or listen(shared=True)
        status = _constant_status(config, address)
        operators = FleetServicer(service, status, shared)
        health = _add_services(server, service, operators, RouteServicer(service.models, routes))
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        readiness = _run_within(stack, _follow_readiness(service.models, health), "readiness")
        await server.start()
        settle()
        probed = health.probed(config.host, config.health_port, shared is not None)
        await stack.enter_async_context(probed)
        page = serving(recorder.render, config.host, config.metrics_port)
        await stack.enter_async_context(page)
        for protocol in protocols:
            await stack.enter_async_context(protocol(service))
        formats = "; ".join(f"{s.name} ({text.chat_formats})" for s, text in texts)
        log.info("router %s at %s serves %s", config.incarnation, address, formats)
        _run_within(stack, operators.publish(), "status")
        _run_within(stack, operators.follow_plan(registry.plan), "plan")
        await _serve(stop, leave, partial(_leave, limits.default_timeout_s, service, server))
        readiness.cancel()
        await health.set(False)
        await _drain(config.drain_s, service, server if _has_siblings(shared) else None)
    return 0


def _load_texts(config: RouterConfig, tenants: Tenants) -> list[tuple[ModelSource, Admission]]:
    """Each model with what makes its tokens of texts; one directory is read once."""
    if config.limits.chat_template and len({one.path for one in config.sources}) > 1:
        raise ConfigError("--chat-template is for a router of one model: leave it out")
    read: dict[Path, Admission] = {}
    found = []
    for source in config.sources:
        if (path := model_path(source.path)) not in read:
            # Only a model with random weights may have no tokenizer.
            tokenizer = load_tokenizer(path, required=not config.random_weights)
            grammars = GrammarCompiler(path, tokenizer.vocab_size, tokenizer.eos_token_ids)
            is_auto = config.api.generation_config == "auto"
            defaults = sampling_defaults(path) if is_auto else DEFAULTS
            read[path] = Admission(
                config, tokenizer, tenants, grammars=grammars, sampling_defaults=defaults
            )
        found.append((source, read[path]))
    return found


async def _started_service(
    config: RouterConfig,
    registry: EtcdRegistry,
    texts: Sequence[tuple[ModelSource, Admission]],
    tenants: Tenants,
    tracer: Tracer,
    stop: asyncio.Event,
    stack: contextlib.AsyncExitStack,
) -> tuple[GenerationService, Membership, RouteTable]:
    """The service over models that follow the registry; `stop` is set if they cannot any more."""
    limits, stats = config.limits, RouterStats()
    membership = await stack.enter_async_context(registry.watch())
    routes = await stack.enter_async_context(registry.routes())
    _run_within(stack, tenants.follow(), "tenants")
    new_version = partial(_new_version, config, tracer, stats)
    models = Models(texts, new_version, config.api.model_aliases, lambda: routes.routes)
    for _, admission in texts:
        await stack.enter_async_context(aclosing(admission))
    _run_within(stack, models.follow(membership), "models").add_done_callback(lambda _: stop.set())
    tickets = ResumeTickets(await registry.ticket_key())
    service = GenerationService(models, tenants, limits, stats, tracer, tickets)
    return service, membership, routes


def _new_version(
    config: RouterConfig,
    tracer: Tracer,
    stats: RouterStats,
    name: str,
    version: str,
    admission: Admission,
    membership: Membership,
) -> ModelVersion:
    """A version with nothing in common with others but the router's counts."""
    limits = config.limits
    fleet = Fleet(
        membership,
        config.incarnation,
        admission.tokenizer.fingerprint,
        LivenessConfig(limits.silence_s, limits.stall_s),
        decode_alone=limits.local_prefill_max_tokens > 0,
    )
    queue = WaitQueue(
        limits.max_queue,
        fleet.tokens_in_flight,
        has_room=lambda demand, reserved: room.has_room(fleet.snapshot(), demand, reserved),
    )
    fleet.listeners.append(queue.fleet_changed)
    dispatch = Dispatch(fleet, queue, limits, tracer, stats)
    return ModelVersion(name, version, admission, membership, fleet, queue, dispatch)


def _observe(
    config: RouterConfig,
    service: GenerationService,
    recorder: Recorder,
    telemetry: Telemetry,
    routes: RouteTable,
) -> list[Coroutine[Any, Any, None]]:
    """Connects metrics, tail sampling and canaries to the service; returns what they run."""
    slos = slo.parse_all(config.limits.slos)
    metrics = RouterMetrics(recorder, slos)
    metrics.observe(service)
    service.models.on_ejected = metrics.ejected
    sampler = SamplingPolicy(telemetry, config.limits.trace_slow_s, slos)
    # In this order: a trace that is kept may be an exemplar of a metric.
    canaries = Canaries(
        service.models,
        routes,
        telemetry.tracer,
        config.limits.recovery_s,
        service.stats.note,
        metrics.canary_decided,
    )
    access_log = AccessLog(config.limits.access_log)
    service.stats.listeners = (sampler, metrics, canaries, access_log)
    return [measure_lag(metrics.lag.record), canaries.follow()]


async def _serve(
    stop: asyncio.Event, leave: asyncio.Event, hand_over: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Returns when this router must stop, or has left its ports to a successor on request."""

    async def left() -> None:
        await leave.wait()
        log.info("another process serves at these ports: leaving them to it")
        await hand_over()

    tasks = [asyncio.create_task(stop.wait()), asyncio.create_task(left())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            await _cancelled(task)


def _has_siblings(shared: SharedState | None) -> bool:
    """Whether another process at the same ports can place requests."""
    return shared is not None and any(one.state == "SERVING" for one in shared.siblings())


async def _workers_connected(
    membership: Membership, models: Models, shared: SharedState | None
) -> None:
    """Returns once this router is connected to the registered workers, or after _JOIN_S.

    Earlier calls would find no worker; they wait at the port, or siblings accept them. A worker
    that is dead stays registered until its lease ends: one try to connect to each is enough.
    """

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_JOIN_S):
            while True:
                changed = models.changed
                known = {
                    one.incarnation
                    for one in models.workers
                    if one.state != UNREACHABLE or one.reason != NOT_TRIED
                }
                ready = {
                    name
                    for name, record in membership.records.items()
                    if record.state == common_pb2.WORKER_STATE_READY
                    and name not in membership.missing
                }
                if ready <= known and not (models.why_not_ready and _has_siblings(shared)):
                    return
                await changed.wait()


def _add_services(
    server: grpc.aio.Server,
    service: GenerationService,
    operators: FleetServicer,
    routes: RouteServicer,
) -> Health:
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(service), server)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(operators, server)
    route_pb2_grpc.add_RouteServiceServicer_to_server(routes, server)
    health = Health()
    health.add_to(server, _SERVICES)
    return health


def _constant_status(config: RouterConfig, address: str) -> fleet_pb2.RouterStatus:
    return fleet_pb2.RouterStatus(
        incarnation=config.incarnation,
        address=address,
        pid=os.getpid(),
        cluster=config.registry.cluster,
        otlp=config.otlp or "",
    )


def _no_page(accept: str) -> tuple[str, bytes]:
    raise InvalidRequest(
        "several processes serve at this port, and a page would show only one of them: scrape each "
        "at its own port, from --metrics-port on"
    )


def _run_within(
    stack: contextlib.AsyncExitStack, work: Coroutine[Any, Any, None], name: str
) -> asyncio.Task[None]:
    """A task that ends with the stack."""
    task = asyncio.create_task(work, name=name)
    stack.push_async_callback(_cancelled, task)
    return task


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Ends a task; raises its error, if it failed."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _follow_readiness(models: Models, health: Health) -> None:
    """SERVING exactly while a request could be placed somewhere; runs until cancelled."""
    while True:
        changed, why_not = models.changed, models.why_not_ready
        if (not why_not) is not health.serving:
            log.info("readiness: %s", f"NOT_SERVING, {why_not}" if why_not else "SERVING")
        await health.set(not why_not)
        await changed.wait()


async def _leave(longest_s: float, service: GenerationService, server: grpc.aio.Server) -> None:
    """Accepts no new connections, and serves the existing ones to their end.

    Their requests have at most the time of a request without a deadline.
    """
    ports = [leave() for leave in service.on_leave]
    await wait_at_most(longest_s, asyncio.gather(server.stop(longest_s), *ports))


async def _drain(
    drain_s: float, service: GenerationService, shared: grpc.aio.Server | None
) -> None:
    """Accepts no new requests; running ones may finish.

    Callers of a `shared` server are asked to reconnect, and reach a sibling.
    """
    log.info("draining %d requests for at most %.0f s", service.running, drain_s)
    async with contextlib.AsyncExitStack() as stack:
        if shared is not None:
            leaving = _run_within(stack, _leave(drain_s + STOP_GRACE_S, service, shared), "leave")
            await asyncio.wait([leaving], timeout=0)
        service.draining = True
        try:
            async with asyncio.timeout(drain_s):
                await service.idle()
        except TimeoutError:
            log.warning("%d requests did not finish in time and end UNAVAILABLE", service.running)
            service.give_up()
            await wait_at_most(STOP_GRACE_S, service.idle())
