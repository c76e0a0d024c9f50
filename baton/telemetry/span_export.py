"""Which spans are exported, and their export. Needs the OpenTelemetry SDK.

Every process records all spans, exports those of sampled traces and holds the others in bounded
memory, because only at a request's end is it known whether it failed or was slow: tail sampling. A
collector may start late or be away for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

log = logging.getLogger(__name__)

MAX_SPANS = 16_384  # held, about 50 MB; at 20 spans a request the last 800 requests
MAX_KEPT = 4096  # traces whose later spans are exported as well
MAX_QUEUED = 8192  # spans, about 25 MB; the oldest go first
_BATCH_DELAY_MS = 200
_ATTEMPT_S = 5.0
_MAX_RETRY_S = 300.0  # of one batch: a collector may refuse it for good
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 5.0
_COPIED = (
    *("name", "parent", "resource", "attributes", "events", "links", "kind", "status"),
    *("start_time", "end_time", "instrumentation_scope"),
)


class HeadSampler(sampling.ParentBased):
    """Samples as the parent did, and of traces that begin here a share by their ids.

    What is not sampled is recorded all the same.
    """

    def __init__(self, ratio: float) -> None:
        super().__init__(sampling.TraceIdRatioBased(ratio))

    def should_sample(  # type: ignore[override]
        self, parent_context: Any, trace_id: int, name: str, kind: Any, attributes: Any, links: Any
    ) -> sampling.SamplingResult:
        result = super().should_sample(parent_context, trace_id, name, kind, attributes, links)
        if result.decision is not sampling.Decision.DROP:
            return result
        return sampling.SamplingResult(
            sampling.Decision.RECORD_ONLY, attributes, result.trace_state
        )


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

    def _hold(self, trace_id: int, span: ReadableSpan) -> None:
        self._held.setdefault(trace_id, []).append(span)
        self.num_held += 1
        while self.num_held > self._max_spans:
            _, spans = self._held.popitem(last=False)
            self.num_held -= len(spans)


def _as_sampled(span: ReadableSpan, context: SpanContext) -> ReadableSpan:
    flags = TraceFlags(TraceFlags.SAMPLED)
    sampled = SpanContext(
        context.trace_id, context.span_id, context.is_remote, flags, context.trace_state
    )
    return ReadableSpan(context=sampled, **{name: getattr(span, name) for name in _COPIED})


class _RetryingExporter(SpanExporter):
    """Sends each batch until the collector takes it, for at most `_MAX_RETRY_S`."""

    def __init__(self, url: str) -> None:
        insecure = not url.startswith("https")
        self._exporter = OTLPSpanExporter(endpoint=url, insecure=insecure, timeout=_ATTEMPT_S)
        self._url = url
        self.closing = threading.Event()
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Blocks until the batch is sent, its time is over, or `closing` is set."""
        if self._failing and self.closing.is_set():
            return SpanExportResult.FAILURE
        end, delay_s = time.monotonic() + _MAX_RETRY_S, _FIRST_DELAY_S
        while self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            if not self._failing:
                self._failing = True
                reason = getattr(_FAILURE.seen, "text", "no reason given")
                log.warning("no traces reach %s, spans are kept for it: %s", self._url, reason)
            if time.monotonic() > end or self.closing.wait(delay_s):
                return SpanExportResult.FAILURE
            delay_s = min(delay_s * 2, _MAX_DELAY_S)
        if self._failing:
            self._failing = False
            log.warning("traces reach %s now", self._url)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._exporter.shutdown()


class OtlpProcessor(BatchSpanProcessor):
    """Exports spans in batches to the OTLP/gRPC collector at `url`.

    What it does not take is kept, up to MAX_QUEUED spans, and sent again. That it takes none is
    logged once. At shutdown a collector that takes none is no longer waited for.
    """

    def __init__(self, url: str) -> None:
        self._retrying = _RetryingExporter(url)
        super().__init__(self._retrying, MAX_QUEUED, schedule_delay_millis=_BATCH_DELAY_MS)

    def shutdown(self) -> None:
        self._retrying.closing.set()  # from now on nothing is sent twice
        super().shutdown()  # type: ignore[no-untyped-call]


class _LastFailure(logging.Filter):
    """Takes the exporter's own warnings, one for every attempt, out of the log.

    The last one of each thread is kept: a batch is exported, and its failure logged, on one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        self.seen.text = record.getMessage()
        return False


_FAILURE = _LastFailure()
# Before the exporter's own filter, which drops a warning like the last one, of another collector.
logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").filters.insert(0, _FAILURE)
