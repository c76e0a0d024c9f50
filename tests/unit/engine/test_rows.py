"""Where rows belong, against counting one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.ops.torch.rows import place

SIZE = 4


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def a_batch(contexts: list[int], counts: list[int]) -> StepBatch:
    """Sequences of these sizes, each in blocks of its own: 100, 101, ... of the first and so on."""
    needed = [-(-(a + b) // SIZE) for a, b in zip(contexts, counts, strict=True)]
    tables = torch.zeros(len(counts), max(needed), dtype=torch.int32)
    for at, count in enumerate(needed):
        tables[at, :count] = torch.arange(count) + 100 * (at + 1)
    rows = sum(counts)
    singles = sum(count == 1 for count in counts)
    return StepBatch(ints([*range(rows)]), ints(contexts), ints(counts), tables, ints([]), singles)


@settings(max_examples=80, deadline=None)
@given(
    singles=st.lists(st.integers(0, 40), max_size=4),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(2, 20)), max_size=3),
)
def test_places_are_those_that_counting_gives(
    singles: list[int], chunks: list[tuple[int, int]]
) -> None:
    if not singles and not chunks:
        return
    contexts = singles + [context for context, _ in chunks]
    counts = [1] * len(singles) + [count for _, count in chunks]
    rows = place(a_batch(contexts, counts), SIZE)
    spans = enumerate(zip(contexts, counts, strict=True))
    expected = [(at, position) for at, (a, b) in spans for position in range(a, a + b)]
    assert rows.positions.tolist() == [p for _, p in expected]
    slots = [(100 * (at + 1) + p // SIZE) * SIZE + p % SIZE for at, p in expected]
    assert rows.attention.slots.tolist() == slots
    assert rows.token_ids.tolist() == list(range(sum(counts)))
    assert rows.attention.num_decode == len(singles)
    assert rows.attention.decode_lengths.tolist() == [context + 1 for context in singles]
    assert_tables(rows.attention.decode_tables, singles)
    first_row = len(singles)
    for at, segment in enumerate(rows.attention.segments, len(singles)):
        assert (segment.first_row, segment.num_rows) == (first_row, counts[at])
        assert segment.context == contexts[at]
        needed = -(-(contexts[at] + counts[at]) // SIZE)
        assert segment.block_ids.tolist() == [100 * (at + 1) + n for n in range(needed)]
        first_row += counts[at]
    assert first_row == sum(counts)


def assert_tables(tables: Tensor, singles: list[int]) -> None:
    """Each row's blocks, and no wider than the longest needs: every column costs a gather."""
    needed = [context // SIZE + 1 for context in singles]
    assert not singles or tables.shape[1] == max(needed)
    for at, count in enumerate(needed):
        assert tables[at, :count].tolist() == [100 * (at + 1) + n for n in range(count)]
        assert not tables[at, count:].any()
