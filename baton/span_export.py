"""Export of spans to an OTLP collector that may start late or be away for a while.

Needs the OpenTelemetry SDK.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

MAX_QUEUED = 8192  # spans, about 25 MB; the oldest go first
_BATCH_DELAY_MS = 200
_ATTEMPT_S = 5.0
_MAX_RETRY_S = 300.0  # of one batch: a collector may refuse it for good
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 5.0


def otlp_processor(url: str) -> BatchSpanProcessor:
    """Exports spans in batches to the OTLP/gRPC collector at `url`.

    What it does not take is kept, up to MAX_QUEUED spans, and sent again. That it takes none is
    logged once. At shutdown a collector that takes none is no longer waited for.
    """
    return _Processor(url)


class RetryingExporter(SpanExporter):
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

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


class _Processor(BatchSpanProcessor):
    def __init__(self, url: str) -> None:
        self._retrying = RetryingExporter(url)
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
