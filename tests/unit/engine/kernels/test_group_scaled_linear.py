"""Group-quantised weights as kernels take them: packed, unpacked, and multiplied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.engine.backends.gpu.linear import GpuGroupScaledWeight
from baton.engine.kernels.triton import group_scaled_packing as packing
from baton.engine.kernels.triton.group_scaled_linear import (
    MOST_ROWS,
    dequantized,
    group_scaled_linear,
)
from baton.engine.kernels.triton.group_scaled_packing import pack, random_weight
from baton.engine.kernels.triton.specs import relative_error
from baton.engine.quantization.int4 import Int4Weight, pack_nibbles
from tests.unit.engine.kernels.ptx import run_ptx

FORMATS = ("int4", "awq", "fp8", "mxfp4", "nvfp4")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_unpacked_elements_are_those_of_the_reference(format: str, dtype: torch.dtype) -> None:
    """Where a scale is a number of the type, to the bit; else but for ties."""
    weight = random_weight(format, 70, 384, CPU)
    packed = pack(weight, dtype)
    assert packed is not None and packed.shape == (70, 384)
    found, wanted = dequantized(packed), weight.dequantized(dtype)
    if packed.has_lows:
        moved = (found.float() - wanted.float()).abs() / wanted.float().abs().clamp_min(1e-6)
        assert moved.max() <= torch.finfo(dtype).eps and (moved > 0).float().mean() < 0.01
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("format", "kind", "dtype", "text"),
    [
        ("int4", "int4_symmetric", torch.bfloat16, packing.INT4_SYMMETRIC_BF16),
        ("awq", "int4", torch.bfloat16, packing.INT4_BF16),
        ("awq", "int4", torch.float16, packing.INT4_FP16),
        ("fp8", "fp8", torch.bfloat16, packing.FP8_BF16),
        ("mxfp4", "mxfp4", torch.bfloat16, packing.MXFP4_BF16),
        ("nvfp4", "nvfp4", torch.bfloat16, packing.MXFP4_BF16),
    ],
)
def test_planes_of_words_are_what_was_packed(
    format: str, kind: str, dtype: torch.dtype, text: str
) -> None:
    """A GPU's instructions, whose results `scaled` makes up for by factors of scales."""
    weight = random_weight(format, 64, 256, CPU)
    packed = pack(weight, dtype)
    assert packed is not None and packed.format == kind
    planes = run_ptx(text, packed.words.view(torch.int32), 2 if kind == "fp8" else 4)
    found = torch.cat([plane.view(dtype).double() for plane in planes], dim=-1)  # of each step
    found = found[0].transpose(0, 1).flatten(1)
    if isinstance(weight, Int4Weight):
        wanted = weight.nibbles().double()
        more = 1024 if dtype == torch.float16 else 128
        wanted = wanted * 2.0**-133 if kind == "int4_symmetric" else wanted + more
    else:
        wanted = weight.numbers().double() * 2.0 ** (-120 if kind == "fp8" else -127)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("outputs", "depth", "rows"),
    [(128, 512, 1), (128, 512, 64), (128, 512, 130), (70, 320, 9), (70, 320, 128)],
)
@pytest.mark.parametrize("format", FORMATS)
def test_products_are_those_of_the_reference(
    format: str, outputs: int, depth: int, rows: int
) -> None:
    weight, dtype = random_weight(format, outputs, depth, CPU), torch.bfloat16
    packed = pack(weight, dtype)
    assert packed is not None
    x, bias = torch.randn(rows, depth).to(dtype), torch.randn(outputs).to(dtype)
    exact = x.double() @ weight.dequantized(torch.float64).T + bias.double()
    config = {"OUTPUTS": 64, "SPLIT": 3, "AHEAD": 0, "num_warps": 4, "num_stages": 1}
    for chosen in (None, config if rows <= MOST_ROWS else None, {"LIBRARY": 1}):
        found = group_scaled_linear(x, packed, bias, chosen)
        assert relative_error(found, exact.to(dtype)) <= 1
        assert not packed.counters.any(), "the next launch counts from zero"


@pytest.mark.parametrize(
    ("group", "is_taken"), [(32, True), (256, True), (16, True), (8, False), (96, False)]
)
def test_groups(group: int, is_taken: bool) -> None:
    values = torch.randint(0, 16, (64, 768), dtype=torch.uint8)
    scales, zeros = torch.rand(64, 768 // group), torch.randint(0, 17, (64, 768 // group))
    weight = Int4Weight(pack_nibbles(values), scales, zeros.to(torch.uint8))
    packed = pack(weight, torch.float32)
    assert (packed is not None) == is_taken
    if packed is not None:
        assert torch.equal(dequantized(packed), weight.dequantized(torch.float32))


def test_inputs_in_another_order() -> None:
    weight = replace(random_weight("awq", 64, 256, CPU), order=torch.randperm(256))
    packed = pack(weight, torch.bfloat16)
    assert packed is not None
    x = torch.randn(5, 256).bfloat16()
    assert relative_error(GpuGroupScaledWeight(**vars(packed)).apply(x), weight.apply(x)) <= 1


@pytest.mark.parametrize("format", ["int4", "awq", "fp8"])
def test_fields_of_another_weight_change_no_number(format: str) -> None:
    packed = pack(random_weight(format, 64, 256, CPU), torch.bfloat16)
    assert packed is not None
    has_zeros = format != "fp8"
    other = packed.with_fields(has_zeros, True)
    assert other.has_lows and other.has_zeros == has_zeros
    assert torch.equal(dequantized(other), dequantized(packed))
    assert other.with_fields(False, False) is other


@pytest.mark.parametrize(
    ("format", "depth", "group", "factor", "kind", "dtype"),
    [
        ("fp8", 160, 32, 1.0, "fp8", torch.float32),
        ("mxfp4", 256, 32, 3.0, "nvfp4", torch.bfloat16),
        ("int4", 256, 64, torch.tensor([2.0**-40, 2.0**20, 0.0, 1.0]), "int4_symmetric",
         torch.bfloat16),
    ],
    ids=["half a plane of fp8", "no powers of two", "scales beyond the type"],
)  # fmt: skip
def test_what_is_special_is_packed_to_the_bit(
    format: str, depth: int, group: int, factor: float | torch.Tensor, kind: str, dtype: torch.dtype
) -> None:
    """Planes have factors that fields make up for."""
    weight = random_weight(format, 64, depth, CPU)
    assert weight.group == group
    weight.scales.mul_(factor)
    packed = pack(weight, dtype)
    assert packed is not None and packed.format == kind
    assert torch.equal(dequantized(packed), weight.dequantized(dtype))
