"""Stores the newest traces in bounded memory.

Spans arrive by `baton.local.otlp` and are drawn by `trace_tree`. Not thread-safe: one asyncio loop
owns a store.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.errors import DeadlineExceeded

ROUTER = "baton-router"
AttributeValue = str | int | float | bool


@dataclass(frozen=True)
class Span:
    """One finished span. Ids are hexadecimal, `parent_id` empty for a root; times are Unix ns."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    is_entry: bool = False  # OpenTelemetry's kind SERVER: a call from outside the service
    error: str | None = None  # the status message of a failed span, possibly empty


def is_request(span: Span) -> bool:
    """Whether it is a router's span of a request, whose parent is the caller's span."""
    return span.is_entry and span.service == ROUTER


def is_complete(spans: Sequence[Span], services: Iterable[str] = ()) -> bool:
    """Whether a root, the parents of all spans, and spans of all `services` have arrived.

    A request's span counts as a root: callers may store their spans elsewhere.
    """
    ids = {span.span_id for span in spans}
    others = [span for span in spans if span.parent_id and not is_request(span)]
    has_parents = all(span.parent_id in ids for span in others)
    has_services = set(services) <= {span.service for span in spans}
    return len(others) < len(spans) and has_parents and has_services


@dataclass
class _Trace:
    spans: dict[str, Span] = field(default_factory=dict)  # by id: a span may be sent twice
    arrived_at: float = 0.0  # time.monotonic() of the last one


class SpanStore:
    """Keeps at most `max_traces` traces and `max_spans` spans; drops the oldest traces.

    A single trace longer than `max_spans` loses its later spans.
    """

    def __init__(self, max_traces: int = 256, max_spans: int = 20_000) -> None:
        self.max_traces = max_traces
        self.max_spans = max_spans
        self.spans_total = 0
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._traces)

    def trace(self, trace_id: str) -> list[Span]:
        """The trace's spans so far, in order of arrival; empty for an unknown trace."""
        return list(self._traces.get(trace_id, _Trace()).spans.values())

    def traces(self) -> list[list[Span]]:
        """The spans of each trace, in order of arrival."""
        return [list(trace.spans.values()) for trace in self._traces.values()]

    def arrived_at(self, trace_id: str) -> float:
        """Arrival of its last span, as time.monotonic(); 0 for an unknown trace."""
        return self._traces.get(trace_id, _Trace()).arrived_at

    def add(self, spans: Iterable[Span]) -> None:
        """Stores spans, drops the oldest traces beyond the limits, and wakes `wait_for`."""
        for span in spans:
            trace = self._traces.setdefault(span.trace_id, _Trace())
            if span.span_id not in trace.spans and len(trace.spans) < self.max_spans:
                trace.spans[span.span_id] = span
                trace.arrived_at = time.monotonic()
                self.spans_total += 1
        while len(self._traces) > self.max_traces or self.spans_total > self.max_spans:
            _, oldest = self._traces.popitem(last=False)
            self.spans_total -= len(oldest.spans)
        self._arrived.set()

    async def wait_for(
        self,
        trace_id: str,
        complete: Callable[[Sequence[Span]], bool] = is_complete,
        timeout: float = 5.0,
    ) -> list[Span]:
        """Waits until `complete` holds for a trace; returns its spans. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout):
                while not complete(spans := self.trace(trace_id)):
                    self._arrived.clear()
                    await self._arrived.wait()
                return spans
        except TimeoutError:
            raise DeadlineExceeded(
                f"trace {trace_id} was not complete after {timeout:g} s: "
                f"{len(self.trace(trace_id))} spans arrived"
            ) from None
