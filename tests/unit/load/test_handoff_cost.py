"""What a handoff cost is read from its trace."""

import pytest
from handoff_cost import bookkeeping, cost_of

from baton.local.span_store import Span

MS = 1_000_000


def span(name, start_ms, end_ms, **attributes):
    return Span("t", name, "", name, "s", int(start_ms * MS), int(end_ms * MS), attributes)


def trace(*chunk_ends, hidden_ms=0.0, transfer_start=12.0):
    return [
        span("decode.first_step", 18, 25),
        span("prefill", 0, 30, **{"baton.prompt_tokens": 600}),
        *(span("prefill.chunk", end - 1, end) for end in chunk_ends),
        span("kv.transfer", transfer_start, 16, bytes=4000, wire_ms=2.0, hidden_ms=hidden_ms),
        span("decode.admit", 15, 18),
    ]


def test_one_chunk_is_noticed_put_verified_and_waits():
    cost = cost_of(trace(10))
    assert (cost.prompt_tokens, cost.chunks, cost.num_bytes) == (600, 1, 4000)
    assert (cost.notice, cost.last_put, cost.commit, cost.wait) == (2, 2, 1, 3)
    assert (cost.whole, cost.hidden) == (8, 0)


def test_of_several_chunks_only_the_last_counts():
    cost = cost_of(trace(4, 10, hidden_ms=1.5, transfer_start=5.0))
    assert (cost.chunks, cost.notice, cost.last_put, cost.commit) == (2, 0, 0.5, 4.5)
    assert (cost.whole, cost.hidden) == (8, 0.75)


def test_bookkeeping_is_without_one_copy_and_without_the_wait():
    assert bookkeeping(cost_of(trace(10)), bytes_per_ms=4000) == pytest.approx(5 - 1)
    several = cost_of(trace(4, 10, hidden_ms=1.5, transfer_start=5.0))
    assert bookkeeping(several, bytes_per_ms=4000) == pytest.approx(5 - 0.25)


@pytest.mark.parametrize("missing", ["prefill.chunk", "kv.transfer", "decode.first_step"])
def test_what_was_not_handed_over_costs_nothing(missing):
    assert cost_of([span for span in trace(10) if span.name != missing]) is None
