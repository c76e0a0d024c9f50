"""A decode worker: its process, its services, and the parts behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from baton import telemetry
from baton.engine.build import Loaded
from baton.engine.loop import StepReport
from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.v1 import decode_pb2, handoff_pb2_grpc
from baton.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from baton.worker.node import Node
from decode_worker.reservations import DecodeSpans, Messages, Reservations
from kvtransfer.interface import Transport
from kvtransfer.pool import KvPool
from kvtransfer.receiver import HandoffReceiver

MIN_HEARTBEAT_S = 0.05


class DecodeWorker(Node, DecodeServiceServicer):
    """Joins reservations and the handoffs' receiver."""

    def begin(self, loaded: Loaded, pool: KvPool, usable: list[Transport]) -> None:
        config = self.config
        self._reservations = Reservations(self.engine, self.limits, self.grammars, config.lease_s)
        owner, timeout_s = self._reservations, config.transfer_timeout_s
        self._receiver = HandoffReceiver(
            pool, self.record, usable, owner, self.find, timeout_s=timeout_s
        )
        self._reservations.receiver = self._receiver

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        add_DecodeServiceServicer_to_server(self, server)
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(self._receiver, server)
        return ["baton.v1.DecodeService", "baton.v1.HandoffService"]

    def on_step(self, report: StepReport) -> None:
        self._reservations.on_step(report)

    async def idle(self) -> None:
        await self._reservations.idle()

    async def close(self) -> None:
        """Gives what still runs back to its routers, then ends streams and links."""
        await self._reservations.close()
        await self._receiver.close()

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: Any
    ) -> decode_pb2.ReserveResponse:
        self.refuse_if_draining()
        spans = DecodeSpans(self.tracer, telemetry.extract(context.invocation_metadata()))
        try:
            response = await self._reservations.reserve(request, self.record.incarnation, spans)
        except BaseException as error:  # also a caller that hung up
            spans.end(str(error) or type(error).__name__)
            self.metrics.reserved("refused" if isinstance(error, Overloaded) else "failed")
            raise
        self.metrics.reserved("started" if response.started else "held")
        return response

    async def Cancel(
        self, request: decode_pb2.CancelRequest, context: Any
    ) -> decode_pb2.CancelResponse:
        await self._reservations.cancel(*request.handoff_ids)
        return decode_pb2.CancelResponse()

    async def StreamEvents(
        self, request: decode_pb2.StreamEventsRequest, context: Any
    ) -> AsyncGenerator[decode_pb2.StreamEventsResponse, None]:
        stream_id, heartbeat_s = request.stream_id, request.heartbeat_ms / 1000
        if not stream_id:
            raise InvalidRequest("an event stream needs an id", "stream_id")
        messages = self._reservations.listen(stream_id, request.router_id)
        try:
            await context.send_initial_metadata(())
            while (message := await _next(messages, heartbeat_s)) is not None:
                yield message
            raise Unavailable("the event stream was closed by the decode worker")
        finally:
            self._reservations.hang_up(stream_id, messages)


async def _next(messages: Messages, heartbeat_s: float) -> decode_pb2.StreamEventsResponse | None:
    """The next message; an empty one as a heartbeat after `heartbeat_s` without any (0: never)."""
    if not messages.empty():
        return messages.get_nowait()
    try:
        async with asyncio.timeout(max(heartbeat_s, MIN_HEARTBEAT_S) if heartbeat_s else None):
            return await messages.get()
    except TimeoutError:
        return decode_pb2.StreamEventsResponse()
