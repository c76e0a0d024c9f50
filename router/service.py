"""The router's RPCs, thin: generation for callers (`frontend`), and its view for operators."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

from baton.errors import Unauthenticated
from baton.net import rpc, tls
from baton.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from baton.v1.common_pb2 import WorkerRecord
from router import generation_service
from router.admission.tenants import Tenants
from router.dispatch.request_state import ParsedOutput
from router.generation_service import Caller, GenerationService, Unread
from router.shared_state import SharedState

_FOR_TENANTS = "/baton.v1.InferenceService/"
_FOR_OPERATORS = ("/baton.v1.FleetService/", "/baton.v1.TraceService/", "/grpc.reflection.")
_PUBLISH_S = 0.5
_MOST_JOINED = 64  # tokens in a message of output that waited


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generation over gRPC."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        async with _Writer(context) as sink:
            await self._service.generate(request, caller_of(context), sink)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        return await self._service.tokenize(request, caller_of(context))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=self._service.models(caller_of(context)))


class _Writer:
    """The sink that writes to a call. Output that waits behind a write becomes one message."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._unread = Unread()
        self._waiting: deque[inference_pb2.GenerateResponse] = deque()
        self._num_bytes = 0  # of those, and of the one that is being written
        self._wake = asyncio.Event()
        self._ends = False

    async def __aenter__(self) -> Self:
        self._writing = asyncio.create_task(self._write_all())
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._writing.done():
            self._writing.cancel()
            await asyncio.wait([self._writing])

    def start(self, started: inference_pb2.Started) -> None:
        self._add(inference_pb2.GenerateResponse(started=started))

    def prompt(self, logprobs: common_pb2.PromptLogprobs) -> None:
        response = inference_pb2.GenerateResponse(prompt_logprobs=logprobs)
        self._unread.allow(response.ByteSize())
        self._add(response)

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        reason: common_pb2.FinishReason,
        stop: str,
        parsed: ParsedOutput | None = None,
    ) -> None:
        before = self._num_bytes
        delta = self._waiting[-1].delta if self._waiting else None
        if delta is not None and 0 < len(delta.token_ids) < _MOST_JOINED:
            self._num_bytes -= self._waiting[-1].ByteSize()
            delta.text += text
            delta.token_ids.extend(token_ids)
            delta.logprobs.extend(logprobs)
            delta.finish_reason = reason
            _add_parsed(delta, parsed)
            self._num_bytes += self._waiting[-1].ByteSize()
        else:
            # Much cheaper than a Delta that is copied into it, and empty fields cost as others do.
            response = inference_pb2.GenerateResponse(delta={"text": text, "token_ids": token_ids})
            if logprobs:
                response.delta.logprobs.extend(logprobs)
            if reason:
                response.delta.finish_reason = reason
            _add_parsed(response.delta, parsed)
            self._add(response)
        self._unread.add(before, self._num_bytes - before)

    async def finish(self, finish: inference_pb2.Finish) -> None:
        self._ends = True
        self._add(inference_pb2.GenerateResponse(finish=finish))
        try:
            async with asyncio.timeout(generation_service.UNREAD_S):
                await self._writing
        except TimeoutError:
            raise generation_service.unread_for_long() from None

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
    """The cluster as this router sees it."""

    def __init__(
        self,
        service: GenerationService,
        router: fleet_pb2.RouterStatus,
        shared: SharedState | None = None,
    ) -> None:
        """`router` has what does not change; `shared` is of a router of several processes."""
        self._service = service
        self._router = router
        self._shared = shared

    async def GetStatus(
        self, request: fleet_pb2.GetStatusRequest, context: Any
    ) -> fleet_pb2.GetStatusResponse:
        """Workers, load and pairs as seen now."""
        snapshot = self._service.fleet.snapshot()
        workers = [
            fleet_pb2.WorkerStatus(record=w.record, load=w.load, state=w.state, reason=w.reason)
            for w in (*snapshot.prefill, *snapshot.decode)
        ]
        return fleet_pb2.GetStatusResponse(
            router=self._status(),
            workers=workers,
            pairs=self._service.fleet.pairs,
            siblings=self._shared.siblings() if self._shared else (),
        )

    async def publish(self) -> None:
        """Shows siblings and parent this process, where it has some, until cancelled."""
        while self._shared is not None:
            snapshot = self._service.fleet.snapshot()
            workers = [
                fleet_pb2.WorkerStatus(record=WorkerRecord(pid=w.record.pid), state=w.state)
                for w in (*snapshot.prefill, *snapshot.decode)
            ]
            self._shared.publish(
                fleet_pb2.GetStatusResponse(router=self._status(), workers=workers)
            )
            await asyncio.sleep(_PUBLISH_S)

    def _status(self) -> fleet_pb2.RouterStatus:
        service, fleet, stats = self._service, self._service.fleet, self._service.stats
        router = fleet_pb2.RouterStatus()
        router.CopyFrom(self._router)
        router.state = "NOT_SERVING" if service.why_not_ready else "SERVING"
        router.queued = service.wait_queue.depth
        router.running = service.running
        router.registry_connected = fleet.registry_connected
        router.counts.CopyFrom(stats.counts)
        router.latency.CopyFrom(stats.latency())
        router.events.extend(stats.events)
        return router

    async def Explain(
        self, request: fleet_pb2.ExplainRequest, context: Any
    ) -> fleet_pb2.ExplainResponse:
        """Where a request would run now; nothing is charged and nothing is run."""
        return await self._service.explain(request.request, caller_of(context))


def authorize(tenants: Tenants, method: str, context: Any) -> None:
    """Raises Unauthenticated where a caller may not call a method of a router.

    What is for operators takes an operator's key, or a certificate with a role where the port asks
    for certificates; without either of these settings it is for everybody. Generation takes a
    tenant's key, where there are tenants.
    """
    keys = tuple(context.invocation_metadata() or ())
    if sum(name == "authorization" for name, _ in keys) > 1:
        raise Unauthenticated("authorization is there more than once")
    if method.startswith(_FOR_TENANTS):
        tenants.of(keys)
    by_key = tls.current().client_ca_file is None or tenants.is_admin(keys)
    if method.startswith(_FOR_OPERATORS) and by_key:
        tenants.check_admin(keys)
    else:
        rpc.authorize_role(method, context)


def caller_of(context: Any) -> Caller:
    """A call's metadata and the time that is left of it."""
    metadata = tuple(context.invocation_metadata() or ())
    return Caller(metadata, context.time_remaining(), resumes=True)
