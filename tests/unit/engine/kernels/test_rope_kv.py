"""Rotary embedding and the write to the pool in one kernel: as the model's own steps in torch."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from baton.engine.models.config import Rope
from baton.engine.models.decoder import rope_tables
from baton.engine.ops.triton.rope_kv import rope_and_write, rope_and_write_reference
from baton.engine.weights.quantize import SCALE_BYTES, is_quantized, unpack_rows

FP8 = torch.float8_e4m3fn
LAYERS, BLOCKS, MAX_CONTEXT = 3, 4, 64


def tables(head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of all positions."""
    cos, sin = rope_tables(Rope(theta=10_000.0), head_size, MAX_CONTEXT)
    return cos.to(dtype), sin.to(dtype)


def filled_pool(kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype) -> Tensor:
    """A pool of random bytes, so that a write to a wrong place shows."""
    row = head_size + (SCALE_BYTES if is_quantized(dtype) else 0)
    shape = (BLOCKS, LAYERS, 2, kv_heads, block_size, row * dtype.itemsize)
    return torch.randint(0, 60, shape, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("head_size", [16, 48, 80, 128])
@pytest.mark.parametrize("kept", [None, torch.int8, FP8], ids=["same", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_its_reference(head_size: int, kept: torch.dtype | None, dtype: torch.dtype) -> None:
    """With sizes that divide by nothing, some padding, and rows of a wider tensor."""
    draw = Random(f"{head_size} {kept} {dtype}")
    torch.manual_seed(draw.randrange(2**31))
    block_size, rows, kv_heads = draw.choice([16, 32]), draw.randint(1, 6), draw.randint(1, 5)
    heads, normed = kv_heads * draw.randint(1, 4), draw.random() < 0.5
    padding = torch.rand(rows) < 0.2
    slots = torch.randperm(BLOCKS * block_size)[:rows].to(torch.int32).masked_fill(padding, -1)
    positions = torch.randint(0, MAX_CONTEXT, (rows,), dtype=torch.int32).masked_fill(padding, -1)
    width = (heads + 2 * kv_heads) * head_size
    qkv = torch.randn(rows, width + 5).to(dtype)[:, :width]
    norms = [torch.rand(head_size).to(dtype) + 0.5 for _ in "qk"] if normed else [None, None]
    pool = filled_pool(kv_heads, block_size, head_size, kept or dtype)
    expected_pool = pool.clone()
    case = (qkv, positions, slots, *tables(head_size, dtype))
    sizes = (draw.randrange(LAYERS), heads, kv_heads, *norms, 1e-5)

    q = rope_and_write(*case, pool, *sizes)
    expected = rope_and_write_reference(*(x.contiguous() for x in case), expected_pool, *sizes)

    tolerance = 4 * torch.finfo(dtype).eps
    assert q.shape == (rows, heads, head_size) and q.dtype == dtype
    torch.testing.assert_close(q, expected, rtol=tolerance, atol=tolerance)
    if kept is None:
        torch.testing.assert_close(pool, expected_pool, rtol=tolerance, atol=tolerance)
    elif not normed:
        assert torch.equal(pool.view(torch.int8), expected_pool.view(torch.int8))
    else:
        # A norm may differ in its last bit, and a value may then lie on the other side of a tie.
        got, wanted = (unpack_rows(of, torch.float32) for of in (pool, expected_pool))
        step = wanted.abs().amax(-1, keepdim=True) / (127 if kept == torch.int8 else 14)
        assert ((got - wanted).abs() <= step * 1.01).all()
        assert (got != wanted).float().mean() < 0.02
