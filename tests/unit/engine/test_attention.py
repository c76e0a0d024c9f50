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

    def __init__(self, length: int, block_size: int, dtype: torch.dtype, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        count = -(-length // block_size)
        self.pool = torch.zeros(
            2 * count + 1, LAYERS, 2, KV_HEADS, block_size, HEAD_SIZE, dtype=dtype
        )
        # Block 0 is what padded block_tables point at; finite garbage there must not be seen.
        self.pool[0] = 1e4
        self.blocks = torch.randperm(2 * count, generator=self.generator)[:count] + 1
        self.k, self.v = self.random(length, KV_HEADS), self.random(length, KV_HEADS)
        write_kv(self.pool, LAYER, self.slots(0, length), self.k, self.v)

    def random(self, rows: int, heads: int) -> Tensor:
        drawn = torch.randn(rows, heads, HEAD_SIZE, generator=self.generator)
        return drawn.to(self.pool.dtype)

    def slots(self, start: int, end: int) -> Tensor:
        at = torch.arange(start, end)
        return self.blocks[at // self.block_size] * self.block_size + at % self.block_size

    def expected(self, q: Tensor, positions: list[int], window: int | None) -> Tensor:
        rows = zip(q, positions, strict=True)
        return torch.stack([textbook(row, self.k, self.v, at, window) for row, at in rows])

    def segment(self, first_row: int, start: int, end: int) -> PrefillSegment:
        blocks = self.blocks[: -(-end // self.block_size)]
        return PrefillSegment(first_row, end - start, start, blocks)


def only(*segments: PrefillSegment) -> AttentionBatch:
    return AttentionBatch(NO_ROWS, 0, NO_ROWS.view(0, 0), NO_ROWS, segments)


def test_write_kv_touches_its_own_slots_only() -> None:
    pool = torch.zeros(5, LAYERS, 2, KV_HEADS, 4, HEAD_SIZE)
    k, v = torch.randn(2, 2, KV_HEADS, HEAD_SIZE).unbind()
    write_kv(pool, 2, torch.tensor([3 * 4 + 1, 0 * 4 + 3]), k, v)
    assert torch.equal(pool[3, 2, 0, :, 1], k[0])
    assert torch.equal(pool[3, 2, 1, :, 1], v[0])
    assert torch.equal(pool[0, 2, 0, :, 3], k[1])
    assert torch.equal(pool[0, 2, 1, :, 3], v[1])
    assert pool.count_nonzero() == k.numel() + v.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("block_size", [1, 16, 24, 256])
def test_equals_the_textbook(block_size: int, window: int | None, dtype: torch.dtype) -> None:
    length = 150
    paged = Paged(length, block_size, dtype)
    decode = [0, 31, 149, 16]
    chunks = [(0, 37), (90, 150)]
    positions = decode + [at for start, end in chunks for at in range(start, end)]
    q = paged.random(len(positions), HEADS)
    batch = AttentionBatch(
        slots=NO_ROWS,
        num_decode=len(decode),
        decode_tables=paged.blocks.repeat(len(decode), 1),
        decode_lengths=torch.tensor(decode) + 1,
        segments=(paged.segment(4, *chunks[0]), paged.segment(41, *chunks[1])),
    )
    got = attend(q, paged.pool, LAYER, batch, SCALE, window)
    assert got.shape == (len(positions), HEADS * HEAD_SIZE)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = paged.expected(q, positions, window)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_short_tables_are_padded_with_a_block_nobody_sees() -> None:
    paged = Paged(150, 16, torch.float32)
    q = paged.random(2, HEADS)
    block_tables = torch.stack([paged.blocks, torch.zeros_like(paged.blocks)])
    block_tables[1, 0] = paged.blocks[0]
    batch = AttentionBatch(NO_ROWS, 2, block_tables, torch.tensor([150, 3]), ())
    got = attend(q, paged.pool, LAYER, batch, SCALE, None)
    expected = paged.expected(q, [149, 2], None)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_queries_taken_in_parts_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged(700, 16, torch.float32)
    q = paged.random(700, HEADS)
    batch = only(paged.segment(0, 0, 700))
    whole = attend(q, paged.pool, LAYER, batch, SCALE, None)
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 50 * HEADS * padded_keys(700))
    assert torch.equal(attend(q, paged.pool, LAYER, batch, SCALE, None), whole)


def test_decode_rows_taken_in_groups_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged(300, 16, torch.float32)
    q = paged.random(7, HEADS)
    lengths = torch.tensor([300, 5, 16, 17, 128, 129, 299])
    batch = AttentionBatch(NO_ROWS, 7, paged.blocks.repeat(7, 1), lengths, ())
    results = []
    for size in (1, 50_000, 1 << 30):
        monkeypatch.setattr(attention, "GATHER_BYTES", size)
        results.append(attend(q, paged.pool, LAYER, batch, SCALE, None))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("length", [500, 2100])
def test_a_query_gives_the_same_bits_whatever_its_chunk(length: int) -> None:
    paged = Paged(length, 16, torch.float32)
    q = paged.random(length, HEADS)
    whole = attend(q, paged.pool, LAYER, only(paged.segment(0, 0, length)), SCALE, None)
    for start, end in ((0, 33), (0, 253), (250, 314), (400, 402), (length - 60, length)):
        batch = only(paged.segment(0, start, end))
        got = attend(q[start:end], paged.pool, LAYER, batch, SCALE, None)
        assert torch.equal(got, whole[start:end])


BLOCK = 4


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def a_batch(context_lens: list[int], query_lens: list[int]) -> StepBatch:
    """Sequences of these sizes, each in blocks of its own: 100, 101, ... of the first and so on."""
    needed = [-(-(a + b) // BLOCK) for a, b in zip(context_lens, query_lens, strict=True)]
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
    rows = place(a_batch(context_lens, query_lens), BLOCK)
    spans = enumerate(zip(context_lens, query_lens, strict=True))
    expected = [(at, position) for at, (a, b) in spans for position in range(a, a + b)]
    assert rows.positions.tolist() == [p for _, p in expected]
    slots = [(100 * (at + 1) + p // BLOCK) * BLOCK + p % BLOCK for at, p in expected]
    assert rows.attention.slots.tolist() == slots
    assert rows.token_ids.tolist() == list(range(sum(query_lens)))
    assert rows.attention.num_decode == len(num_decodes)
    assert rows.attention.decode_lengths.tolist() == [context + 1 for context in num_decodes]
    assert_tables(rows.attention.decode_tables, num_decodes)
    first_row = len(num_decodes)
    for at, segment in enumerate(rows.attention.segments, len(num_decodes)):
        assert (segment.first_row, segment.num_rows) == (first_row, query_lens[at])
        assert segment.context == context_lens[at]
        needed = -(-(context_lens[at] + query_lens[at]) // BLOCK)
        assert segment.block_ids.tolist() == [100 * (at + 1) + n for n in range(needed)]
        first_row += query_lens[at]
    assert first_row == sum(query_lens)


def assert_tables(block_tables: Tensor, num_decodes: list[int]) -> None:
    """Each row's blocks, and no wider than the longest needs: every column costs a gather."""
    needed = [context // BLOCK + 1 for context in num_decodes]
    assert not num_decodes or block_tables.shape[1] == max(needed)
    for at, count in enumerate(needed):
        assert block_tables[at, :count].tolist() == [100 * (at + 1) + n for n in range(count)]
        assert not block_tables[at, count:].any()
