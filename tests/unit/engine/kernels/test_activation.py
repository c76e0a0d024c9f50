"""The feed-forward gate in one kernel."""

from __future__ import annotations

import pytest
import torch

from baton.engine.ops.triton.activation import silu_mul, silu_mul_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (7, 32), (3, 33), (2, 300), (4, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_equals_its_reference(dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(size)
    gate_up = (torch.randn(rows, 2 * size) * 4).to(dtype)
    out, expected = silu_mul(gate_up), silu_mul_reference(gate_up)
    assert out.shape == (rows, size) and out.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_far_from_zero_it_is_the_identity_or_nothing() -> None:
    gate_up = torch.tensor([[80.0, -80.0, 0.0, 2.0, 3.0, 4.0]])
    torch.testing.assert_close(silu_mul(gate_up), torch.tensor([[160.0, 0.0, 0.0]]))


def test_rows_of_a_wider_tensor() -> None:
    wide = torch.randn(3, 100)
    assert torch.equal(silu_mul(wide[:, 10:50]), silu_mul(wide[:, 10:50].contiguous()))


def test_no_rows() -> None:
    assert silu_mul(torch.ones(0, 32)).shape == (0, 16)
