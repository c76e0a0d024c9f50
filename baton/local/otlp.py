"""A small OTLP/gRPC trace receiver: the local cluster's spans, without a collector to install.

Any OpenTelemetry exporter can send to it. Traces only; spans go to a bounded `SpanStore`, and
`baton trace` reads them at the same address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from baton import rpc
from baton.local.span_store import AttributeValue, Span, SpanStore
from baton.local.trace_service import TraceServicer
from baton.v1 import trace_pb2_grpc


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free loopback port between `async with` and its end; `address` says where."""

    def __init__(self, store: SpanStore) -> None:
        self.store = store
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = rpc.server()
        register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        register(self, self._server)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(TraceServicer(self.store), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.address = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        await self._server.stop(grace=0.5)
        self.store.close()

    async def Export(self, request: Any, context: Any) -> Any:
        """Stores the spans of one export."""
        self.store.add(list(spans_of(request)))
        return trace_service_pb2.ExportTraceServiceResponse()


def spans_of(request: Any) -> Iterator[Span]:
    """The spans of an ExportTraceServiceRequest."""
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        service = str(resource.get("service.name", "unknown"))
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield _span(span, service)


def _span(span: Any, service: str) -> Span:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=service,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        is_entry=span.kind == trace_pb2.Span.SPAN_KIND_SERVER,
        error=span.status.message if failed else None,
    )


def _attributes(pairs: Iterable[Any]) -> dict[str, AttributeValue]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> AttributeValue:
    kind = value.WhichOneof("value")
    if kind in ("string_value", "int_value", "double_value", "bool_value"):
        scalar: AttributeValue = getattr(value, kind)
        return scalar
    if kind == "array_value":
        return ", ".join(str(_value(item)) for item in value.array_value.values)
    return "" if kind is None else f"<{kind.removesuffix('_value')}>"
