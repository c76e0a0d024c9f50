"""A small OTLP/gRPC trace receiver with a `TraceService` that reads what it received.

Any OpenTelemetry exporter can send traces to it; they go to a bounded `SpanStore`, and `baton
trace` reads them at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2

from baton.errors import DeadlineExceeded, InvalidRequest
from baton.local.span_store import ROUTER, AttributeValue, Span, SpanStore, is_complete
from baton.local.trace_tree import is_trace_id
from baton.net import rpc
from baton.v1 import trace_pb2, trace_pb2_grpc

_QUIET_S = 1.0  # exporters send several times a second: afterwards a trace is complete
_MAX_WAIT_S = 10.0  # spans that have not arrived by then were lost with their process


class OtlpReceiver(
    trace_service_pb2_grpc.TraceServiceServicer, trace_pb2_grpc.TraceServiceServicer
):
    """Listens on a loopback port inside `async with`; `address` is its URL."""

    def __init__(
        self,
        store: SpanStore,
        port: int = 0,
        quiet_s: float = _QUIET_S,
        authorize: rpc.Authorize = rpc.authorize_role,
    ) -> None:
        """`quiet_s`: time without new spans after which a trace counts as complete."""
        self.store = store
        self._authorize = authorize
        self.address = ""
        self._port = port
        self._quiet_s = quiet_s
        self._server: grpc.aio.Server

    async def __aenter__(self) -> Self:
        self._server = rpc.server(self._authorize)
        register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        register(self, self._server)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()
        self.address = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace=0.5)

    async def Export(self, request: Any, context: Any) -> Any:
        self.store.add(_received(request))
        return trace_service_pb2.ExportTraceServiceResponse()

    async def ReadTraces(
        self, request: trace_pb2.ReadTracesRequest, context: Any
    ) -> AsyncIterator[trace_pb2.ReadTracesResponse]:
        """Streams all traces, or one when it is complete or the wait is over."""
        if not (trace_id := request.trace_id):
            for spans in self.store.traces():
                yield _response(spans)
            return
        if not is_trace_id(trace_id):
            raise InvalidRequest("a trace id has 32 hexadecimal digits", "trace_id")
        now = time.monotonic()
        end = now + request.wait_ms / 1000
        if not 0 < self.store.arrived_at(trace_id) < now - _MAX_WAIT_S:
            with contextlib.suppress(DeadlineExceeded):
                whole = partial(is_complete, services=[ROUTER])
                await self.store.wait_for(trace_id, whole, end - now)
                quiet_at = self.store.arrived_at(trace_id) + self._quiet_s
                await asyncio.sleep(min(quiet_at, end) - time.monotonic())
        if spans := self.store.trace(trace_id):
            yield _response(spans)


def _response(spans: Sequence[Span]) -> trace_pb2.ReadTracesResponse:
    return trace_pb2.ReadTracesResponse(spans=[json.dumps(asdict(span)) for span in spans])


def _received(request: Any) -> Iterator[Span]:
    for resource_spans in request.resource_spans:
        resource = _otlp_attributes(resource_spans.resource.attributes)
        service = str(resource.get("service.name", "unknown"))
        for span in (span for scope in resource_spans.scope_spans for span in scope.spans):
            failed = span.status.code == otlp_pb2.Status.STATUS_CODE_ERROR
            yield Span(
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                name=span.name,
                service=service,
                start_ns=span.start_time_unix_nano,
                end_ns=span.end_time_unix_nano,
                attributes=_otlp_attributes(span.attributes),
                is_entry=span.kind == otlp_pb2.Span.SPAN_KIND_SERVER,
                error=span.status.message if failed else None,
            )


def _otlp_attributes(pairs: Iterable[Any]) -> dict[str, AttributeValue]:
    return {pair.key: _otlp_value(pair.value) for pair in pairs}


def _otlp_value(value: Any) -> AttributeValue:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return ", ".join(str(_otlp_value(item)) for item in value.array_value.values)
    found = getattr(value, kind) if kind else ""
    return found if isinstance(found, str | int | float | bool) else str(found)
