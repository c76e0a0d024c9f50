"""What a router counts and remembers of its requests, and that GetStatus tells it."""

import asyncio
import contextlib
import time
from unittest.mock import AsyncMock

import pytest

from baton.errors import InvalidRequest, Overloaded, TransferFailed, Unavailable
from baton.v1 import common_pb2, fleet_pb2, inference_pb2
from router.admission.admission import Admission
from router.frontend import Caller, GenerationService
from router.service import FleetServicer
from router.telemetry.stats import RouterStats

from .scripted_workers import TIMEOUT_S, request_state, started
from .small_tokenizers import byte_tokenizer

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
FAILOVER, REFUSAL, FAILURE = (
    fleet_pb2.EVENT_KIND_FAILOVER,
    fleet_pb2.EVENT_KIND_REFUSAL,
    fleet_pb2.EVENT_KIND_FAILURE,
)


def placed(**fields):
    """A request that something was run for."""
    state = request_state(**fields)
    state.placed_at = state.started
    return state


def end(stats, state=None, error=None, finished=False):
    """One request, from its beginning to its end."""
    with contextlib.suppress(BaseException), stats.request() as record:
        record.trace_id = TRACE
        if state is not None:
            stats.admitted(record, state)
        record.finished = finished
        if error is not None:
            raise error


def finished(ttft_s, tpot_s=0.01, **fields):
    """A request that got its first token after so long, and four more."""
    state = placed(**fields)
    state.deliver([1])
    state.deliver([2, 3, 4, 5])
    state.first_at = state.started + ttft_s
    state.last_at = state.first_at + 4 * tpot_s
    return state


def kinds(stats):
    return [event.kind for event in stats.events]


def test_requests_are_counted_by_how_they_ended():
    stats = RouterStats()
    end(stats, finished(0.1))
    end(stats, error=InvalidRequest("bad", "input"))  # never let in
    end(stats, request_state(), Overloaded("full"))  # let in, and never placed
    end(stats, placed(), Unavailable("gone"))
    end(stats, placed(), ValueError("a bug"))
    end(stats, placed(), asyncio.CancelledError())
    end(stats, request_state(), GeneratorExit())
    end(stats, finished(0.1), GeneratorExit(), finished=True)  # its reader has all of it
    counts = stats.counts()
    assert dict(counts.ended) == {
        "OK": 2, "INVALID_ARGUMENT": 1, "RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1, "INTERNAL": 1,
        "CANCELLED": 2,
    }  # fmt: skip
    assert counts.refused == 2
    assert counts.prompt_tokens == 7 * 3
    assert kinds(stats) == [REFUSAL, REFUSAL, FAILURE, FAILURE]
    events = stats.events
    assert [event.text for event in events] == [
        "INVALID_ARGUMENT: bad", "RESOURCE_EXHAUSTED: full", "UNAVAILABLE: gone",
        "INTERNAL: a bug",
    ]  # fmt: skip
    assert [event.request_id for event in events] == ["", "r", "r", "r"]
    assert {event.trace_id for event in events} == {TRACE}


def test_what_comes_again_counts_up_the_last_event():
    stats = RouterStats()
    before_ms = time.time_ns() // 1_000_000
    for text in ("full", "full", "full", "other", "full"):
        end(stats, error=Overloaded(text))
    events = stats.events
    assert [event.times for event in events] == [3, 1, 1]
    assert before_ms <= events[0].time_ms <= events[-1].time_ms <= time.time_ns() // 1_000_000


def test_events_are_few_and_short():
    stats = RouterStats()
    for number in range(100):
        end(stats, error=Overloaded(f"{number} " + "x" * 5000))
    events = stats.events
    assert len(events) == 32 and events[-1].text.startswith("RESOURCE_EXHAUSTED: 99")
    assert max(len(event.text) for event in events) == 300
    assert stats.counts().refused == 100


def test_a_failover_names_the_workers_it_left():
    stats, state = RouterStats(), placed()
    state.route.prefill, state.route.decode = "p0", "d0"
    stats.failed_over(state, TRACE, TransferFailed("lost"))
    state.route.prefill = ""
    stats.failed_over(state, TRACE, Unavailable("gone"))
    assert stats.counts().failovers == 2
    assert [event.text for event in stats.events] == ["p0 and d0: lost", "d0: gone"]
    assert kinds(stats) == [FAILOVER, FAILOVER]


def test_late_is_who_missed_a_target():
    stats = RouterStats()
    end(stats, finished(0.5))  # had none
    end(stats, finished(0.5, ttft_target_s=0.6))
    end(stats, finished(0.5, ttft_target_s=0.4))
    assert (stats.late, stats.ended["OK"]) == (1, 3)


def test_percentiles_are_of_the_last_minute():
    now = [100.0]
    stats = RouterStats(clock=lambda: now[0])
    end(stats, finished(9.0, 9.0))
    now[0] += 61
    for milliseconds in range(1, 101):
        end(stats, finished(milliseconds / 1e3, milliseconds / 1e4))
    latency = stats.latency()
    assert latency.requests == 100
    assert (latency.ttft_p50_ms, latency.ttft_p95_ms) == pytest.approx((50, 95))
    assert (latency.tpot_p50_ms, latency.tpot_p95_ms) == pytest.approx((5.0, 9.5))
    now[0] += 61
    assert stats.latency() == fleet_pb2.Latency()


def request(tokens=(1, 2, 3), **fields):
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=tokens),
        sampling=common_pb2.SamplingParams(max_tokens=5, ignore_eos=True),
        **fields,
    )


async def test_get_status_tells_what_happened(cluster_of, tmp_path):
    """One request that fails over and goes well, one that is refused."""
    cluster = await cluster_of(prefill=1, decode=1)
    admission = Admission("tiny", byte_tokenizer(tmp_path), 10.0)
    service = GenerationService(
        admission, cluster.wait_queue, cluster.dispatch, cluster.fleet, cluster.tracer
    )
    own = fleet_pb2.RouterStatus(incarnation="router", otlp="http://o:1")
    servicer = FleetServicer(service, own)

    async def breaks(request):
        yield started()
        raise TransferFailed("the link broke")

    cluster.prefills[0].scripts = [breaks]
    async with asyncio.timeout(TIMEOUT_S):
        await service.generate(request(), Caller(), AsyncMock())
        with pytest.raises(InvalidRequest):
            await service.generate(request(tokens=(10**6,)), Caller(), AsyncMock())
        router = (await servicer.GetStatus(fleet_pb2.GetStatusRequest(), None)).router
        await cluster.dispatch.close()
    assert dict(router.counts.ended) == {"OK": 1, "INVALID_ARGUMENT": 1}
    counts = router.counts
    assert (counts.refused, counts.failovers, counts.prompt_tokens, counts.output_tokens) == (
        1, 1, 3, 5,
    )  # fmt: skip
    assert [event.kind for event in router.events] == [FAILOVER, REFUSAL]
    assert "the link broke" in router.events[0].text
    assert router.latency.requests == 1 and router.latency.ttft_p50_ms > 0
    assert (router.incarnation, router.otlp) == ("router", "http://o:1")
