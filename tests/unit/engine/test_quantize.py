"""int8 and fp8: how far a number moves at most, what a packed row is, and KV pools of such rows."""

import numpy as np
import pytest
import torch

from baton.engine.kernels.torch import linear
from baton.engine.kernels.torch.attention import write_kv
from baton.engine.kernels.torch.linear import exact_products, products_by_float
from baton.engine.kernels.torch.row_quantization import (
    FP8,
    SCALE_BYTES,
    pack_rows,
    quantize_rows,
    unpack_rows,
)
from baton.engine.kv_cache import KvLayout, allocate_pool
from baton.engine.quantization import group_scaled, int8
from baton.engine.quantization.fp8 import Fp8Weight
from baton.engine.quantization.int4 import Int4Weight, pack_nibbles
from baton.engine.quantization.int8 import Int8Weight

DTYPES = (torch.float32, torch.bfloat16)
FORMATS = {torch.int8: Int8Weight, FP8: Fp8Weight}
LAYERS, KV_HEADS, HEAD_SIZE, BLOCKS = 3, 2, 16, 40
by_format = pytest.mark.parametrize("kind", FORMATS, ids=str)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_int8(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator).to(torch.int8)


def same_bytes(one, other):
    assert one.dtype == other.dtype
    return torch.equal(one.view(torch.int8), other.view(torch.int8))


@by_format
@by_dtype
@pytest.mark.parametrize("size", [1, 64, 1000])
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e30])
def test_how_far_a_number_moves(size, magnitude, dtype, kind):
    """int8: half a unit. fp8: a sixteenth, or below 2 ** -6, where exponents end, 2 ** -10."""
    x = (random(50, size) * magnitude).to(dtype)
    values, scales = quantize_rows(x, kind)
    assert (values.dtype, scales.dtype) == (kind, torch.float32)
    assert (values.float().abs().amax(-1) == (127 if kind == torch.int8 else 448)).all()
    moved = (values.double() * scales[:, None].double() - x.double()).abs()
    units = scales[:, None].double()
    limit = units / 2 if kind == torch.int8 else (x.double().abs() / 16).maximum(units * 2**-10)
    assert (moved <= limit * 1.00002).all()


def test_int8_arithmetic_is_the_formula_s_to_the_bit():
    peaks = random(2000, 1).abs() + 0.1
    # All but the first next to the middle between two units, where the last bit decides.
    x = torch.cat([peaks, peaks * (random_int8(2000, 32).clamp(-126, 126) + 0.5) / 127], dim=1)
    largest = np.abs(x.numpy()).max(axis=1)
    inverse = np.float32(127) / largest
    values, scales = quantize_rows(x)
    assert np.array_equal(values.numpy(), np.rint(x.numpy() * inverse[:, None]).astype(np.int8))
    assert np.array_equal(scales.numpy(), largest / np.float32(127))


@by_format
@pytest.mark.parametrize("nothing", [0.0, 1e-44, 1e-37])
def test_rows_of_next_to_nothing_stay_finite(nothing, kind):
    x = torch.zeros(3, 8)
    x[1, 2] = nothing
    values, scales = quantize_rows(x, kind)
    assert torch.isfinite(scales).all()
    assert not values[0].float().any()
    torch.testing.assert_close(values.float() * scales[:, None], x, rtol=0, atol=2e-36)


@by_format
def test_a_weight_taken_in_parts_is_the_same(kind, monkeypatch):
    weight = random(70, 24)
    values, scales = quantize_rows(weight, kind)
    monkeypatch.setattr(int8, "ROWS_AT_ONCE", 16)
    parts = FORMATS[kind].from_dense(weight)
    assert parts.shape == weight.shape
    assert same_bytes(parts.values, values)
    assert torch.equal(parts.scales, scales)


def test_int8_products_stay_on_the_device_and_leave_out_what_only_cpus_do(monkeypatch):
    """What a GPU asks of torch's own, more than 16 rows, a reference cannot promise."""
    monkeypatch.setattr(linear, "_HAS_VNNI", True)
    monkeypatch.delattr(torch, "_int_mm")
    x, weight = (torch.empty(n, 2000, dtype=torch.int8, device="meta") for n in (3, 5))
    sums = exact_products(x, weight)
    assert (sums.device.type, sums.shape, sums.dtype) == ("meta", (3, 5), torch.int32)


@pytest.mark.parametrize("product", [exact_products, products_by_float])
@pytest.mark.parametrize(
    ("rows", "depth", "outputs"), [(3, 33, 65), (17, 1025, 7), (40, 5000, 33), (3, 1, 16)]
)
def test_int8_sums_are_exact(product, rows, depth, outputs):
    x, weight = random_int8(rows, depth), random_int8(outputs, depth, seed=1)
    x[0], weight[0], weight[1] = 127, 127, -127
    x[0, 0] = 126  # so that the largest sums are odd, and no float32 above 2 ** 24 is
    got = product(x, weight)
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), x.long() @ weight.long().T)


@by_format
@by_dtype
def test_a_product_is_the_formula(dtype, kind):
    x, bias = random(9, 100, dtype=dtype), random(30, seed=2, dtype=dtype)
    weight = FORMATS[kind].from_dense(random(30, 100, seed=1))
    values, scales = quantize_rows(x, kind)
    sums = values.double() @ weight.values.double().T
    if kind == torch.int8:
        expected = sums.float() * (scales[:, None] * weight.scales)
        assert torch.equal(weight.apply(x), expected.to(dtype))
        assert torch.equal(weight.apply(x, bias), (expected + bias.float()).to(dtype))
        return
    expected = sums * scales[:, None].double() * weight.scales.double()
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-4}
    torch.testing.assert_close(weight.apply(x), expected.to(dtype), **near)
    biased = (expected + bias.double()).to(dtype)
    torch.testing.assert_close(weight.apply(x, bias), biased, **near)


@by_format
@by_dtype
@pytest.mark.parametrize("size", [6, 64, 125])
def test_packed_rows_are_the_elements_of_all_and_then_their_scales(size, dtype, kind):
    x = random(7, 3, size, dtype=dtype)
    packed = pack_rows(x, kind)
    assert (packed.shape, packed.dtype) == ((7, 3, size + SCALE_BYTES), kind)
    values, scales = quantize_rows(x, kind)
    octets = packed[4].view(torch.int8).flatten().numpy()
    assert np.array_equal(octets[: 3 * size], values[4].view(torch.int8).flatten().numpy())
    assert octets[3 * size :].tobytes() == scales[4].numpy().tobytes()
    back = unpack_rows(packed, dtype)
    assert (back.shape, back.dtype) == (x.shape, dtype)
    assert torch.equal(back, (values.float() * scales[..., None]).to(dtype))


def layout(dtype, block_size=16):
    return KvLayout(BLOCKS, LAYERS, KV_HEADS, block_size, HEAD_SIZE, dtype)


def pool_of(dtype, block_size=16):
    return allocate_pool(layout(dtype, block_size), None, torch.device("cpu"))


@by_format
@by_dtype
def test_write_kv_writes_its_own_slots_only(dtype, kind):
    pool, plain = pool_of(kind, block_size=4), pool_of(dtype, block_size=4)
    k, v = (random(2, KV_HEADS, HEAD_SIZE, seed=seed, dtype=dtype) for seed in (1, 2))
    write_kv(pool, 2, torch.tensor([3 * 4 + 1, 0 * 4 + 3]), k, v)
    expected = torch.zeros(BLOCKS, LAYERS, 2, KV_HEADS, 4, HEAD_SIZE)
    for part, rows in enumerate((k, v)):
        expected[3, 2, part, :, 1], expected[0, 2, part, :, 3] = rows
    assert same_bytes(pool, pack_rows(expected, kind))
    write_kv(plain, 2, torch.tensor([3 * 4 + 1, 0 * 4 + 3]), k, v)
    for part, rows in enumerate((k, v)):
        assert torch.equal(torch.stack([plain[3, 2, part, :, 1], plain[0, 2, part, :, 3]]), rows)
    assert plain.count_nonzero() == k.numel() + v.numel()


@by_dtype
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e30])
def test_int4_moves_a_number_by_half_a_unit_or_what_is_beyond_the_far_end(dtype, magnitude):
    weight = (random(70, 192) * magnitude).to(dtype)
    weight[0, :64] = 0
    held = Int4Weight.from_dense(weight)
    assert (held.shape, held.group, held.scales.shape) == ((70, 192), 64, (70, 3))
    units = held.scales.abs().repeat_interleave(64, dim=1)
    moved = (held.dequantized(torch.float32) - weight.float()).abs()
    assert (moved <= 1.04 * units).all()  # scales are rounded, too
    # Only what is beyond 7 units, on the side where the extreme of -8 is not, moves further.
    inside = weight.float() / held.scales.repeat_interleave(64, dim=1) <= 7.5
    assert (moved[inside] <= 0.50001 * units[inside]).all()
    assert not held.dequantized(dtype)[0, :64].any()


@by_dtype
@pytest.mark.parametrize("ordered", [False, True])
def test_an_int4_product_is_that_of_the_dequantised_matrix(dtype, ordered, monkeypatch):
    monkeypatch.setattr(group_scaled, "ROWS_AT_ONCE", 16)
    generator = torch.Generator().manual_seed(1)
    values, order = torch.randint(0, 16, (40, 96), generator=generator), torch.randperm(96)
    zeros, scales = torch.randint(0, 17, (40, 3), generator=generator), random(40, 3) / 50
    packed = pack_nibbles(values.to(torch.uint8))
    weight = Int4Weight(packed, scales, zeros.to(torch.uint8), order if ordered else None)
    group = torch.arange(96) // 32
    full = ((values - zeros[:, group]) * scales.double()[:, group]).to(dtype).double()
    x, bias = random(5, 96, dtype=dtype), random(40, dtype=dtype)
    expected = x.double()[:, order if ordered else torch.arange(96)] @ full.T + bias.double()
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4e-6 if dtype == torch.float32 else 1e-2}
    torch.testing.assert_close(weight.apply(x, bias), expected.to(dtype), **near)
    if dtype == torch.float32:  # a row has the same bits alone
        assert torch.equal(weight.apply(x[2:3], bias), weight.apply(x, bias)[2:3])
