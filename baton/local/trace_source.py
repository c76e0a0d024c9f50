"""Where `baton trace` reads: the traces that `baton up` keeps."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import fields

import grpc

from baton import rpc
from baton.client import Client
from baton.errors import Unavailable
from baton.local.span_store import Span
from baton.v1 import trace_pb2, trace_pb2_grpc

_WAIT_S = 3.0  # for the spans of a request that has only just ended
_FAILED = {
    grpc.StatusCode.UNIMPLEMENTED: "{} is not a `baton up` that keeps traces: look for them where "
    "its collector sends them, as to Jaeger",
    grpc.StatusCode.UNAVAILABLE: "nothing answers at {}, where the traces should be kept",
}


def read_traces(
    address: str, trace_id: str, api_key: str | None, timeout_s: float
) -> list[list[Span]]:
    """All traces that are kept at HOST:PORT or a URL; or one, once it is whole, if it is known."""
    wait_ms = int(min(_WAIT_S, timeout_s / 2) * 1000)
    request = trace_pb2.ReadTracesRequest(trace_id=trace_id, wait_ms=wait_ms)
    url = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
    with (
        rpc.channel(url.netloc, grpc.ssl_channel_credentials(), grpc)
        if url.scheme == "https"
        else grpc.insecure_channel(url.netloc, options=rpc.OPTIONS)
    ) as channel:
        try:
            answers = trace_pb2_grpc.TraceServiceStub(channel).ReadTraces(
                request, timeout=timeout_s, metadata=rpc.bearer(api_key)
            )
            return [[_span_of(text) for text in answer.spans] for answer in answers]
        except grpc.RpcError as error:
            if why := _FAILED.get(error.code()):
                raise Unavailable(why.format(address)) from error
            raise rpc.error_of(error) from error


def _span_of(text: str) -> Span:
    """The span in a JSON object, without what only a newer version knows."""
    known = {field.name for field in fields(Span)}
    return Span(**{key: value for key, value in json.loads(text).items() if key in known})


def kept_by(target: str, api_key: str | None, timeout_s: float) -> str:
    """The address to which the cluster of the router at `target` sends spans. Raises Unavailable.

    Of several addresses it is the first: `baton up` puts its own there.
    """
    with Client(target, api_key=api_key) as client:
        router = client.status(timeout=timeout_s)["router"]
    if not router["otlp"]:
        raise Unavailable(
            f"the router at {router['address']} exports no traces: "
            "`baton up` keeps them, and --otlp URL sends them to a collector"
        )
    address: str = router["otlp"].split(",")[0]
    return address
