"""Tracing: one trace for each request, across all processes (see `propagation`).

Only the OpenTelemetry API is needed; without its SDK, or without an OTLP address, every span is a
no-op. Spans of work done on other threads are recorded afterwards from measured times.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
)

from baton.errors import ConfigError, InvalidRequest
from baton.v1 import inference_pb2

_TRACE_ID = re.compile("[0-9a-f]{32}")
for _name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # they log callers' mistakes
_NO_SPAN = contextlib.nullcontext(INVALID_SPAN)
PROVIDER = "baton"  # `gen_ai.provider.name` of spans and metrics
_MAX_STATUS_CHARS = 1000  # thousands of spans are held, and an error may quote a request
Attributes = Mapping[str, str | int | float | bool]


def operation_of(request: inference_pb2.GenerateRequest) -> str:
    """Name of a request's operation in OpenTelemetry's conventions for generative AI."""
    if request.sampling.embedding:
        return "embeddings"
    return "chat" if request.HasField("chat") else "text_completion"


@dataclass
class Telemetry:
    """A process's tracer and, if spans or log lines are exported, what exports them."""

    tracer: Tracer
    _provider: Any = None
    _tail: Any = None
    _logs: Any = None

    def keep(self, trace_id: str) -> None:
        """Exports this process's spans of an unsampled trace, also later ones.

        Raises InvalidRequest unless the id has 32 hexadecimal digits.
        """
        if not _TRACE_ID.fullmatch(trace_id):
            raise InvalidRequest(f"{trace_id!r} is no trace id", "trace_ids")
        if self._tail is not None:
            self._tail.keep(int(trace_id, 16))

    def close(self) -> None:
        """Exports pending spans and log lines, in bounded time."""
        if self._provider is not None:
            self._provider.shutdown()
        if self._logs is not None:
            self._logs.close()


def setup(
    service: str,
    otlp: str | None,
    attributes: Attributes | None = None,
    sample: float = 1.0,
    logs: str | None = None,
) -> Telemetry:
    """The tracer of `service`, which exports to the OTLP/gRPC addresses `otlp`, if given.

    sample: share of traces that begin here to export; other traces have their callers' sampling
    flag. Unsampled spans are held for a while: see `Telemetry.keep`. logs: address to which the
    access and the audit log are exported. Raises ConfigError if the SDK is needed and not
    installed.
    """
    if not (otlp or logs):
        return Telemetry(trace.NoOpTracer())
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider

        from baton.telemetry.log_export import OtlpLogHandler
        from baton.telemetry.span_export import HeadSampler, OtlpProcessor, TailSampler
    except ImportError as error:
        option = f"--otlp {otlp}" if otlp else f"--otlp-logs {logs}"
        raise ConfigError(
            f"{option} needs the OpenTelemetry SDK: pip install '.[otel]' in Baton's source tree"
        ) from error
    resource = Resource.create({"service.name": service, **(attributes or {})})
    handler = OtlpLogHandler(logs, resource) if logs else None
    if not otlp:
        return Telemetry(trace.NoOpTracer(), _logs=handler)
    provider = TracerProvider(resource=resource, sampler=HeadSampler(sample))
    exporting = SynchronousMultiSpanProcessor()  # type: ignore[no-untyped-call]
    for url in otlp.split(","):
        exporting.add_span_processor(OtlpProcessor(url.strip()))
    tail = TailSampler(exporting)
    provider.add_span_processor(tail)
    return Telemetry(provider.get_tracer("baton"), provider, tail, handler)


def context_of(span: Span) -> Context:
    """A context in which `span` is the parent; an empty one if it is not recorded."""
    if span is INVALID_SPAN:
        return Context()
    return trace.set_span_in_context(span)


def is_held(span: Span) -> bool:
    """Whether a span is held, to be exported only if its trace is kept."""
    return span.is_recording() and not span.get_span_context().trace_flags.sampled


def example(span: Span, kept: bool = False) -> Context | None:
    """A context for exemplars of measurements, if the trace is exported."""
    context = span.get_span_context()
    if not (context.is_valid and (kept or context.trace_flags.sampled)):
        return None
    if not context.trace_flags.sampled:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        context = SpanContext(context.trace_id, context.span_id, False, sampled)
    # Not the span itself, which the context would keep alive.
    return trace.set_span_in_context(NonRecordingSpan(context), Context())


def trace_id_of(span: Span) -> str:
    """The span's trace id as 32 hexadecimal digits; empty if it is not recorded."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def trace_id_in(context: Context | None) -> str:
    """The trace id of a context; empty if there is none."""
    return trace_id_of(trace.get_current_span(context)) if context is not None else ""


def span(
    tracer: Tracer,
    name: str,
    parent: Context,
    attributes: Attributes | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> AbstractContextManager[Span]:
    """A span around the block, which marks failure and cancellation.

    It does not become the current span, which in a generator would leak to the consumer. If nothing
    is recorded, it is the caller's span, so that traces pass through.
    """
    if isinstance(tracer, trace.NoOpTracer):
        return contextlib.nullcontext(trace.get_current_span(parent)) if parent else _NO_SPAN
    return _recorded(tracer, name, parent, attributes, kind)


@contextlib.contextmanager
def _recorded(
    tracer: Tracer, name: str, parent: Context, attributes: Attributes | None, kind: SpanKind
) -> Iterator[Span]:
    entered = tracer.start_span(name, context=parent, attributes=dict(attributes or {}), kind=kind)
    try:
        yield entered
    except BaseException as error:
        _ended_by(entered, error)
        raise
    finally:
        entered.end()


def _ended_by(span: Span, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        span.set_attribute("baton.cancelled", True)
    elif isinstance(error, Exception):
        failed(span, error)


def failed(span: Span, error: Exception) -> None:
    """Marks a span as failed, with the kind of error."""
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(StatusCode.ERROR, str(error)[:_MAX_STATUS_CHARS])


def record(
    tracer: Tracer,
    name: str,
    parent: Context,
    start_ns: int,
    end_ns: int | None = None,
    attributes: Attributes | None = None,
    error: BaseException | None = None,
) -> None:
    """Records a past span from its times in Unix nanoseconds (`time.time_ns`).

    `error`: what ended it, if it failed or was cancelled.
    """
    if isinstance(tracer, trace.NoOpTracer):
        return
    known = dict(attributes or {})
    span = tracer.start_span(name, parent, attributes=known, start_time=start_ns)
    if error is not None:
        _ended_by(span, error)
    span.end(end_ns if end_ns is not None else time.time_ns())
