"""Rotary embedding and the write to the pool in one kernel: as the model's own steps in torch."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.models.config import Rope
from baton.engine.models.decoder import rope_tables
from baton.engine.ops.triton.rope_kv import rope_and_write, rope_and_write_reference
from baton.engine.weights.quantize import SCALE_BYTES, is_quantized, unpack_rows

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYERS = 3
BLOCKS = 4
MAX_CONTEXT = 64


def drawn(draw: Random, dtype: torch.dtype, head_size: int, block_size: int) -> dict[str, Any]:
    """The arguments of a launch but for the pool: sizes that divide by nothing, some padding."""
    rows, kv_heads = draw.randint(1, 6), draw.randint(1, 5)
    heads = kv_heads * draw.randint(1, 4)
    torch.manual_seed(draw.randrange(2**31))
    padding = torch.rand(rows) < 0.2
    slots = torch.randperm(BLOCKS * block_size)[:rows].to(torch.int32)
    positions = torch.randint(0, MAX_CONTEXT, (rows,), dtype=torch.int32)
    cos, sin = tables(head_size, dtype)
    norms = [torch.rand(head_size).to(dtype) + 0.5 for _ in "qk"] if draw.random() < 0.5 else []
    return {
        "qkv": torch.randn(rows, (heads + 2 * kv_heads) * head_size).to(dtype),
        "positions": positions.masked_fill(padding, -1), "slots": slots.masked_fill(padding, -1),
        "cos": cos, "sin": sin, "layer": draw.randrange(LAYERS), "num_heads": heads,
        "num_kv_heads": kv_heads, **dict(zip(("q_norm", "k_norm"), norms, strict=False)),
        "eps": 1e-5,
    }  # fmt: skip


def tables(head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of all positions."""
    cos, sin = rope_tables(Rope(theta=10_000.0), head_size, MAX_CONTEXT)
    return cos.to(dtype), sin.to(dtype)


def filled_pool(kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype) -> Tensor:
    """A pool of random bytes, so that a write to a wrong place shows."""
    row = head_size + (SCALE_BYTES if is_quantized(dtype) else 0)
    shape = (BLOCKS, LAYERS, 2, kv_heads, block_size, row * dtype.itemsize)
    return torch.randint(0, 60, shape, dtype=torch.uint8).view(dtype)


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Equal but for the last bits."""
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_size", [16, 48, 80, 128])
@pytest.mark.parametrize("kept", [None, torch.int8, FP8], ids=["same", "int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_equals_its_reference(
    head_size: int, kept: torch.dtype | None, dtype: torch.dtype
) -> None:
    draw = Random(f"{head_size} {kept} {dtype}")
    block_size = draw.choice([16, 32])
    case = drawn(draw, dtype, head_size, block_size)
    pool = filled_pool(case["num_kv_heads"], block_size, head_size, kept or dtype)
    expected_pool = pool.clone()

    q = rope_and_write(**case, pool=pool)
    expected = rope_and_write_reference(**case, pool=expected_pool)

    assert q.shape == (len(case["qkv"]), case["num_heads"], head_size) and q.dtype == dtype
    close(q, expected, dtype)
    if kept is None:
        close(pool, expected_pool, dtype)
    elif "k_norm" not in case:
        assert torch.equal(pool.view(torch.int8), expected_pool.view(torch.int8))
    else:
        # A norm may differ in its last bit, and a value may then lie on the other side of a tie.
        got, wanted = (unpack_rows(of, torch.float32) for of in (pool, expected_pool))
        step = wanted.abs().amax(-1, keepdim=True) / (127 if kept == torch.int8 else 14)
        assert ((got - wanted).abs() <= step * 1.01).all()
        assert (got != wanted).float().mean() < 0.02


@pytest.mark.parametrize("kept", [torch.float32, torch.int8, FP8], ids=str)
def test_a_padding_row_writes_nothing(kept: torch.dtype) -> None:
    case = drawn(Random(1), torch.float32, 32, 16)
    case["slots"].fill_(-1)
    pool = filled_pool(case["num_kv_heads"], 16, 32, kept)
    before = pool.clone()
    rope_and_write(**case, pool=pool)
    assert torch.equal(pool.view(torch.uint8), before.view(torch.uint8))


def test_rows_of_a_wider_tensor() -> None:
    """The projection's output may be a part of something larger."""
    case = drawn(Random(3), torch.float32, 16, 16)
    wide = torch.cat([case["qkv"], torch.full_like(case["qkv"], float("nan"))], dim=1)
    pools = [filled_pool(case["num_kv_heads"], 16, 16, torch.float32)] * 2
    pools[1] = pools[0].clone()
    part = {**case, "qkv": wide[:, : case["qkv"].shape[1]]}
    found, wanted = rope_and_write(**part, pool=pools[0]), rope_and_write(**case, pool=pools[1])
    assert torch.equal(found, wanted) and torch.equal(*pools)


def test_one_position_turns_by_its_own_angle() -> None:
    """By hand: a pair of elements is turned like a point in the plane."""
    qkv = torch.zeros(1, 3 * 16)
    qkv[0, 3], qkv[0, 8 + 3] = 2.0, 1.0
    cos, sin = tables(16, torch.float32)
    pool = filled_pool(1, 16, 16, torch.float32)
    at = torch.tensor([5], dtype=torch.int32)
    q = rope_and_write(qkv, at, at, cos, sin, pool, 0, 1, 1)
    angle = torch.tensor(5 * 10_000 ** (-3 / 8))
    assert q[0, 0, 3] == pytest.approx((2 * angle.cos() - angle.sin()).item(), abs=1e-6)
    assert q[0, 0, 11] == pytest.approx((angle.cos() + 2 * angle.sin()).item(), abs=1e-6)
    assert q.count_nonzero() == 2
