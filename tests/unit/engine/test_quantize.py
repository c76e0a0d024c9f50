"""Eight bits: how far a number moves at most, and that a row never depends on its neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.weights import quantize
from baton.engine.weights.linear import linear
from baton.engine.weights.quantize import (
    SCALE_BYTES,
    Int8Weight,
    exact_products,
    pack_rows,
    products_by_float,
    quantize_rows,
    unpack_rows,
)

DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_int8(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator).to(torch.int8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 64, 1000])
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e6, 1e30])
def test_no_number_moves_further_than_half_a_unit(
    size: int, magnitude: float, dtype: torch.dtype
) -> None:
    x = (random(50, size) * magnitude).to(dtype)
    values, scales = quantize_rows(x)
    assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert torch.equal(values.abs().amax(-1), torch.full((50,), 127, dtype=torch.int8))
    moved = (values.double() * scales[:, None].double() - x.double()).abs()
    assert (moved <= scales[:, None].double() * 0.50001).all()


def test_halves_go_to_the_even_number() -> None:
    values, scales = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]]))
    assert scales.item() == 1.0
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -126]]


def test_the_arithmetic_is_the_formula_s_to_the_bit() -> None:
    peaks = random(2000, 1).abs() + 0.1
    # All but the first next to the middle between two units, where the last bit decides.
    x = torch.cat([peaks, peaks * (random_int8(2000, 32).clamp(-126, 126) + 0.5) / 127], dim=1)
    largest = np.abs(x.numpy()).max(axis=1)
    inverse = np.float32(127) / largest
    values, scales = quantize_rows(x)
    assert np.array_equal(values.numpy(), np.rint(x.numpy() * inverse[:, None]).astype(np.int8))
    assert np.array_equal(scales.numpy(), largest / np.float32(127))


@pytest.mark.parametrize("nothing", [0.0, 1e-44, 1e-37])
def test_rows_of_next_to_nothing_stay_finite(nothing: float) -> None:
    x = torch.zeros(3, 8)
    x[1, 2] = nothing
    values, scales = quantize_rows(x)
    assert torch.isfinite(scales).all()
    assert not values[0].any()
    torch.testing.assert_close(values * scales[:, None], x, rtol=0, atol=1e-36)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_taken_in_parts_is_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random(70, 24, dtype=dtype)
    whole = Int8Weight.of(weight)
    monkeypatch.setattr(quantize, "_ROWS_AT_ONCE", 16)
    parts = Int8Weight.of(weight)
    values, scales = quantize_rows(weight)
    for one in (whole, parts):
        assert one.shape == weight.shape
        assert torch.equal(one.values, values)
        assert torch.equal(one.scales, scales)


@pytest.mark.parametrize("product", [exact_products, products_by_float])
@pytest.mark.parametrize(
    ("rows", "depth", "outputs"), [(1, 64, 96), (3, 33, 65), (17, 1025, 7), (40, 5000, 33)]
)
def test_sums_are_exact(product, rows: int, depth: int, outputs: int) -> None:
    x, weight = random_int8(rows, depth), random_int8(outputs, depth, seed=1)
    x[0], weight[0], weight[1] = 127, 127, -127
    x[0, 0] = 126  # so that the largest sums are odd, and no float32 above 2 ** 24 is
    expected = x.long() @ weight.long().T
    assert expected[0, 0] == 127 * 127 * depth - 127
    got = product(x, weight)
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), expected)


@pytest.mark.parametrize("product", [exact_products, products_by_float])
def test_sums_are_exact_at_the_least_depth(product) -> None:
    x, weight = random_int8(3, 1), random_int8(16, 1, seed=1)
    assert torch.equal(product(x, weight).long(), x.long() @ weight.long().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_the_formula(dtype: torch.dtype) -> None:
    x, bias = random(9, 100, dtype=dtype), random(30, seed=2, dtype=dtype)
    weight = Int8Weight.of(random(30, 100, seed=1))
    values, scales = quantize_rows(x)
    sums = (values.long() @ weight.values.long().T).float()
    expected = sums * (scales[:, None] * weight.scales)
    assert torch.equal(linear(x, weight), expected.to(dtype))
    assert torch.equal(linear(x, weight, bias), (expected + bias.float()).to(dtype))


def test_a_product_is_as_near_as_its_operands() -> None:
    """|x w - x' w'| <= |x| |w - w'| + |w'| |x - x'|, each difference half a unit at most."""
    x, full = random(20, 300), random(40, 300, seed=1)
    weight = Int8Weight.of(full)
    _, scales = quantize_rows(x)
    limit = x.abs().sum(1)[:, None] * weight.scales / 2
    limit += (weight.values.float().abs().sum(1) * weight.scales) * scales[:, None] / 2
    moved = (linear(x, weight) - x @ full.T).abs()
    assert (moved <= limit * 1.001).all()
    assert moved.mean() < 0.02 * (x @ full.T).abs().mean()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "outputs"), [(33, 65), (576, 96), (1536, 57)])
def test_rows_of_a_product_do_not_know_their_neighbours(
    depth: int, outputs: int, dtype: torch.dtype
) -> None:
    x, bias = random(150, depth, dtype=dtype), random(outputs, seed=2, dtype=dtype)
    x[3] *= 1000  # a scale for the whole batch would be felt
    weight = Int8Weight.of(random(outputs, depth, seed=1, dtype=dtype))
    whole = linear(x, weight, bias)
    for rows in (1, 2, 3, 7, 16, 17, 33, 127):
        assert torch.equal(linear(x[11 : 11 + rows], weight, bias), whole[11 : 11 + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [6, 16, 64, 125])
def test_a_packed_row_is_its_elements_then_its_scale(size: int, dtype: torch.dtype) -> None:
    x = random(7, 3, size, dtype=dtype)
    rows = pack_rows(x)
    assert (rows.shape, rows.dtype) == ((7, 3, size + SCALE_BYTES), torch.int8)
    values, scales = quantize_rows(x)
    row = rows[4, 1].numpy()
    assert np.array_equal(row[:size], values[4, 1].numpy())
    assert row[size:].tobytes() == scales[4, 1].numpy().tobytes()
    back = unpack_rows(rows, dtype)
    assert (back.shape, back.dtype) == (x.shape, dtype)
    assert torch.equal(back, (values.float() * scales[..., None]).to(dtype))


def test_zeroed_rows_are_zeros() -> None:
    assert not unpack_rows(torch.zeros(2, 20, dtype=torch.int8), torch.float32).any()
