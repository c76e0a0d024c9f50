"""The router's RPCs, thin: generation for callers (`frontend`), and its view for operators."""

from __future__ import annotations

from typing import Any

from baton.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.frontend import Caller, GenerationService


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generation over gRPC."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        await self._service.generate(request, caller_of(context), context.write)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        return await self._service.tokenize(request, caller_of(context))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=self._service.models(caller_of(context)))


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """The cluster as this router sees it."""

    def __init__(self, service: GenerationService, router: fleet_pb2.RouterStatus) -> None:
        """`router` has what does not change."""
        self._service = service
        self._router = router

    async def GetStatus(
        self, request: fleet_pb2.GetStatusRequest, context: Any
    ) -> fleet_pb2.GetStatusResponse:
        """Workers, load and pairs as seen now."""
        service, fleet = self._service, self._service.fleet
        snapshot, stats = fleet.snapshot(), service.stats
        router = fleet_pb2.RouterStatus()
        router.CopyFrom(self._router)
        router.state = "NOT_SERVING" if service.why_not_ready else "SERVING"
        router.queued = service.wait_queue.depth
        router.running = service.running
        router.registry_connected = fleet.registry_connected
        router.counts.CopyFrom(stats.counts)
        router.latency.CopyFrom(stats.latency())
        router.events.extend(stats.events)
        workers = [
            fleet_pb2.WorkerStatus(record=w.record, load=w.load, state=w.state, reason=w.reason)
            for w in (*snapshot.prefill, *snapshot.decode)
        ]
        return fleet_pb2.GetStatusResponse(router=router, workers=workers, pairs=fleet.pairs)

    async def Explain(
        self, request: fleet_pb2.ExplainRequest, context: Any
    ) -> fleet_pb2.ExplainResponse:
        """Where a request would run now; nothing is charged and nothing is run."""
        return await self._service.explain(request.request, caller_of(context))


def caller_of(context: Any) -> Caller:
    """A call's metadata and the time that is left of it."""
    return Caller(tuple(context.invocation_metadata() or ()), context.time_remaining())
