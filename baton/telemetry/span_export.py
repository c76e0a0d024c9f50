"""Head and tail sampling of spans, and their export. Needs the OpenTelemetry SDK.

Every process records all spans, exports those of sampled traces and keeps the others in bounded
memory until the end of their request: those of failed and slow ones are exported (tail sampling).
A collector may start late or be unreachable for a while.
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

MAX_SPANS = 16_384  # spans held, about 50 MB: of the last 800 requests at 20 spans each
MAX_KEPT = 4096  # kept traces whose later spans are exported, too
MAX_QUEUED = 8192  # spans to export, about 25 MB; the oldest are dropped
_BATCH_DELAY_MS = 200
ATTEMPT_S = 5.0
_MAX_RETRY_S = 300.0  # for a batch: a collector may refuse it permanently
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 5.0
_COPIED = (
    *("name", "parent", "resource", "attributes", "events", "links", "kind", "status"),
    *("start_time", "end_time", "instrumentation_scope"),
)


class HeadSampler(sampling.ParentBased):
    """Samples as the parent did; of traces that begin here, a share by their ids.

    Unsampled spans are recorded, too.
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
    """Passes sampled spans to `exporting` at once, the others when their trace is kept."""

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
        """Exports the held and all later spans of a trace."""
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


class RetryingExporter(SpanExporter):
    """Retries each batch until the collector accepts it, for at most `_MAX_RETRY_S`."""

    def __init__(self, exporter: Any, results: Any, what: str, url: str) -> None:
        """`results`: the exporter's enumeration of them; `what`: it exports, in log lines."""
        self._exporter, self._results, self._what, self._url = exporter, results, what, url
        self.closing = threading.Event()
        self._failing = False

    def export(self, batch: Sequence[Any]) -> Any:
        """Blocks until the batch is sent or given up, or `closing` is set."""
        if self._failing and self.closing.is_set():
            return self._results.FAILURE
        end, delay_s = time.monotonic() + _MAX_RETRY_S, _FIRST_DELAY_S
        what, url = self._what, self._url
        while self._exporter.export(batch) is not self._results.SUCCESS:
            if not self._failing:
                self._failing = True
                reason = getattr(_FAILURE.seen, "text", "no reason given")
                log.warning("cannot export %s to %s, they are queued: %s", what, url, reason)
            if time.monotonic() > end or self.closing.wait(delay_s):
                return self._results.FAILURE
            delay_s = min(delay_s * 2, _MAX_DELAY_S)
        if self._failing:
            self._failing = False
            log.warning("%s are exported to %s again", what, url)
        return self._results.SUCCESS

    def shutdown(self) -> None:
        self._exporter.shutdown()


class OtlpProcessor(BatchSpanProcessor):
    """Exports spans in batches to the OTLP/gRPC collector at `url`.

    Batches that fail are queued, up to MAX_QUEUED spans, and retried; an outage is logged once. At
    shutdown an unreachable collector is not waited for.
    """

    def __init__(self, url: str) -> None:
        insecure = not url.startswith("https")
        exporter = OTLPSpanExporter(endpoint=url, insecure=insecure, timeout=ATTEMPT_S)
        self._retrying = RetryingExporter(exporter, SpanExportResult, "traces", url)
        super().__init__(self._retrying, MAX_QUEUED, schedule_delay_millis=_BATCH_DELAY_MS)

    def shutdown(self) -> None:
        self._retrying.closing.set()  # no more retries
        super().shutdown()  # type: ignore[no-untyped-call]


class _LastFailure(logging.Filter):
    """Removes the exporter's warnings, one for every attempt, from the log.

    Keeps the last one of each thread: a batch is exported, and its failure logged, on one thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        self.seen.text = record.getMessage()
        return False


_FAILURE = _LastFailure()
# Before the exporter's filter, which drops repeated warnings even if they are of other collectors.
logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").filters.insert(0, _FAILURE)
