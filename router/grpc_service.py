"""The router's gRPC services: generation for callers, and the cluster's state for operators."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Self

from baton.errors import BatonError, Unauthenticated
from baton.net import rpc, tls
from baton.v1 import (
    common_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    planner_pb2,
)
from baton.v1.common_pb2 import WorkerRecord
from router import adapters
from router.admission.tenants import Tenants
from router.generation_service import Caller, GenerationService
from router.output import sink
from router.output.output_parser import ParsedOutput
from router.output.sink import Piece, UnreadLimit
from router.shared_state import SharedState

_TENANT_METHODS = "/baton.v1.InferenceService/"
_GENERATE = f"{_TENANT_METHODS}Generate"
_OPERATOR_METHODS = (
    "/baton.v1.FleetService/", "/baton.v1.RouteService/", "/baton.v1.TraceService/",
    "/grpc.reflection.",
)  # fmt: skip
_PLAN_S = 2.0  # between two looks at the planner's plan
# Workers' states are polled every _POLL_S; a status is published when one has changed, and at every
# _POLLS-th poll.
_POLLS, _POLL_S = 10, 0.05
_MAX_JOINED = 64  # tokens in a message of joined output


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generation over gRPC."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        async with _CallWriter(context) as writer:
            await self._service.generate(request, caller_of(context), writer)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        return await self._service.tokenize(request, caller_of(context))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(
            models=self._service.list_models(caller_of(context))
        )


class _CallWriter:
    """A sink that writes to a call. Output that waits for a write is joined into one message."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._unread = UnreadLimit()
        self._waiting: deque[inference_pb2.GenerateResponse] = deque()
        self._num_bytes = 0  # waiting or being written
        self._wake = asyncio.Event()
        self._ends = False

    async def __aenter__(self) -> Self:
        self._writing = asyncio.create_task(self._write_all())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)  # the caller may have left

    def start(self, started: inference_pb2.Started) -> None:
        self._add(inference_pb2.GenerateResponse(started=started))

    def prompt(self, logprobs: common_pb2.PromptLogprobs) -> None:
        response = inference_pb2.GenerateResponse(prompt_logprobs=logprobs)
        self._unread.allow(response.ByteSize())
        self._add(response)

    def put(self, piece: Piece) -> None:
        text, token_ids, logprobs, reason, stop, parsed = piece
        before = self._num_bytes
        delta = self._waiting[-1].delta if self._waiting else None
        if delta is not None and 0 < len(delta.token_ids) < _MAX_JOINED:
            self._num_bytes -= self._waiting[-1].ByteSize()
            delta.text += text
            delta.token_ids.extend(token_ids)
            delta.logprobs.extend(logprobs)
            delta.finish_reason = reason
            delta.stop = stop
            _add_parsed(delta, parsed)
            self._num_bytes += self._waiting[-1].ByteSize()
        else:
            # Much cheaper than copying a Delta into it; empty fields would cost as others do.
            response = inference_pb2.GenerateResponse(delta={"text": text, "token_ids": token_ids})
            if logprobs:
                response.delta.logprobs.extend(logprobs)
            if reason:
                response.delta.finish_reason = reason
            if stop:
                response.delta.stop = stop
            _add_parsed(response.delta, parsed)
            self._add(response)
        self._unread.add(before, self._num_bytes - before)

    async def finish(self, finish: inference_pb2.Finish) -> None:
        self._ends = True
        self._add(inference_pb2.GenerateResponse(finish=finish))
        try:
            async with asyncio.timeout(sink.UNREAD_S):
                await self._writing
        except TimeoutError:
            raise sink.unread_too_long() from None

    def _add(self, response: inference_pb2.GenerateResponse) -> None:
        self._waiting.append(response)
        self._num_bytes += response.ByteSize()
        self._wake.set()

    async def _write_all(self) -> None:
        while self._waiting or not self._ends:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                response = self._waiting.popleft()
                await self._context.write(response)
                self._num_bytes -= response.ByteSize()


def _add_parsed(delta: inference_pb2.Delta, parsed: ParsedOutput | None) -> None:
    if parsed is not None:
        delta.reasoning += parsed.reasoning
        for call in parsed.tool_calls:
            delta.tool_calls.add(
                index=call.index, id=call.id, name=call.name, arguments=call.arguments
            )


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """The cluster's state at this router."""

    def __init__(
        self,
        service: GenerationService,
        router: fleet_pb2.RouterStatus,
        shared: SharedState | None = None,
    ) -> None:
        """`router`: constant fields of the status; `shared`: set if the router has siblings."""
        self._service = service
        self._router = router
        self._shared = shared

    async def GetStatus(
        self, request: fleet_pb2.GetStatusRequest, context: Any
    ) -> fleet_pb2.GetStatusResponse:
        """The current workers, load and pairs."""
        models = self._service.models
        workers = [
            fleet_pb2.WorkerStatus(record=w.record, load=w.load, state=w.state, reason=w.reason)
            for w in models.workers
        ]
        return fleet_pb2.GetStatusResponse(
            router=self._status(),
            workers=workers,
            pairs=() if request.without_pairs else self._service.models.pairs,
            siblings=self._shared.siblings() if self._shared else (),
        )

    async def follow_plan(self, read: Callable[[], Awaitable[planner_pb2.Plan]]) -> None:
        """Keeps the planner's newest plan for the status until cancelled."""
        while True:
            with contextlib.suppress(BatonError):  # the last one stays
                if (plan := await read()).roles:
                    self._router.plan.CopyFrom(plan)
            await asyncio.sleep(_PLAN_S)

    async def publish(self) -> None:
        """Publishes this process's status to its siblings and parent, if any, until cancelled.

        Soon when a worker's state has changed: a parent that starts the worker waits for that.
        """
        models = self._service.models

        def states() -> list[tuple[int, str, str]]:
            return [(one.record.pid, one.record.host_id, one.state) for one in models.workers]

        while self._shared is not None:
            published = states()
            workers = [
                fleet_pb2.WorkerStatus(record=WorkerRecord(pid=pid, host_id=host), state=state)
                for pid, host, state in published
            ]
            self._shared.publish(
                fleet_pb2.GetStatusResponse(router=self._status(), workers=workers)
            )
            for _ in range(_POLLS):
                await asyncio.sleep(_POLL_S)
                if states() != published:
                    break

    def _status(self) -> fleet_pb2.RouterStatus:
        service, models, stats = self._service, self._service.models, self._service.stats
        router = fleet_pb2.RouterStatus()
        router.CopyFrom(self._router)
        router.state = "NOT_SERVING" if service.why_not_ready else "SERVING"
        router.queued = service.queued
        router.running = service.running
        router.registry_connected = models.registry_connected
        router.model = models.default
        router.models.extend(models.names)
        router.routes.extend(models.routes().values())
        router.counts.CopyFrom(stats.counts)
        router.latency.CopyFrom(stats.latency())
        router.events.extend(stats.events)
        router.traffic.extend(one.traffic_now() for one in models.versions.values())
        return router

    async def Explain(
        self, request: fleet_pb2.ExplainRequest, context: Any
    ) -> fleet_pb2.ExplainResponse:
        """Where a request would run now; nothing is charged and nothing is run."""
        return await self._service.explain(request.request, caller_of(context))

    async def LoadFleetAdapter(
        self, request: fleet_pb2.LoadFleetAdapterRequest, context: Any
    ) -> fleet_pb2.LoadFleetAdapterResponse:
        results = await adapters.load(self._service.models, request, context.time_remaining())
        return fleet_pb2.LoadFleetAdapterResponse(results=results)

    async def UnloadFleetAdapter(
        self, request: fleet_pb2.UnloadFleetAdapterRequest, context: Any
    ) -> fleet_pb2.UnloadFleetAdapterResponse:
        results = await adapters.unload(self._service.models, request, context.time_remaining())
        return fleet_pb2.UnloadFleetAdapterResponse(results=results)


def authorize(tenants: Tenants, method: str, context: Any) -> None:
    """Raises Unauthenticated if a caller may not call a method of a router.

    Operators' methods need an operator's key, or a certificate with a role if the port requires
    certificates; without either of these settings everybody may call them. Generation needs a
    tenant's key, if there are tenants.
    """
    keys = tuple(context.invocation_metadata() or ())
    if sum(name == "authorization" for name, _ in keys) > 1:
        raise Unauthenticated("authorization is given more than once")
    if method.startswith(_TENANT_METHODS):
        tenants.tenant_for(keys)
    by_key = tls.current().client_ca_file is None or tenants.is_admin(keys)
    if method.startswith(_OPERATOR_METHODS) and by_key:
        tenants.check_admin(keys)
    else:
        rpc.authorize_role(method, context)


def authorize_counted(service: GenerationService, method: str, context: Any) -> None:
    """As `authorize`; a request that is refused counts among those of `service`."""
    try:
        authorize(service.tenants, method, context)
    except Unauthenticated as error:
        if method == _GENERATE:
            service.refused(error, caller_of(context))
        raise


def caller_of(context: Any) -> Caller:
    """The caller of a call, with its metadata and remaining time."""
    metadata, left_s = tuple(context.invocation_metadata() or ()), context.time_remaining()
    return Caller(metadata, None if left_s is None else time.monotonic() + left_s, resumes=True)
