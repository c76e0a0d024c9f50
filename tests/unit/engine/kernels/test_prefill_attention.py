"""Prefill attention: the kernel as its reference, and the reference as the engine's attention."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from baton.engine.ops.torch.attention import AttentionBatch, PrefillSegment, attend
from baton.engine.ops.triton.prefill_attention import (
    LEAST_ROWS,
    MOST_ROWS,
    Tiles,
    plan_tiles,
    prefill_attention,
    prefill_attention_reference,
)
from baton.engine.ops.triton.spec import Config
from tests.unit.engine.kernels.attention_cases import FP8, LAYER, SCALE, Heads, paged

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# (tokens before a chunk, tokens in it), around the borders of blocks and tiles.
CHUNKS = [(0, 1), (15, 2), (16, 17), (0, 33), (50, 31), (0, 0), (64, 1)]

Inputs = tuple[Tensor, Tensor, int, Tensor, Tensor, Tensor]


def inputs(
    heads: Heads,
    chunks: list[tuple[int, int]],
    window: int | None = None,
    seed: int = 0,
    poison: float = torch.nan,
) -> Inputs:
    """The first arguments of a kernel, for chunks of several sequences."""
    torch.manual_seed(seed)
    spans = [
        range(max(0, context + 1 - window) if window and count else 0, context + count)
        for context, count in chunks
    ]
    pool, tables = paged(heads, spans, poison)
    contexts, counts = torch.tensor(chunks, dtype=torch.int32).unbind(1)
    q = heads.queries(int(counts.sum()))
    return q, pool, LAYER, tables, contexts.contiguous(), counts.contiguous()


def planned(arguments: Inputs) -> Tiles:
    q, pool, counts = arguments[0], arguments[1], arguments[-1]
    return plan_tiles(counts, len(q), q.shape[1] // pool.shape[3])


@pytest.mark.parametrize(
    ("heads", "window"),
    [
        (Heads(2, 2, 64), None),
        (Heads(4, 2, 64), None),
        (Heads(4, 1, 128), None),
        (Heads(7, 1, 16), None),
        (Heads(8, 1, 80, block_size=32), None),
        (Heads(4, 2, 32, block_size=48), None),
        (Heads(4, 2, 16), 1),
        (Heads(4, 2, 16), 20),
        (Heads(2, 1, 32, block_size=32), 40),
        (Heads(4, 2, 64, dtype=FP16), None),
        (Heads(4, 2, 64, dtype=BF16), 40),
        (Heads(4, 2, 64, kept=torch.int8), None),
        (Heads(4, 2, 80, dtype=BF16, kept=torch.int8), None),
        (Heads(4, 2, 64, dtype=FP16, kept=torch.int8), 50),
        (Heads(2, 1, 64, kept=FP8), None),
        (Heads(2, 1, 64, dtype=FP16, kept=FP8), None),
        (Heads(2, 1, 64, dtype=BF16, kept=FP8), None),
    ],
    ids=str,
)
def test_kernel_equals_reference_and_reads_nothing_else(heads: Heads, window: int | None) -> None:
    arguments = inputs(heads, CHUNKS, window)
    out = prefill_attention(*arguments, planned(arguments), SCALE, window)
    expected = prefill_attention_reference(*arguments, SCALE, window)
    assert out.dtype == heads.dtype
    torch.testing.assert_close(out, expected, atol=heads.tolerance, rtol=heads.tolerance)


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(seed: int) -> None:
    torch.manual_seed(seed)
    group, kv_heads, blocks = (int(torch.randint(1, most, ())) for most in (9, 4, 4))
    heads = Heads(group * kv_heads, kv_heads, 16 * int(torch.randint(1, 9, ())), 16 * blocks)
    window = int(torch.randint(1, 70, ())) if seed % 2 else None
    chunks = [(int(torch.randint(0, 60, ())), int(torch.randint(0, 60, ()))) for _ in range(3)]
    arguments = inputs(heads, chunks, window, seed)
    config = Config(4, 1, {"TILE": 16 << seed % 3})
    out = prefill_attention(*arguments, planned(arguments), SCALE, window, config)
    expected = prefill_attention_reference(*arguments, SCALE, window)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kept", "window"), [(None, None), (None, 21), (torch.int8, None)])
def test_reference_equals_the_engine(kept: torch.dtype | None, window: int | None) -> None:
    chunks = [(0, 1), (16, 17), (0, 33), (50, 31)]
    arguments = inputs(Heads(6, 2, 32, kept=kept), chunks, poison=1.0)
    q, pool, _, tables, contexts, counts = arguments
    firsts = (counts.cumsum(0) - counts).tolist()
    segments = tuple(
        PrefillSegment(first, count, context, table[: -(-(context + count) // 16)].long())
        for first, count, context, table in zip(
            firsts, counts.tolist(), contexts.tolist(), tables, strict=True
        )
    )
    nothing = torch.empty(0)
    batch = AttentionBatch(nothing, 0, nothing, nothing, segments)
    expected = attend(q, pool, LAYER, batch, SCALE, window)
    out = prefill_attention_reference(*arguments, SCALE, window)
    torch.testing.assert_close(out.flatten(1), expected, atol=1e-5, rtol=1e-5)


def test_the_same_again() -> None:
    arguments = inputs(Heads(4, 2, 32), CHUNKS)
    first = prefill_attention(*arguments, planned(arguments), SCALE, None)
    assert torch.equal(first, prefill_attention(*arguments, planned(arguments), SCALE, None))


@pytest.mark.parametrize("window", [None, 24])
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(window: int | None) -> None:
    arguments = inputs(Heads(4, 2, 32), [(0, 70)])
    q, pool, layer, table, _, counts = arguments
    whole = prefill_attention(*arguments, planned(arguments), SCALE, window)
    for begin, end in ((0, 13), (13, 14), (14, 70)):
        part = (q[begin:end], pool, layer, table, counts * 0 + begin, counts * 0 + end - begin)
        out = prefill_attention(*part, planned(part), SCALE, window)
        torch.testing.assert_close(out, whole[begin:end], atol=1e-5, rtol=1e-5)


def test_writes_where_it_is_told_to() -> None:
    arguments = inputs(Heads(2, 1, 16), [(3, 5), (0, 2)])
    out = torch.full((9, 2, 16), 7.0)
    prefill_attention(*arguments, planned(arguments), SCALE, None, out=out[1:8])
    assert torch.equal(out[1:8], prefill_attention(*arguments, planned(arguments), SCALE, None))
    assert torch.equal(out[[0, 8]], torch.full((2, 2, 16), 7.0))


@pytest.mark.parametrize(
    ("counts", "group"),
    [
        ([1], 1),
        ([5, 0, 3], 4),
        ([300], 1),
        ([1, 200, 33, 64], 4),
        ([19, 18, 37], 7),
        ([9] * 5, 128),
    ],
)
def test_plan_covers_every_row_once_and_late_ones_first(counts: list[int], group: int) -> None:
    tiles = plan_tiles(torch.tensor(counts, dtype=torch.int32), sum(counts), group)
    assert tiles.tokens == tiles.rows // group
    assert LEAST_ROWS <= tiles.rows <= MOST_ROWS
    assert len(tiles.places) <= sum(counts)
    starts = [sum(counts[:sequence]) for sequence in range(len(counts))]
    covered: Counter[int] = Counter()
    before: dict[int, int] = {}
    used = [place for place in tiles.places.tolist() if place[0] >= 0]
    for sequence, first, row in used:
        assert row == starts[sequence] + first
        assert first < before.get(sequence, counts[sequence])
        before[sequence] = first
        covered.update(range(row, row + min(tiles.tokens, counts[sequence] - first)))
    assert covered == Counter(range(sum(counts)))
    assert len(used) == sum(-(-count // tiles.tokens) for count in counts)


def test_tiles_are_as_small_as_chunks_are() -> None:
    short = torch.full((8,), 4, dtype=torch.int32)
    assert plan_tiles(short, 32, 4).rows == LEAST_ROWS
    assert plan_tiles(short * 5, 160, 4).rows == MOST_ROWS
    with pytest.raises(ValueError, match="129 query heads"):
        plan_tiles(short, 32, 129)
