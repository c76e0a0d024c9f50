"""Reads the traces that `baton up` keeps, for `baton trace`."""

from __future__ import annotations

import json
import urllib.parse
from dataclasses import fields

import grpc

from baton.client import Client
from baton.errors import Unauthenticated, Unavailable
from baton.local.span_store import Span
from baton.net import rpc, tls
from baton.v1 import trace_pb2, trace_pb2_grpc

_WAIT_S = 3.0  # for the spans of a request that has just ended
_FAILED = {
    grpc.StatusCode.UNIMPLEMENTED: "{} is not a `baton up` that keeps traces: look for them where "
    "its collector sends them, as to Jaeger",
    grpc.StatusCode.UNAVAILABLE: "nothing answers at {}, where the traces should be kept",
}


class KeptTraces:
    """The traces that `baton up` keeps, at the address its processes export to."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        """`address` is HOST:PORT or a URL. Without TLS the key is sent to this machine only."""
        self.name = address
        url = _url(address)
        self._address, self._secure = url.netloc, url.scheme == "https"
        self._takes_key = self._secure or tls.is_loopback(url.hostname or "")
        self._metadata = rpc.bearer(api_key if self._takes_key else None)

    def traces(self, trace_id: str, timeout_s: float) -> list[list[Span]]:
        """All traces; or one, when it is complete, and none if it is unknown."""
        wait_ms = int(min(_WAIT_S, timeout_s / 2) * 1000)
        request = trace_pb2.ReadTracesRequest(trace_id=trace_id, wait_ms=wait_ms)
        with (
            rpc.channel(self._address, grpc.ssl_channel_credentials(), grpc)
            if self._secure
            else grpc.insecure_channel(self._address, options=rpc.OPTIONS)
        ) as channel:
            try:
                answers = trace_pb2_grpc.TraceServiceStub(channel).ReadTraces(
                    request, timeout=timeout_s, metadata=self._metadata
                )
                return [[_span_of(text) for text in answer.spans] for answer in answers]
            except grpc.RpcError as error:
                if why := _FAILED.get(error.code()):
                    raise Unavailable(why.format(self.name)) from error
                if error.code() is grpc.StatusCode.UNAUTHENTICATED and not self._takes_key:
                    why = f"{self.name} gets no API key: it is neither on this machine nor https"
                    raise Unauthenticated(why) from error
                raise rpc.error_of(error) from error


def _url(address: str) -> urllib.parse.SplitResult:
    return urllib.parse.urlsplit(address if "//" in address else f"//{address}")


def _span_of(text: str) -> Span:
    """The span in a JSON object, without fields of newer versions."""
    known = {field.name for field in fields(Span)}
    return Span(**{key: value for key, value in json.loads(text).items() if key in known})


def kept_by(target: str, api_key: str | None, timeout_s: float) -> KeptTraces:
    """The receiver that the router at `target` exports spans to. Raises Unavailable.

    It is the first of several addresses: `baton up` puts its own there, which is on the router's
    machine. Another one is a collector's, and gets no key of the router's callers.
    """
    with Client(target, api_key=api_key) as client:
        router = client.status(timeout=timeout_s)["router"]
    if not router["otlp"]:
        raise Unavailable(
            f"the router at {router['address']} exports no traces: "
            "`baton up` keeps them, and --otlp URL sends them to a collector"
        )
    address = router["otlp"].split(",")[0]
    is_here = tls.is_loopback(_url(address).hostname or "")
    return KeptTraces(address, api_key if is_here else None)
