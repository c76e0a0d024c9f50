"""Tail sampling: spans of traces that were not sampled are held until the request's end.

Whether a request fails or is slow is known then. Every process therefore records all spans, exports
those of sampled traces and holds the others in bounded memory; `keep` exports them after all. Needs
the OpenTelemetry SDK.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState

MAX_SPANS = 16_384  # about 50 MB; at 20 spans a request the last 800 requests
MAX_KEPT = 4096  # traces whose later spans are exported as well

_ID_BITS = (1 << 64) - 1
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class HeadSampler(Sampler):
    """Samples as the parent did, and of traces that begin here a share by their ids.

    What is not sampled is recorded all the same.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._bound = round(ratio * (_ID_BITS + 1))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        mine = (trace_id & _ID_BITS) < self._bound
        sampled = parent.trace_flags.sampled if parent.is_valid else mine
        decision = Decision.RECORD_AND_SAMPLE if sampled else Decision.RECORD_ONLY
        return SamplingResult(decision, attributes, parent.trace_state or None)

    def get_description(self) -> str:
        return f"HeadSampler{{{self._ratio}}}"


class TailSampler(SpanProcessor):
    """Hands sampled spans to `exporting` at once, and the others when their trace is kept."""

    def __init__(self, exporting: SpanProcessor, max_spans: int = MAX_SPANS) -> None:
        self._exporting = exporting
        self._max_spans = max_spans
        self._lock = threading.Lock()
        self._held: OrderedDict[int, list[ReadableSpan]] = OrderedDict()  # by trace, oldest first
        self.num_held = 0  # spans
        self._kept: OrderedDict[int, None] = OrderedDict()

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None:
            return
        if context.trace_flags.sampled:
            self._exporting.on_end(span)
            return
        with self._lock:
            if context.trace_id not in self._kept:
                self._hold(context.trace_id, span)
                return
        self._exporting.on_end(_as_sampled(span, context))

    def keep(self, trace_id: int) -> None:
        """Exports what is held of a trace, and what still comes of it."""
        with self._lock:
            self._kept[trace_id] = None
            self._kept.move_to_end(trace_id)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            spans = self._held.pop(trace_id, [])
            self.num_held -= len(spans)
        for span in spans:
            if context := span.get_span_context():
                self._exporting.on_end(_as_sampled(span, context))

    def shutdown(self) -> None:
        self._exporting.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporting.force_flush(timeout_millis)

    def _hold(self, trace_id: int, span: ReadableSpan) -> None:
        self._held.setdefault(trace_id, []).append(span)
        self.num_held += 1
        while self.num_held > self._max_spans:
            _, spans = self._held.popitem(last=False)
            self.num_held -= len(spans)


def _as_sampled(span: ReadableSpan, context: SpanContext) -> ReadableSpan:
    """The same span, such that exporters take it."""
    sampled = SpanContext(
        context.trace_id, context.span_id, context.is_remote, _SAMPLED, context.trace_state
    )
    return ReadableSpan(
        name=span.name,
        context=sampled,
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
