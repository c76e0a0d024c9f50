"""TraceService: the traces that a local cluster keeps, for `baton trace`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from baton import rpc
from baton.errors import DeadlineExceeded, InvalidRequest
from baton.local.span_store import Span, SpanStore
from baton.local.trace_messages import span_message, summary_message
from baton.local.trace_summary import is_trace_id, is_whole, summarize
from baton.v1 import trace_pb2, trace_pb2_grpc

# Exporters send several times a second: after so much quiet nothing more is on its way.
QUIET_S = 1.0
_PATIENCE_S = 10.0  # what has not come by then died with its process
_MOST_LISTED = 20


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    """Thin over the store."""

    def __init__(self, store: SpanStore, quiet_s: float = QUIET_S) -> None:
        self._store = store
        self._quiet_s = quiet_s

    @rpc.unary
    async def GetTrace(
        self, request: trace_pb2.GetTraceRequest, context: Any
    ) -> trace_pb2.GetTraceResponse:
        """The trace's spans; none of an unknown trace."""
        if not is_trace_id(request.trace_id):
            raise InvalidRequest("a trace id has 32 hexadecimal digits", "trace_id")
        spans = await self._settled(request.trace_id, request.wait_ms / 1000)
        return trace_pb2.GetTraceResponse(spans=map(span_message, spans))

    @rpc.unary
    async def ListTraces(
        self, request: trace_pb2.ListTracesRequest, context: Any
    ) -> trace_pb2.ListTracesResponse:
        """Requests, in the order asked for."""
        found = [told for spans in self._store.traces() if (told := summarize(spans))]
        if request.order == trace_pb2.TRACE_ORDER_SLOWEST:
            found.sort(key=lambda told: told.took_ms, reverse=True)
        else:
            found.sort(key=lambda told: told.start_ns + told.took_ms * 1e6, reverse=True)
        most = request.most or _MOST_LISTED
        return trace_pb2.ListTracesResponse(traces=map(summary_message, found[:most]))

    async def _settled(self, trace_id: str, wait_s: float) -> list[Span]:
        """The trace when it is whole and nothing more comes, or what there is after `wait_s`."""
        now = time.monotonic()
        if 0 < self._store.arrived_at(trace_id) < now - _PATIENCE_S:
            return self._store.trace(trace_id)
        end = now + wait_s
        with contextlib.suppress(DeadlineExceeded):
            await self._store.wait_for(trace_id, is_whole, wait_s)
            quiet_at = self._store.arrived_at(trace_id) + self._quiet_s
            await asyncio.sleep(min(quiet_at, end) - time.monotonic())
        return self._store.trace(trace_id)
