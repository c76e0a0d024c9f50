"""A decode worker: its process, its services, and the parts behind them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc

from baton.engine.build import Loaded
from baton.engine.loop import StepReport
from baton.errors import Unavailable
from baton.telemetry import propagation
from baton.v1 import handoff_pb2_grpc
from baton.v1.dispatch_pb2 import RouterMessage
from baton.worker.dispatch_service import RouterStream
from baton.worker.node import Node
from decode_worker.reservations import DecodeSpans, Reservations
from kvtransfer.interface import Transport
from kvtransfer.rank_links import RankPool
from kvtransfer.receiver import HandoffReceiver


class DecodeWorker(Node):
    """Joins reservations and the handoffs' receiver."""

    def begin(self, loaded: Loaded, pools: list[RankPool], usable: list[Transport]) -> None:
        config = self.config
        self._reservations = Reservations(
            self.engine, self.limits, self.grammars, config.lease_s, self.metrics.reserved
        )
        owner, timeout_s = self._reservations, config.transfer_timeout_s
        self._receiver = HandoffReceiver(
            pools, self.record, usable, owner, self.find, timeout_s=timeout_s
        )
        self._reservations.receiver = self._receiver
        self._closing_links = asyncio.create_task(self._close_links())

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(self._receiver, server)
        return ["baton.v1.HandoffService"]

    def on_step(self, report: StepReport) -> None:
        self._reservations.on_step(report)

    async def idle(self) -> None:
        await self._reservations.idle()

    async def close(self) -> None:
        """Gives what still runs back to its routers, then ends the links."""
        await self._reservations.close()
        self._closing_links.cancel()
        await self._receiver.close()

    async def _close_links(self) -> None:
        """Closes links to prefill workers that have left: one on another host does not say so."""
        async with contextlib.aclosing(self._members.changes()) as changes:
            async for records in changes:
                self._receiver.keep_links(records.keys())

    def dispatch(self, router: RouterStream, message: RouterMessage) -> Iterator[None]:
        for request in message.reserve:
            spans = DecodeSpans(self.tracer, propagation.extract(request.trace.items()))
            try:
                self.refuse_if_draining()
            except Unavailable as error:
                self._reservations.refuse(router, request.sequence.handoff_id, spans, error)
            else:
                self._reservations.reserve(router, request, spans)
            yield
        for handoff_id in message.cancel:
            self._reservations.cancel(router, handoff_id)
            yield

    def lost(self, router: RouterStream) -> None:
        self._reservations.lost(router)
