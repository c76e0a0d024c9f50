"""An OTLP endpoint for the stack's test: prints a line for each span it is sent.

Runs in a container of the image under test, in the collector's place and under its name.
"""

from __future__ import annotations

from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes everything."""

    def Export(self, request: Any, context: Any) -> Any:
        """`span SERVICE TRACE_ID NAME` for each."""
        for resource_spans in request.resource_spans:
            attributes = resource_spans.resource.attributes
            names = [one.value.string_value for one in attributes if one.key == "service.name"]
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    print("span", *names, span.trace_id.hex(), span.name, flush=True)
        return trace_service_pb2.ExportTraceServiceResponse()


if __name__ == "__main__":
    server = grpc.server(futures.ThreadPoolExecutor(2))
    register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    register(Receiver(), server)
    server.add_insecure_port("0.0.0.0:4317")
    server.start()
    server.wait_for_termination()
