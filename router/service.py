"""The router's RPCs for callers, thin: what they mean is told in `door`."""

from __future__ import annotations

from typing import Any

from baton import rpc
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.frontend import Caller, Door


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generation over gRPC."""

    def __init__(self, door: Door) -> None:
        self._door = door

    @rpc.unary
    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        """Streams one completion."""
        await self._door.generate(request, caller_of(context), context.write)

    @rpc.unary
    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text or a conversation."""
        return await self._door.tokenize(request, caller_of(context))

    @rpc.unary
    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """The one model this router serves."""
        return inference_pb2.ListModelsResponse(models=self._door.models(caller_of(context)))


def caller_of(context: Any) -> Caller:
    """Who calls, and how long the call may take."""
    return Caller(tuple(context.invocation_metadata() or ()), context.time_remaining())
