"""A worker's part that reserves blocks, takes KV in, and runs the batch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc

from baton.engine.build import Loaded
from baton.engine.step_report import StepReport
from baton.errors import Unavailable
from baton.telemetry import propagation
from baton.v1 import handoff_pb2_grpc
from baton.v1.dispatch_pb2 import RouterMessage
from baton.worker.dispatch_service import RouterStream
from baton.worker.node import Node, Part
from decode_worker.reservations import Reservations
from decode_worker.service import HandoffService
from decode_worker.spans import DecodeSpans
from kvtransfer.incoming import IncomingLinks
from kvtransfer.interface import Transport
from kvtransfer.rank_ends import RankPool


class DecodePart(Part):
    """Reserves blocks for routers, takes in KV from other workers, and decodes."""

    def __init__(
        self, node: Node, loaded: Loaded, pools: list[RankPool], usable: list[Transport]
    ) -> None:
        super().__init__(node, loaded, pools, usable)
        timeout_s, lease_s = node.config.transfer_timeout_s, node.config.lease_s
        parts = node.engine, node.limits, node.grammars
        self._handoffs = Reservations(*parts, lease_s, timeout_s, node.metrics.reserved)
        places = pools, node.record, usable, node.find
        self._links = IncomingLinks(*places, self._handoffs, timeout_s=timeout_s)
        self._service = HandoffService(self._handoffs, self._links)
        self._closing_links = asyncio.create_task(self._close_links())

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(self._service, server)
        return ["baton.v1.HandoffService"]

    def on_step(self, report: StepReport) -> None:
        self._handoffs.on_step(report)

    async def idle(self) -> None:
        await self._handoffs.idle()

    async def close(self) -> None:
        """Gives what still runs back to its routers, then ends the links."""
        await self._handoffs.close(f"the decode worker {self.node.why_leaving}")
        self._closing_links.cancel()
        await self._links.close()
        self._service.close_streams()

    async def _close_links(self) -> None:
        """Closes links to prefill workers that have left: one on another host does not say so."""
        async with contextlib.aclosing(self.node.members.changes()) as changes:
            async for records in changes:
                self._links.keep_only(records.keys())

    def dispatch(self, router: RouterStream, message: RouterMessage) -> Iterator[None]:
        for request in message.reserve:
            spans = DecodeSpans(self.node.tracer, propagation.extract(request.trace.items()))
            try:
                self.node.refuse_if_draining()
            except Unavailable as error:
                self._handoffs.refuse(router, request.sequence.handoff_id, spans, error)
            else:
                self._handoffs.reserve(router, request, spans)
            yield
        for handoff_id in message.cancel:
            self._handoffs.cancel(router, handoff_id)
            yield

    def lost(self, router: RouterStream) -> None:
        self._handoffs.lost(router)
