"""The judge of endings: what is right passes, and each thing that is wrong is seen."""

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
from tests.chaos.wishes import (
    CUT,
    REFUSED,
    TOLD,
    UNREACHED,
    Ending,
    Run,
    Wish,
    complaint,
    wish,
)

TOKENS = tuple(range(100, 140))
TEXT = "".join(chr(97 + i % 26) for i in range(40))
LOGPROBS = tuple(TokenLogprobs(token, -0.5, ()) for token in TOKENS)
RUN = Run((1, 2, 3), {"temperature": 0.0}, Completion(TEXT, TOKENS, "length", logprobs=LOGPROBS))


def whole(wish: Wish, **other: Any) -> Ending:
    """A request's right end, but for what is given otherwise."""
    count = wish.max_tokens
    fields: dict[str, Any] = {
        "text": TEXT[:count],
        "token_ids": TOKENS[:count],
        "finish_reason": "length",
        "logprobs": LOGPROBS[:count] if wish.logprobs else (),
        "usage": Usage(3, count),
    }
    if wish.stop:
        fields |= {
            "text": TEXT[: TEXT.index(wish.stop)], "finish_reason": "stop", "stop": wish.stop,
        }  # fmt: skip
    completion = Completion(**{**fields, **other})
    return Ending(completion.token_ids, 10.0, 11.0, completion=completion)


def failed(error: BatonError, tokens: int = 0, lasted_s: float = 1.0) -> Ending:
    return Ending(TOKENS[:tokens], 10.0, 10.0 + lasted_s, error=error)


@pytest.mark.parametrize(
    "asked", [Wish(RUN, 40), Wish(RUN, 5), Wish(RUN, 7, logprobs=True), Wish(RUN, 40, stop="klm")]
)
def test_what_the_oracle_says_is_right(asked: Wish) -> None:
    assert complaint(asked, whole(asked), False, False) == ""


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
    asked = Wish(RUN, 5, logprobs=True)
    assert word in complaint(asked, whole(asked, **other), True, True)


def test_a_missed_stop_is_seen() -> None:
    asked = Wish(RUN, 40, stop="klm")
    late = whole(asked, text=TEXT, finish_reason="length", stop="")
    assert "stop" in complaint(asked, late, False, False)


def test_tokens_before_a_failure_or_a_cancel_count_too() -> None:
    asked = Wish(RUN, 40, cancel_after=3)
    right = Ending(TOKENS[:4], 10.0, 11.0, cancelled=True)
    wrong = Ending((100, 9), 10.0, 11.0, cancelled=True)
    assert complaint(asked, right, False, False) == ""
    assert "other tokens" in complaint(asked, wrong, False, False)
    torn = Ending((100, 9), 10.0, 11.0, error=Unavailable("gone"))
    assert "other tokens" in complaint(asked, torn, True, True)


def test_a_request_without_an_end_is_seen() -> None:
    assert complaint(Wish(RUN, 5), Ending((), 10.0, 99.0, over=False), True, True)


@pytest.mark.parametrize(
    ("error", "allowed_when_hurt"),
    [
        (Unavailable("no decode worker"), True),
        (Cancelled("its server was stopped"), True),
        (DeadlineExceeded("late"), False),
        (Overloaded("full"), False),  # without advice when to come again
        (InternalError("a bug"), False),
        (TransferFailed("lost"), False),
    ],
)
def test_errors_need_an_excuse(error: BatonError, allowed_when_hurt: bool) -> None:
    asked = Wish(RUN, 5)
    assert complaint(asked, failed(error), False, False)
    assert (complaint(asked, failed(error), True, False) == "") is allowed_when_hurt


def test_a_role_that_is_down_excuses_unavailable_alone() -> None:
    asked = Wish(RUN, 5)
    assert complaint(asked, failed(Unavailable("none"), 2), False, True) == ""
    assert complaint(asked, failed(InternalError("bug")), False, True)


@pytest.mark.parametrize(
    ("broke", "router_hurt", "role_down", "advice_s", "allowed"),
    [
        (CUT, False, True, 0.0, False),  # of its own router's death alone
        (CUT, True, False, 0.0, True),
        (UNREACHED, False, True, 0.0, False),
        (UNREACHED, True, False, 0.0, True),
        (REFUSED, False, False, 1.0, True),
        (REFUSED, True, True, 0.0, False),  # without advice
        (TOLD, False, False, 0.0, False),
        (TOLD, False, True, 0.0, True),
    ],
)
def test_streams_over_http_that_were_cut_are_told_from_those_refused(
    broke: str, router_hurt: bool, role_down: bool, advice_s: float, allowed: bool
) -> None:
    ending = Ending((), 1.0, 2.0, error=Unavailable("x", advice_s), router="router", broke=broke)
    assert (complaint(Wish(RUN, 5, http=True), ending, router_hurt, role_down) == "") is allowed


def test_a_short_deadline_may_pass_but_is_told_in_time() -> None:
    hasty = Wish(RUN, 40, timeout_s=0.5)
    assert complaint(hasty, failed(DeadlineExceeded("late"), 3, 0.6), False, False) == ""
    assert complaint(hasty, failed(DeadlineExceeded("late"), 3, 11.0), False, False)


def test_a_refusal_comes_with_advice_and_before_any_token() -> None:
    asked = Wish(RUN, 5)
    assert complaint(asked, failed(Overloaded("full", 0.5)), False, False) == ""
    assert complaint(asked, failed(Overloaded("full", 0.5), tokens=1), False, False)


def test_wishes_are_of_every_kind_and_repeatable() -> None:
    wishes = [wish(random.Random(i), [RUN]) for i in range(300)]
    assert wishes == [wish(random.Random(i), [RUN]) for i in range(300)]
    assert all(1 <= one.max_tokens <= len(TOKENS) for one in wishes)
    kinds = (
        [one for one in wishes if one.impatient],
        [one for one in wishes if one.cancel_after is not None],
        [one for one in wishes if one.stop],
        [one for one in wishes if one.logprobs],
        [one for one in wishes if one.http],
    )
    assert all(len(kind) > 10 for kind in kinds)
