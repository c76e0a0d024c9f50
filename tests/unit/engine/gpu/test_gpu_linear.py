"""Products with 8-bit weights: what GPUs refuse, and what torch's operations give on a CPU."""

import os

import pytest
import torch

from baton.engine.backends.gpu import linear as gpu
from baton.engine.backends.gpu.backend import LEAST_CAPABILITY
from baton.engine.kernels.triton.row_quantization import QuantizedRows
from baton.engine.quantization.fp8 import Fp8Weight
from baton.engine.quantization.linear_weight import DenseWeight
from baton.engine.quantization.methods import quantize_weight
from baton.errors import CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_prepare_leaves_what_products_refuse(quantization):
    kind = {"int8": gpu.GpuInt8Weight, "fp8": gpu.GpuFp8Weight, "int4": gpu.GpuReferenceWeight}
    odd = quantization == "int4"  # which takes any number of outputs
    for shape, fits in (((48, 64), True), ((301, 64), odd), ((48, 65), False)):
        weight = DenseWeight(random(*shape))
        prepared = gpu.prepare(weight, False, quantization)
        assert type(prepared) is (kind[quantization] if fits else gpu.GpuDenseWeight)
        assert prepared.shape == weight.shape
        assert type(gpu.prepare(weight, False, "none")) is gpu.GpuDenseWeight


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_an_8_bit_matrix_that_tp_cut_too_small_is_refused_when_it_is_loaded(quantization):
    for shape, fits in (((48, 64), True), ((44, 64), False), ((48, 60), False)):
        weight = quantize_weight(DenseWeight(random(*shape)), quantization)
        if fits:
            assert gpu.prepare(weight, False, "none").shape == shape
            continue
        with pytest.raises(CheckpointError, match=rf"each rank has {shape[0]} x .*smaller --tp"):
            gpu.prepare(weight, False, "none")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "depth"), [(1, 256), (17, 72), (64, 264), (65, 72), (130, 8)])
def test_int8_products_are_those_of_the_reference(rows, depth, biased):
    generator = torch.Generator().manual_seed(rows)
    # Small enough for processors whose products of bytes saturate.
    x, values = (
        torch.randint(-60, 61, (size, depth), generator=generator).to(torch.int8)
        for size in (rows, 40)
    )
    scales = random(rows, seed=1).abs()
    weight = gpu.GpuInt8Weight(values, random(40, seed=2).abs())
    bias = random(40, seed=3) if biased else None
    got = weight.apply(QuantizedRows(x, scales, torch.float32), bias)
    exact = (x.int() @ values.int().T).float()
    expected = exact * (scales[:, None] * weight.scales)
    assert torch.equal(got, expected if bias is None else expected + bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 17])
def test_fp8_products_are_those_of_the_reference(rows, biased, dtype):
    x, full = random(rows, 64, dtype=dtype), random(48, 64, seed=1)
    bias = random(48, seed=2, dtype=dtype) if biased else None
    weight = gpu.GpuFp8Weight.from_dense(full)
    got = weight.apply(x, bias)
    assert (got.shape, got.dtype) == ((rows, 48), dtype)
    expected = Fp8Weight(weight.values, weight.scales).apply(x, bias)
    torch.testing.assert_close(got, expected, rtol=1e-5 + torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "0", reason="kernels are interpreted")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", ["none", "int8", "fp8", "int4"])
def test_on_a_gpu(quantization, dtype):
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY.get(quantization, (8, 0)):
        pytest.skip(f"this GPU is too old for {quantization}")
    full, bias = random(208, 512, seed=1, dtype=dtype), random(208, seed=2, dtype=dtype)
    weight, there = (
        gpu.prepare(DenseWeight(matrix), False, quantization) for matrix in (full, full.cuda())
    )
    # Sums of 512 products of numbers around 1; tensor cores round those of fp8 on the way.
    atol = 0.2 if quantization == "fp8" else 1e-3 if dtype == torch.float32 else 0.02
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": atol}
    for rows in (1, 16, 64, 65, 300):
        x = random(rows, 512, dtype=dtype)
        plain = there.apply(x.cuda()).cpu()
        torch.testing.assert_close(plain, weight.apply(x), **near)
        biased = there.apply(x.cuda(), bias.cuda()).cpu()
        torch.testing.assert_close(biased, weight.apply(x, bias), **near)
