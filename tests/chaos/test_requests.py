"""Each kind of violation is found, and what the oracle says passes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton.client import Completion, TokenLogprobs, Usage
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    TransferFailed,
    Unavailable,
)
from tests.chaos.requests import (
    CUT,
    ERROR_EVENT,
    REFUSED,
    UNREACHED,
    ChaosRequest,
    Outcome,
    Run,
    next_request,
    violation,
)

TOKENS = tuple(range(100, 140))
TEXT = "".join(chr(97 + i % 26) for i in range(40))
LOGPROBS = tuple(TokenLogprobs(token, -0.5, ()) for token in TOKENS)
RUN = Run((1, 2, 3), {"temperature": 0.0}, Completion(TEXT, TOKENS, "length", logprobs=LOGPROBS))


def whole(asked: ChaosRequest, **other: Any) -> Outcome:
    """A asked's right end, but for what is given otherwise."""
    count = asked.max_tokens
    fields: dict[str, Any] = {
        "text": TEXT[:count],
        "token_ids": TOKENS[:count],
        "finish_reason": "length",
        "logprobs": LOGPROBS[:count] if asked.logprobs else (),
        "usage": Usage(3, count),
    }
    if asked.stop:
        fields |= {
            "text": TEXT[: TEXT.index(asked.stop)], "finish_reason": "stop", "stop": asked.stop,
        }  # fmt: skip
    completion = Completion(**{**fields, **other})
    return Outcome(completion.token_ids, 10.0, 11.0, completion=completion)


def failed(error: BatonError, tokens: int = 0, lasted_s: float = 1.0) -> Outcome:
    return Outcome(TOKENS[:tokens], 10.0, 10.0 + lasted_s, error=error)


@pytest.mark.parametrize(
    "asked",
    [
        ChaosRequest(RUN, 40),
        ChaosRequest(RUN, 5),
        ChaosRequest(RUN, 7, logprobs=True),
        ChaosRequest(RUN, 40, stop="klm"),
    ],
)
def test_what_the_oracle_says_is_right(asked: ChaosRequest) -> None:
    assert violation(asked, whole(asked), False, False) == ""


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"token_ids": (100, 101, 7, 103, 104)}, "other tokens"),
        ({"token_ids": TOKENS[:4]}, "4"),
        ({"token_ids": TOKENS[:6]}, "6"),
        ({"finish_reason": "stop"}, "stop"),
        ({"text": "abxde"}, "other text"),
        ({"usage": Usage(3, 6)}, "6"),
        ({"usage": Usage(4, 5)}, "4"),
        ({"logprobs": LOGPROBS[:4]}, "4 of 5"),
        ({"logprobs": (*LOGPROBS[:4], TokenLogprobs(104, -0.6, ()))}, "at token 4"),
    ],
)
def test_a_wrong_answer_is_seen(other: dict[str, Any], word: str) -> None:
    asked = ChaosRequest(RUN, 5, logprobs=True)
    assert word in violation(asked, whole(asked, **other), True, True)


def test_a_missed_stop_is_seen() -> None:
    asked = ChaosRequest(RUN, 40, stop="klm")
    late = whole(asked, text=TEXT, finish_reason="length", stop="")
    assert "stop" in violation(asked, late, False, False)


def test_tokens_before_a_failure_or_a_cancel_count_too() -> None:
    asked = ChaosRequest(RUN, 40, cancel_after=3)
    right = Outcome(TOKENS[:4], 10.0, 11.0, cancelled=True)
    wrong = Outcome((100, 9), 10.0, 11.0, cancelled=True)
    assert violation(asked, right, False, False) == ""
    assert "other tokens" in violation(asked, wrong, False, False)
    torn = Outcome((100, 9), 10.0, 11.0, error=Unavailable("gone"))
    assert "other tokens" in violation(asked, torn, True, True)


def test_a_request_without_an_end_is_seen() -> None:
    assert violation(ChaosRequest(RUN, 5), Outcome((), 10.0, 99.0, over=False), True, True)


@pytest.mark.parametrize(
    ("error", "allowed_when_down"),
    [
        (Unavailable("no decode worker"), True),
        (Cancelled("its server was stopped"), True),
        (DeadlineExceeded("late"), False),
        (Overloaded("full"), False),  # without advice when to come again
        (InternalError("a bug"), False),
        (TransferFailed("lost"), False),
    ],
)
def test_errors_are_allowed_only_while_a_router_is_down(
    error: BatonError, allowed_when_down: bool
) -> None:
    asked = ChaosRequest(RUN, 5)
    assert violation(asked, failed(error), False, False)
    assert (violation(asked, failed(error), True, False) == "") is allowed_when_down


def test_a_role_that_is_down_excuses_unavailable_alone() -> None:
    asked = ChaosRequest(RUN, 5)
    assert violation(asked, failed(Unavailable("none"), 2), False, True) == ""
    assert violation(asked, failed(InternalError("bug")), False, True)


@pytest.mark.parametrize(
    ("failure", "router_down", "role_down", "advice_s", "allowed"),
    [
        (CUT, False, True, 0.0, False),  # of its own router's death alone
        (CUT, True, False, 0.0, True),
        (UNREACHED, False, True, 0.0, False),
        (UNREACHED, True, False, 0.0, True),
        (REFUSED, False, False, 1.0, True),
        (REFUSED, True, True, 0.0, False),  # without advice
        (ERROR_EVENT, False, False, 0.0, False),
        (ERROR_EVENT, False, True, 0.0, True),
    ],
)
def test_streams_over_http_that_were_cut_are_distinguished_from_those_refused(
    failure: str, router_down: bool, role_down: bool, advice_s: float, allowed: bool
) -> None:
    outcome = Outcome(
        (), 1.0, 2.0, error=Unavailable("x", advice_s), router="router", failure=failure
    )
    assert (
        violation(ChaosRequest(RUN, 5, http=True), outcome, router_down, role_down) == ""
    ) is allowed


def test_a_short_deadline_may_pass_but_is_reported_in_time() -> None:
    asked = ChaosRequest(RUN, 40, timeout_s=0.5)
    assert violation(asked, failed(DeadlineExceeded("late"), 3, 0.6), False, False) == ""
    assert violation(asked, failed(DeadlineExceeded("late"), 3, 11.0), False, False)


def test_a_refusal_comes_with_advice_and_before_any_token() -> None:
    asked = ChaosRequest(RUN, 5)
    assert violation(asked, failed(Overloaded("full", 0.5)), False, False) == ""
    assert violation(asked, failed(Overloaded("full", 0.5), tokens=1), False, False)


def test_requests_are_of_every_kind_and_repeatable() -> None:
    requests = [next_request(random.Random(i), [RUN]) for i in range(300)]
    assert requests == [next_request(random.Random(i), [RUN]) for i in range(300)]
    assert all(1 <= one.max_tokens <= len(TOKENS) for one in requests)
    kinds = (
        [one for one in requests if one.has_short_deadline],
        [one for one in requests if one.cancel_after is not None],
        [one for one in requests if one.stop],
        [one for one in requests if one.logprobs],
        [one for one in requests if one.http],
    )
    assert all(len(kind) > 10 for kind in kinds)
