"""Spans that were not sampled: held in bounds, and exported when their trace is kept."""

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton import telemetry
from baton.errors import InvalidRequest
from baton.tail_sampling import HeadSampler, TailSampler
from baton.telemetry import Telemetry


class World:
    """A process's tracing, and what it exported."""

    def __init__(self, ratio, max_spans=100):
        self.exporter = InMemorySpanExporter()
        self.held = TailSampler(SimpleSpanProcessor(self.exporter), max_spans)
        provider = TracerProvider(sampler=HeadSampler(ratio), shutdown_on_exit=False)
        provider.add_span_processor(self.held)
        self.telemetry = Telemetry(provider.get_tracer("test"), provider, self.held)

    def start(self, name, parent=None):
        return self.telemetry.tracer.start_span(name, context=parent or Context())

    def keep(self, span):
        self.telemetry.keep(telemetry.trace_id_of(span))

    @property
    def names(self):
        return [span.name for span in self.exporter.get_finished_spans()]


@pytest.mark.parametrize(("ratio", "least", "most"), [(0, 0, 0), (0.25, 150, 350), (1, 1000, 1000)])
def test_a_share_is_exported_and_all_spans_of_a_trace_go_together(ratio, least, most):
    world = World(ratio, max_spans=10_000)
    for _ in range(1000):
        root = world.start("root")
        child = world.start("child", telemetry.context_of(root))
        assert telemetry.is_held(root) == telemetry.is_held(child)
        child.end()
        root.end()
    assert least <= world.names.count("root") <= most  # 250 ± 7 standard deviations
    assert world.names.count("root") == world.names.count("child")
    assert world.held.num_held == 2000 - len(world.names)


@pytest.mark.parametrize("flags", ["00", "01"])
def test_a_caller_decides_for_its_own_trace(flags):
    world = World(1.0 if flags == "00" else 0.0)
    parent = telemetry.extract([("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-{flags}")])
    world.start("x", parent).end()
    assert world.names == (["x"] if flags == "01" else [])
    carried = dict(telemetry.inject(telemetry.context_of(world.start("y", parent))))
    assert carried["traceparent"].endswith(flags), "workers decide alike"


def test_a_kept_trace_is_exported_whole_with_what_comes_later():
    world = World(0.0)
    root = world.start("root")
    within = telemetry.context_of(root)
    with telemetry.span(world.telemetry.tracer, "early", within, {"a": 1}) as span:
        span.add_event("e")
    world.start("other").end()
    assert world.names == []
    world.keep(root)
    world.start("late", within).end()
    root.end()
    assert world.names == ["early", "late", "root"]
    early, _, last = world.exporter.get_finished_spans()
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
    Telemetry(world.telemetry.tracer).keep("ab" * 16)  # nothing is exported, nothing is held
