"""WorkerService: what a worker answers about itself."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from baton import rpc
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.worker.node import Node

WATCH_INTERVAL_S = 0.05


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Thin: every answer is read from the node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @rpc.unary
    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        """Who it is."""
        node = self._node
        return worker_pb2.DescribeResponse(
            record=node.record, load=node.load(), pairs=node.role.pairs()
        )

    @rpc.streaming
    async def Watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchResponse]:
        """Load and cache changes, and heartbeats."""
        node, heartbeat_s = self._node, request.heartbeat_ms / 1000
        watch = node.meter.watch(WATCH_INTERVAL_S, heartbeat_s)
        async with contextlib.aclosing(watch) as events:
            async for cache in events:
                yield worker_pb2.WatchResponse(
                    load=node.load(),
                    state=node.record.state,
                    cache=cache,
                    pairs=node.role.pairs(),
                )

    @rpc.unary
    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        """Drains; answers when nothing runs any more."""
        await self._node.drain()
        return worker_pb2.DrainResponse()

    @rpc.unary
    async def KeepTraces(
        self, request: worker_pb2.KeepTracesRequest, context: Any
    ) -> worker_pb2.KeepTracesResponse:
        """Exports traces that were not sampled."""
        for trace_id in request.trace_ids:
            self._node.telemetry.keep(trace_id)
        return worker_pb2.KeepTracesResponse()
