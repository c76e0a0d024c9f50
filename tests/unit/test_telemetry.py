"""Traces: how they travel, what a span says of failure, and that no SDK is needed."""

from __future__ import annotations

import asyncio
import builtins

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, Tracer

from baton import telemetry
from baton.errors import ConfigError, Overloaded
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import SpanStore


class Recorded:
    """A tracer whose finished spans can be looked at."""

    def __init__(self):
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = provider.get_tracer("test")

    @property
    def spans(self):
        return self._exporter.get_finished_spans()


@pytest.fixture
def recorded():
    return Recorded()


def test_context_travels_in_metadata(recorded):
    with telemetry.span(recorded.tracer, "here", Context()) as here:
        metadata = telemetry.inject(telemetry.context_of(here))
    assert [key for key, _ in metadata] == ["traceparent"]
    with telemetry.span(recorded.tracer, "there", telemetry.extract(metadata)) as there:
        pass
    assert telemetry.trace_id_of(there) == telemetry.trace_id_of(here)
    first, second = recorded.spans
    assert second.parent is not None and second.parent.span_id == first.context.span_id
    assert second.parent.is_remote


@pytest.mark.parametrize(
    "metadata",
    [None, (), (("other", "x"),), (("traceparent", "nonsense"),), (("traceparent-bin", b"\xff"),)],
)
def test_callers_without_a_trace_begin_one(recorded, metadata):
    with telemetry.span(recorded.tracer, "work", telemetry.extract(metadata)):
        pass
    (span,) = recorded.spans
    assert span.parent is None


@pytest.mark.parametrize(
    ("raised", "status", "description"),
    [
        (None, StatusCode.UNSET, None),
        (Overloaded("full"), StatusCode.ERROR, "full"),
        # Thousands of spans are held, and a caller can make an error as long as its request.
        (Overloaded("x" * 1_000_000), StatusCode.ERROR, "x" * 1000),
        (asyncio.CancelledError(), StatusCode.UNSET, None),  # giving up is no failure
        (GeneratorExit(), StatusCode.UNSET, None),
    ],
)
def test_a_span_says_how_its_work_ended(recorded, raised, status, description):
    attributes = {"baton.attempt": 2}
    kind = SpanKind.SERVER
    try:
        with telemetry.span(recorded.tracer, "work", Context(), attributes, kind) as span:
            assert trace.get_current_span() is not span  # in a generator it would leak
            if raised:
                raise raised
    except BaseException as error:
        assert error is raised
    (done,) = recorded.spans
    if raised and status is StatusCode.UNSET:
        attributes["baton.cancelled"] = True
    assert (done.name, done.kind, dict(done.attributes or {})) == ("work", kind, attributes)
    assert (done.status.status_code, done.status.description) == (status, description)


def test_spans_can_be_recorded_from_measured_times(recorded):
    with telemetry.span(recorded.tracer, "parent", Context()) as parent:
        within = telemetry.context_of(parent)
        telemetry.record(recorded.tracer, "chunk", within, 10**18, 10**18 + 5, {"n": 1})
    chunk, _ = recorded.spans
    assert (chunk.start_time, chunk.end_time) == (10**18, 10**18 + 5)
    assert chunk.parent is not None
    assert chunk.parent.span_id == parent.get_span_context().span_id


def test_without_an_address_nothing_is_recorded_and_no_sdk_needed(monkeypatch):
    real = builtins.__import__

    def without_sdk(name, *args, **kwargs):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_sdk)
    quiet = telemetry.setup("baton-test", None)
    with telemetry.span(quiet.tracer, "work", Context()) as span:
        assert not span.is_recording()
        assert telemetry.trace_id_of(span) == ""
        assert telemetry.inject(telemetry.context_of(span)) == ()
    quiet.close()
    with pytest.raises(ConfigError, match=r"--otlp http://h:1 needs .*baton-serving\[otel\]"):
        telemetry.setup("baton-test", "http://h:1")


async def test_spans_are_exported_over_otlp():
    """What is pending at the end is sent by `close`, with the service's name and attributes."""
    async with OtlpReceiver(SpanStore()) as receiver:
        exporting = telemetry.setup("baton-test", receiver.address, {"service.instance.id": "abc"})
        with telemetry.span(exporting.tracer, "work", Context(), {"baton.attempt": 1}) as span:
            trace_id = telemetry.trace_id_of(span)
        await asyncio.to_thread(exporting.close)
        (received,) = receiver.store.trace(trace_id)
    assert (received.service, received.name) == ("baton-test", "work")
