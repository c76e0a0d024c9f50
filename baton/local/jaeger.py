"""Traces out of Jaeger, by the JSON of its HTTP API (as Jaeger 1 and 2 serve it to their own UI).

`GET /api/traces/ID` and `GET /api/traces?service=…`: a trace has `spans`, whose `processID` names
an entry of `processes`; times are microseconds; a parent is a reference of type CHILD_OF.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.errors import InternalError, InvalidRequest, Unavailable
from baton.local.span_store import AttributeValue, Span
from baton.local.trace_source import TraceSource
from baton.local.trace_summary import ROUTER, Summary, summarize

_MOST_BYTES = 64 << 20
_LOOKBACK_S = 3600
_LEAST_ASKED = 200  # the slowest can only be found among those that were asked for
_NOT_OURS = ("span.kind", "internal.")  # what Jaeger adds
_ENTRY_KINDS = ("server", "consumer")


class Jaeger(TraceSource):
    """A Jaeger query service, as `http://HOST:16686`, with its base path if it has one."""

    def __init__(self, url: str) -> None:
        """Raises InvalidRequest when it is no HTTP URL."""
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidRequest(f"--jaeger {url}: not a URL like http://HOST:16686")
        self.name = f"Jaeger at {parts.netloc}"
        self._base = urllib.parse.urlunsplit(parts._replace(query="", fragment="")).rstrip("/")

    def trace(self, trace_id: str, timeout_s: float) -> Sequence[Span]:
        """The trace's spans; none when Jaeger does not know it."""
        answer = self._get(f"/api/traces/{trace_id}", timeout_s)
        return [span for trace in _traces(answer) for span in spans_of(trace)]

    def summaries(self, slowest: bool, most: int, timeout_s: float) -> Sequence[Summary]:
        """Requests of the last hour, in the order asked for."""
        end = time.time_ns() // 1000
        query = urllib.parse.urlencode(
            {
                "service": ROUTER,
                "limit": max(most, _LEAST_ASKED),
                "start": end - _LOOKBACK_S * 1_000_000,
                "end": end,
            }
        )
        answer = self._get(f"/api/traces?{query}", timeout_s)
        found = [told for trace in _traces(answer) if (told := summarize(spans_of(trace)))]
        found.sort(key=lambda s: s.took_ms if slowest else s.start_ns + s.took_ms * 1e6)
        return found[::-1][:most]

    def _get(self, path: str, timeout_s: float) -> Any:
        """The answer's JSON; None for what Jaeger does not know."""
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self._base + path, headers={"Accept": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310
                body = response.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404 and _is_json(error.read(_MOST_BYTES)):
                    return None
            raise Unavailable(f"{self.name} answers {error.code} {error.reason}") from error
        except OSError as error:  # URLError, a time-out, a broken connection
            reason = getattr(error, "reason", error)
            raise Unavailable(f"{self.name} does not answer: {reason}") from error
        if len(body) > _MOST_BYTES:
            raise InternalError(f"{self.name}: the answer has more than {_MOST_BYTES >> 20} MiB")
        try:
            return json.loads(body)
        except ValueError as error:
            raise InternalError(f"{self.name}: the answer is not JSON: is it Jaeger?") from error


def spans_of(trace: Mapping[str, Any]) -> list[Span]:
    """The spans of one trace of Jaeger's JSON. Raises InternalError when it is none."""
    try:
        return [_span(span, trace["processes"]) for span in trace["spans"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InternalError(f"not a trace as Jaeger describes it: {error!r}") from error


def _traces(answer: Any) -> Iterator[Mapping[str, Any]]:
    if answer is None:
        return
    if not isinstance(answer, dict) or not isinstance(answer.get("data") or [], list):
        raise InternalError("not an answer of Jaeger: it has no list of traces in `data`")
    yield from answer.get("data") or []


def _span(span: Mapping[str, Any], processes: Mapping[str, Any]) -> Span:
    tags = {tag["key"]: _value(tag) for tag in span.get("tags") or ()}
    start_ns = int(span["startTime"]) * 1000
    failed = tags.pop("error", False) in (True, "true") or tags.get("otel.status_code") == "ERROR"
    return Span(
        trace_id=str(span["traceID"]).zfill(32),
        span_id=span["spanID"],
        parent_id=_parent(span),
        name=span["operationName"],
        service=processes[span["processID"]]["serviceName"],
        start_ns=start_ns,
        end_ns=start_ns + int(span["duration"]) * 1000,
        attributes={key: value for key, value in tags.items() if not key.startswith(_NOT_OURS)},
        is_entry=tags.get("span.kind") in _ENTRY_KINDS,
        error=str(tags.get("otel.status_description", "")) if failed else None,
    )


def _parent(span: Mapping[str, Any]) -> str:
    """A link to another trace is a reference, too, but no parent."""
    for reference in span.get("references") or ():
        if reference["refType"] == "CHILD_OF" and reference["traceID"] == span["traceID"]:
            parent: str = reference["spanID"]
            return parent
    return ""


def _value(tag: Mapping[str, Any]) -> AttributeValue:
    """Numbers may come as text: Jaeger writes 64-bit integers so."""
    value, kind = tag["value"], tag.get("type")
    if isinstance(value, str) and kind == "int64":
        return int(value)
    if isinstance(value, str) and kind == "float64":
        return float(value)
    if isinstance(value, str) and kind == "bool":
        return value == "true"
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)


def _is_json(body: bytes) -> bool:
    """Jaeger says in JSON that it does not know a trace; other servers' 404 are pages."""
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False
