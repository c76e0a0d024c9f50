"""Which requests' traces are kept though they were not sampled, and who is told of it."""

import asyncio

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton import telemetry
from baton.errors import InternalError, InvalidRequest, Overloaded, Unavailable
from baton.slo import Slo
from baton.tail_sampling import HeadSampler, TailSampler
from baton.telemetry import Telemetry
from router.telemetry.stats import RouterStats
from router.telemetry.tail_sampling import SamplingPolicy

from .scripted_workers import TIMEOUT_S, request_state, seen


class World:
    """A router's tracing, without a router."""

    def __init__(self, fleet, ratio=0.0, slos=()):
        self.exporter = InMemorySpanExporter()
        held = TailSampler(SimpleSpanProcessor(self.exporter))
        provider = TracerProvider(sampler=HeadSampler(ratio), shutdown_on_exit=False)
        provider.add_span_processor(held)
        self.trace = Telemetry(provider.get_tracer("test"), provider, held)
        self.stats = RouterStats()
        self.policy = SamplingPolicy(self.trace, fleet, slow_s=1.0, slos=slos)
        self.stats.listeners = (self.policy,)

    def request(self, error=None, attempts=1, ttft_s=0.1, placed=True, workers=()):
        """A request's life; whether its span was exported, and its trace id."""
        try:
            with (
                self.stats.request() as one,
                telemetry.span(self.trace.tracer, "router.generate", Context()) as span,
            ):
                one.span, one.trace_id = span, telemetry.trace_id_of(span)
                one.held = telemetry.is_held(span)
                one.state = told = request_state()
                told.attempts, told.workers = attempts, set(workers)
                if placed:
                    told.placed_at = told.started
                    told.deliver([1])
                    told.first_at = told.started + ttft_s
                    self.stats.first_token(one)
                if error:
                    raise error
                one.finished = True
        except (Exception, asyncio.CancelledError) as raised:
            assert raised is error
        ids = {f"{span.context.trace_id:032x}" for span in self.exporter.get_finished_spans()}
        return one.trace_id in ids, one.trace_id


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, False),
        ({"attempts": 2}, True),
        ({"ttft_s": 1.5}, True),
        ({"error": InternalError("x")}, True),
        ({"error": InternalError("x"), "placed": False}, True),
        ({"error": Unavailable("x"), "placed": False}, True),
        ({"error": Overloaded("x", 1)}, True),  # after it had begun
        ({"error": Overloaded("x", 1), "placed": False}, False),
        ({"error": InvalidRequest("x", "y"), "placed": False}, False),
        ({"error": asyncio.CancelledError()}, False),
        ({"error": asyncio.CancelledError(), "ttft_s": 1.5}, True),
    ],
)
async def test_what_is_worth_keeping(cluster_of, fields, kept):
    cluster = await cluster_of()
    assert World(cluster.fleet).request(**fields)[0] is kept


async def test_who_kept_no_class_is_slow(cluster_of):
    cluster = await cluster_of()
    world = World(cluster.fleet, slos=(Slo("a", ttft_s=0.2), Slo("b", ttft_s=0.5)))
    assert not world.request(ttft_s=0.1)[0]
    assert not world.request(ttft_s=0.4)[0]
    assert world.request(ttft_s=0.6)[0]


async def test_the_workers_it_was_on_are_told(cluster_of):
    cluster = await cluster_of(prefill=2, decode=1)
    world = World(cluster.fleet)
    world.request(workers=("p0", "d0"))
    first = world.request(InternalError("x"), workers=("p0", "d0", "gone"))[1]
    second = world.request(InternalError("x"), workers=("d0",))[1]
    await asyncio.wait_for(world.policy.close(), TIMEOUT_S)
    told = {worker.record.incarnation: worker.kept for worker in cluster.workers}
    assert told == {"p0": [[first]], "p1": [], "d0": [[first, second]]}


async def test_what_comes_while_they_are_told_is_told_next(cluster_of):
    cluster = await cluster_of()
    decode = cluster.decodes[0]
    decode.keeps.clear()
    world = World(cluster.fleet)
    first = world.request(InternalError("x"), workers=("d0",))[1]
    await seen(lambda: decode.kept)
    second = world.request(InternalError("x"), workers=("d0",))[1]
    decode.keeps.set()
    await asyncio.wait_for(world.policy.close(), TIMEOUT_S)
    assert decode.kept == [[first], [second]]


async def test_nobody_is_told_of_what_is_exported_anyway(cluster_of):
    cluster = await cluster_of()
    world = World(cluster.fleet, ratio=1.0)
    assert world.request(InternalError("x"), workers=("d0",))[0]
    await world.policy.close()
    assert cluster.decodes[0].kept == []


async def test_a_worker_that_has_gone_changes_nothing(cluster_of):
    cluster = await cluster_of()
    await cluster.decodes[0].stop()
    world = World(cluster.fleet)
    assert world.request(InternalError("x"), workers=("d0",))[0]
    await asyncio.wait_for(world.policy.close(), TIMEOUT_S)
