"""What the native kernels do to rows one by one, against the torch reference."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from baton.engine.models.decoder import rms_norm
from baton.engine.ops.native import library
from baton.engine.ops.torch.linear import silu_gate

pytestmark = pytest.mark.skipif(
    library.load() is None, reason="no native library can be built here"
)
# float32 differs in the order of additions only; bf16 may round to a neighbour, twice.
TOLERANCE = {
    torch.float32: {"rtol": 3e-6, "atol": 3e-7},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-3},
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def add_rms_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, threads: int = 1) -> Tensor:
    out, eps = torch.empty_like(hidden), ctypes.c_float(1e-5)
    library.require(hidden.dtype).baton_add_rms_norm(
        threads, at(hidden), at(added), at(weight), eps, *hidden.shape, at(out)
    )
    return out


def silu_mul(gate_up: Tensor, threads: int = 1) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype)
    library.require(gate_up.dtype).baton_silu_mul(threads, at(gate_up), rows, size, at(out))
    return out


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100, 576, 1536])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_they_equal_their_references_with_the_same_bits_in_any_batch(
    dtype: torch.dtype, size: int
) -> None:
    weight = random(size, seed=1).to(dtype)
    for added in (random(7, size, seed=2).to(dtype), None):
        hidden = random(7, size).to(dtype)
        expected = hidden + added if added is not None else hidden.clone()
        got = add_rms_norm(hidden, added, weight, threads=2)
        assert torch.equal(hidden, expected)
        torch.testing.assert_close(got, rms_norm(expected, weight, 1e-5), **TOLERANCE[dtype])
        for row in range(7):
            assert torch.equal(add_rms_norm(expected[row : row + 1], None, weight)[0], got[row])
    gate_up = (random(9, 2 * size) * 8).to(dtype)
    got = silu_mul(gate_up, threads=2)
    torch.testing.assert_close(got, silu_gate(gate_up), **TOLERANCE[dtype])
    for row in range(9):
        assert torch.equal(silu_mul(gate_up[row : row + 1])[0], got[row])


def test_silu_of_extremes() -> None:
    gate = torch.tensor([[-1e30, -100.0, -87.4, -0.0, 0.0, 87.4, 100.0, 1e30]])
    got = silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-6)
