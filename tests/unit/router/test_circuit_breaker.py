"""Circuit breakers by a clock that tests turn, and outlier ejection."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import DeadlineExceeded, InternalError, TransferFailed
from router.fleet.circuit_breaker import (
    CALLS_FOR_A_SHARE,
    COOL_DOWN_S,
    FAILURES_IN_A_ROW,
    PROBE_S,
    RECENT_CALLS,
    RECENT_S,
    CircuitBreakers,
)
from router.fleet.snapshot import SILENT

from .conftest import Clock
from .snapshots import decode_views, fleet, usable_pairs, worker

FIRST_S, LONGEST_S = COOL_DOWN_S
PAIR = ("p0", "d0")


@pytest.fixture
def breakers(clock):
    return CircuitBreakers(clock)


@pytest.fixture
def breaker(breakers):
    return breakers["d0"]


def fail(breaker, times=FAILURES_IN_A_ROW):
    for _ in range(times):
        breaker.sent()
        breaker.failed("it broke")


def probe(breaker, well):
    breaker.sent()
    if well:
        breaker.succeeded()
    else:
        breaker.failed("it broke again")


def cool_down_of(breaker):
    """How long the breaker stays open from now on; the clock stands at its end afterwards."""
    clock = breaker.clock
    began = clock.now
    while breaker.why_open:
        clock.now += 0.25
    return clock.now - began


@pytest.mark.parametrize("key", ["d0", PAIR])
def test_failures_in_a_row_open_one_breaker_and_say_why(breakers, key):
    fail(breakers[key], FAILURES_IN_A_ROW - 1)
    assert breakers[key].why_open == ""
    fail(breakers[key], 1)
    why = f"its last {FAILURES_IN_A_ROW} calls failed, the last with: it broke"
    assert breakers.all_open() == {key: why}, "a pair and its workers are judged apart"


def test_calls_that_succeed_keep_nothing():
    """1.3 KB for each of a large fleet's pairs were hundreds of MiB."""
    breakers = CircuitBreakers(Clock())
    for key in ("p0", "d0", PAIR):
        breakers.sent(key)
        breakers.succeeded(key)
    assert not breakers._breakers
    breakers.failed_attempt(PAIR, {"d0"}, InternalError("it broke"))
    assert breakers._breakers.keys() == {"d0"}
    breakers.succeeded("d0")
    assert [well for _, well in breakers["d0"].recent] == [False, True]


def test_a_success_interrupts_the_row_but_a_share_of_failures_opens_it_too(breakers):
    well = breakers["d1"]
    for _ in range(RECENT_CALLS):
        well.succeeded()
    for _ in range(3):
        fail(well, FAILURES_IN_A_ROW - 1)
        well.succeeded()
        well.succeeded()
    assert well.why_open == ""
    breaker, calls = breakers["d0"], 0
    while not breaker.why_open:
        breaker.succeeded() if calls % 2 else breaker.failed("it broke")
        calls += 1
    assert calls == CALLS_FOR_A_SHARE
    assert "3 of its last 5 calls failed" in breaker.why_open


def test_failures_of_long_ago_do_not_count(breaker, clock):
    fail(breaker, FAILURES_IN_A_ROW - 1)
    clock.now += RECENT_S + 1
    fail(breaker, FAILURES_IN_A_ROW - 1)
    assert breaker.why_open == ""
    fail(breaker, 1)
    assert breaker.why_open


def test_after_the_cool_down_one_probe_at_a_time(breaker, clock):
    fail(breaker)
    assert cool_down_of(breaker) == FIRST_S
    breaker.sent()
    assert breaker.why_open
    clock.now += PROBE_S  # a probe without an outcome is forgotten
    assert breaker.why_open == ""
    breaker.sent()
    assert breaker.why_open
    breaker.succeeded()
    assert breaker.why_open == ""


def test_failed_probes_double_the_cool_down_up_to_the_longest(breaker):
    fail(breaker)
    cool_downs = []
    for _ in range(7):
        cool_downs.append(cool_down_of(breaker))
        probe(breaker, well=False)
    assert cool_downs == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_S, LONGEST_S]
    assert breaker.why_open == "its probe failed with: it broke again"


@pytest.mark.parametrize(("well_s", "cool_down_s"), [(0, 2 * FIRST_S), (LONGEST_S, FIRST_S)])
def test_what_fails_again_soon_is_left_alone_for_longer(breaker, clock, well_s, cool_down_s):
    fail(breaker)
    cool_down_of(breaker)
    probe(breaker, well=True)
    clock.now += well_s
    fail(breaker)
    assert cool_down_of(breaker) == cool_down_s


def test_calls_that_began_before_it_opened_change_nothing(breaker):
    fail(breaker)
    breaker.failed("one of twenty that died together")
    breaker.succeeded()
    assert cool_down_of(breaker) == FIRST_S
    breaker.failed("a late one")
    assert breaker.why_open == ""  # the probe is still to come


@pytest.mark.parametrize("well", [True, False])
def test_a_call_in_the_cool_down_for_want_of_others_is_a_probe(breaker, well):
    fail(breaker)
    probe(breaker, well)
    assert breaker.why_open == ("" if well else "its probe failed with: it broke again")


@pytest.mark.parametrize(
    ("error", "suspects", "avoided", "counted"),
    [
        (InternalError("x"), {"p0"}, {"p0"}, "p0"),
        (InternalError("x"), set(), {"d0"}, "d0"),
        (InternalError("x"), {"p0", "d0"}, {"p0", "d0"}, PAIR),
        (TransferFailed("x"), {"p0"}, {"p0", "d0"}, PAIR),
        (DeadlineExceeded("x"), {"p0"}, {"p0"}, None),
    ],
)
def test_a_failed_attempt_counts_against_a_worker_or_the_pair(
    breakers, error, suspects, avoided, counted
):
    for _ in range(FAILURES_IN_A_ROW):
        assert breakers.failed_attempt(PAIR, suspects, error) == avoided
    assert breakers.all_open().keys() == ({counted} if counted else set())


@given(
    st.lists(
        st.sampled_from(["sent", "succeeded", "failed", "fail", 0.5, 1.0, PROBE_S, LONGEST_S]),
        max_size=40,
    )
)
def test_after_any_calls_and_pauses_a_breaker_is_usable_again_in_time(steps):
    breaker = CircuitBreakers(Clock())["d0"]
    for step in steps:
        closed = breaker.open_until is None
        if isinstance(step, float):
            breaker.clock.now += step
        elif step == "fail":
            fail(breaker)
            assert breaker.why_open or not closed
        else:
            getattr(breaker, step)(*["it broke"] * (step == "failed"))
        if step == "sent":
            assert bool(breaker.why_open) is not closed, "one probe at a time"
        assert breaker.open_until is not None or not breaker.why_open
        later = copy.deepcopy(breaker)
        later.clock.now += LONGEST_S + PROBE_S
        assert later.why_open == ""
        probe(later, well=True)
        assert later.why_open == ""


# Outlier ejection.


def test_decode_workers_that_serve_alone_are_not_all_ejected(breakers):
    before = fleet([worker("p0", SILENT)], [worker("d0"), worker("d1")], decode_alone=True)
    for name, ready in (("d0", "d1"), ("d1", "d0")):
        after, _ = ejected(breakers, before, name)
        assert [w.incarnation for w in decode_views(after) if w.ready] == [ready]


def test_without_its_only_prefill_worker_decode_workers_serve_alone(breakers):
    before = fleet([worker("p0")], [worker("d0")], decode_alone=True)
    after, _ = ejected(breakers, before, "p0")
    assert not before.alone.any() and after.alone.any() and after.why_not_ready == ""


def ejected(breakers, snapshot, *failed):
    """The snapshot after these have failed, the first one longest ago."""
    for key in failed:
        breakers._clock.now += 0.01
        fail(breakers[key])
    after = breakers.without_ejected(snapshot)
    return after, usable_pairs(after)


def test_a_worker_that_fails_is_ejected_and_a_pair_is_excluded(breakers):
    decode = [worker("d0"), worker("d1"), worker("d2"), worker("d3", SILENT, "still")]
    before = fleet([worker("p0"), worker("p1")], decode)
    snapshot, usable = ejected(breakers, before, "d1", "d3", ("p0", "d2"))
    assert [w.state for w in decode_views(snapshot)] == ["READY", "EJECTED", "READY", SILENT]
    assert "it broke" in decode_views(snapshot)[1].reason
    assert decode_views(snapshot)[3].reason == "still", "what is not ready keeps its own state"
    assert "it broke" in snapshot.excluded_pairs["p0", "d2"]
    assert usable == {("p0", "d0"), ("p1", "d0"), ("p1", "d2")}


@pytest.mark.parametrize(
    ("failed", "decode", "used"),
    [
        (["p0", "d0", ("p0", "d0")], [worker("d0")], ("p0", "d0")),
        (["p0", "d0", "d1"], [worker("d0"), worker("d1")], ("p0", "d0")),
        (["p0", "d1", "d0"], [worker("d0"), worker("d1")], ("p0", "d1")),
        ([("p0", "d1"), ("p0", "d0")], [worker("d0"), worker("d1")], ("p0", "d1")),
        (
            ["p0", "d0"],
            [worker("d0"), worker("d1", dtype="bfloat16")],
            ("p0", "d0"),
        ),  # no pair with d1
    ],
)
def test_of_the_last_pairs_the_one_that_failed_longest_ago_is_used(breakers, failed, decode, used):
    snapshot, usable = ejected(breakers, fleet([worker("p0")], decode), *failed)
    assert usable == {used}
    assert all(view.reason == "" for view in decode_views(snapshot) if view.incarnation == used[1])
