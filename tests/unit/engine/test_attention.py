"""Paged attention against the textbook formula, for scattered blocks, windows and block sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.ops.torch import attention
from baton.engine.ops.torch.attention import (
    AttentionBatch,
    PrefillSegment,
    attend,
    padded_keys,
    place,
    write_kv,
)

LAYERS, LAYER, HEADS, KV_HEADS, HEAD_SIZE = 3, 1, 6, 2, 16
SCALE = HEAD_SIZE**-0.5
NO_ROWS = torch.empty(0, dtype=torch.int64)


def textbook(q: Tensor, k: Tensor, v: Tensor, position: int, window: int | None) -> Tensor:
    """One query `[heads, head_size]` over k, v `[tokens, kv_heads, head_size]`, in float64."""
    first = 0 if window is None else max(0, position - window + 1)
    k, v = (
        x[first : position + 1].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v)
    )
    weights = torch.einsum("hd,thd->ht", q.double(), k).mul(SCALE).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v).flatten()


class Paged:
    """A pool that holds one sequence of random K and V in scattered blocks."""

    def __init__(
        self, length: int, block_size: int = 16, dtype: torch.dtype = torch.float32
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.block_size = block_size
        count = -(-length // block_size)
        shape = (2 * count + 1, LAYERS, 2, KV_HEADS, block_size, HEAD_SIZE)
        self.pool = torch.zeros(shape, dtype=dtype)
        # Block 0 is what padded block_tables point at; finite garbage there must not be seen.
        self.pool[0] = 1e4
        self.blocks = torch.randperm(2 * count, generator=self.generator)[:count] + 1
        self.k, self.v = self.random(length, KV_HEADS), self.random(length, KV_HEADS)
        at = torch.arange(length)
        slots = self.blocks[at // block_size] * block_size + at % block_size
        write_kv(self.pool, LAYER, slots, self.k, self.v)

    def random(self, rows: int, heads: int = HEADS) -> Tensor:
        drawn = torch.randn(rows, heads, HEAD_SIZE, generator=self.generator)
        return drawn.to(self.pool.dtype)

    def segment(self, first_row: int, start: int, end: int) -> PrefillSegment:
        blocks = self.blocks[: -(-end // self.block_size)]
        return PrefillSegment(first_row, end - start, start, blocks)

    def attend(
        self, q: Tensor, decode: list[int], *chunks: PrefillSegment, window: int | None = None
    ) -> Tensor:
        """Of decode rows that see so many tokens, and of chunks."""
        tables, lengths = self.blocks.repeat(len(decode), 1), torch.tensor(decode)
        batch = AttentionBatch(NO_ROWS, len(decode), tables, lengths, chunks)
        return attend(q, self.pool, LAYER, batch, SCALE, window)


def test_write_kv_touches_its_own_slots_only() -> None:
    pool = torch.zeros(5, LAYERS, 2, KV_HEADS, 4, HEAD_SIZE)
    k, v = torch.randn(2, 2, KV_HEADS, HEAD_SIZE).unbind()
    write_kv(pool, 2, torch.tensor([3 * 4 + 1, 0 * 4 + 3]), k, v)
    for row, (block, offset) in enumerate(((3, 1), (0, 3))):
        assert torch.equal(pool[block, 2, 0, :, offset], k[row])
        assert torch.equal(pool[block, 2, 1, :, offset], v[row])
    assert pool.count_nonzero() == k.numel() + v.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("block_size", [1, 16, 24, 256])
def test_equals_the_textbook(block_size: int, window: int | None, dtype: torch.dtype) -> None:
    paged = Paged(150, block_size, dtype)
    positions = [0, 31, 149, 16, *range(37), *range(90, 150)]
    q = paged.random(len(positions))
    chunks = paged.segment(4, 0, 37), paged.segment(41, 90, 150)
    got = paged.attend(q, [1, 32, 150, 17], *chunks, window=window)
    expected = [
        textbook(row, paged.k, paged.v, at, window) for row, at in zip(q, positions, strict=True)
    ]
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), torch.stack(expected), rtol=tolerance, atol=tolerance)


def test_short_tables_are_padded_with_a_block_that_is_not_seen() -> None:
    paged = Paged(150)
    q = paged.random(2)
    block_tables = torch.stack([paged.blocks, torch.zeros_like(paged.blocks)])
    block_tables[1, 0] = paged.blocks[0]
    batch = AttentionBatch(NO_ROWS, 2, block_tables, torch.tensor([150, 3]), ())
    got = attend(q, paged.pool, LAYER, batch, SCALE, None)
    torch.testing.assert_close(got, paged.attend(q, [150, 3]), rtol=1e-5, atol=1e-5)


def test_queries_and_rows_taken_in_parts_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged, lengths = Paged(700), [700, 5, 16, 17, 128, 129, 299]
    q, rows = paged.random(700), paged.random(7)
    whole, decoded = paged.attend(q, [], paged.segment(0, 0, 700)), paged.attend(rows, lengths)
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 50 * HEADS * padded_keys(700))
    assert torch.equal(paged.attend(q, [], paged.segment(0, 0, 700)), whole)
    for size in (1, 50_000, 1 << 30):
        monkeypatch.setattr(attention, "GATHER_BYTES", size)
        assert torch.equal(paged.attend(rows, lengths), decoded)


@pytest.mark.parametrize("length", [500, 2100])
def test_a_query_gives_the_same_bits_whatever_its_chunk(length: int) -> None:
    paged = Paged(length)
    q = paged.random(length)
    whole = paged.attend(q, [], paged.segment(0, 0, length))
    for start, end in ((0, 33), (0, 253), (250, 314), (400, 402), (length - 60, length)):
        got = paged.attend(q[start:end], [], paged.segment(0, start, end))
        assert torch.equal(got, whole[start:end])


BLOCK = 4


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=80, deadline=None)
@given(
    decodes=st.lists(st.integers(0, 40), max_size=4),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(2, 20)), max_size=3),
)
def test_places_are_those_that_counting_gives(
    decodes: list[int], chunks: list[tuple[int, int]]
) -> None:
    """Sequences have blocks of their own: 100, 101, ... of the first, and so on."""
    if not decodes and not chunks:
        return
    spans = [*((context, 1) for context in decodes), *chunks]
    needed = [-(-sum(span) // BLOCK) for span in spans]
    tables = torch.zeros(len(spans), max(needed), dtype=torch.int32)
    for at, count in enumerate(needed):
        tables[at, :count] = torch.arange(count) + 100 * (at + 1)
    contexts, counts = ([*values] for values in zip(*spans, strict=True))
    tokens = ints([*range(sum(counts))])
    batch = StepBatch(tokens, ints(contexts), ints(counts), tables, ints([]), len(decodes))

    rows = place(batch, BLOCK)
    expected = [(at, p) for at, (a, b) in enumerate(spans) for p in range(a, a + b)]
    assert rows.token_ids.tolist() == tokens.tolist()
    assert rows.positions.tolist() == [p for _, p in expected]
    slots = [(100 * (at + 1) + p // BLOCK) * BLOCK + p % BLOCK for at, p in expected]
    assert rows.attention.slots.tolist() == slots
    assert rows.attention.num_decode == len(decodes)
    assert rows.attention.decode_lengths.tolist() == [context + 1 for context in decodes]
    # No wider than the longest decode row needs: every column costs a gather.
    width = max(needed[: len(decodes)], default=0)
    assert not decodes or torch.equal(rows.attention.decode_tables, tables[: len(decodes), :width])
    first_row = len(decodes)
    for at, segment in enumerate(rows.attention.segments, len(decodes)):
        assert (segment.first_row, segment.context, segment.num_rows) == (first_row, *spans[at])
        assert segment.block_ids.tolist() == [100 * (at + 1) + n for n in range(needed[at])]
        first_row += counts[at]
    assert first_row == sum(counts)
