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
from typing import Any

import grpc
import uvloop

from baton.config import RouterConfig, model_path, slo
from baton.errors import InvalidRequest
from baton.generation.generation_config import DEFAULTS, sampling_defaults
from baton.generation.structured_output import GrammarCompiler
from baton.net.metrics_server import serving
from baton.net.rpc import max_request_bytes
from baton.net.server import EventLoop, Health, bind, measure_lag, settle
from baton.registry import EtcdRegistry, Membership
from baton.telemetry import tracing
from baton.telemetry.metrics.recorder import Recorder
from baton.text import load_tokenizer
from baton.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, inference_pb2_grpc
from router.admission.admission import Admission
from router.admission.resume_ticket import ResumeTickets
from router.admission.tenants import Tenants
from router.admission.wait_queue import WaitQueue
from router.dispatch.dispatch import Dispatch
from router.fleet.fleet import Fleet
from router.fleet.heartbeat import LivenessConfig
from router.fleet.snapshot import UNREACHABLE
from router.generation_service import GenerationService
from router.service import FleetServicer, InferenceServicer, authorize
from router.shared_state import SharedState
from router.telemetry.metrics import RouterMetrics
from router.telemetry.tail_sampling import SamplingPolicy

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
RECONNECT_S = 300.0  # a client's connection is renewed, so that it finds routers that are new
_JOIN_S = 10.0  # at most, until all workers that are there have been connected
_SERVICES = ("baton.v1.InferenceService", "baton.v1.FleetService")


# Serves generation over another protocol, from its start to the end of the drain.
Frontend = Callable[[GenerationService], AbstractAsyncContextManager[None]]


def run(
    config: RouterConfig, frontends: Sequence[Frontend] = (), shared: SharedState | None = None
) -> int:
    """Runs one router until SIGTERM or SIGINT; 0. Raises ConfigError when it cannot begin.

    With `shared` other processes serve at the same ports: siblings, or one that it is to succeed.
    """
    return uvloop.run(_run(config, frontends, shared), loop_factory=EventLoop)


async def _run(
    config: RouterConfig, frontends: Sequence[Frontend], shared: SharedState | None
) -> int:
    limits = config.limits
    stop, leave = _requested(signal.SIGTERM, signal.SIGINT), _requested(signal.SIGUSR1)
    path = model_path(config.model)
    # Only a model with made-up weights may have no tokenizer.
    tokenizer = load_tokenizer(path, required=not config.random_weights)
    tenants = Tenants(
        limits.tenants_file, admin_keys=config.admin_keys, api_keys=limits.api_keys, shared=shared
    )
    service: GenerationService
    listen = partial(
        bind,
        config.host,
        config.port,
        partial(authorize, tenants),
        max_request_bytes=lambda: max_request_bytes(service.max_context),
        reconnect_s=RECONNECT_S,
    )
    bound = None if shared else listen()
    name = {"service.instance.id": config.incarnation}
    trace = tracing.setup("baton-router", config.otlp, name, config.trace_sample)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, trace.close)
        registry = EtcdRegistry(config.registry)
        stack.push_async_callback(registry.close)
        membership = await stack.enter_async_context(registry.watch())
        _run_within(stack, tenants.follow(), "tenants")
        fleet = Fleet(
            membership,
            config.incarnation,
            tokenizer.fingerprint,
            LivenessConfig(limits.silence_s, limits.stall_s),
            decode_alone=limits.local_prefill_max_tokens > 0,
        )
        # A router is nothing without its fleet.
        _run_within(stack, fleet.follow(), "fleet").add_done_callback(lambda _: stop.set())
        admission = await stack.enter_async_context(
            aclosing(
                Admission(
                    config.served_name,
                    tokenizer,
                    limits.default_timeout_s,
                    ttft_target_s=limits.ttft_target_s,
                    max_prompt_tokens=limits.max_prompt_tokens,
                    stream_interval=limits.stream_interval,
                    prefill_rate=lambda: fleet.snapshot().prefill_rate,
                    tenants=tenants,
                    aliases=config.api.model_aliases,
                    grammars=GrammarCompiler(path, tokenizer.vocab_size, tokenizer.eos_token_ids),
                    tool_parser=limits.tool_parser,
                    reasoning_parser=limits.reasoning_parser,
                    tickets=ResumeTickets(await registry.ticket_key()),
                    text_processes=limits.text_processes,
                    sampling_defaults=(
                        sampling_defaults(path)
                        if config.api.generation_config == "auto"
                        else DEFAULTS
                    ),
                )
            )
        )
        queue = WaitQueue(limits.max_queue, lambda: fleet.changed, fleet.tokens_in_flight)
        dispatch = Dispatch(fleet, queue, limits, trace.tracer)
        service = GenerationService(
            admission,
            queue,
            dispatch,
            fleet,
            trace.tracer,
            limits.trace_content,
            limits.trust_traceparent,
        )
        recorder = Recorder("router", name)
        slos = slo.parse_all(limits.slos)
        metrics = RouterMetrics(recorder, admission.model, slos)
        metrics.observe(service)
        _run_within(stack, measure_lag(metrics.lag.record), "event loop lag")
        sampler = SamplingPolicy(trace, fleet, limits.trace_slow_s, slos)
        # In this order: a trace that is kept may be an exemplar of a metric.
        dispatch.stats.listeners = (sampler, metrics)
        service.metrics_page = recorder.render if config.router_processes == 1 else _no_page
        await _workers_connected(membership, fleet, shared)
        server, address = bound or listen(shared=True)
        operators = FleetServicer(service, _what_stays(config, address, admission.model), shared)
        health = _add_services(server, service, operators)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        readiness = _run_within(stack, _follow_readiness(fleet, health), "readiness")
        await server.start()
        settle()
        probed = health.probed(config.host, config.health_port, shared is not None)
        await stack.enter_async_context(probed)
        if config.metrics_port is not None:
            page = serving(recorder.render, config.host, config.metrics_port)
            await stack.enter_async_context(page)
        for frontend in frontends:
            await stack.enter_async_context(frontend(service))
        log.info("router %s at %s serves %s", config.incarnation, address, admission)
        _run_within(stack, operators.publish(), "status")
        await _serve(stop, leave, partial(_leave, limits.default_timeout_s, service, server))
        readiness.cancel()
        await health.set(False)
        await _drain(config.drain_s, service, server if _has_siblings(shared) else None)
    return 0


def _requested(*numbers: signal.Signals) -> asyncio.Event:
    """Set by these signals."""
    event = asyncio.Event()
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


async def _serve(
    stop: asyncio.Event, leave: asyncio.Event, hand_over: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Returns when this router is to stop, or has left its ports to a successor, if asked to."""

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
    membership: Membership, fleet: Fleet, shared: SharedState | None
) -> None:
    """Returns once this router is connected to the workers that are there, or after a while.

    Before, calls that are let in would find no worker; they wait at the port, or siblings take
    them.
    """

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_JOIN_S):
            while True:
                changed, snapshot = fleet.changed, fleet.snapshot()
                views = *snapshot.prefill, *snapshot.decode
                known = {view.incarnation for view in views if view.state != UNREACHABLE}
                ready = {
                    name
                    for name, record in membership.records.items()
                    if record.state == common_pb2.WORKER_STATE_READY
                }
                if ready <= known and not (snapshot.why_not_ready and _has_siblings(shared)):
                    return
                await changed.wait()


def _add_services(
    server: grpc.aio.Server, service: GenerationService, operators: FleetServicer
) -> Health:
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(service), server)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(operators, server)
    health = Health()
    health.add_to(server, _SERVICES)
    return health


def _what_stays(config: RouterConfig, address: str, model: str) -> fleet_pb2.RouterStatus:
    return fleet_pb2.RouterStatus(
        incarnation=config.incarnation,
        address=address,
        pid=os.getpid(),
        model=model,
        cluster=config.registry.cluster,
        otlp=config.otlp or "",
    )


def _no_page(accept: str) -> tuple[str, bytes]:
    raise InvalidRequest(
        "several processes serve at this port, and a page would be one of theirs: scrape each "
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
    """Ends a task; what it failed with is raised."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _follow_readiness(fleet: Fleet, health: Health) -> None:
    """SERVING exactly while a request could be placed somewhere; runs until cancelled."""
    while True:
        changed = fleet.changed
        why_not = fleet.snapshot().why_not_ready
        if (not why_not) is not health.serving:
            log.info("readiness: %s", f"NOT_SERVING, {why_not}" if why_not else "SERVING")
        await health.set(not why_not)
        await changed.wait()


async def _leave(longest_s: float, service: GenerationService, server: grpc.aio.Server) -> None:
    """Takes no connections any more, and serves those that there are to their end.

    What they ask has at most the time of a request without a deadline.
    """
    ports = [leave() for leave in service.on_leave]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            await asyncio.gather(server.stop(longest_s), *ports)


async def _drain(
    drain_s: float, service: GenerationService, shared: grpc.aio.Server | None
) -> None:
    """Takes nothing new; what runs may finish.

    Callers of a server that is `shared` are told to connect again: a sibling takes them.
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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_GRACE_S):
                    await service.idle()
