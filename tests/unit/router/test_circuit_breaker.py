"""Circuit breakers by a clock that tests turn, and outlier ejection."""

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.fleet.circuit_breaker import (
    CALLS_FOR_A_SHARE,
    COOL_DOWN_S,
    FAILURES_IN_A_ROW,
    PROBE_S,
    RECENT_CALLS,
    RECENT_S,
    CircuitBreakers,
    without_ejected,
)
from router.fleet.snapshot import SILENT

from .snapshots import fleet, worker

FIRST_S, LONGEST_S = COOL_DOWN_S
PAIR = ("p0", "d0")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breakers(clock):
    return CircuitBreakers(clock)


def fail(breakers, times=FAILURES_IN_A_ROW, key="d0"):
    for _ in range(times):
        breakers.sent(key)
        breakers.failed(key, "it broke")


def probe(breakers, well, key="d0"):
    breakers.sent(key)
    if well:
        breakers.succeeded(key)
    else:
        breakers.failed(key, "it broke again")


def cool_down_of(breakers, clock, key="d0"):
    """How long the breaker stays open from now on; the clock stands at its end afterwards."""
    began = clock.now
    while breakers.why_open(key):
        clock.now += 0.25
    return clock.now - began


@pytest.mark.parametrize("key", ["d0", PAIR])
def test_failures_in_a_row_open_it_and_the_verdict_says_why(breakers, key):
    fail(breakers, FAILURES_IN_A_ROW - 1, key)
    assert breakers.why_open(key) == ""
    fail(breakers, 1, key)
    why = f"its last {FAILURES_IN_A_ROW} calls failed, the last with: it broke"
    assert breakers.all_open() == {key: why}


def test_a_pair_and_its_workers_are_judged_apart(breakers):
    fail(breakers, key=PAIR)
    assert breakers.all_open().keys() == {PAIR}
    assert (
        breakers.why_open("p0") == breakers.why_open("d0") == breakers.why_open(("p0", "d1")) == ""
    )


def test_a_success_interrupts_the_row(breakers):
    for _ in range(RECENT_CALLS):
        breakers.succeeded("d0")
    for _ in range(3):
        fail(breakers, FAILURES_IN_A_ROW - 1)
        breakers.succeeded("d0")
        breakers.succeeded("d0")
    assert breakers.why_open("d0") == ""


def test_every_second_call_failing_opens_it_but_not_from_too_few_calls(breakers):
    calls = 0
    while not breakers.why_open("d0"):
        breakers.succeeded("d0") if calls % 2 else breakers.failed("d0", "it broke")
        calls += 1
    assert calls == CALLS_FOR_A_SHARE
    assert "3 of its last 5 calls failed" in breakers.why_open("d0")


def test_failures_of_long_ago_do_not_count(breakers, clock):
    fail(breakers, FAILURES_IN_A_ROW - 1)
    clock.now += RECENT_S + 1
    fail(breakers, FAILURES_IN_A_ROW - 1)
    assert breakers.why_open("d0") == ""
    fail(breakers, 1)
    assert breakers.why_open("d0")


def test_after_the_cool_down_one_probe_at_a_time(breakers, clock):
    fail(breakers)
    clock.now += FIRST_S - 0.01
    assert breakers.why_open("d0")
    clock.now += 0.01
    assert breakers.why_open("d0") == ""
    breakers.sent("d0")
    assert breakers.why_open("d0")
    breakers.succeeded("d0")
    assert breakers.why_open("d0") == ""


def test_failed_probes_double_the_cool_down_up_to_the_longest(breakers, clock):
    fail(breakers)
    cool_downs = []
    for _ in range(7):
        cool_downs.append(cool_down_of(breakers, clock))
        probe(breakers, well=False)
    assert cool_downs == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_S, LONGEST_S]
    assert breakers.why_open("d0") == "its probe failed with: it broke again"


def test_a_probe_whose_end_nobody_tells_is_forgotten(breakers, clock):
    fail(breakers)
    clock.now += FIRST_S
    breakers.sent("d0")
    clock.now += PROBE_S - 0.01
    assert breakers.why_open("d0")
    clock.now += 0.01
    assert breakers.why_open("d0") == ""
    breakers.sent("d0")
    assert breakers.why_open("d0")


def test_who_fails_again_soon_is_left_alone_for_longer(breakers, clock):
    fail(breakers)
    clock.now += FIRST_S
    probe(breakers, well=True)
    fail(breakers)
    assert cool_down_of(breakers, clock) == 2 * FIRST_S


def test_who_was_well_for_long_is_forgiven(breakers, clock):
    fail(breakers)
    clock.now += FIRST_S
    probe(breakers, well=False)
    cool_down_of(breakers, clock)
    probe(breakers, well=True)
    clock.now += LONGEST_S
    fail(breakers)
    assert cool_down_of(breakers, clock) == FIRST_S


def test_calls_that_began_before_it_opened_change_nothing(breakers, clock):
    fail(breakers)
    breakers.failed("d0", "one of twenty that died together")
    breakers.succeeded("d0")
    assert cool_down_of(breakers, clock) == FIRST_S
    breakers.failed("d0", "a late one")
    assert breakers.why_open("d0") == ""  # the probe is still to come


def test_who_is_used_in_the_cool_down_for_want_of_others_is_probed(breakers, clock):
    fail(breakers)
    probe(breakers, well=True)
    assert breakers.why_open("d0") == ""
    fail(breakers)
    probe(breakers, well=False)
    assert breakers.why_open("d0") == "its probe failed with: it broke again"


def test_those_who_left_are_forgotten_with_their_pairs(breakers):
    for key in ("p0", "d0", "d1", PAIR, ("p0", "d1")):
        fail(breakers, key=key)
    breakers.retain({"p0", "d1"})
    assert breakers.all_open().keys() == {"p0", "d1", ("p0", "d1")}


class Calls(RuleBasedStateMachine):
    """Any sequence of calls and pauses."""

    @initialize()
    def start(self):
        self.clock = Clock()
        self.breakers = CircuitBreakers(self.clock)
        self.breakers.succeeded("d0")

    @property
    def closed(self):
        return self.breakers._breakers["d0"].open_until is None

    @rule()
    def sent(self):
        closed = self.closed
        self.breakers.sent("d0")
        assert bool(self.breakers.why_open("d0")) is not closed  # one probe at a time

    @rule()
    def succeeded(self):
        self.breakers.succeeded("d0")

    @rule()
    def failed(self):
        self.breakers.failed("d0", "it broke")

    @rule()
    def a_bad_patch(self):
        closed = self.closed
        fail(self.breakers)
        if closed:
            assert self.breakers.why_open("d0")

    @rule(seconds=st.sampled_from([0.5, 1.0, PROBE_S, LONGEST_S]))
    def pause(self, seconds):
        self.clock.now += seconds

    @invariant()
    def who_is_not_shut_off_is_usable(self):
        if self.closed:
            assert self.breakers.why_open("d0") == ""

    @invariant()
    def nobody_is_shut_for_ever(self):
        breakers = CircuitBreakers(self.clock)
        breakers._breakers = copy.deepcopy(self.breakers._breakers)
        self.clock.now += LONGEST_S + PROBE_S
        assert breakers.why_open("d0") == ""
        probe(breakers, well=True)
        assert breakers.why_open("d0") == ""
        self.clock.now -= LONGEST_S + PROBE_S


Calls.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCalls = Calls.TestCase


# Outlier ejection.


def two_by_two():
    return fleet([worker("p0"), worker("p1")], [worker("d0"), worker("d1")])


def fail_in_turn(breakers, clock, *keys):
    """One after the other, the first one longest ago."""
    for key in keys:
        clock.now += 0.01
        for _ in range(FAILURES_IN_A_ROW):
            breakers.failed(key, "it broke")


def usable(snapshot):
    return {(p.incarnation, d.incarnation) for p, d in snapshot.usable_pairs()}


def states(snapshot):
    return {w.incarnation: w.state for w in (*snapshot.prefill, *snapshot.decode)}


def test_a_worker_that_fails_is_ejected_and_says_why(breakers, clock):
    fail_in_turn(breakers, clock, "d1")
    snapshot = without_ejected(two_by_two(), breakers)
    assert states(snapshot) == {"p0": "READY", "p1": "READY", "d0": "READY", "d1": "EJECTED"}
    assert "it broke" in snapshot.decode[1].reason
    assert usable(snapshot) == {("p0", "d0"), ("p1", "d0")}


def test_a_pair_that_fails_is_shut_and_its_workers_stay(breakers, clock):
    fail_in_turn(breakers, clock, ("p0", "d1"))
    snapshot = without_ejected(two_by_two(), breakers)
    assert set(states(snapshot).values()) == {"READY"}
    assert "it broke" in snapshot.excluded_pairs["p0", "d1"]
    assert len(usable(snapshot)) == 3


def test_who_is_not_ready_keeps_its_own_state(breakers, clock):
    fail_in_turn(breakers, clock, "d1")
    snapshot = fleet([worker("p0")], [worker("d0"), worker("d1", SILENT, "still")])
    after = without_ejected(snapshot, breakers).decode[1]
    assert (after.state, after.reason) == (SILENT, "still")


@pytest.mark.parametrize(
    ("failed", "decode", "used"),
    [
        (["p0", "d0", ("p0", "d0")], [worker("d0")], ("p0", "d0")),
        (["d0", "d1"], [worker("d0"), worker("d1")], ("p0", "d0")),
        (["d1", "d0"], [worker("d0"), worker("d1")], ("p0", "d1")),
        ([("p0", "d1"), ("p0", "d0")], [worker("d0"), worker("d1")], ("p0", "d1")),
        (["d0"], [worker("d0"), worker("d1", dtype="bfloat16")], ("p0", "d0")),  # no pair with d1
    ],
)
def test_of_the_last_pairs_the_one_that_failed_longest_ago_is_used(
    breakers, clock, failed, decode, used
):
    fail_in_turn(breakers, clock, *failed)
    snapshot = without_ejected(fleet([worker("p0")], decode), breakers)
    assert usable(snapshot) == {used}
    assert all(view.reason == "" for view in snapshot.decode if view.incarnation == used[1])


def test_a_pair_that_the_worker_itself_shuts_is_no_last_resort(breakers, clock):
    fail_in_turn(breakers, clock, "p0", "d0")
    snapshot = fleet([worker("p0")], [worker("d0")], {("p0", "d0"): "quarantined"})
    after = without_ejected(snapshot, breakers)
    assert not after.ready
    assert after.excluded_pairs == {("p0", "d0"): "quarantined"}
