"""DecodeService, thin: reservations and event streams do the work."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from baton import rpc, telemetry
from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.v1 import decode_pb2, decode_pb2_grpc
from baton.worker.node import Node
from decode_worker.events import EventStreams, next_message
from decode_worker.reservations import Reservations
from decode_worker.spans import DecodeSpans


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Runs the batch for routers."""

    def __init__(self, node: Node, reservations: Reservations, streams: EventStreams) -> None:
        self._node = node
        self._reservations = reservations
        self._streams = streams

    @rpc.unary
    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: Any
    ) -> decode_pb2.ReserveResponse:
        """Holds blocks or refuses."""
        self._node.refuse_if_draining()
        parent = telemetry.extract(context.invocation_metadata())
        spans = DecodeSpans(self._node.telemetry.tracer, parent)
        incarnation, figures = self._node.record.incarnation, self._node.figures
        try:
            response = await self._reservations.reserve(request, incarnation, spans)
        except BaseException as error:  # also a caller that hung up
            spans.end(str(error) or type(error).__name__)
            figures.reserved("refused" if isinstance(error, Overloaded) else "failed")
            raise
        figures.reserved("started" if response.started else "held")
        return response

    @rpc.unary
    async def Cancel(
        self, request: decode_pb2.CancelRequest, context: Any
    ) -> decode_pb2.CancelResponse:
        """Ends sequences."""
        await self._reservations.cancel(*request.handoff_ids)
        return decode_pb2.CancelResponse()

    @rpc.streaming
    async def StreamEvents(
        self, request: decode_pb2.StreamEventsRequest, context: Any
    ) -> AsyncGenerator[decode_pb2.StreamEventsResponse, None]:
        """A router's events and heartbeats, until it hangs up."""
        stream_id, silence_s = request.stream_id, request.heartbeat_ms / 1000
        if not stream_id:
            raise InvalidRequest("an event stream needs an id", "stream_id")
        # The router gave up what it waited for on an earlier stream when that one broke.
        self._reservations.cancel_stream(stream_id)
        messages = self._streams.register(stream_id, request.router_id)
        try:
            await context.send_initial_metadata(())
            while (message := await next_message(messages, silence_s)) is not None:
                yield message
            raise Unavailable("the event stream was closed by the decode worker")
        finally:
            if self._streams.leave(stream_id, messages):
                self._reservations.cancel_stream(stream_id)
