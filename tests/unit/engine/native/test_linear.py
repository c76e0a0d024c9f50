"""Native products of activations and packed weights, against exact ones."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.ops.native import library
from baton.engine.ops.native.model import Linear
from baton.engine.ops.native.packing import ACTIVATION_OFFSET, PANEL, pack
from baton.engine.weights.quantize import Int8Weight, quantize_rows

native = library.load()
pytestmark = pytest.mark.skipif(native is None, reason="no native library can be built here")


@dataclass(frozen=True)
class Kind:
    """Types of a product."""

    name: str
    activations: torch.dtype
    outputs: torch.dtype


F32 = Kind("f32", torch.float32, torch.float32)
BF16 = Kind("bf16", torch.bfloat16, torch.bfloat16)
BF16_FLOATS = Kind("bf16_floats", torch.bfloat16, torch.float32)
KINDS = (F32, BF16, BF16_FLOATS)
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)

BF16_ROUNDING = 2**-8  # moves a value by so much of itself at most
UNTOUCHED = 77.0


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def aligned(x: Tensor) -> int:
    assert x.data_ptr() % 64 == 0
    return x.data_ptr()


def linear(
    kind: Kind,
    x: Tensor,
    weight: Tensor | Int8Weight,
    bias: Tensor | None = None,
    threads: int = 1,
    kernels: ctypes.CDLL | None = None,
) -> Tensor:
    kernels = kernels or library.require(kind.activations)
    rows, (outputs, inputs) = x.shape[0], weight.shape
    scales = offsets = None
    if isinstance(weight, Int8Weight):
        scales = weight.scales
        offsets = weight.values.sum(1, dtype=torch.int32) * ACTIVATION_OFFSET
        packed = pack(weight.values)
    else:
        packed = pack(weight)
    weights = Linear(
        aligned(packed),
        None if scales is None else scales.data_ptr(),
        None if offsets is None else offsets.data_ptr(),
        None if bias is None else bias.data_ptr(),
        inputs,
        outputs,
    )
    size = kernels.baton_linear_scratch
    size.restype = ctypes.c_size_t
    scratch = torch.empty(size(ctypes.byref(weights), rows), dtype=torch.uint8)
    # The row behind the last is to stay as it is.
    y = torch.full((rows + 1, outputs), UNTOUCHED, dtype=kind.outputs)
    function = "baton_linear" if kind.outputs == kind.activations else "baton_linear_floats"
    kernels[function](
        threads,
        ctypes.c_void_p(x.data_ptr()),
        rows,
        ctypes.byref(weights),
        ctypes.c_void_p(y.data_ptr()),
        ctypes.c_void_p(scratch.data_ptr()),
    )
    assert (y[rows] == UNTOUCHED).all()
    return y[:rows]


def assert_close(kind: Kind, got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within rounding of float32 additions, then of one to bfloat16."""
    added = torch.zeros(1) if bias is None else bias
    exact = x.double() @ weight.double().T + added.double()
    magnitude = x.double().abs() @ weight.double().abs().T + added.double().abs()
    tolerance = 1e-6 * magnitude
    if kind.outputs == torch.bfloat16:
        tolerance += 1.01 * exact.abs() * BF16_ROUNDING
    assert ((got.double() - exact).abs() <= tolerance).all()


def int8_product(x: Tensor, weight: Int8Weight) -> Tensor:
    """The formula: exact sums of whole numbers, and one scale for each row and output."""
    values, scales = quantize_rows(x)
    sums = values.double() @ weight.values.double().T
    return sums.float() * (scales[:, None] * weight.scales)


SHAPES = st.tuples(
    st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 18, 19, 24, 33, 48, 101]),  # rows
    st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 576, 1030])),  # in
    st.one_of(st.integers(1, 70), st.sampled_from([100, 127, 128, 129, 192, 577])),  # out
)


@by_kind
@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, with_bias=st.booleans(), threads=st.integers(1, 2), seed=st.integers(0, 9))
def test_products_are_exact_but_for_rounding(
    kind: Kind, shape: tuple[int, int, int], with_bias: bool, threads: int, seed: int
) -> None:
    rows, inputs, outputs = shape
    x = random(rows, inputs, seed=seed, dtype=kind.activations)
    weight = random(outputs, inputs, seed=seed + 10, dtype=kind.activations)
    bias = random(outputs, seed=seed + 20, dtype=kind.activations) if with_bias else None
    assert_close(kind, linear(kind, x, weight, bias, threads), x, weight, bias)


@by_kind
@pytest.mark.parametrize(("inputs", "outputs"), [(4500, 70), (65, 700)])
@pytest.mark.parametrize("rows", [4, 40, 700])
def test_products_in_several_chunks_and_blocks(
    kind: Kind, rows: int, inputs: int, outputs: int
) -> None:
    x = random(rows, inputs, seed=1, dtype=kind.activations)
    weight = random(outputs, inputs, seed=2, dtype=kind.activations)
    assert_close(kind, linear(kind, x, weight, threads=2), x, weight, None)


@by_kind
@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, with_bias=st.booleans(), threads=st.integers(1, 2), seed=st.integers(0, 9))
def test_int8_products_follow_the_formula(
    kind: Kind, shape: tuple[int, int, int], with_bias: bool, threads: int, seed: int
) -> None:
    rows, inputs, outputs = shape
    x = random(rows, inputs, seed=seed, dtype=kind.activations)
    weight = Int8Weight.of(random(outputs, inputs, seed=seed + 10))
    bias = random(outputs, seed=seed + 20, dtype=kind.activations) if with_bias else None
    product = int8_product(x, weight)
    got = linear(kind, x, weight, bias, threads)
    if bias is None:
        assert torch.equal(got, product.to(kind.outputs))
        return
    # The bias is added without a rounding in between.
    expected = product + bias.float()
    tolerance = 1e-6 * (product.abs() + bias.float().abs())
    if kind.outputs == torch.bfloat16:
        tolerance += 1.01 * expected.abs() * BF16_ROUNDING
    assert ((got.float() - expected).abs() <= tolerance).all()


def test_int8_takes_rows_of_zeros_and_of_extremes() -> None:
    x = torch.stack([torch.zeros(67), torch.full((67,), 3.0), torch.full((67,), -3.0)])
    weight = Int8Weight.of(torch.stack([torch.full((67,), 2.0), torch.full((67,), -2.0)]))
    got = linear(F32, x, weight)
    assert torch.equal(got, int8_product(x, weight))
    assert torch.equal(got[0], torch.zeros(2))


@by_kind
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize(("inputs", "outputs"), [(577, 200), (4500, 70)])
def test_a_row_has_the_same_bits_in_every_company(
    kind: Kind, int8: bool, inputs: int, outputs: int
) -> None:
    x = random(340, inputs, seed=1, dtype=kind.activations)
    plain = random(outputs, inputs, seed=2, dtype=kind.activations)
    weight = Int8Weight.of(plain) if int8 else plain
    bias = random(outputs, seed=3, dtype=kind.activations)
    together = linear(kind, x, weight, bias)
    assert torch.equal(linear(kind, x, weight, bias, threads=2), together)
    for rows in range(1, 41):
        some = x[-rows:].contiguous()
        got = linear(kind, some, weight, bias, threads=1 + rows % 2)
        assert torch.equal(got, together[-rows:])


@pytest.mark.parametrize("target", library.TARGETS, ids=lambda target: target.name)
@by_kind
def test_every_kind_of_cpu_multiplies(kind: Kind, target: library.Target) -> None:
    if not target.cpu <= library._cpu_flags():
        pytest.skip(f"this CPU is no {target.name}")
    kernels = library.load_target(target, kind.activations)
    x = random(61, 579, seed=1, dtype=kind.activations)
    plain = random(150, 579, seed=2, dtype=kind.activations)
    assert_close(kind, linear(kind, x, plain, kernels=kernels), x, plain, None)
    int8 = Int8Weight.of(plain)
    expected = int8_product(x, int8).to(kind.outputs)
    assert torch.equal(linear(kind, x, int8, kernels=kernels), expected)
    for rows in range(1, 25):
        some = x[-rows:].contiguous()
        alone = linear(kind, some, plain, kernels=kernels)
        assert torch.equal(alone, linear(kind, x, plain, kernels=kernels)[-rows:])


def test_neighbours_in_memory_do_not_matter() -> None:
    # An odd depth ends within a group, whose other half belongs to the next row.
    memory = random(3, 33, seed=1, dtype=torch.bfloat16)
    weight = random(5, 33, seed=2, dtype=torch.bfloat16)
    expected = linear(BF16, memory[:1].clone(), weight)
    memory[1:] = float("nan")
    assert torch.equal(linear(BF16, memory[:1], weight), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (64, 8), (65, 33), (5000, 3)])
def test_packing_puts_every_weight_in_its_place(
    dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight = (random(outputs, inputs) * 40).to(dtype)
    packed = pack(weight)
    group = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}[dtype]
    panels, groups = -(-outputs // PANEL), -(-inputs // group)
    assert packed.shape == (panels, groups, PANEL, group)
    assert packed.is_contiguous()
    flat = packed.transpose(1, 2).reshape(panels * PANEL, groups * group)
    assert torch.equal(flat[:outputs, :inputs], weight)
    assert not flat[outputs:].any()
    assert not flat[:, inputs:].any()
