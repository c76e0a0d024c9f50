"""Where `baton trace` reads: the traces that `baton up` keeps, or a Jaeger query service."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import grpc

from baton import rpc
from baton.client import Client
from baton.errors import InternalError, InvalidRequest, Unavailable
from baton.local.span_store import ROUTER, AttributeValue, Span
from baton.v1 import trace_pb2, trace_pb2_grpc

_WAIT_S = 3.0  # for the spans of a request that has only just ended
_MAX_JAEGER_BYTES = 64 << 20
_JAEGER_LOOKBACK_S = 3600
_JAEGER_LIMIT = 200  # the slowest are found among at least as many
_FAILED = {
    grpc.StatusCode.UNIMPLEMENTED: "{} is not a `baton up` that keeps traces: if they go to Jaeger,"
    " name it with --jaeger URL",
    grpc.StatusCode.UNAVAILABLE: "nothing answers at {}, where the traces should be kept",
}
_ADDED_BY_JAEGER = ("span.kind", "internal.")
_PARSERS: Mapping[str, Callable[[str], AttributeValue]] = {
    "int64": int,
    "float64": float,
    "bool": lambda text: text == "true",
}


class KeptTraces:
    """The traces that `baton up` keeps, at the address its processes export to."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        """`address` is HOST:PORT or a URL."""
        self._metadata = rpc.bearer(api_key)
        self.name = address
        url = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
        self._address, self._secure = url.netloc, url.scheme == "https"

    def traces(self, trace_id: str, timeout_s: float) -> list[list[Span]]:
        """All traces; or one, once it is whole, and none where it is not known."""
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
                raise rpc.error_of(error) from error


def _span_of(text: str) -> Span:
    """The span in a JSON object, without what only a newer version knows."""
    known = {field.name for field in fields(Span)}
    return Span(**{key: value for key, value in json.loads(text).items() if key in known})


def kept_by(target: str, api_key: str | None, timeout_s: float) -> KeptTraces:
    """Where the cluster of the router at `target` sends its spans. Raises Unavailable.

    Of several addresses it is the first: `baton up` puts its own there.
    """
    with Client(target, api_key=api_key) as client:
        router = client.status(timeout=timeout_s)["router"]
    if not router["otlp"]:
        raise Unavailable(
            f"the router at {router['address']} exports no traces: "
            "`baton up` keeps them, and --otlp URL sends them to a collector"
        )
    return KeptTraces(router["otlp"].split(",")[0], api_key)


class Jaeger:
    """A Jaeger query service, as `http://HOST:16686`, with its base path if it has one.

    It is read by the JSON of its HTTP API, as Jaeger 1 and 2 serve it to their own UI: a trace has
    `spans`, whose `processID` names an entry of `processes`; times are microseconds; a parent is a
    reference of type CHILD_OF.
    """

    def __init__(self, url: str, most: int = 0) -> None:
        """`most` requests are listed. Raises InvalidRequest when it is no HTTP URL."""
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidRequest(f"--jaeger {url}: not a URL like http://HOST:16686")
        self.name = f"Jaeger at {parts.netloc}"
        self._base = urllib.parse.urlunsplit(parts._replace(query="", fragment="")).rstrip("/")
        self._limit = max(most, _JAEGER_LIMIT)

    def traces(self, trace_id: str, timeout_s: float) -> list[list[Span]]:
        """Requests of the last hour; or one trace, and none where it is not known."""
        if trace_id:
            return self._get(f"/api/traces/{trace_id}", timeout_s)
        end = time.time_ns() // 1000
        start = end - _JAEGER_LOOKBACK_S * 1_000_000
        query = {"service": ROUTER, "limit": self._limit, "start": start, "end": end}
        return self._get(f"/api/traces?{urllib.parse.urlencode(query)}", timeout_s)

    def _get(self, path: str, timeout_s: float) -> list[list[Span]]:
        url = self._base + path
        try:  # the scheme was checked
            with urllib.request.urlopen(url, timeout=timeout_s) as response:  # noqa: S310
                body = response.read(_MAX_JAEGER_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(_MAX_JAEGER_BYTES)
            # Jaeger's 404 for an unknown trace is JSON without data; other servers' 404 are pages.
            if error.code != 404 or not body.startswith(b"{"):
                raise Unavailable(f"{self.name} answers {error.code} {error.reason}") from error
        except OSError as error:  # URLError, a time-out, a broken connection
            reason = getattr(error, "reason", error)
            raise Unavailable(f"{self.name} does not answer: {reason}") from error
        if len(body) > _MAX_JAEGER_BYTES:
            limit = f"{_MAX_JAEGER_BYTES >> 20} MiB"
            raise InternalError(f"{self.name}: the answer has more than {limit}")
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise InternalError(f"{self.name}: the answer is not JSON: is it Jaeger?") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("data") or [], list):
            raise InternalError("not an answer of Jaeger: it has no list of traces in `data`")
        return list(map(_jaeger_spans, answer.get("data") or []))


def _jaeger_spans(trace: Mapping[str, Any]) -> list[Span]:
    try:
        return [_jaeger_span(span, trace["processes"]) for span in trace["spans"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InternalError(f"not a trace as Jaeger describes it: {error!r}") from error


def _jaeger_span(span: Mapping[str, Any], processes: Mapping[str, Any]) -> Span:
    tags = {tag["key"]: _jaeger_value(tag) for tag in span.get("tags") or ()}
    start_ns = int(span["startTime"]) * 1000
    failed = tags.pop("error", False) in (True, "true") or tags.get("otel.status_code") == "ERROR"
    parents = [  # a link to another trace is a reference, too, but no parent
        reference["spanID"]
        for reference in span.get("references") or ()
        if reference["refType"] == "CHILD_OF" and reference["traceID"] == span["traceID"]
    ]
    return Span(
        trace_id=str(span["traceID"]).zfill(32),
        span_id=span["spanID"],
        parent_id=parents[0] if parents else "",
        name=span["operationName"],
        service=processes[span["processID"]]["serviceName"],
        start_ns=start_ns,
        end_ns=start_ns + int(span["duration"]) * 1000,
        attributes={k: v for k, v in tags.items() if not k.startswith(_ADDED_BY_JAEGER)},
        is_entry=tags.get("span.kind") in ("server", "consumer"),
        error=str(tags.get("otel.status_description", "")) if failed else None,
    )


def _jaeger_value(tag: Mapping[str, Any]) -> AttributeValue:
    """Numbers may come as text: Jaeger writes 64-bit integers so."""
    value, parse = tag["value"], _PARSERS.get(tag.get("type", ""))
    if isinstance(value, str) and parse is not None:
        return parse(value)
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)
