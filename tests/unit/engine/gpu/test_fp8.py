"""fp8: how far a number moves at most, what a row of a pool is, and attention over such a pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.kv_cache import KvLayout, allocate_pool
from baton.engine.ops.native.packing import PackedWeight
from baton.engine.ops.torch.attention import AttentionBatch, PrefillSegment, attend, write_kv
from baton.engine.ops.triton.row_quantize import quantize_rows as quantize_rows_by_kernel
from baton.engine.weights import quantize
from baton.engine.weights.linear import linear
from baton.engine.weights.quantize import (
    FP8,
    SCALE_BYTES,
    Fp8Weight,
    pack_rows,
    quantize_rows,
    unpack_rows,
)

DTYPES = (torch.float32, torch.bfloat16)
LAYERS, LAYER, HEADS, KV_HEADS, HEAD_SIZE, BLOCKS = 3, 1, 6, 2, 16, 40


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    assert one.dtype == other.dtype == FP8
    return torch.equal(one.view(torch.int8), other.view(torch.int8))


def layout(dtype: torch.dtype = FP8, block_size: int = 16) -> KvLayout:
    return KvLayout(BLOCKS, LAYERS, KV_HEADS, block_size, HEAD_SIZE, dtype)


def pool_of(dtype: torch.dtype, block_size: int = 16) -> Tensor:
    return allocate_pool(layout(dtype, block_size), None, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e6, 1e30])
def test_no_number_moves_further_than_a_sixteenth(magnitude: float, dtype: torch.dtype) -> None:
    """Three bits behind the leading one; below 2 ** -6, where exponents end, steps of 2 ** -9."""
    x = (random(50, 100) * magnitude).to(dtype)
    values, scales = quantize_rows(x, FP8)
    assert (values.dtype, scales.dtype) == (FP8, torch.float32)
    assert torch.equal(values.float().abs().amax(-1), torch.full((50,), 448.0))
    moved = (values.double() * scales[:, None].double() - x.double()).abs()
    limit = (x.double().abs() / 16).maximum(scales[:, None].double() * 2**-10)
    assert (moved <= limit * 1.00001).all()


def test_ties_go_to_the_even_number() -> None:
    values, scales = quantize_rows(torch.tensor([[448.0, 17.0, 19.0, 25.0, -17.0, -19.0]]), FP8)
    assert scales.item() == 1.0
    assert values.float().tolist() == [[448, 16, 20, 24, -16, -20]]


@pytest.mark.parametrize("nothing", [0.0, 1e-44, 1e-37])
def test_rows_of_next_to_nothing_stay_finite(nothing: float) -> None:
    x = torch.zeros(3, 8)
    x[1, 2] = nothing
    values, scales = quantize_rows(x, FP8)
    assert torch.isfinite(scales).all()
    assert not values[0].float().any()
    torch.testing.assert_close(values.float() * scales[:, None], x, rtol=0, atol=2e-36)


def test_a_weight_taken_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(70, 24)
    values, scales = quantize_rows(weight, FP8)
    monkeypatch.setattr(quantize, "_ROWS_AT_ONCE", 16)
    parts = Fp8Weight.of(weight)
    assert parts.shape == weight.shape
    assert same_bytes(parts.values, values)
    assert torch.equal(parts.scales, scales)


def test_native_code_refuses_it() -> None:
    with pytest.raises(AssertionError, match="GPUs"):
        PackedWeight.of(Fp8Weight.of(random(64, 64)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_the_formula(dtype: torch.dtype) -> None:
    x, bias = random(9, 100, dtype=dtype), random(30, seed=2, dtype=dtype)
    weight = Fp8Weight.of(random(30, 100, seed=1))
    values, scales = quantize_rows(x, FP8)
    whole = values.double() @ weight.values.double().T
    expected = whole * scales[:, None].double() * weight.scales.double()
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-4}
    torch.testing.assert_close(linear(x, weight), expected.to(dtype), **near)
    biased = (expected + bias.double()).to(dtype)
    torch.testing.assert_close(linear(x, weight, bias), biased, **near)


def test_a_product_is_as_near_as_its_operands() -> None:
    """|x w - x' w'| <= |x| |w - w'| + |w'| |x - x'|, each difference a sixteenth at most."""
    x, full = random(20, 300), random(40, 300, seed=1)
    exact = x @ full.T
    moved = (linear(x, Fp8Weight.of(full)) - exact).abs()
    assert (moved <= (x.abs() @ full.abs().T) * (2 / 16 + 1 / 256) + 1e-2).all()
    assert moved.mean() < 0.05 * exact.abs().mean()


@pytest.mark.parametrize("size", [6, 16, 125])
def test_a_packed_row_is_its_elements_then_its_scale(size: int) -> None:
    x = random(7, 3, size)
    rows = pack_rows(x, FP8)
    assert (rows.shape, rows.dtype) == ((7, 3, size + SCALE_BYTES), FP8)
    values, scales = quantize_rows(x, FP8)
    row = rows[4, 1].view(torch.int8).numpy()
    assert np.array_equal(row[:size], values[4, 1].view(torch.int8).numpy())
    assert row[size:].tobytes() == scales[4, 1].numpy().tobytes()
    back = unpack_rows(rows, torch.bfloat16)
    assert torch.equal(back, (values.float() * scales[..., None]).bfloat16())
    assert same_bytes(pack_rows(unpack_rows(rows, torch.float32), FP8)[..., :-4], rows[..., :-4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 80])
def test_the_kernel_s_rows_are_these(size: int, dtype: torch.dtype) -> None:
    x = random(50, size, dtype=dtype) * 2.0 ** torch.arange(50)[:, None]
    x = x.to(dtype)
    x[4] = 0
    values, scales = quantize_rows(x, FP8)
    by_kernel, scales_by_kernel = quantize_rows_by_kernel(x, FP8)
    assert torch.equal(scales_by_kernel, scales)
    assert same_bytes(by_kernel, values)


def test_sizes_and_descriptor() -> None:
    small = layout()
    assert small.row_size == HEAD_SIZE + SCALE_BYTES
    assert small.bytes_per_token == 2 * LAYERS * KV_HEADS * (HEAD_SIZE + SCALE_BYTES)
    descriptor = small.descriptor("model", torch.bfloat16, "fp8")
    assert (descriptor.dtype, descriptor.compute_dtype) == ("float8_e4m3fn", "bfloat16")
    assert descriptor.quantization == "fp8"
    memory = torch.zeros(small.num_bytes, dtype=torch.uint8)
    pool = allocate_pool(small, lambda size: memory[:size], torch.device("cpu"))
    assert (pool.dtype, pool.shape) == (FP8, torch.Size(small.shape))


def test_a_new_pool_is_zeros() -> None:
    pool = pool_of(FP8)
    assert not pool.view(torch.uint8).any()
    assert not unpack_rows(pool, torch.float32).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_packs_its_own_slots_only(dtype: torch.dtype) -> None:
    pool = pool_of(FP8, block_size=4)
    k, v = (random(2, KV_HEADS, HEAD_SIZE, seed=seed, dtype=dtype) for seed in (1, 2))
    write_kv(pool, 2, torch.tensor([3 * 4 + 1, 0 * 4 + 3]), k, v)
    expected = torch.zeros_like(pool)
    for part, rows in enumerate((pack_rows(k, FP8), pack_rows(v, FP8))):
        expected[3, 2, part, :, 1], expected[0, 2, part, :, 3] = rows
    assert same_bytes(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "window"), [(16, None), (24, 40)])
def test_what_is_read_is_what_was_written(
    block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    length = 150
    k, v = (random(length, KV_HEADS, HEAD_SIZE, seed=seed, dtype=dtype) for seed in (1, 2))
    blocks = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(3)) + 1
    at = torch.arange(length)
    slots = blocks[at // block_size] * block_size + at % block_size
    small, plain = pool_of(FP8, block_size), pool_of(dtype, block_size)
    write_kv(small, LAYER, slots, k, v)
    write_kv(plain, LAYER, slots, *(unpack_rows(pack_rows(x, FP8), dtype) for x in (k, v)))
    used = blocks[: -(-length // block_size)]
    batch = AttentionBatch(
        slots=slots[:0],
        num_decode=2,
        decode_tables=torch.stack([used, used]),
        decode_lengths=torch.tensor([31, 150]),
        segments=(PrefillSegment(2, 60, 90, used),),
    )
    q = random(62, HEADS, HEAD_SIZE, seed=4, dtype=dtype)
    got = attend(q, small, LAYER, batch, HEAD_SIZE**-0.5, window)
    assert torch.equal(got, attend(q, plain, LAYER, batch, HEAD_SIZE**-0.5, window))
