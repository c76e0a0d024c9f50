"""What stats, metrics and tail sampling make of requests that pass as the frontend passes them."""

import asyncio
import re
import time
from types import SimpleNamespace

import pytest
from opentelemetry.context import Context

from baton.config.slo import Slo
from baton.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Stale,
    TransferFailed,
    Unauthenticated,
    Unavailable,
)
from baton.net.http_errors import ServerFull
from baton.telemetry import tracing
from baton.telemetry.metrics import instruments
from baton.telemetry.metrics.prometheus import Recorder
from baton.v1 import fleet_pb2
from baton.v1.route_pb2 import CANARY_STATE_RUNNING, Canary, ModelRoute, RouteTarget
from router.fleet.snapshot import Snapshot
from router.request import LimitReached
from router.telemetry.access_log import AccessLog
from router.telemetry.metrics import CAUSES, RouterMetrics
from router.telemetry.stats import RouterStats, Traffic
from router.telemetry.tail_sampling import SamplingPolicy
from tests.tracing import Traces

from .scripted_workers import request_state, seen
from .snapshots import decode_views

OF_MODEL = {"gen_ai.request.model": "tiny", "baton.model.version": "v1"}
MODEL = {name.replace(".", "_"): value for name, value in OF_MODEL.items()}
LABELS = {**MODEL, "gen_ai_provider_name": "baton", "gen_ai_operation_name": "chat"}
FAILOVER, REFUSAL, FAILURE = (
    fleet_pb2.EVENT_KIND_FAILOVER,
    fleet_pb2.EVENT_KIND_REFUSAL,
    fleet_pb2.EVENT_KIND_FAILURE,
)
SLOS = (Slo("fast", ttft_s=0.2, tpot_s=0.02), Slo("slow", ttft_s=5.0))
FULL, INVALID, LEFT = Overloaded("full", 1.0), InvalidRequest("bad", "x"), asyncio.CancelledError()


class World(Traces):
    """Stats with both listeners, without a router."""

    def __init__(self, slos=SLOS, fleet=None, ratio=0.0, clock=time.monotonic):
        super().__init__(ratio)
        self.recorder = Recorder("router", {})
        self.stats = RouterStats(clock)
        self.metrics = RouterMetrics(self.recorder, slos)
        self.fleet = fleet or SimpleNamespace(snapshot=lambda: Snapshot(()))
        self.fleet.on_ejected = self.metrics.ejected
        self.version = SimpleNamespace(labels=OF_MODEL, output_tokens=0)
        self.traffic = self.first_traffic = Traffic()
        self.sampler = SamplingPolicy(self.telemetry, slow_s=1.0, slos=slos)
        self.stats.listeners = (self.sampler, self.metrics)
        self.observe()

    def observe(self, queued=0, running=0):
        self.metrics.observe(
            SimpleNamespace(
                models=self,
                queued=queued,
                running=running,
                stats=self.stats,
                batches={"completed": 1},
                batch_lines={"failed": 2},
            )
        )

    @property
    def versions(self):
        return {("tiny", "v1"): self.version}

    @property
    def routes(self):
        targets = [RouteTarget(model="tiny", version=name, weight=1.0) for name in ("v1", "v2")]
        canary = Canary(target=targets[1], state=CANARY_STATE_RUNNING)
        changed_ms = time.time_ns() // 1_000_000 - 60_000
        route = ModelRoute(name="chat", targets=targets, canary=canary, changed_ms=changed_ms)
        return lambda: {"chat": route}

    @property
    def workers(self):
        return self.fleet.snapshot().workers

    def request(
        self, error=None, *, tokens=3, ttft_s=0.1, tpot_s=0.01, admitted=True, placed=True,
        finished=False, attempts=1, workers=(), predicted_ttft_s=0.0, cached=0,
        in_batch=False, **fields,
    ):  # fmt: skip
        """One request from arrival to end; its record."""
        try:
            with (
                self.stats.request() as record,
                tracing.span(self.tracer, "chat tiny", Context()) as span,
            ):
                record.span, record.trace_id = span, tracing.trace_id_of(span)
                record.held = tracing.is_held(span)
                record.operation, record.tenant, record.in_batch = "chat", "t", in_batch
                record.request_id = "r"
                record.asked_model = "tiny"
                record.labels, record.fleet = OF_MODEL, self.fleet
                record.traffic = self.traffic
                if admitted:
                    self._run(record, tokens if placed else 0, ttft_s, tpot_s, fields)
                    record.state.attempts, record.state.workers = attempts, set(workers)
                    record.state.predicted_ttft_s = predicted_ttft_s
                    record.state.cached_tokens = cached
                    if placed:
                        self.stats.first_token(record)
                record.finished = finished
                if error is not None:
                    raise error
        except (Exception, asyncio.CancelledError) as raised:
            assert raised is error
        return record

    def _run(self, record, tokens, ttft_s, tpot_s, fields):
        state = request_state(tenant="t", **fields)
        self.stats.admitted(record, state)
        if tokens:
            state.placed_at = state.started + 0.02
            for number in range(tokens):
                self.stats.delivered(record, 1, state.deliver([number]))
                self.version.output_tokens += 1
            state.first_at = state.started + ttft_s
            state.last_at = state.first_at + tpot_s * (tokens - 1)

    def exported(self, record):
        return record.trace_id in {f"{span.context.trace_id:032x}" for span in self.spans}

    def value(self, name, **labels):
        """A sample's value as Prometheus reads it; None where there is none."""
        for line in self.recorder.render("")[1].decode().splitlines():
            found, _, value = line.rpartition(" ")
            given = dict(re.findall(r'(\w+)="([^"]*)"', found))
            if found.partition("{")[0] == name and given == labels:
                return float(value)
        return None


@pytest.fixture
def world():
    return World()


# Stats.


def test_demand_is_what_was_let_in_and_what_was_turned_away_for_want_of_room(world):
    """Not what a tenant's own limits or its mistakes kept out."""
    world.request()
    errors = (FULL, Unavailable("no worker"), LimitReached("of the tenant"), INVALID)
    for error in errors:
        with pytest.raises(type(error)), world.stats.request() as record:
            record.tenant = "t"
            raise error
    world.request(FULL, placed=False)
    assert (world.stats.counts.admitted, world.stats.counts.turned_away) == (2, 2)


def test_a_versions_requests_are_counted_with_all_and_by_themselves(world):
    world.request(ttft_s=0.5)
    world.request(INVALID, admitted=False)
    world.traffic = Traffic()  # another version's
    world.request(ttft_s=0.1)
    world.request(FULL, admitted=False)
    with pytest.raises(Unauthenticated), world.stats.request():
        raise Unauthenticated("no key")  # of no version
    first, second = world.first_traffic.counts, world.traffic.counts
    assert (first.admitted, second.admitted, world.stats.counts.admitted) == (1, 1, 2)
    assert (first.turned_away, second.turned_away) == (0, 1)
    assert (dict(first.ended), dict(second.ended)) == (
        {"OK": 1, "INVALID_ARGUMENT": 1}, {"OK": 1, "RESOURCE_EXHAUSTED": 1},
    )  # fmt: skip
    assert sum(world.stats.counts.ended.values()) == 5
    assert world.traffic.latency(time.monotonic()).ttft_p95_ms == pytest.approx(100)
    assert world.stats.latency().ttft_p95_ms == pytest.approx(500)


def test_requests_are_counted_and_noted_by_how_they_ended(world):
    world.request()
    world.request(INVALID, admitted=False)
    world.request(FULL, placed=False)
    world.request(Unavailable("gone"))
    world.request(ValueError("a bug"))
    world.request(LEFT)
    world.request(LEFT, placed=False)
    world.request(LEFT, finished=True)  # its reader has all of it
    world.request(LEFT, timeout_s=0.0)  # cut at its deadline
    counts, events = world.stats.counts, world.stats.events
    assert dict(counts.ended) == {
        "OK": 2, "INVALID_ARGUMENT": 1, "RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1, "INTERNAL": 1,
        "CANCELLED": 2, "DEADLINE_EXCEEDED": 1,
    }  # fmt: skip
    assert (counts.refused, counts.prompt_tokens, counts.output_tokens) == (2, 8 * 3, 6 * 3)
    assert [(event.kind, event.text, event.request_id) for event in events] == [
        (REFUSAL, "INVALID_ARGUMENT: bad", "r"),
        (REFUSAL, "RESOURCE_EXHAUSTED: full", "r"),
        (FAILURE, "UNAVAILABLE: gone", "r"),
        (FAILURE, "INTERNAL: a bug", "r"),
        (FAILURE, "DEADLINE_EXCEEDED: the deadline passed", "r"),
    ]
    assert all(event.trace_id for event in events)


def test_events_are_few_and_short_and_repeated_ones_are_one(world):
    before_ms = time.time_ns() // 1_000_000
    for text in ("full", "full", "full", "other", "full"):
        world.request(Overloaded(text), admitted=False)
    events = world.stats.events
    assert [event.times for event in events] == [3, 1, 1]
    assert before_ms <= events[0].time_ms <= events[-1].time_ms <= time.time_ns() // 1_000_000
    for number in range(100):
        world.request(Overloaded(f"{number} " + "x" * 5000), admitted=False)
    assert len(events) == 32 and events[-1].text.startswith("RESOURCE_EXHAUSTED: 99")
    assert max(len(event.text) for event in events) == 300


def test_failovers_name_the_workers_they_left(world):
    stats, state = world.stats, request_state()
    state.route.prefill, state.route.decode = "p0", "d0"
    stats.failed_over(state, "trace", TransferFailed("lost"))
    state.route.prefill = ""
    for error in (Stale("old"), Unavailable("gone"), Unavailable("gone")):
        stats.failed_over(state, "trace", error)
    assert stats.counts.failovers == 4
    texts = [(event.kind, event.text, event.times) for event in stats.events]
    assert texts == [
        (FAILOVER, "p0 and d0: lost", 1),
        (FAILOVER, "d0: old", 1),
        (FAILOVER, "d0: gone", 2),
    ]
    assert world.value("baton_failovers_total", reason="Stale") == 1
    assert world.value("baton_failovers_total", reason="Unavailable") == 2


def test_late_requests_and_percentiles_of_the_last_minute(clock):
    world = World(clock=clock)
    for fields in ({}, {"ttft_target_s": 0.6}, {"ttft_target_s": 0.4}):
        world.request(ttft_s=0.5, **fields)
    assert world.stats.counts.late == 1
    clock.now += 61
    for milliseconds in range(1, 101):
        world.request(ttft_s=milliseconds / 1e3, tpot_s=milliseconds / 1e4)
    latency = world.stats.latency()
    assert latency.requests == 100
    assert (latency.ttft_p50_ms, latency.ttft_p95_ms) == pytest.approx((50, 95))
    assert (latency.tpot_p50_ms, latency.tpot_p95_ms) == pytest.approx((5.0, 9.5))
    clock.now += 61
    assert world.stats.latency() == fleet_pb2.Latency()


# Metrics.


def test_a_request_that_ends_well_is_measured(world):
    world.stats.on_placed(0.001)
    world.request(prompt=(1, 2, 3, 4), predicted_ttft_s=0.3, cached=2)
    value = world.value
    assert value("baton_placement_duration_seconds_count") == 1
    assert value("baton_requests_ended_total", status="OK", tenant="t") == 1
    assert value("baton_requests_served_total", way="cached") == 1
    assert value("gen_ai_server_time_to_first_token_seconds_sum", **LABELS) == pytest.approx(0.1)
    tpot = value("gen_ai_server_time_per_output_token_seconds_sum", **LABELS)
    assert tpot == pytest.approx(0.01)
    assert value("gen_ai_server_request_duration_seconds_count", **LABELS, error_type="") == 1
    usage = "gen_ai_client_token_usage_sum"
    assert value(usage, **LABELS, gen_ai_token_type="input") == 4
    assert value(usage, **LABELS, gen_ai_token_type="output") == 3
    assert value("baton_request_queue_time_seconds_sum") == pytest.approx(0.02)
    assert value("baton_request_inter_token_latency_seconds_count") == 2
    kinds = ("input", "cached", "output")
    tokens = [value(f"baton_tokens_{what}_total", **MODEL) for what in kinds]
    assert tokens == [4, 2, 3]
    assert value("baton_request_ttft_prediction_ratio_sum") == pytest.approx(3.0)
    for slo in ("fast", "slow"):
        assert value("baton_slo_requests_total", slo=slo, met="true") == 1
        assert value("baton_slo_requests_total", slo=slo, met="false") == 0
    world.request(tokens=1)  # has no time per token, and nothing was predicted of it
    assert value("gen_ai_server_time_per_output_token_seconds_count", **LABELS) == 1
    assert value("baton_request_ttft_prediction_ratio_count") == 1


def test_times_are_those_of_requests_that_someone_waits_for(world):
    """A batch's lines wait for room by design: alerts and the planner go by the others' times."""
    world.request(predicted_ttft_s=0.3)
    world.request(ttft_s=30.0, tpot_s=1.0, ttft_target_s=0.1, in_batch=True)
    world.request(InternalError("x"), in_batch=True)
    latency = world.stats.latency()
    assert (latency.requests, latency.ttft_p95_ms) == (1, pytest.approx(100))
    assert latency == world.traffic.latency(time.monotonic())
    assert (world.stats.counts.late, sum(world.stats.counts.served.values())) == (1, 2)
    counts = {
        "baton_request_queue_time_seconds_count": ({}, 1),
        "baton_request_inter_token_latency_seconds_count": ({}, 2),
        "gen_ai_server_time_to_first_token_seconds_count": (LABELS, 1),
        "gen_ai_server_time_per_output_token_seconds_count": (LABELS, 1),
        "gen_ai_server_request_duration_seconds_count": ({**LABELS, "error_type": ""}, 1),
        "gen_ai_client_token_usage_count": ({**LABELS, "gen_ai_token_type": "input"}, 2),
    }
    for name, (labels, count) in counts.items():
        assert world.value(name, **labels) == count, name


def test_a_prompt_of_several_choices_counts_once(world):
    for number in range(4):
        world.request(cached=2, predicted_ttft_s=0.3, is_further_choice=number > 0)
    tokens = [world.value(f"baton_tokens_{what}_total", **MODEL) for what in ("input", "cached")]
    assert tokens == [3, 2]
    for kind, count, total in (("input", 1, 3), ("output", 4, 12)):
        labels = {**LABELS, "gen_ai_token_type": kind}
        assert world.value("gen_ai_client_token_usage_count", **labels) == count
        assert world.value("gen_ai_client_token_usage_sum", **labels) == total
    assert world.value("baton_request_ttft_prediction_ratio_count") == 1, "of what began at once"


def test_all_that_a_router_lists_is_measured(world):
    world.request(predicted_ttft_s=0.1)
    world.request(InternalError("x"))
    world.metrics.canary_decided("chat", "stepped")
    page = world.recorder.render("")[1].decode()
    for one in instruments.for_process("router").values():
        assert any(line.startswith(one.samples) for line in page.splitlines()), one.name


def test_goodput_is_counted_by_class_and_not_of_what_callers_did(world):
    world.request(ttft_s=0.3)
    world.request(tpot_s=0.03)
    world.request(InternalError("broken"))
    world.request(FULL, placed=False, cached=2)
    world.request(INVALID, placed=False)
    world.request(LEFT)
    world.request(ttft_s=0.3, in_batch=True)
    world.request(FULL, admitted=False, in_batch=True)
    counts = {
        (slo, met): world.value("baton_slo_requests_total", slo=slo, met=met)
        for slo in ("fast", "slow")
        for met in ("true", "false")
    }
    assert counts == {
        ("fast", "true"): 0, ("fast", "false"): 4, ("slow", "true"): 2, ("slow", "false"): 2
    }  # fmt: skip
    assert world.value("baton_requests_ended_total", status="CANCELLED", tenant="t") == 1
    kinds = {"": 2, "InternalError": 1, "Overloaded": 1, "InvalidRequest": 1, "CANCELLED": 1}
    for kind, count in kinds.items():
        name = "gen_ai_server_request_duration_seconds_count"
        assert world.value(name, **LABELS, error_type=kind) == count
    assert world.value("baton_tokens_input_total", **MODEL) == 5 * 3, "of what was placed"
    assert world.value("baton_requests_refused_total", cause="tenant_limit") == 0
    assert world.value("baton_batch_requests_total", result="failed") == 2
    assert world.value("baton_tokens_cached_total", **MODEL) == 0


@pytest.mark.parametrize(
    ("error", "step", "cause"),
    [
        (Unavailable("draining"), "arrived", "draining"),
        (FULL, "arrived", "queue_full"),
        (Unauthenticated("no key"), "arrived", "tenant_unknown"),
        (FULL, "known", "queue_full"),
        (LimitReached("full"), "known", "tenant_limit"),
        (INVALID, "known", "invalid"),
        (Unavailable("no worker"), "known", "no_worker"),
        (FULL, "admitted", "too_late"),
        (FULL, "queued", "queue_full"),
        (DeadlineExceeded("late"), "queued", "deadline"),
        (RuntimeError("a bug"), "known", "internal"),
        (ServerFull("too many connections"), "arrived", "overloaded"),
    ],
)
def test_refusals_are_counted_by_cause(world, error, step, cause):
    with pytest.raises(type(error)), world.stats.request() as record:
        if step != "arrived":
            record.tenant, record.labels = "t", OF_MODEL
        if step in ("admitted", "queued"):
            record.state = request_state()
            record.state.attempts = int(step == "queued")
        raise error
    counts = {one: world.value("baton_requests_refused_total", cause=one) for one in CAUSES}
    assert counts == {one: int(one == cause) for one in CAUSES}


async def test_fleet_queue_and_ejections_are_read_at_each_look(cluster_of):
    cluster = await cluster_of(prefill=2, decode=2)
    world = World(fleet=cluster.fleet)
    world.observe(queued=3, running=5)
    assert world.value("baton_requests_running") == 5
    assert world.value("baton_requests_queued") == 3
    assert world.value("baton_workers", **MODEL, role="prefill", state="READY") == 2
    for _ in range(3):
        cluster.fleet.breakers["p0"].failed("broken")
        cluster.fleet.breakers["p1", "d1"].failed("broken")
    cluster.fleet._tick()
    cluster.fleet._tick()
    assert world.value("baton_breaker_ejections_total", kind="worker") == 1
    assert world.value("baton_breaker_ejections_total", kind="pair") == 1
    for decode in cluster.decodes:
        await cluster.leave(decode)
    await cluster.until(lambda s: not decode_views(s))
    assert world.value("baton_workers", **MODEL, role="decode", state="READY") == 0


# Tail sampling.


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, False),
        ({"attempts": 2}, True),
        ({"ttft_s": 1.5}, True),
        ({"ttft_s": 1.5, "in_batch": True}, False),
        ({"error": InternalError("x")}, True),
        ({"error": InternalError("x"), "placed": False}, True),
        ({"error": Unavailable("x"), "placed": False}, True),
        ({"error": FULL}, True),  # after it had begun
        ({"error": FULL, "placed": False}, False),
        ({"error": INVALID, "placed": False}, False),
        ({"error": LEFT}, False),
        ({"error": LEFT, "ttft_s": 1.5}, True),
        # With SLOs, what has met none of them is slow.
        ({"slos": SLOS, "ttft_s": 0.6}, False),
        ({"slos": SLOS[:1], "ttft_s": 0.1}, False),
        ({"slos": SLOS[:1], "ttft_s": 0.6}, True),
        ({"slos": SLOS[:1], "ttft_s": 0.6, "in_batch": True}, False),
    ],
)
async def test_traces_of_failed_and_slow_requests_are_kept(fields, kept):
    world = World(slos=fields.pop("slos", ()))
    assert world.exported(world.request(**fields)) is kept


async def test_the_workers_of_a_kept_trace_are_told(cluster_of):
    """But not of what is exported anyway; and none is missed if it is dead."""
    cluster = await cluster_of(prefill=2, decode=1)
    world, failed = World(fleet=cluster.fleet), InternalError("x")
    world.request(workers=("p0", "d0"))
    first = world.request(failed, workers=("p0", "d0", "gone")).trace_id
    second = world.request(failed, workers=("d0",)).trace_id
    await seen(lambda: len(cluster.decodes[0].kept) == 2 and cluster.prefills[0].kept)
    everything = World(fleet=cluster.fleet, ratio=1.0)
    assert everything.exported(everything.request(failed, workers=("d0",)))
    await cluster.decodes[0].stop()
    assert world.exported(world.request(failed, workers=("d0",)))
    kept = {worker.record.incarnation: worker.kept for worker in cluster.workers}
    assert kept == {"p0": [first], "p1": [], "d0": [first, second]}


def test_the_access_log_has_a_line_for_each_request_or_for_a_sample(caplog):
    world = World()
    world.stats.listeners = (AccessLog(1.0),)
    with caplog.at_level("INFO", "baton.access"):
        world.request(tokens=3, ttft_s=0.1, tpot_s=0.01, cached=2, model="tiny@v1")
        world.request(FULL, admitted=False)
        world.stats.listeners = (AccessLog(0.0),)
        world.request()
    served, refused = [one.fields for one in caplog.records if one.name == "baton.access"]
    known = {"tenant": "t", "model": "tiny@v1", "operation": "chat", "batch": False}
    numbers = {"cached_tokens": 2, "output_tokens": 3, "ttft_ms": 100.0, "tpot_ms": 10.0}
    assert served.items() >= {**known, **numbers, "status": "OK", "queue_ms": 20.0}.items()
    assert served["request_id"] and served["trace_id"] and served["prompt_tokens"]
    assert refused == {
        **known, "status": "RESOURCE_EXHAUSTED", "error": "Overloaded",
        "trace_id": refused["trace_id"], "request_id": "r",
    }  # fmt: skip
