"""Products with 8-bit weights: what GPUs refuse, and what torch's operations give on a CPU."""

import os

import pytest
import torch
from torch import Tensor

from baton.engine.backends.gpu import linear as gpu
from baton.engine.backends.gpu.backend import LEAST_CAPABILITY
from baton.engine.ops.torch import linear as reference
from baton.engine.ops.triton.int8_matmul import (
    int8_matmul,
    int8_matmul_reference,
    scale_sums,
    scale_sums_reference,
)
from baton.engine.ops.triton.row_quantize import quantize_rows as quantize_rows_by_kernel
from baton.engine.weights.quantize import FP8, Fp8Weight, Int8Weight, quantize_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_prepare_leaves_what_products_refuse(quantization):
    kind = {"int8": Int8Weight, "fp8": Fp8Weight}[quantization]
    for shape, fits in (((48, 32), True), ((301, 32), False), ((48, 33), False)):
        matrix = random(*shape)
        prepared = gpu.prepare(matrix, quantization)
        assert isinstance(prepared, kind if fits else Tensor)
        assert prepared.shape == matrix.shape
        assert gpu.prepare(matrix, "none") is matrix


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
def test_on_a_cpu_it_is_the_reference(quantization, dtype):
    x, bias = random(19, 64, dtype=dtype), random(48, seed=2, dtype=dtype)
    weight = gpu.prepare(random(48, 64, seed=1, dtype=dtype), quantization)
    assert torch.equal(gpu.linear(x, weight, bias), reference.linear(x, weight, bias))
    assert torch.equal(gpu.linear(x, weight), reference.linear(x, weight))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "depth"), [(1, 256), (17, 72), (64, 264), (65, 72), (130, 8)])
def test_int8_products_are_those_of_the_reference(rows, depth, biased):
    generator = torch.Generator().manual_seed(rows)
    # Small enough for processors whose products of bytes saturate.
    x, values = (
        torch.randint(-60, 61, (size, depth), generator=generator).to(torch.int8)
        for size in (rows, 40)
    )
    scales, weight = random(rows, seed=1).abs(), Int8Weight(values, random(40, seed=2).abs())
    bias = random(40, seed=3) if biased else None
    got = gpu.int8_products(x, scales, weight, bias, torch.float32)
    exact = (x.int() @ values.int().T).float()
    expected = exact * (scales[:, None] * weight.scales)
    assert torch.equal(got, expected if bias is None else expected + bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_int8_rows_in_several_tiles(dtype):
    generator = torch.Generator().manual_seed(4)
    x, values = (
        torch.randint(-127, 128, (size, 160), generator=generator).to(torch.int8)
        for size in (20, 104)
    )
    scales = random(20, seed=1).abs() * 1e-3, random(104, seed=2).abs()
    bias = random(104, seed=3, dtype=dtype)
    config = {"num_warps": 4, "num_stages": 1, "OUTPUTS": 32, "DEPTH": 32}
    got = int8_matmul(x, values, *scales, bias, dtype, config)
    expected = int8_matmul_reference(x, values, *scales, bias, dtype)
    # The interpreter cuts what bfloat16 cannot hold, where a GPU rounds.
    unit = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(got, expected, rtol=unit, atol=0)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_kernels_one_after_the_other_are_the_reference(quantization):
    x, bias = random(7, 64), random(48, seed=2)
    weight = gpu.prepare(random(48, 64, seed=1), quantization)
    assert isinstance(weight, Int8Weight | Fp8Weight)
    products = {"int8": gpu.int8_products, "fp8": gpu.fp8_products}[quantization]
    values, scales = quantize_rows_by_kernel(x, weight.values.dtype)
    got = products(values, scales, weight, bias, x.dtype)
    torch.testing.assert_close(got, reference.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 17])
def test_fp8_products_are_those_of_the_reference(rows, biased, dtype):
    x, full = random(rows, 64, dtype=dtype), random(48, 64, seed=1)
    bias = random(48, seed=2, dtype=dtype) if biased else None
    weight = Fp8Weight.of(full)
    values, scales = quantize_rows(x, FP8)
    got = gpu.fp8_products(values, scales, weight, bias, dtype)
    assert (got.shape, got.dtype) == ((rows, 48), dtype)
    expected = reference.linear(x, weight, bias)
    torch.testing.assert_close(got, expected, rtol=1e-5 + torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (3, 1032), (5, 2048)])
def test_scaled_sums_are_the_formula(rows, columns, biased, dtype):
    generator = torch.Generator().manual_seed(columns)
    sums = torch.randint(-(2**24), 2**24, (rows, columns), generator=generator, dtype=torch.int32)
    bias = random(columns, seed=3, dtype=dtype) if biased else None
    scales = (random(rows, seed=1).abs() * 1e-4, random(columns, seed=2).abs() * 1e-3)
    got = scale_sums(sums, *scales, bias, dtype)
    expected = scale_sums_reference(sums, *scales, bias, dtype)
    # The interpreter cuts what bfloat16 cannot hold, where a GPU rounds.
    unit = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(got, expected, rtol=unit, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "0", reason="kernels are interpreted")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
def test_on_a_gpu(quantization, dtype):
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY[quantization]:
        pytest.skip(f"this GPU is too old for {quantization}")
    full, bias = random(208, 512, seed=1, dtype=dtype), random(208, seed=2, dtype=dtype)
    weight, there = (gpu.prepare(matrix, quantization) for matrix in (full, full.cuda()))
    # Sums of 512 products of numbers around 1; tensor cores round those of fp8 on the way.
    atol = 0.2 if quantization == "fp8" else 1e-3 if dtype == torch.float32 else 0.02
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": atol}
    for rows in (1, 16, 64, 65, 300):
        x = random(rows, 512, dtype=dtype)
        plain = gpu.linear(x.cuda(), there).cpu()
        torch.testing.assert_close(plain, reference.linear(x, weight), **near)
        biased = gpu.linear(x.cuda(), there, bias.cuda()).cpu()
        torch.testing.assert_close(biased, reference.linear(x, weight, bias), **near)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("size", [16, 80])
def test_the_kernel_s_fp8_rows_are_the_reference_s(size, dtype):
    x = (random(50, size, dtype=dtype) * 2.0 ** torch.arange(50)[:, None]).to(dtype)
    x[4] = 0
    values, scales = quantize_rows(x, FP8)
    by_kernel, scales_by_kernel = quantize_rows_by_kernel(x, FP8)
    assert torch.equal(scales_by_kernel, scales)
    assert torch.equal(by_kernel.view(torch.int8), values.view(torch.int8))
