"""What a router counts and remembers of its requests, and that GetStatus tells it."""

import asyncio
import contextlib
import time
from unittest.mock import AsyncMock

import pytest

from baton.errors import InvalidRequest, Overloaded, TransferFailed, Unavailable
from baton.v1 import common_pb2, fleet_pb2, inference_pb2
from router.admission.admission import Admission
from router.fleet_service import FleetServicer
from router.frontend import Caller, Door
from router.telemetry.stats import Tally

from .scripted_workers import PATIENCE_S, started, story
from .texts import byte_tokenizer

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
FAILOVER, REFUSAL, FAILURE = (
    fleet_pb2.EVENT_KIND_FAILOVER,
    fleet_pb2.EVENT_KIND_REFUSAL,
    fleet_pb2.EVENT_KIND_FAILURE,
)


def placed(**fields):
    """A request that something was run for."""
    told = story(**fields)
    told.placed_at = told.started
    return told


def end(tally, told=None, error=None, finished=False):
    """One request, from its beginning to its end."""
    with contextlib.suppress(BaseException), tally.request() as seen:
        seen.trace_id = TRACE
        if told is not None:
            tally.let_in(seen, told)
        seen.finished = finished
        if error is not None:
            raise error


def finished(ttft_s, tpot_s=0.01, **fields):
    """A request that got its first token after so long, and four more."""
    told = placed(**fields)
    told.deliver([1])
    told.deliver([2, 3, 4, 5])
    told.first_at = told.started + ttft_s
    told.last_at = told.first_at + 4 * tpot_s
    return told


def kinds(tally):
    return [event.kind for event in tally.recent_events()]


def test_requests_are_counted_by_how_they_ended():
    tally = Tally()
    end(tally, finished(0.1))
    end(tally, error=InvalidRequest("bad", "input"))  # never let in
    end(tally, story(), Overloaded("full"))  # let in, and never placed
    end(tally, placed(), Unavailable("gone"))
    end(tally, placed(), ValueError("a bug"))
    end(tally, placed(), asyncio.CancelledError())
    end(tally, story(), GeneratorExit())
    end(tally, finished(0.1), GeneratorExit(), finished=True)  # its reader has all of it
    counts = tally.counts()
    assert dict(counts.ended) == {
        "OK": 2, "INVALID_ARGUMENT": 1, "RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1, "INTERNAL": 1,
        "CANCELLED": 2,
    }  # fmt: skip
    assert counts.refused == 2
    assert counts.prompt_tokens == 7 * 3
    assert kinds(tally) == [REFUSAL, REFUSAL, FAILURE, FAILURE]
    told = tally.recent_events()
    assert [event.text for event in told] == [
        "INVALID_ARGUMENT: bad", "RESOURCE_EXHAUSTED: full", "UNAVAILABLE: gone",
        "INTERNAL: a bug",
    ]  # fmt: skip
    assert [event.request_id for event in told] == ["", "r", "r", "r"]
    assert {event.trace_id for event in told} == {TRACE}


def test_what_comes_again_counts_up_the_last_event():
    tally = Tally()
    before_ms = time.time_ns() // 1_000_000
    for text in ("full", "full", "full", "other", "full"):
        end(tally, error=Overloaded(text))
    told = tally.recent_events()
    assert [event.times for event in told] == [3, 1, 1]
    assert before_ms <= told[0].time_ms <= told[-1].time_ms <= time.time_ns() // 1_000_000


def test_events_are_few_and_short():
    tally = Tally()
    for number in range(100):
        end(tally, error=Overloaded(f"{number} " + "x" * 5000))
    told = tally.recent_events()
    assert len(told) == 32 and told[-1].text.startswith("RESOURCE_EXHAUSTED: 99")
    assert max(len(event.text) for event in told) == 300
    assert tally.counts().refused == 100


def test_a_failover_names_the_workers_it_left():
    tally, told = Tally(), placed()
    told.route.prefill, told.route.decode = "p0", "d0"
    tally.failed_over(told, TRACE, TransferFailed("lost"))
    told.route.prefill = ""
    tally.failed_over(told, TRACE, Unavailable("gone"))
    assert tally.counts().failovers == 2
    assert [event.text for event in tally.recent_events()] == ["p0 and d0: lost", "d0: gone"]
    assert kinds(tally) == [FAILOVER, FAILOVER]


def test_late_is_who_missed_a_target():
    tally = Tally()
    end(tally, finished(0.5))  # had none
    end(tally, finished(0.5, ttft_target_s=0.6))
    end(tally, finished(0.5, ttft_target_s=0.4))
    assert (tally.late, tally.ended["OK"]) == (1, 3)


def test_percentiles_are_of_the_last_minute():
    now = [100.0]
    tally = Tally(clock=lambda: now[0])
    end(tally, finished(9.0, 9.0))
    now[0] += 61
    for milliseconds in range(1, 101):
        end(tally, finished(milliseconds / 1e3, milliseconds / 1e4))
    latency = tally.latency()
    assert latency.requests == 100
    assert (latency.ttft_p50_ms, latency.ttft_p95_ms) == pytest.approx((50, 95))
    assert (latency.tpot_p50_ms, latency.tpot_p95_ms) == pytest.approx((5.0, 9.5))
    now[0] += 61
    assert tally.latency() == fleet_pb2.Latency()


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
    door = Door(admission, cluster.line, cluster.dispatch, cluster.fleet, cluster.tracer)
    own = fleet_pb2.RouterStatus(incarnation="router", otlp="http://o:1")
    servicer = FleetServicer(cluster.fleet, cluster.line, admission, door, own, 4)

    async def breaks(request):
        yield started()
        raise TransferFailed("the link broke")

    cluster.prefills[0].scripts = [breaks]
    async with asyncio.timeout(PATIENCE_S):
        await door.generate(request(), Caller(), AsyncMock())
        with pytest.raises(InvalidRequest):
            await door.generate(request(tokens=(10**6,)), Caller(), AsyncMock())
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
