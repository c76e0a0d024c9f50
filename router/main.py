"""Runs a router as a process: registry watch, servers, readiness, drain, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import grpc
import uvloop

from baton import slo, telemetry
from baton.config import RouterConfig, model_path
from baton.metrics.recorder import Recorder
from baton.metrics.server import serving
from baton.registry import EtcdRegistry
from baton.server import EventLoop, Health, bind, settle
from baton.telemetry import Telemetry
from baton.text import AnyTokenizer, Tokenizer, load_tokenizer
from baton.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2_grpc
from router.admission import feasibility
from router.admission.admission import Admission
from router.admission.tenants import Tenants
from router.admission.wait_queue import Line
from router.dispatch.dispatch import Dispatch, Settings
from router.fleet.fleet import Fleet
from router.fleet.heartbeat import Patience
from router.fleet.readiness import follow_readiness
from router.fleet_service import FleetServicer
from router.frontend import Door
from router.service import InferenceServicer
from router.telemetry.metrics import Figures
from router.telemetry.request_log import RequestLog
from router.telemetry.tail_sampling import TraceKeeping

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
_SERVICES = ("baton.v1.InferenceService", "baton.v1.FleetService")


# Serves the door over another protocol, from its start to the end of the drain.
Frontend = Callable[[Door], AbstractAsyncContextManager[None]]


def run(config: RouterConfig, frontends: Sequence[Frontend] = ()) -> int:
    """Runs one router until SIGTERM or SIGINT; 0. Raises ConfigError when it cannot begin."""
    return uvloop.run(_run(config, frontends), loop_factory=EventLoop)


async def _run(config: RouterConfig, frontends: Sequence[Frontend]) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tokenizer = _tokenizer(config)
    tenants = Tenants.load(config.tenants_file)
    server, address = bind(config.host, config.port)
    trace = telemetry.setup(
        "baton-router",
        config.otlp,
        {"service.instance.id": config.incarnation},
        config.trace_sample,
    )
    registry = EtcdRegistry(config.registry)
    try:
        async with registry.watch() as membership:
            patience = Patience(config.silence_s, config.stall_s)
            fleet = Fleet(membership, config.incarnation, tokenizer.fingerprint, patience)
            admission = Admission(
                config.served_name,
                tokenizer,
                config.default_timeout_s,
                ttft_target_s=config.ttft_target_s,
                max_prompt_tokens=config.max_prompt_tokens,
                prefill_rate=lambda: feasibility.prefill_rate(fleet.snapshot()),
                tenants=tenants,
            )
            following = asyncio.create_task(fleet.follow(), name="fleet")
            following.add_done_callback(lambda _: stop.set())  # a router is nothing without it
            try:
                await _serve(config, server, address, admission, fleet, trace, stop, frontends)
            finally:
                following.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await following
    finally:
        await registry.close()
        await asyncio.to_thread(trace.close)
    return 0


def _tokenizer(config: RouterConfig) -> AnyTokenizer:
    """The model's tokenizer; only a model with made-up weights may have none."""
    path = model_path(config.model)
    return load_tokenizer(path) if config.random_weights else Tokenizer.load(path)


async def _serve(
    config: RouterConfig,
    server: grpc.aio.Server,
    address: str,
    admission: Admission,
    fleet: Fleet,
    trace: Telemetry,
    stop: asyncio.Event,
    frontends: Sequence[Frontend],
) -> None:
    settings = Settings(
        max_attempts=config.max_attempts,
        recovery_s=config.recovery_s,
        local_prefill_max_tokens=config.local_prefill_max_tokens,
    )
    line = Line(config.max_queue, in_flight=fleet.tokens_in_flight)
    dispatch = Dispatch(fleet, line, settings, trace.tracer)
    door = Door(admission, line, dispatch, fleet, trace.tracer)
    slos = slo.parse_all(config.slos)
    recorder = Recorder("router", {"service.instance.id": config.incarnation})
    figures = Figures(recorder, admission.model, slos)
    figures.look_at(door, line, fleet)
    keeping = TraceKeeping(trace, fleet, config.trace_slow_s, slos)
    # In this order: a trace that is kept may be an example of a figure.
    dispatch.tally.listeners = (keeping, figures, RequestLog())
    door.metrics_page = recorder.render
    status = fleet_pb2.RouterStatus(
        incarnation=config.incarnation,
        address=address,
        pid=os.getpid(),
        model=admission.model,
        cluster=config.registry.cluster,
        otlp=config.otlp or "",
    )
    health = Health()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(door), server)
    operators = FleetServicer(fleet, line, admission, door, status, config.local_prefill_max_tokens)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(operators, server)
    health.add_to(server, _SERVICES)
    readiness = asyncio.create_task(follow_readiness(fleet, health), name="readiness")
    try:
        async with contextlib.AsyncExitStack() as stack:
            await server.start()
            settle()
            if config.metrics_port is not None:
                page = serving(recorder.render, config.host, config.metrics_port)
                await stack.enter_async_context(page)
            for frontend in frontends:
                await stack.enter_async_context(frontend(door))
            log.info("router %s at %s serves %s", config.incarnation, address, admission.model)
            await stop.wait()
            readiness.cancel()
            await health.set(False)
            await _drain(config.drain_s, door)
    finally:
        readiness.cancel()
        await asyncio.gather(readiness, return_exceptions=True)
        await server.stop(STOP_GRACE_S)
        await dispatch.close()
        await keeping.close()
        recorder.close()


async def _drain(drain_s: float, door: Door) -> None:
    """Takes nothing new; what runs may finish."""
    log.info("draining %d requests for at most %.0f s", door.running, drain_s)
    door.draining = True
    try:
        async with asyncio.timeout(drain_s):
            await door.idle()
    except TimeoutError:
        log.warning("%d requests did not finish in time: their callers are told", door.running)
        door.give_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await door.idle()
