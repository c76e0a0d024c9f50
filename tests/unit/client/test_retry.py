"""The retry policy as a table."""

from dataclasses import replace

import pytest

from baton.client.retry import RetryPolicy
from baton.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)

GONE, REST = Unavailable("gone"), Unavailable("every pair rests", 3.0)
BEGUN = {"begun": True}
POLICY = RetryPolicy(max_attempts=4, first_delay_s=0.1, max_delay_s=1.0)
MANY = replace(POLICY, max_attempts=99)


def decide(error=None, policy=POLICY, **changes):
    state = {"attempts": 1, "addresses": 1, "time_left_s": None, "jitter": 0.0, **changes}
    return policy.wait_s(error or GONE, **state)


@pytest.mark.parametrize(
    ("error", "state", "wait_s"),
    [
        # What cannot pass is final.
        *((kind("x"), {}, None) for kind in (InvalidRequest, DeadlineExceeded, Cancelled)),
        (InternalError("x"), {}, None),
        # Advice is the shortest wait.
        (Overloaded("full", 3.0), {}, 3.0),
        (Overloaded("full", 0.01), {}, 0.05),
        # A full router means a full cluster, a missing one only itself.
        (Overloaded("full", 3.0), {"addresses": 2}, 3.0),
        (Unavailable("draining", 3.0), {"addresses": 2}, 0.0),
        (Unavailable("draining", 3.0), {"addresses": 2, "attempts": 2}, 3.0),
        # An address that was not tried yet is tried at once, and every one gets an attempt.
        (GONE, {"addresses": 3, "attempts": 2}, 0.0),
        (GONE, {"addresses": 3, "attempts": 3}, 0.05),
        (GONE, {"attempts": 4}, None),
        (GONE, {"addresses": 6, "attempts": 4}, 0.0),
        (GONE, {"addresses": 6, "attempts": 6}, None),
        # A stream that had begun is tried until its deadline, or for `keep_trying_s`.
        (GONE, {"attempts": 400, **BEGUN, "failing_s": 9.9}, 0.5),
        (GONE, {"attempts": 400, **BEGUN, "failing_s": 10.0}, None),
        (GONE, {"attempts": 400, **BEGUN, "failing_s": 50.0, "time_left_s": 20.0}, 0.5),
        (GONE, {"attempts": 400, **BEGUN, "failing_s": 50.0, "time_left_s": 0.1}, None),
        (Overloaded("full"), {"attempts": 4, **BEGUN}, None),
        # So is what a router refuses with a time to come back.
        (REST, {"attempts": 400, "failing_s": 9.9}, 3.0),
        (REST, {"attempts": 400, "failing_s": 10.0}, None),
        (REST, {"attempts": 400, "failing_s": 50.0, "time_left_s": 3.1}, 3.0),
        (REST, {"attempts": 400, "failing_s": 50.0, "time_left_s": 3.0}, None),
        (Overloaded("full", 3.0), {"attempts": 4}, 3.0),
        (REST, {"policy": RetryPolicy(max_attempts=1)}, None),
        (GONE, {"policy": RetryPolicy(max_attempts=1), "addresses": 2}, 0.0),
        (GONE, {"policy": RetryPolicy(max_attempts=1), "addresses": 2, "attempts": 2}, None),
        # Backoff doubles up to its limit.
        *(
            (GONE, {"policy": MANY, "attempts": n}, wait_s)
            for n, wait_s in enumerate((0.05, 0.1, 0.2, 0.4, 0.5, 0.5), 1)
        ),
        (GONE, {"policy": RetryPolicy(max_attempts=1), **BEGUN}, None),
        # A wait that outlasts the deadline is not begun.
        (Overloaded("full", 3.0), {"time_left_s": 3.0}, None),
        (Overloaded("full", 3.0), {"time_left_s": 3.1}, 3.0),
    ],
)
def test_when_to_try_again(error, state, wait_s):
    assert decide(error, **state) == (None if wait_s is None else pytest.approx(wait_s))


def test_clients_refused_together_retry_at_different_times():
    waits = {decide(Overloaded("full", 4.0), jitter=n / 10) for n in range(10)}
    assert len(waits) == 10
    assert 4.0 <= min(waits) <= max(waits) < 5.0
