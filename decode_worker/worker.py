"""A decode worker: its process, its services, and the parts behind them."""

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
from baton.worker.node import Node
from decode_worker.events import DecodeSpans
from decode_worker.handoffs import Handoffs
from decode_worker.service import HandoffService
from kvtransfer.incoming import IncomingLinks
from kvtransfer.interface import Transport
from kvtransfer.rank_ends import RankPool


class DecodeWorker(Node):
    """Reserves blocks for routers, takes in KV from prefill workers, and decodes."""

    def begin(self, loaded: Loaded, pools: list[RankPool], usable: list[Transport]) -> None:
        config, metrics = self.config, self.metrics
        timeout_s = config.transfer_timeout_s
        self._handoffs = Handoffs(
            self.engine, self.limits, self.grammars, config.lease_s, timeout_s, metrics.reserved
        )
        places = pools, self.record, usable, self.find
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
        await self._handoffs.close()
        self._closing_links.cancel()
        await self._links.close()
        self._service.close_streams()

    async def _close_links(self) -> None:
        """Closes links to prefill workers that have left: one on another host does not say so."""
        async with contextlib.aclosing(self._members.changes()) as changes:
            async for records in changes:
                self._links.keep_only(records.keys())

    def dispatch(self, router: RouterStream, message: RouterMessage) -> Iterator[None]:
        for request in message.reserve:
            spans = DecodeSpans(self.tracer, propagation.extract(request.trace.items()))
            try:
                self.refuse_if_draining()
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
