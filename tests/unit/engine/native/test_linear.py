"""Native products of activations and packed weights, against exact ones."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.kernels.native import library
from baton.engine.kernels.native.packing import PackedWeight
from baton.engine.kernels.torch.row_quantization import FP8, quantize_rows
from baton.engine.quantization.fp8 import Fp8BlockWeight
from baton.engine.quantization.gguf import QUANTIZED, GgufWeight, read_gguf, scaled
from baton.engine.quantization.group_scaled import GroupScaledWeight
from baton.engine.quantization.int4 import Int4Weight, pack_nibbles
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.quantization.linear_weight import DenseWeight, LinearWeight
from baton.engine.quantization.mxfp4 import Mxfp4Weight
from tests.unit.engine.gguf_files import quantized
from tests.unit.engine.native.paged_rows import random_tensor

pytestmark = pytest.mark.usefixtures("every_cpu")
F32, BF16 = torch.float32, torch.bfloat16
# Types of activations and of outputs.
by_kind = pytest.mark.parametrize(
    "kind", [(F32, F32), (BF16, BF16), (BF16, F32)], ids=["f32", "bf16", "bf16_floats"]
)
Kind = tuple[torch.dtype, torch.dtype]

BF16_ROUNDING = 2**-8  # moves a value by so much of itself at most
UNTOUCHED = 77.0


def random(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return random_tensor(*shape, seed=seed).to(dtype)


def linear(
    kind: Kind, x: Tensor, weight: LinearWeight, bias: Tensor | None = None, threads: int = 1
) -> Tensor:
    kernels, rows, packed = library.require(kind[0]), len(x), PackedWeight.from_weight(weight)
    assert packed.packed.data_ptr() % 64 == 0
    weights = packed.linear(bias)
    # Of int8 rows and their scales, or of int4's ordered rows and sums of 32 elements.
    scratch = torch.empty(rows, 5 * packed.inputs + 8, dtype=torch.uint8)
    # The row behind the last is to stay as it is.
    y = torch.full((rows + 1, packed.outputs), UNTOUCHED, dtype=kind[1])
    kernels.baton_linear(
        threads, ctypes.c_void_p(x.data_ptr()), rows, ctypes.byref(weights),
        ctypes.c_void_p(y.data_ptr()), kind[1] == F32, ctypes.c_void_p(scratch.data_ptr()),
    )  # fmt: skip
    assert (y[rows] == UNTOUCHED).all()
    return y[:rows]


def check(
    kind: Kind, x: Tensor, weight: LinearWeight, bias: Tensor | None = None, threads: int = 1
) -> Tensor:
    """The products: within rounding of float32 additions, then of one to bfloat16; int8 sums are
    exact."""
    got = linear(kind, x, weight, bias, threads)
    added = torch.zeros(1) if bias is None else bias.double()
    if isinstance(weight, Int8Weight):
        product = int8_product(x, weight)
        if bias is None:
            assert torch.equal(got, product.to(kind[1]))
            return got
        exact, magnitude = product + added, product.abs() + added.abs()
    elif isinstance(weight, Int4Weight):
        ordered = x.double() if weight.order is None else x.double()[:, weight.order]
        exact = ordered @ weight.dequantized(torch.float64).T + added
        # What is added up: values less 8, and what zero points differ from it.
        zeros = torch.full_like(weight.scales, 8) if weight.zeros is None else weight.zeros
        zeros = zeros.double().repeat_interleave(weight.group, dim=1)
        scales = weight.scales.double().repeat_interleave(weight.group, dim=1)
        terms = ((weight.nibbles().double() - 8).abs() + (zeros - 8).abs()) * scales.abs()
        magnitude = ordered.abs() @ terms.T + added.abs()
    elif isinstance(weight, GgufWeight):
        taken = x.double()
        if kind[0] == BF16:  # quantised in blocks
            values, units = quantize_rows(x.unflatten(1, (-1, 32)))
            taken = (values.double() * units.double()[..., None]).flatten(1)
        exact = taken @ weight.dequantized(torch.float32).double().T + added
        # What is added up: scaled numbers, and minimums.
        terms = replace(weight, minimums=None).dequantized(torch.float32).double().abs()
        if weight.minimums is not None:
            minimums = scaled(weight.minimums, weight.minimum_units).double().abs()
            terms += minimums.repeat_interleave(weight.group, dim=1)
        magnitude = taken.abs() @ terms.T + added.abs()
    else:
        assert isinstance(weight, DenseWeight | GroupScaledWeight)
        is_dense = isinstance(weight, DenseWeight)
        full = weight.tensor.double() if is_dense else weight.dequantized(torch.float64)
        exact = x.double() @ full.T + added
        magnitude = x.double().abs() @ full.abs().T + added.abs()
    tolerance = 1e-6 * magnitude
    if kind[1] == BF16:
        tolerance += 1.01 * exact.abs() * BF16_ROUNDING
    assert ((got.double() - exact).abs() <= tolerance).all()
    return got


def int8_product(x: Tensor, weight: Int8Weight) -> Tensor:
    """The formula: exact sums of whole numbers, and one scale for each row and output."""
    values, scales = quantize_rows(x)
    sums = values.double() @ weight.values.double().T
    return sums.float() * (scales[:, None] * weight.scales)


def grouped_weight(
    outputs: int, inputs: int, group: int, seed: int, form: str
) -> GroupScaledWeight:
    """Random numbers; form: fp8 or MXFP4 with all their numbers, or which tensors int4 has."""
    generator = torch.Generator().manual_seed(seed)
    scales = random(outputs, inputs // group, seed=seed)
    if form == "fp8":
        held = torch.randint(0, 256, (outputs, inputs), generator=generator).to(torch.uint8)
        held[held & 127 == 127] = 0  # NaN
        return Fp8BlockWeight(held.view(FP8), scales)
    if form == "mxfp4":
        pairs = torch.randint(0, 256, (outputs, inputs // 2), generator=generator)
        return Mxfp4Weight(pairs.to(torch.uint8), scales)
    values = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 17, (outputs, inputs // group), generator=generator).to(torch.uint8)
    return Int4Weight(
        pack_nibbles(values),
        scales,
        zeros if "zeros" in form else None,
        torch.randperm(inputs, generator=generator) if "order" in form else None,
    )


SHAPES = st.tuples(
    st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 18, 19, 24, 33, 48, 101]),  # rows
    st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 576, 1030])),  # in
    st.one_of(st.integers(1, 70), st.sampled_from([100, 127, 128, 129, 192, 577])),  # out
)


@by_kind
@settings(max_examples=40, deadline=None)
@given(
    shape=SHAPES, int8=st.booleans(), with_bias=st.booleans(), threads=st.integers(1, 2),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_products_are_exact_but_for_rounding(
    kind: Kind, shape: tuple[int, int, int], int8: bool, with_bias: bool, threads: int, seed: int
) -> None:
    rows, inputs, outputs = shape
    x = random(rows, inputs, seed=seed, dtype=kind[0])
    plain = random(outputs, inputs, seed=seed + 10, dtype=kind[0])
    bias = random(outputs, seed=seed + 20, dtype=kind[0]) if with_bias else None
    check(kind, x, Int8Weight.from_dense(plain) if int8 else DenseWeight(plain), bias, threads)


@by_kind
@pytest.mark.parametrize("form", ["symmetric", "zeros", "order", "zeros and order", "fp8", "mxfp4"])
@settings(max_examples=10, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 2, 3, 6, 7, 13, 48, 101]), group=st.sampled_from([32, 64, 128]),
    groups=st.integers(1, 4), outputs=st.sampled_from([1, 16, 63, 64, 65, 130, 577]),
    with_bias=st.booleans(), threads=st.integers(1, 2), seed=st.integers(0, 9),
)  # fmt: skip
def test_products_of_groups_are_exact_but_for_rounding(
    kind: Kind, form: str, rows: int, group: int, groups: int, outputs: int, with_bias: bool,
    threads: int, seed: int,
) -> None:  # fmt: skip
    x = random(rows, group * groups, seed=seed, dtype=kind[0])
    bias = random(outputs, seed=seed + 20, dtype=kind[0]) if with_bias else None
    check(kind, x, grouped_weight(outputs, group * groups, group, seed, form), bias, threads)


def gguf_weight(outputs: int, inputs: int, kind: str, seed: int) -> GroupScaledWeight:
    plain = random(outputs, inputs, seed=seed).numpy()
    raw = quantized(plain, gguf.GGMLQuantizationType[kind])
    return read_gguf(kind, torch.from_numpy(raw.copy()))


@by_kind
@pytest.mark.parametrize("form", QUANTIZED)
@settings(max_examples=6, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 2, 3, 4, 7, 13, 48, 101]), blocks=st.integers(1, 10),
    outputs=st.sampled_from([1, 16, 63, 64, 65, 130]), with_bias=st.booleans(),
    threads=st.integers(1, 2), seed=st.integers(0, 9),
)  # fmt: skip
def test_products_with_types_of_gguf_are_exact_but_for_rounding(
    kind: Kind, form: str, rows: int, blocks: int, outputs: int, with_bias: bool, threads: int,
    seed: int,
) -> None:  # fmt: skip
    inputs = blocks * (256 if "_K" in form else 32)
    x = random(rows, inputs, seed=seed, dtype=kind[0])
    bias = random(outputs, seed=seed + 20, dtype=kind[0]) if with_bias else None
    check(kind, x, gguf_weight(outputs, inputs, form, seed), bias, threads)


def test_a_packed_weight_by_itself_is_a_product() -> None:
    x, bias = random(3, 128, dtype=BF16), random(70, seed=1, dtype=BF16)
    for weight in (DenseWeight(random(70, 128, dtype=BF16)), Int8Weight.from_dense(random(70, 128)),
                   grouped_weight(70, 128, 64, 1, "zeros and order")):  # fmt: skip
        packed = PackedWeight.from_weight(weight)
        assert PackedWeight.from_weight(packed) is packed
        assert packed.shape == weight.shape
        assert torch.equal(packed.apply(x, bias), linear((BF16, BF16), x, weight, bias))


def test_int8_takes_rows_of_zeros_and_of_extremes() -> None:
    x = torch.stack([torch.zeros(67), torch.full((67,), 3.0), torch.full((67,), -3.0)])
    weight = Int8Weight.from_dense(torch.stack([torch.full((67,), 2.0), torch.full((67,), -2.0)]))
    got = linear((F32, F32), x, weight)
    assert torch.equal(got, int8_product(x, weight)) and not got[0].any()


@by_kind
def test_a_row_has_the_same_bits_in_every_batch(kind: Kind) -> None:
    """Also in products of several chunks of the depth and several blocks of rows and outputs.

    Numbers of rows: around each multiple of a tile's six, up to where kernels change.
    """
    numbers = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 18, 19, 20, 24, 25, 40)
    for inputs, outputs in ((577, 200), (4500, 70), (65, 4200), (768, 200)):
        x = random(330, inputs, seed=1, dtype=kind[0])
        plain = random(outputs, inputs, seed=2, dtype=kind[0])
        bias = random(outputs, seed=3, dtype=kind[0])
        weights: list[LinearWeight] = [DenseWeight(plain), Int8Weight.from_dense(plain)]
        if inputs % 128 == 0:
            weights = [grouped_weight(outputs, inputs, 64, 2, "symmetric"),
                       grouped_weight(outputs, inputs, 128, 2, "zeros and order"),
                       grouped_weight(outputs, inputs, 128, 2, "fp8"),
                       grouped_weight(outputs, inputs, 32, 2, "mxfp4"),
                       *(gguf_weight(outputs, inputs, one, 2) for one in QUANTIZED)]  # fmt: skip
        for weight in weights:
            together = check(kind, x, weight, bias, threads=2)
            for rows in numbers:
                some = x[-rows:].contiguous()
                got = linear(kind, some, weight, bias, 1 + rows % 2)
                assert torch.equal(got, together[-rows:])


def test_neighbours_in_memory_do_not_matter() -> None:
    # An odd depth ends within a group, whose other half belongs to the next row.
    memory = random(3, 33, seed=1, dtype=BF16)
    weight = DenseWeight(random(5, 33, seed=2, dtype=BF16))
    expected = linear((BF16, BF16), memory[:1].clone(), weight)
    memory[1:] = float("nan")
    assert torch.equal(linear((BF16, BF16), memory[:1], weight), expected)
