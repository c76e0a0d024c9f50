"""The retry policy as a table, and its bounds whatever is thrown at it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.client.retry import RetryPolicy
from baton.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)

POLICY = RetryPolicy(max_attempts=4, first_delay_s=0.1, max_delay_s=1.0)


def decide(error=None, policy=POLICY, **changes):
    state = {
        "attempts": 1,
        "addresses": 1,
        "time_left_s": None,
        "jitter": 0.0,
        **changes,
    }
    return policy.wait_s(error or Unavailable("gone"), **state)


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("x"), DeadlineExceeded("x"), Cancelled("x"), InternalError("x")],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_pass_is_final(error):
    assert decide(error) is None


def test_backoff_doubles_up_to_its_limit():
    policy = RetryPolicy(max_attempts=99, first_delay_s=0.1, max_delay_s=1.0)
    waits = [decide(policy=policy, attempts=n) for n in range(1, 7)]
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.5, 0.5])


def test_advice_is_a_minimum():
    assert decide(Overloaded("full", 3.0)) == 3.0
    assert decide(Overloaded("full", 0.01)) == pytest.approx(0.05)


def test_clients_refused_together_retry_at_different_times():
    waits = {decide(Overloaded("full", 4.0), jitter=n / 10) for n in range(10)}
    assert len(waits) == 10
    assert 4.0 <= min(waits) <= max(waits) < 5.0


def test_a_full_router_means_a_full_cluster_but_a_missing_one_only_itself():
    assert decide(Overloaded("full", 3.0), addresses=2) == 3.0
    assert decide(Unavailable("draining", 3.0), addresses=2) == 0.0
    assert decide(Unavailable("draining", 3.0), addresses=2, attempts=2) == 3.0


def test_an_untried_address_is_tried_at_once():
    assert decide(addresses=3) == 0.0
    assert decide(addresses=3, attempts=2) == 0.0
    assert decide(addresses=3, attempts=3) == pytest.approx(0.05)


def test_attempts_are_bounded_but_every_address_gets_one():
    assert decide(attempts=3) is not None
    assert decide(attempts=4) is None
    assert decide(attempts=4, addresses=6) is not None
    assert decide(attempts=6, addresses=6) is None


def test_a_stream_that_had_begun_is_tried_until_its_deadline_or_for_so_long():
    policy = RetryPolicy(max_attempts=4, reconnect_s=10.0)
    assert decide(policy=policy, attempts=400, broken_s=9.9) is not None
    assert decide(policy=policy, attempts=400, broken_s=10.0) is None
    assert decide(policy=policy, attempts=400, broken_s=50.0, time_left_s=20.0) is not None
    assert decide(policy=policy, attempts=400, broken_s=50.0, time_left_s=0.1) is None
    assert decide(Overloaded("full"), policy=policy, attempts=4, broken_s=1.0) is None
    assert decide(policy=RetryPolicy(max_attempts=1), broken_s=1.0) is None


def test_a_wait_that_outlasts_the_deadline_is_not_begun():
    assert decide(Overloaded("full", 3.0), time_left_s=3.0) is None
    assert decide(Overloaded("full", 3.0), time_left_s=3.1) == 3.0


@given(
    attempts=st.integers(1, 50),
    addresses=st.integers(1, 9),
    time_left_s=st.none() | st.floats(0, 100),
    jitter=st.floats(0, 1, exclude_max=True),
    retry_after_s=st.floats(0, 100),
)
def test_bounds(attempts, addresses, time_left_s, jitter, retry_after_s):
    retry = decide(
        Overloaded("full", retry_after_s),
        attempts=attempts,
        addresses=addresses,
        time_left_s=time_left_s,
        jitter=jitter,
    )
    if retry is not None:
        assert attempts < max(4, addresses)
        assert retry_after_s <= retry <= max(retry_after_s * 1.25, 1.0)
        assert time_left_s is None or retry < time_left_s
