"""What is said of a request's trace as a whole: is it complete, how long, what is not explained."""

from typing import Any

import pytest

from baton.local.span_store import Span
from baton.local.trace_tree import coverage, entry_of, is_trace_id, is_whole, summarize

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def span(name: str, ids: str, start: int, end: int, **fields: Any) -> Span:
    """`ids` is "id" for a root or "parent/id"; times are milliseconds."""
    parent, _, own = ids.rpartition("/")
    return Span(TRACE, own, parent, name, fields.pop("service", "baton-router"),
                start * 1_000_000, end * 1_000_000, **fields)  # fmt: skip


def request(start: int = 0, end: int = 100, ids: str = "client/r", **fields: Any) -> Span:
    return span("router.generate", ids, start, end, is_entry=True, **fields)


def test_gaps_are_when_nothing_below_the_request_ran() -> None:
    told = coverage(
        [
            request(),
            span("router.admit", "r/a", 5, 10),
            span("router.attempt", "r/b", 10, 95),  # contains the others: explains nothing
            span("prefill", "b/c", 12, 40, service="baton-prefill"),
            span("decode.run", "b/d", 35, 80, service="baton-decode"),
            span("kv.transfer", "b/e", 36, 38, service="baton-prefill"),  # within another
        ]
    )
    assert told is not None
    assert told.took_ns == 100_000_000
    assert told.known_ns == 73_000_000  # 5 to 10 and 12 to 80; what overlaps counts once
    assert [(a // 1_000_000, b // 1_000_000) for a, b in told.gaps] == [(80, 100), (0, 5), (10, 12)]
    assert told.share == pytest.approx(0.73)


def test_what_is_outside_the_request_or_measures_it_does_not_count() -> None:
    told = coverage(
        [
            request(10, 90),
            span("generate", "client", 0, 100, service="baton-client"),
            span("router.first_token", "r/f", 10, 90),
            span("router.admit", "r/a", 0, 20),
            span("decode.run", "r/d", 80, 500),
        ]
    )
    assert told is not None and told.known_ns == 20_000_000


def test_a_request_alone_is_not_explained_at_all() -> None:
    told = coverage([request()])
    assert told is not None and told.share == 0.0
    assert told.gaps == ((0, 100_000_000),)
    assert coverage([span("other", "x", 0, 1)]) is None


def test_of_several_routers_the_one_that_ended_last_counts() -> None:
    first, second = request(0, 50, "c/r1"), request(60, 90, "c/r2")
    assert entry_of([second, first]) is second
    assert entry_of([span("decode", "x", 0, 1, service="baton-decode", is_entry=True)]) is None


def test_a_trace_is_whole_when_every_parent_but_the_callers_has_come() -> None:
    attempt, decode = span("router.attempt", "r/b", 1, 9), span("decode", "b/d", 2, 8)
    assert is_whole([request(), attempt, decode])
    assert not is_whole([request(), decode])
    assert not is_whole([attempt, decode])
    assert not is_whole([])


def test_a_summary_is_the_requests_own() -> None:
    tokens = {"gen_ai.usage.input_tokens": 717, "gen_ai.usage.output_tokens": 40}
    told = summarize(
        [
            span("router.attempt", "r/b", 1, 9),
            span("router.attempt", "r/c", 10, 99),
            request(5, 105, attributes=tokens, error="gone"),
        ]
    )
    assert told is not None
    assert (told.trace_id, told.start_ns, told.took_ms, told.spans) == (TRACE, 5_000_000, 100.0, 3)
    assert (told.input_tokens, told.output_tokens, told.attempts) == (717, 40, 2)
    assert told.error == "gone"
    refused = summarize([request()])
    assert refused is not None and (refused.input_tokens, refused.error) == (0, None)
    assert summarize([span("router.attempt", "r/b", 1, 9)]) is None


@pytest.mark.parametrize("text", ["", TRACE[:-1], TRACE + "0", TRACE.upper(), "g" * 32, "0" * 32])
def test_what_is_no_trace_id(text: str) -> None:
    assert is_trace_id(TRACE) and not is_trace_id(text)
