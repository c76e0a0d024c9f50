"""HandoffService over gRPC: each RPC is one call of `HandoffReceiver`."""

from __future__ import annotations

from typing import Any

from baton import rpc
from baton.v1 import handoff_pb2, handoff_pb2_grpc
from kvtransfer.receiver import HandoffReceiver


class HandoffServicer(handoff_pb2_grpc.HandoffServiceServicer):
    """Add it with `handoff_pb2_grpc.add_HandoffServiceServicer_to_server`."""

    def __init__(self, receiver: HandoffReceiver) -> None:
        self._receiver = receiver

    @rpc.unary
    async def Offer(self, request: handoff_pb2.OfferRequest, context: Any) -> Any:
        return await self._receiver.offer(request)

    @rpc.unary
    async def Ready(self, request: handoff_pb2.ReadyRequest, context: Any) -> Any:
        return await self._receiver.ready(request)

    @rpc.unary
    async def Commit(self, request: handoff_pb2.CommitRequest, context: Any) -> Any:
        return await self._receiver.commit(request)

    @rpc.unary
    async def Abort(self, request: handoff_pb2.AbortRequest, context: Any) -> Any:
        return await self._receiver.abort(request)
