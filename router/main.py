"""Runs a router as a process: registry watch, servers, readiness, drain, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import grpc
import uvloop

from baton import slo, telemetry
from baton.config import RouterConfig, model_path
from baton.errors import InvalidRequest
from baton.generation_config import DEFAULTS, sampling_defaults
from baton.metrics.recorder import Recorder
from baton.metrics.server import serving
from baton.registry import EtcdRegistry
from baton.server import EventLoop, Health, bind, measure_lag, settle
from baton.structured_output import GrammarCompiler
from baton.text import load_tokenizer
from baton.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2_grpc
from router.admission.admission import Admission
from router.admission.tenants import Tenants
from router.admission.wait_queue import WaitQueue
from router.dispatch.dispatch import Dispatch
from router.fleet.fleet import Fleet
from router.fleet.heartbeat import LivenessConfig
from router.frontend import GenerationService
from router.service import FleetServicer, InferenceServicer, authorize
from router.shared_state import SharedState
from router.telemetry.metrics import RouterMetrics
from router.telemetry.tail_sampling import SamplingPolicy

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
_JOIN_S = 10.0
_SERVICES = ("baton.v1.InferenceService", "baton.v1.FleetService")


# Serves generation over another protocol, from its start to the end of the drain.
Frontend = Callable[[GenerationService], AbstractAsyncContextManager[None]]


def run(
    config: RouterConfig, frontends: Sequence[Frontend] = (), shared: SharedState | None = None
) -> int:
    """Runs one router until SIGTERM or SIGINT; 0. Raises ConfigError when it cannot begin.

    With `shared` it is one of several processes at the same ports.
    """
    return uvloop.run(_run(config, frontends, shared), loop_factory=EventLoop)


async def _run(
    config: RouterConfig, frontends: Sequence[Frontend], shared: SharedState | None
) -> int:
    stop = _stop_requested()
    path = model_path(config.model)
    # Only a model with made-up weights may have no tokenizer.
    tokenizer = load_tokenizer(path, required=not config.random_weights)
    tenants = Tenants(config.tenants_file, admin_keys=config.admin_keys, shared=shared)
    listen = partial(bind, config.host, config.port, partial(authorize, tenants))
    bound = None if shared else listen()
    name = {"service.instance.id": config.incarnation}
    trace = telemetry.setup("baton-router", config.otlp, name, config.trace_sample)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, trace.close)
        registry = EtcdRegistry(config.registry)
        stack.push_async_callback(registry.close)
        membership = await stack.enter_async_context(registry.watch())
        _run_within(stack, tenants.follow(), "tenants")
        liveness = LivenessConfig(config.silence_s, config.stall_s)
        fleet = Fleet(membership, config.incarnation, tokenizer.fingerprint, liveness)
        following = _run_within(stack, fleet.follow(), "fleet")
        following.add_done_callback(lambda _: stop.set())  # a router is nothing without it
        admission = Admission(
            config.served_name,
            tokenizer,
            config.default_timeout_s,
            ttft_target_s=config.ttft_target_s,
            max_prompt_tokens=config.max_prompt_tokens,
            stream_interval=config.stream_interval,
            prefill_rate=lambda: fleet.snapshot().prefill_rate,
            tenants=tenants,
            aliases=config.model_aliases,
            grammars=GrammarCompiler(path, tokenizer.vocab_size, tokenizer.eos_token_ids),
            tool_parser=config.tool_parser,
            reasoning_parser=config.reasoning_parser,
            sampling_defaults=(
                sampling_defaults(path) if config.generation_config == "auto" else DEFAULTS
            ),
        )
        queue = WaitQueue(config.max_queue, lambda: fleet.changed, fleet.tokens_in_flight)
        dispatch = Dispatch(fleet, queue, config, trace.tracer)
        service = GenerationService(admission, queue, dispatch, fleet, trace.tracer)
        recorder = Recorder("router", name)
        slos = slo.parse_all(config.slos)
        metrics = RouterMetrics(recorder, admission.model, slos)
        metrics.observe(service)
        _run_within(stack, measure_lag(metrics.lag.record), "event loop lag")
        sampler = SamplingPolicy(trace, fleet, config.trace_slow_s, slos)
        # In this order: a trace that is kept may be an exemplar of a metric.
        dispatch.stats.listeners = (sampler, metrics)
        service.metrics_page = recorder.render if shared is None else _no_page
        server, address = bound or await _join(listen, fleet, shared)
        health = Health()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(service), server
        )
        operators = FleetServicer(service, _what_stays(config, address, admission.model), shared)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(operators, server)
        health.add_to(server, _SERVICES)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        readiness = _run_within(stack, _follow_readiness(fleet, health), "readiness")
        await server.start()
        settle()
        if config.metrics_port is not None:
            page = serving(recorder.render, config.host, config.metrics_port)
            await stack.enter_async_context(page)
        for frontend in frontends:
            await stack.enter_async_context(frontend(service))
        log.info("router %s at %s serves %s", config.incarnation, address, admission)
        _run_within(stack, operators.publish(), "status")
        await stop.wait()
        readiness.cancel()
        await health.set(False)
        await _drain(config.drain_s, service, server if shared else None)
    return 0


def _stop_requested() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _join(
    listen: Callable[..., tuple[grpc.aio.Server, str]], fleet: Fleet, shared: SharedState | None
) -> tuple[grpc.aio.Server, str]:
    """Listens beside siblings: while one of them can place requests, not before this process can.

    Connections would come at once, and their requests would find no worker.
    """
    if shared and any(sibling.state == "SERVING" for sibling in shared.siblings()):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_S):
                while fleet.snapshot().why_not_ready:
                    await fleet.changed.wait()
    return listen(shared=True)


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


async def _cancelled(task: asyncio.Task[None]) -> None:
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


async def _drain(
    drain_s: float, service: GenerationService, shared: grpc.aio.Server | None
) -> None:
    """Takes nothing new; what runs may finish.

    Callers of a server that is `shared` are told to connect again: a sibling takes them.
    """
    log.info("draining %d requests for at most %.0f s", service.running, drain_s)
    if shared is not None:
        for leave in service.on_leave:
            leave()
        leaving = asyncio.create_task(shared.stop(drain_s + STOP_GRACE_S), name="leave")
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
