"""Spans as messages of `TraceService` and back: values in, values out."""

from __future__ import annotations

from collections.abc import Iterable

from baton.local.span_store import AttributeValue, Span
from baton.local.trace_summary import Summary
from baton.v1 import trace_pb2


def span_message(span: Span) -> trace_pb2.Span:
    """A span as it travels."""
    return trace_pb2.Span(
        span_id=span.span_id,
        parent_id=span.parent_id,
        name=span.name,
        service=span.service,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        attributes={key: _value_message(value) for key, value in span.attributes.items()},
        is_entry=span.is_entry,
        error=span.error,
    )


def spans_of(trace_id: str, messages: Iterable[trace_pb2.Span]) -> list[Span]:
    """The spans of a trace that came as messages."""
    return [
        Span(
            trace_id=trace_id,
            span_id=message.span_id,
            parent_id=message.parent_id,
            name=message.name,
            service=message.service,
            start_ns=message.start_ns,
            end_ns=message.end_ns,
            attributes={key: _value(value) for key, value in message.attributes.items()},
            is_entry=message.is_entry,
            error=message.error if message.HasField("error") else None,
        )
        for message in messages
    ]


def summary_message(summary: Summary) -> trace_pb2.TraceSummary:
    """A summary as it travels."""
    return trace_pb2.TraceSummary(
        trace_id=summary.trace_id,
        start_ns=summary.start_ns,
        took_ms=summary.took_ms,
        spans=summary.spans,
        error=summary.error,
        input_tokens=summary.input_tokens,
        output_tokens=summary.output_tokens,
        attempts=summary.attempts,
    )


def summary_of(message: trace_pb2.TraceSummary) -> Summary:
    """A summary that came as a message."""
    return Summary(
        trace_id=message.trace_id,
        start_ns=message.start_ns,
        took_ms=message.took_ms,
        spans=message.spans,
        error=message.error if message.HasField("error") else None,
        input_tokens=message.input_tokens,
        output_tokens=message.output_tokens,
        attempts=message.attempts,
    )


def _value_message(value: AttributeValue) -> trace_pb2.AttributeValue:
    if isinstance(value, bool):  # which is an int, too
        return trace_pb2.AttributeValue(flag=value)
    if isinstance(value, int):
        return trace_pb2.AttributeValue(integer=value)
    if isinstance(value, float):
        return trace_pb2.AttributeValue(number=value)
    return trace_pb2.AttributeValue(text=value)


def _value(message: trace_pb2.AttributeValue) -> AttributeValue:
    kind = message.WhichOneof("value")
    value: AttributeValue = getattr(message, kind) if kind else ""
    return value
