"""Where `baton trace` reads: the traces that `baton up` keeps, found through a router of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import grpc

from baton import rpc
from baton.client import Client
from baton.errors import BatonError, Unavailable
from baton.local.span_store import Span
from baton.local.trace_messages import spans_of, summary_of
from baton.local.trace_summary import Summary
from baton.v1 import trace_pb2, trace_pb2_grpc

_WAIT_S = 3.0  # for the spans of a request that has only just ended


class TraceSource(ABC):
    """Somewhere that traces are kept. Methods raise BatonError."""

    name: str  # where that is, for people

    @abstractmethod
    def trace(self, trace_id: str, timeout_s: float) -> Sequence[Span]:
        """The trace's spans; none when it is not kept."""

    @abstractmethod
    def summaries(self, slowest: bool, most: int, timeout_s: float) -> Sequence[Summary]:
        """Requests whose traces are kept: those that ended last, or took longest, first."""


class KeptTraces(TraceSource):
    """What `baton up` keeps, at the address its processes export to."""

    def __init__(self, address: str) -> None:
        """`address` is HOST:PORT or a URL."""
        self.name = address
        url = urlsplit(address if "//" in address else f"//{address}")
        self._address, self._secure = url.netloc, url.scheme == "https"

    def trace(self, trace_id: str, timeout_s: float) -> Sequence[Span]:
        """The trace's spans, once they all have come."""
        wait_ms = int(min(_WAIT_S, timeout_s / 2) * 1000)
        request = trace_pb2.GetTraceRequest(trace_id=trace_id, wait_ms=wait_ms)
        return spans_of(trace_id, self._call("GetTrace", request, timeout_s).spans)

    def summaries(self, slowest: bool, most: int, timeout_s: float) -> Sequence[Summary]:
        """Requests, in the order asked for."""
        order = trace_pb2.TRACE_ORDER_SLOWEST if slowest else trace_pb2.TRACE_ORDER_LATEST
        request = trace_pb2.ListTracesRequest(order=order, most=most)
        return [summary_of(told) for told in self._call("ListTraces", request, timeout_s).traces]

    def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        with self._channel() as channel:
            stub = trace_pb2_grpc.TraceServiceStub(channel)
            try:
                return getattr(stub, method)(request, timeout=timeout_s)
            except grpc.RpcError as error:
                raise self._failure(error) from error

    def _channel(self) -> grpc.Channel:
        if self._secure:
            credentials = grpc.ssl_channel_credentials()
            return grpc.secure_channel(self._address, credentials, options=rpc.OPTIONS)
        return grpc.insecure_channel(self._address, options=rpc.OPTIONS)

    def _failure(self, error: grpc.RpcError) -> BatonError:
        code = error.code()
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return Unavailable(
                f"{self.name} is not a `baton up` that keeps traces: if they go to Jaeger, "
                "name it with --jaeger URL"
            )
        if code == grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"nobody answers at {self.name}, where the traces should be kept")
        return rpc.error_of(error)


def kept_by(target: str, timeout_s: float) -> KeptTraces:
    """Where the cluster of the router at `target` sends its spans. Raises Unavailable."""
    with Client(target) as client:
        router = client.status(timeout=timeout_s)["router"]
    if not router["otlp"]:
        raise Unavailable(
            f"the router at {router['address']} exports no traces: "
            "`baton up` keeps them, and --otlp URL sends them away"
        )
    return KeptTraces(router["otlp"])
