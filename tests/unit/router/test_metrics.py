"""What a router's metrics say of requests, told to them as the service tells them."""

import asyncio
import re
from types import SimpleNamespace

import pytest

from baton.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Stale,
    Unauthenticated,
    Unavailable,
)
from baton.metrics import table
from baton.metrics.recorder import Recorder
from baton.slo import Slo
from router.telemetry.metrics import CAUSES, RouterMetrics
from router.telemetry.stats import RouterStats

from .scripted_workers import request_state

LABELS = {"gen_ai_request_model": "tiny", "gen_ai_operation_name": "chat"}


class World:
    """A stats with metrics, and what Prometheus would read."""

    def __init__(self, *slos):
        self.recorder = Recorder("router", {})
        self.stats = RouterStats()
        self.metrics = RouterMetrics(self.recorder, "tiny", slos)
        self.stats.listeners = (self.metrics,)

    def request(
        self,
        error=None,
        tokens=3,
        ttft_s=0.1,
        tpot_s=0.01,
        placed=True,
        predicted_ttft_s=0.0,
        **fields,
    ):
        """One request from service to end."""
        try:
            with self.stats.request() as record:
                record.operation, record.tenant = "chat", "t"
                state = request_state(tenant="t", **fields)
                state.predicted_ttft_s = predicted_ttft_s
                self.stats.admitted(record, state)
                state.attempts = 1
                if placed:
                    state.placed_at = state.started + 0.02
                    for number in range(tokens):
                        gap_s = state.deliver([number])
                        self.stats.delivered(1, gap_s)
                    state.first_at = state.started + ttft_s
                    state.last_at = state.first_at + tpot_s * (tokens - 1)
                    self.stats.first_token(record)
                if error is not None:
                    raise error
                record.finished = True
        except (Exception, asyncio.CancelledError) as raised:
            assert raised is error

    def value(self, name, **labels):
        """A sample's value; None where there is none."""
        for line in self.recorder.render("")[1].decode().splitlines():
            found, _, value = line.rpartition(" ")
            told = dict(re.findall(r'(\w+)="([^"]*)"', found))
            if found.partition("{")[0] == name and told == labels:
                return float(value)
        return None


@pytest.fixture
def world():
    return World(Slo("fast", ttft_s=0.2, tpot_s=0.02), Slo("slow", ttft_s=5.0))


def test_a_request_that_ends_well(world):
    world.request(prompt=(1, 2, 3, 4), cache_salt="x")
    value = world.value
    assert value("baton_requests_ended_total", status="OK", tenant="t") == 1
    assert value("gen_ai_server_time_to_first_token_seconds_sum", **LABELS) == pytest.approx(0.1)
    tpot = value("gen_ai_server_time_per_output_token_seconds_sum", **LABELS)
    assert tpot == pytest.approx(0.01)
    assert value("gen_ai_server_request_duration_seconds_count", **LABELS) == 1
    usage = "gen_ai_client_token_usage_sum"
    assert value(usage, **LABELS, gen_ai_token_type="input") == 4
    assert value(usage, **LABELS, gen_ai_token_type="output") == 3
    assert value("baton_request_queue_time_seconds_sum") == pytest.approx(0.02)
    assert value("baton_request_inter_token_latency_seconds_count") == 2
    assert value("baton_tokens_input_total") == 4
    assert value("baton_tokens_output_total") == 3
    for slo in ("fast", "slow"):
        assert value("baton_slo_requests_total", slo=slo, met="true") == 1
        assert value("baton_slo_requests_total", slo=slo, met="false") == 0


def test_what_was_predicted_is_told_by_what_happened(world):
    for predicted_s in (0.3, 0.0):  # 0: nothing was known
        world.request(ttft_s=0.1, predicted_ttft_s=predicted_s)
    assert world.value("baton_request_ttft_prediction_ratio_count") == 1
    assert world.value("baton_request_ttft_prediction_ratio_sum") == pytest.approx(3.0)


def test_one_output_token_has_no_time_per_token(world):
    world.request(tokens=1)
    assert world.value("gen_ai_server_time_per_output_token_seconds_count", **LABELS) is None
    assert world.value("gen_ai_server_request_duration_seconds_count", **LABELS) == 1


def test_cached_tokens_are_counted_of_what_was_placed(world):
    def note_cached(record, state):
        state.note_cached(2)
        return RouterStats.admitted(world.stats, record, state)

    world.stats.admitted = note_cached
    world.request()
    world.request(Overloaded("full", 1.0), placed=False)
    assert world.value("baton_tokens_input_total") == 3
    assert world.value("baton_tokens_cached_total") == 2


def test_goodput_is_counted_by_class(world):
    world.request(ttft_s=0.3)
    world.request(tpot_s=0.03)
    world.request(InternalError("broken"))
    world.request(Overloaded("full", 1.0), placed=False)
    world.request(InvalidRequest("wrong", "x"), placed=False)  # the caller's own fault
    world.request(asyncio.CancelledError())
    assert world.value("baton_slo_requests_total", slo="fast", met="false") == 4
    assert world.value("baton_slo_requests_total", slo="fast", met="true") == 0
    assert world.value("baton_slo_requests_total", slo="slow", met="true") == 2
    assert world.value("baton_slo_requests_total", slo="slow", met="false") == 2


def test_a_caller_that_leaves(world):
    world.request(asyncio.CancelledError())
    assert world.value("baton_requests_ended_total", status="CANCELLED", tenant="t") == 1
    assert world.value("gen_ai_server_request_duration_seconds_count", **LABELS) is None
    assert world.value("baton_tokens_input_total") == 3
    assert all(world.value("baton_requests_refused_total", cause=cause) == 0 for cause in CAUSES)


def test_a_call_cut_at_its_deadline_is_late_and_not_left(world):
    world.request(asyncio.CancelledError(), timeout_s=0.0)
    assert world.value("baton_requests_ended_total", status="DEADLINE_EXCEEDED", tenant="t") == 1
    assert world.value("baton_slo_requests_total", slo="slow", met="false") == 1


@pytest.mark.parametrize(
    ("error", "step", "cause"),
    [
        (Unavailable("draining"), "arrived", "draining"),
        (Overloaded("full", 1), "arrived", "queue_full"),
        (Unauthenticated("no key"), "arrived", "tenant_unknown"),
        (Overloaded("too often", 1), "known", "tenant_limit"),
        (InvalidRequest("wrong", "x"), "known", "invalid"),
        (Unavailable("nobody"), "known", "no_worker"),
        (Overloaded("late", 1), "admitted", "too_late"),
        (Overloaded("full", 1), "queued", "queue_full"),
        (DeadlineExceeded("late"), "queued", "deadline"),
        (RuntimeError("a bug"), "known", "internal"),
    ],
)
def test_refusals_by_cause(world, error, step, cause):
    with pytest.raises(type(error)), world.stats.request() as record:
        if step != "arrived":
            record.tenant = "t"
        if step in ("admitted", "queued"):
            record.state = request_state()
            record.state.attempts = int(step == "queued")
        raise error
    counts = {one: world.value("baton_requests_refused_total", cause=one) for one in CAUSES}
    assert counts == {one: int(one == cause) for one in CAUSES}
    assert world.value("baton_tokens_input_total") == 0


def test_failovers_by_reason(world):
    world.stats.failed_over(request_state(), "", Stale("old"))
    world.stats.failed_over(request_state(), "", Unavailable("gone"))
    world.stats.failed_over(request_state(), "", Unavailable("gone"))
    assert world.value("baton_failovers_total", reason="Stale") == 1
    assert world.value("baton_failovers_total", reason="Unavailable") == 2


async def test_the_fleet_and_the_queue_are_read_at_each_look(world, cluster_of):
    cluster = await cluster_of(prefill=2, decode=1)
    world.metrics.observe(served(cluster.fleet, cluster.wait_queue, running=5))
    assert world.value("baton_requests_running") == 5
    assert world.value("baton_requests_queued") == 0
    assert world.value("baton_workers", role="prefill", state="READY") == 2
    await cluster.leave(cluster.decodes[0])
    await cluster.until(lambda s: not s.decode)
    assert world.value("baton_workers", role="decode", state="READY") == 0


async def test_ejections_are_counted(world, cluster_of):
    cluster = await cluster_of(prefill=2, decode=2)
    world.metrics.observe(served(cluster.fleet, cluster.wait_queue))
    for _ in range(3):
        cluster.fleet.breakers.failed("p0", "broken")
        cluster.fleet.breakers.failed(("p1", "d1"), "broken")
    cluster.fleet._tick()
    cluster.fleet._tick()
    assert world.value("baton_breaker_ejections_total", kind="worker") == 1
    assert world.value("baton_breaker_ejections_total", kind="pair") == 1


def test_all_that_a_router_lists_is_measured(world):
    world.metrics.observe(served(_Empty(), SimpleNamespace(depth=0)))
    world.request(predicted_ttft_s=0.1)
    world.request(InternalError("x"))
    page = world.recorder.render("")[1].decode()
    for one in table.of("router").values():
        assert any(line.startswith(one.samples) for line in page.splitlines()), one.name


def served(fleet, wait_queue, running=0):
    return SimpleNamespace(fleet=fleet, wait_queue=wait_queue, running=running)


class _Empty:
    def snapshot(self):
        return SimpleNamespace(prefill=(), decode=())
