"""Traces: how they travel, what a span says of failure, and which are exported."""

from __future__ import annotations

import asyncio
import builtins

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode

from baton.errors import ConfigError, InvalidRequest, Overloaded
from baton.telemetry import propagation, tracing
from baton.telemetry.tracing import Telemetry
from tests.tracing import Traces


class World(Traces):
    """A process's tracing, and what it exported."""

    def start(self, name, parent=None):
        return self.tracer.start_span(name, context=parent or Context())

    def keep(self, span):
        self.telemetry.keep(tracing.trace_id_of(span))

    @property
    def names(self):
        return [span.name for span in self.spans]


@pytest.fixture
def recorded():
    """Where every span is exported."""
    return World(1.0)


def test_context_travels_in_metadata_also_to_spans_that_are_recorded_later(recorded):
    with tracing.span(recorded.tracer, "here", Context()) as here:
        metadata = propagation.inject(tracing.context_of(here))
    assert [key for key, _ in metadata] == ["traceparent"]
    there = propagation.extract(metadata)
    tracing.record(recorded.tracer, "chunk", there, 10**18, 10**18 + 5, {"n": 1})
    first, second = recorded.spans
    assert second.parent.span_id == first.context.span_id and second.parent.is_remote
    assert second.context.trace_id == first.context.trace_id
    assert (second.start_time, second.end_time) == (10**18, 10**18 + 5)
    malformed = ((("traceparent", "nonsense"),), (("traceparent-bin", b"\xff"),))
    (good,) = metadata
    zeros = (("traceparent", f"00-{'0' * 32}-{'ab' * 8}-01"),)
    for metadata in (None, (), (("other", "x"),), (good, good), zeros, *malformed):
        # A caller without a trace.
        with tracing.span(recorded.tracer, "work", propagation.extract(metadata)):
            pass
        assert recorded.spans[-1].parent is None


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
        with tracing.span(recorded.tracer, "work", Context(), attributes, kind) as span:
            assert trace.get_current_span() is not span  # in a generator it would leak
            if raised:
                raise raised
    except BaseException as error:
        assert error is raised
    (done,) = recorded.spans
    if raised and status is StatusCode.UNSET:
        attributes["baton.cancelled"] = True
    elif raised:
        attributes["error.type"] = type(raised).__name__
    assert (done.name, done.kind, dict(done.attributes or {})) == ("work", kind, attributes)
    assert (done.status.status_code, done.status.description) == (status, description)


def test_without_an_address_nothing_is_recorded_and_no_sdk_needed(monkeypatch):
    real = builtins.__import__

    def without_sdk(name, *args, **kwargs):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_sdk)
    quiet = tracing.setup("baton-test", None)
    with tracing.span(quiet.tracer, "work", Context()) as span:
        assert not span.is_recording()
        assert tracing.trace_id_of(span) == ""
        assert propagation.inject(tracing.context_of(span)) == ()
    quiet.close()
    with pytest.raises(ConfigError, match=r"--otlp http://h:1 needs .*'\.\[otel\]'"):
        tracing.setup("baton-test", "http://h:1")


@pytest.mark.parametrize(("ratio", "least", "most"), [(0, 0, 0), (0.25, 150, 350), (1, 1000, 1000)])
def test_a_share_is_exported_and_all_spans_of_a_trace_go_together(ratio, least, most):
    world = World(ratio, max_spans=10_000)
    for _ in range(1000):
        root = world.start("root")
        child = world.start("child", tracing.context_of(root))
        assert tracing.is_held(root) == tracing.is_held(child)
        child.end()
        root.end()
    assert least <= world.names.count("root") <= most  # 250 ± 7 standard deviations
    assert world.names.count("root") == world.names.count("child")
    assert world.held.num_held == 2000 - len(world.names)


@pytest.mark.parametrize("flags", ["00", "01"])
def test_a_caller_decides_for_its_own_trace(flags):
    world = World(1.0 if flags == "00" else 0.0)
    parent = propagation.extract([("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-{flags}")])
    world.start("x", parent).end()
    assert world.names == (["x"] if flags == "01" else [])
    carried = dict(propagation.inject(tracing.context_of(world.start("y", parent))))
    assert carried["traceparent"].endswith(flags), "workers decide alike"


def test_a_kept_trace_is_exported_whole_with_what_comes_later():
    world = World(0.0)
    root = world.start("root")
    within = tracing.context_of(root)
    with tracing.span(world.tracer, "early", within, {"a": 1}) as span:
        span.add_event("e")
    world.start("other").end()
    assert world.names == []
    world.keep(root)
    world.start("late", within).end()
    root.end()
    assert world.names == ["early", "late", "root"]
    early, _, last = world.spans
    assert early.parent.span_id == last.context.span_id
    assert early.context.trace_flags.sampled
    assert (dict(early.attributes), [event.name for event in early.events]) == ({"a": 1}, ["e"])
    assert early.start_time < early.end_time and early.resource is span.resource
    assert world.held.num_held == 1


def test_the_oldest_traces_are_given_up_first():
    world = World(0.0, max_spans=3)
    roots = [world.start(f"r{number}") for number in range(4)]
    for root in roots:
        root.end()
    assert world.held.num_held == 3
    for root in roots:
        world.keep(root)
    assert (world.names, world.held.num_held) == (["r1", "r2", "r3"], 0)


def test_what_is_no_trace_id_is_refused():
    world = World(0.0)
    for text in ("", "xyz", "AB" * 16, "ab" * 15):
        with pytest.raises(InvalidRequest):
            world.telemetry.keep(text)
    Telemetry(world.tracer).keep("ab" * 16)  # nothing is exported, nothing is held
