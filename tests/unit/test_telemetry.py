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


def test_a_span_has_what_it_was_given(recorded):
    attributes = {"baton.attempt": 2}
    with telemetry.span(recorded.tracer, "work", Context(), attributes, SpanKind.SERVER) as span:
        assert trace.get_current_span() is not span  # in a generator it would leak
    (done,) = recorded.spans
    assert (done.name, done.kind, dict(done.attributes or {})) == (
        "work",
        SpanKind.SERVER,
        attributes,
    )
    assert done.status.status_code is StatusCode.UNSET


def test_a_failure_is_marked(recorded):
    with pytest.raises(Overloaded), telemetry.span(recorded.tracer, "work", Context()):
        raise Overloaded("full")
    (done,) = recorded.spans
    assert done.status.status_code is StatusCode.ERROR
    assert done.status.description == "full"


def test_a_span_does_not_keep_a_whole_request(recorded):
    """Thousands of spans are held, and a caller can make an error as long as its request."""
    with pytest.raises(Overloaded), telemetry.span(recorded.tracer, "root", Context()):
        raise Overloaded("full " + "x" * 1_000_000)
    (root,) = recorded.spans
    assert root.status.description is not None and len(root.status.description) <= 1000


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
def test_giving_up_is_no_failure(recorded, error):
    with pytest.raises(error), telemetry.span(recorded.tracer, "work", Context()):
        raise error
    (done,) = recorded.spans
    assert done.status.status_code is StatusCode.UNSET
    assert (done.attributes or {})["baton.cancelled"] is True


def test_spans_can_be_recorded_from_measured_times(recorded):
    with telemetry.span(recorded.tracer, "parent", Context()) as parent:
        telemetry.record(
            recorded.tracer, "chunk", telemetry.context_of(parent), 10**18, 10**18 + 5, {"n": 1}
        )
    chunk, _ = recorded.spans
    assert (chunk.start_time, chunk.end_time) == (10**18, 10**18 + 5)
    assert chunk.parent is not None
    assert chunk.parent.span_id == parent.get_span_context().span_id


def test_without_an_address_nothing_is_recorded():
    quiet = telemetry.setup("baton-test", None)
    with telemetry.span(quiet.tracer, "work", Context()) as span:
        assert not span.is_recording()
        assert telemetry.trace_id_of(span) == ""
        assert telemetry.inject(telemetry.context_of(span)) == ()
    quiet.close()


def test_a_missing_sdk_is_a_config_error(monkeypatch):
    real = builtins.__import__

    def without_sdk(name, *args, **kwargs):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_sdk)
    with pytest.raises(ConfigError, match=r"--otlp http://h:1 needs .*baton-serving\[otel\]"):
        telemetry.setup("baton-test", "http://h:1")
    telemetry.setup("baton-test", None).close()  # no address, nothing is needed


async def test_spans_are_exported_over_otlp():
    """What is pending at the end is sent by `close`, with the service's name and attributes."""
    async with OtlpReceiver(SpanStore()) as receiver:
        exporting = telemetry.setup("baton-test", receiver.address, {"service.instance.id": "abc"})
        with telemetry.span(exporting.tracer, "work", Context(), {"baton.attempt": 1}) as span:
            trace_id = telemetry.trace_id_of(span)
        await asyncio.to_thread(exporting.close)
        (received,) = receiver.store.trace(trace_id)
    assert (received.service, received.name) == ("baton-test", "work")
