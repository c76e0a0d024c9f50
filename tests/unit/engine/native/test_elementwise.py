"""What the native kernels do to rows one by one, against the torch reference."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from baton.engine.models.decoder import rms_norm
from baton.engine.ops.native import library
from baton.engine.ops.torch.linear import silu_gate

native = library.load()
pytestmark = pytest.mark.skipif(native is None, reason="no native library can be built here")

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# float32 differs in the order of additions only; bf16 may round to a neighbour, twice.
TOLERANCE = {"f32": {"rtol": 3e-6, "atol": 3e-7}, "bf16": {"rtol": 1.6e-2, "atol": 1e-3}}
SIZES = (1, 15, 16, 17, 64, 100, 576, 1536)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def add_rms_norm(
    suffix: str, hidden: Tensor, added: Tensor | None, weight: Tensor, threads: int = 1
) -> Tensor:
    rows, size = hidden.shape
    out = torch.empty_like(hidden)
    library.require(DTYPES[suffix]).baton_add_rms_norm(
        threads,
        ctypes.c_void_p(hidden.data_ptr()),
        ctypes.c_void_p(added.data_ptr() if added is not None else None),
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_float(1e-5),
        rows,
        size,
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


def silu_mul(suffix: str, gate_up: Tensor, threads: int = 1) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype)
    library.require(DTYPES[suffix]).baton_silu_mul(
        threads,
        ctypes.c_void_p(gate_up.data_ptr()),
        rows,
        size,
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("suffix", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_add_rms_norm_equals_the_reference(suffix: str, size: int, adds: bool) -> None:
    dtype = DTYPES[suffix]
    hidden, weight = random(7, size).to(dtype), random(size, seed=1).to(dtype)
    added = random(7, size, seed=2).to(dtype) if adds else None
    expected_hidden = hidden + added if added is not None else hidden.clone()
    got = add_rms_norm(suffix, hidden, added, weight, threads=2)
    assert torch.equal(hidden, expected_hidden)
    torch.testing.assert_close(got, rms_norm(expected_hidden, weight, 1e-5), **TOLERANCE[suffix])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("suffix", DTYPES)
def test_silu_mul_equals_the_reference(suffix: str, size: int) -> None:
    gate_up = (random(9, 2 * size) * 8).to(DTYPES[suffix])
    torch.testing.assert_close(silu_mul(suffix, gate_up), silu_gate(gate_up), **TOLERANCE[suffix])


def test_silu_of_extremes() -> None:
    gate = torch.tensor([[-1e30, -100.0, -87.4, -0.0, 0.0, 87.4, 100.0, 1e30]])
    got = silu_mul("f32", torch.cat((gate, torch.ones_like(gate)), dim=1))
    expected = torch.nn.functional.silu(gate)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("suffix", DTYPES)
def test_a_row_does_not_know_its_neighbours(suffix: str) -> None:
    rows = random(40, 200).to(DTYPES[suffix])
    weight = random(200, seed=1).to(DTYPES[suffix])
    whole = add_rms_norm(suffix, rows.clone(), None, weight, threads=2)
    silus = silu_mul(suffix, rows, threads=2)
    for i in range(40):
        alone = rows[i : i + 1].clone()
        assert torch.equal(add_rms_norm(suffix, alone, None, weight)[0], whole[i])
        assert torch.equal(silu_mul(suffix, alone)[0], silus[i])
