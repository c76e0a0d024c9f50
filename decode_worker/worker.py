"""A decode worker: its process, its services, and the parts behind them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import grpc

from baton import rpc, telemetry
from baton.config import WorkerConfig, host_id, split_address
from baton.engine.build import Loaded
from baton.engine.loop import StepReport
from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2_grpc, worker_pb2
from baton.worker import process
from baton.worker.messages import ModelLimits
from baton.worker.node import Node
from decode_worker.events import EventStreams, next_message
from decode_worker.reservations import Reservations
from decode_worker.spans import DecodeSpans
from kvtransfer import transports
from kvtransfer.pool import KvPool
from kvtransfer.receiver import HandoffReceiver, HandoffServicer


def run(config: WorkerConfig) -> int:
    """Runs the process until drained; 0. Raises ConfigError when it cannot begin."""
    return process.run(config, DecodeWorker)


class DecodeWorker:
    """Joins reservations, event streams and the handoffs' receiver."""

    def __init__(self, node: Node, loaded: Loaded, pool: KvPool) -> None:
        config = node.config
        host, _ = split_address(node.record.address)
        usable = transports.usable(pool, host, config.transport)
        self.transports = tuple(transport.kind for transport in usable)
        self._node = node
        self._streams = EventStreams()
        self._reservations = Reservations(
            node.engine,
            self._streams,
            ModelLimits.of(loaded),
            loaded.layout.block_size,
            config.lease_s,
        )
        self._receiver = HandoffReceiver(
            pool,
            loaded.descriptor,
            config.incarnation,
            host_id(),
            usable,
            self._reservations,
            partial(node.find, "prefill"),
            timeout_s=config.transfer_timeout_s,
        )
        self._reservations.receiver = self._receiver

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        """Adds DecodeService and HandoffService."""
        decode = DecodeServicer(self._node, self._reservations, self._streams)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)
        handoff = HandoffServicer(self._receiver)
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(handoff, server)
        return ["baton.v1.DecodeService", "baton.v1.HandoffService"]

    def pairs(self) -> list[worker_pb2.PairStatus]:
        """Links are reported by their prefill ends."""
        return []

    def on_step(self, report: StepReport) -> None:
        """Takes in a step."""
        self._reservations.on_step(report)

    async def idle(self) -> None:
        """Returns when nothing is reserved and nothing decodes."""
        await self._reservations.idle()

    async def close(self) -> None:
        """Gives what still runs back to its routers, then ends streams and links."""
        await self._reservations.close()
        self._streams.close()
        await self._receiver.close()


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """DecodeService, thin: reservations and event streams do the work."""

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
        incarnation, metrics = self._node.record.incarnation, self._node.metrics
        try:
            response = await self._reservations.reserve(request, incarnation, spans)
        except BaseException as error:  # also a caller that hung up
            spans.end(str(error) or type(error).__name__)
            metrics.reserved("refused" if isinstance(error, Overloaded) else "failed")
            raise
        metrics.reserved("started" if response.started else "held")
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
        stream_id, heartbeat_s = request.stream_id, request.heartbeat_ms / 1000
        if not stream_id:
            raise InvalidRequest("an event stream needs an id", "stream_id")
        # The router gave up the sequences of an earlier stream when that one broke.
        self._reservations.cancel_stream(stream_id)
        messages = self._streams.register(stream_id, request.router_id)
        try:
            await context.send_initial_metadata(())
            while (message := await next_message(messages, heartbeat_s)) is not None:
                yield message
            raise Unavailable("the event stream was closed by the decode worker")
        finally:
            if self._streams.leave(stream_id, messages):
                self._reservations.cancel_stream(stream_id)
