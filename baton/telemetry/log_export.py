"""Export of the access and the audit log to an OTLP collector. Needs the OpenTelemetry SDK."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExportResult
from opentelemetry.sdk.resources import Resource

from baton.log_format import one_line
from baton.telemetry.span_export import ATTEMPT_S, RetryingExporter

_LOGGERS = ("baton.access", "baton.audit")
_MAX_QUEUED = 8192  # lines; the oldest are dropped
_BATCH_DELAY_MS = 200


class _Processor(BatchLogRecordProcessor):
    """Queues lines while the collector is unreachable, which is not waited for at shutdown."""

    def __init__(self, url: str) -> None:
        exporter = OTLPLogExporter(
            endpoint=url, insecure=not url.startswith("https"), timeout=ATTEMPT_S
        )
        retrying: Any = RetryingExporter(exporter, LogRecordExportResult, "logs", url)
        super().__init__(retrying, _BATCH_DELAY_MS, max_queue_size=_MAX_QUEUED)
        self._closing = retrying.closing

    def shutdown(self) -> None:
        self._closing.set()  # no more retries
        super().shutdown()  # type: ignore[no-untyped-call]


class OtlpLogHandler(logging.Handler):
    """Exports the lines of these loggers, until it is closed: a line's fields are attributes."""

    def __init__(self, url: str, resource: Resource) -> None:
        super().__init__()
        self._provider = LoggerProvider(resource)
        self._provider.add_log_record_processor(_Processor(url))
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a line; its `trace_id` is the record's own."""
        found: Mapping[str, Any] = getattr(record, "fields", {})
        trace_id = str(found.get("trace_id") or "0")
        line = LogRecord(
            timestamp=int(record.created * 1e9),
            trace_id=int(trace_id, 16),
            severity_number=SeverityNumber.INFO,
            severity_text=record.levelname,
            body=one_line(record.getMessage()),
            attributes={
                name: one_line(value) if isinstance(value, str) else value
                for name, value in found.items()
                if name != "trace_id"
            },
        )
        self._provider.get_logger(record.name).emit(line)

    def close(self) -> None:
        """Exports pending lines, in bounded time."""
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self)
        self._provider.shutdown()
        super().close()
