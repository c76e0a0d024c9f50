"""Where rows belong, against counting one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.ops.torch.attention import place

SIZE = 4


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def a_batch(context_lens: list[int], query_lens: list[int]) -> StepBatch:
    """Sequences of these sizes, each in blocks of its own: 100, 101, ... of the first and so on."""
    needed = [-(-(a + b) // SIZE) for a, b in zip(context_lens, query_lens, strict=True)]
    block_tables = torch.zeros(len(query_lens), max(needed), dtype=torch.int32)
    for at, count in enumerate(needed):
        block_tables[at, :count] = torch.arange(count) + 100 * (at + 1)
    rows = sum(query_lens)
    num_decodes = sum(count == 1 for count in query_lens)
    return StepBatch(
        ints([*range(rows)]),
        ints(context_lens),
        ints(query_lens),
        block_tables,
        ints([]),
        num_decodes,
    )


@settings(max_examples=80, deadline=None)
@given(
    num_decodes=st.lists(st.integers(0, 40), max_size=4),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(2, 20)), max_size=3),
)
def test_places_are_those_that_counting_gives(
    num_decodes: list[int], chunks: list[tuple[int, int]]
) -> None:
    if not num_decodes and not chunks:
        return
    context_lens = num_decodes + [context for context, _ in chunks]
    query_lens = [1] * len(num_decodes) + [count for _, count in chunks]
    rows = place(a_batch(context_lens, query_lens), SIZE)
    spans = enumerate(zip(context_lens, query_lens, strict=True))
    expected = [(at, position) for at, (a, b) in spans for position in range(a, a + b)]
    assert rows.positions.tolist() == [p for _, p in expected]
    slots = [(100 * (at + 1) + p // SIZE) * SIZE + p % SIZE for at, p in expected]
    assert rows.attention.slots.tolist() == slots
    assert rows.token_ids.tolist() == list(range(sum(query_lens)))
    assert rows.attention.num_decode == len(num_decodes)
    assert rows.attention.decode_lengths.tolist() == [context + 1 for context in num_decodes]
    assert_tables(rows.attention.decode_tables, num_decodes)
    first_row = len(num_decodes)
    for at, segment in enumerate(rows.attention.segments, len(num_decodes)):
        assert (segment.first_row, segment.num_rows) == (first_row, query_lens[at])
        assert segment.context == context_lens[at]
        needed = -(-(context_lens[at] + query_lens[at]) // SIZE)
        assert segment.block_ids.tolist() == [100 * (at + 1) + n for n in range(needed)]
        first_row += query_lens[at]
    assert first_row == sum(query_lens)


def assert_tables(block_tables: Tensor, num_decodes: list[int]) -> None:
    """Each row's blocks, and no wider than the longest needs: every column costs a gather."""
    needed = [context // SIZE + 1 for context in num_decodes]
    assert not num_decodes or block_tables.shape[1] == max(needed)
    for at, count in enumerate(needed):
        assert block_tables[at, :count].tolist() == [100 * (at + 1) + n for n in range(count)]
        assert not block_tables[at, count:].any()
