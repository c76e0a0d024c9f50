"""Decode attention: the kernel as its reference, and the reference as the engine's attention."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from baton.engine.ops.torch.attention import AttentionBatch, attend
from baton.engine.ops.triton.decode_attention import (
    MOST_SPLITS,
    PROGRAMS_PER_PROCESSOR,
    decode_attention,
    decode_attention_reference,
    splits_for,
)
from baton.engine.ops.triton.spec import Config
from tests.unit.engine.kernels.attention_cases import (
    FP8,
    LAYER,
    SCALE,
    Heads,
    paged,
    seen_by,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Around the borders of blocks of 16 and 32, and of splits of 32 and more keys; 0 is padding.
LENGTHS = [1, 16, 17, 0, 33, 64, 97, 130]


def inputs(
    heads: Heads, lengths: list[int], window: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, pool, tables and lengths of rows that see so many tokens."""
    torch.manual_seed(seed)
    pool, tables = paged(heads, [seen_by(length, window) for length in lengths])
    return heads.queries(len(lengths)), pool, tables, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize(
    ("heads", "window", "splits"),
    [
        (Heads(2, 2, 64), None, 1),
        (Heads(4, 2, 64), None, 3),
        (Heads(4, 1, 128), None, 4),
        (Heads(7, 1, 16), None, 2),
        (Heads(8, 1, 80, block_size=32), None, 0),
        (Heads(4, 2, 96, block_size=48), None, 2),
        (Heads(4, 2, 16), 1, 2),
        (Heads(4, 2, 16), 20, 3),
        (Heads(2, 1, 32, block_size=32), 64, 2),
        (Heads(4, 2, 64, dtype=FP16), None, 3),
        (Heads(4, 2, 64, dtype=BF16), 40, 3),
        (Heads(4, 2, 64, kept=torch.int8), None, 3),
        (Heads(4, 2, 80, dtype=BF16, kept=torch.int8), None, 2),
        (Heads(4, 2, 64, dtype=FP16, kept=torch.int8), 50, 2),
        (Heads(2, 1, 64, kept=FP8), None, 2),
        (Heads(2, 1, 64, dtype=FP16, kept=FP8), None, 2),
        (Heads(2, 1, 64, dtype=BF16, kept=FP8), None, 2),
    ],
    ids=str,
)
def test_kernel_equals_reference_and_reads_nothing_else(
    heads: Heads, window: int | None, splits: int
) -> None:
    arguments = inputs(heads, LENGTHS, window)
    out = decode_attention(*at_layer(*arguments), SCALE, window, splits)
    expected = decode_attention_reference(*at_layer(*arguments), SCALE, window)
    assert out.dtype == heads.dtype
    torch.testing.assert_close(out, expected, atol=heads.tolerance, rtol=heads.tolerance)
    assert torch.equal(out[LENGTHS.index(0)], torch.zeros_like(out[0]))


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(seed: int) -> None:
    torch.manual_seed(seed)
    group, kv_heads, blocks = (int(torch.randint(1, most, ())) for most in (9, 4, 4))
    heads = Heads(group * kv_heads, kv_heads, 16 * int(torch.randint(1, 9, ())), 16 * blocks)
    window = int(torch.randint(1, 90, ())) if seed % 2 else None
    lengths = torch.randint(0, 120, (4,)).tolist()
    splits = int(torch.randint(0, 5, ()))
    config = Config(4, 1, {"TILE": 16 << seed % 3, "LEAST_SPLIT": 16})
    arguments = inputs(heads, lengths, window, seed)
    out = decode_attention(*at_layer(*arguments), SCALE, window, splits, config)
    expected = decode_attention_reference(*at_layer(*arguments), SCALE, window)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kept", "window"), [(None, None), (None, 21), (torch.int8, None)])
def test_reference_equals_the_engine(kept: torch.dtype | None, window: int | None) -> None:
    heads, lengths = Heads(6, 2, 32, kept=kept), [1, 16, 33, 70]
    torch.manual_seed(1)
    pool, tables = paged(heads, [range(length) for length in lengths], poison=1.0)
    q = heads.queries(len(lengths))
    tokens = torch.tensor(lengths)
    batch = AttentionBatch(torch.empty(0), len(lengths), tables.long(), tokens, ())
    expected = attend(q, pool, LAYER, batch, SCALE, window)
    out = decode_attention_reference(q, pool, LAYER, tables, tokens, SCALE, window)
    torch.testing.assert_close(out.flatten(1), expected, atol=1e-5, rtol=1e-5)


def test_any_number_of_splits_gives_the_same_and_each_the_same_again() -> None:
    heads = Heads(4, 2, 32)
    arguments = at_layer(*inputs(heads, [130, 90, 0, 31]))
    whole = decode_attention(*arguments, SCALE, None, 1)
    for splits in (2, 5, 9):
        out = decode_attention(*arguments, SCALE, None, splits)
        torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-5)
        assert torch.equal(out, decode_attention(*arguments, SCALE, None, splits))


def test_a_rows_result_does_not_depend_on_those_beside_it() -> None:
    heads = Heads(4, 2, 32)
    q, pool, tables, lengths = inputs(heads, [120, 7, 64])
    together = decode_attention(q, pool, LAYER, tables, lengths, SCALE, None, 3)
    for row in range(len(q)):
        one = slice(row, row + 1)
        alone = decode_attention(q[one], pool, LAYER, tables[one], lengths[one], SCALE, None, 3)
        assert torch.equal(alone[0], together[row])


def test_writes_where_it_is_told_to() -> None:
    heads = Heads(2, 1, 16)
    arguments = at_layer(*inputs(heads, [5, 40]))
    out = torch.full((3, 2, 16), 7.0)
    decode_attention(*arguments, SCALE, None, 2, out=out[:2])
    assert torch.equal(out[:2], decode_attention(*arguments, SCALE, None, 2))
    assert torch.equal(out[2], torch.full((2, 16), 7.0))


def test_reaches_blocks_beyond_2_to_the_31_elements() -> None:
    # Virtual memory for the most part: only the last block is ever touched.
    num_blocks = 2**31 // (2 * 16 * 16) + 8
    pool = torch.empty(num_blocks, 1, 2, 1, 16, 16, dtype=FP16)
    torch.manual_seed(0)
    pool[-1] = torch.randn(pool.shape[1:]).to(FP16)
    q = torch.randn(1, 2, 16).to(FP16)
    tables = torch.tensor([[num_blocks - 1]], dtype=torch.int32)
    lengths = torch.tensor([16], dtype=torch.int32)
    out = decode_attention(q, pool, 0, tables, lengths, SCALE, None)
    near = decode_attention(q, pool[-1:].clone(), 0, tables * 0, lengths, SCALE, None)
    assert torch.equal(out, near)


@pytest.mark.parametrize(
    ("programs", "longest", "processors"),
    list(product((1, 8, 64, 5000), (0, 1, 16, 1000), (1, 132))),
)
def test_splits_fill_the_gpu_and_no_more(programs: int, longest: int, processors: int) -> None:
    splits = splits_for(programs, longest, processors)
    wanted = PROGRAMS_PER_PROCESSOR * processors
    assert 1 <= splits <= max(1, min(longest, MOST_SPLITS))
    assert splits == 1 or (splits - 1) * programs < wanted
    assert splits * programs >= wanted or splits == max(1, min(longest, MOST_SPLITS))


@pytest.mark.parametrize(
    ("q", "pool"),
    [
        (torch.empty(1, 3, 16), torch.empty(1, 1, 2, 2, 16, 16)),  # heads that share unevenly
        (torch.empty(1, 2, 24), torch.empty(1, 1, 2, 2, 16, 24)),  # a head size
        (torch.empty(1, 2, 16), torch.empty(1, 1, 2, 2, 8, 16)),  # a block size
        (torch.empty(1, 2, 16), torch.empty(1, 1, 2, 2, 16, 32)),  # a row of another size
        (torch.empty(1, 2, 16), torch.empty(1, 1, 2, 2, 16, 16, dtype=BF16)),  # another type
        (torch.empty(1, 2, 16), torch.empty(1, 1, 2, 2, 16, 16, dtype=torch.int8)),  # no scale
    ],
)
def test_what_does_not_fit_is_refused(q: Tensor, pool: Tensor) -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"heads|KV rows|multiples|queries"):
        decode_attention(q, pool, 0, table, table[0], SCALE, None)


def at_layer(
    q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
    """The arguments in a kernel's order."""
    return q, pool, LAYER, tables, lengths
