"""Addition and RMS norm, and the feed-forward gate: as the model's own steps in torch."""

from __future__ import annotations

import pytest
import torch

from baton.engine.ops.triton.elementwise import (
    LARGEST_ROW,
    add_rms_norm,
    add_rms_norm_reference,
    silu_mul,
    silu_mul_reference,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("added", [True, False], ids=["added", "alone"])
@pytest.mark.parametrize(("rows", "size"), [(5, 48), (3, 1), (9, 257)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_equal_their_reference(dtype: torch.dtype, rows: int, size: int, added: bool) -> None:
    torch.manual_seed(size)
    x = (torch.randn(rows, size) * 3).to(dtype)
    residual = torch.randn(rows, size).to(dtype) if added else None
    expected_residual = residual.clone() if residual is not None else None
    weight = torch.randn(size).to(dtype)

    normed, stream = add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_stream = add_rms_norm_reference(x, expected_residual, weight, 1e-5)

    assert stream is (residual if added else x)
    assert torch.equal(stream, expected_stream)
    assert normed.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)


def test_unit_mean_square() -> None:
    normed, _ = add_rms_norm(torch.full((1, 8), -3.0), None, torch.full((8,), 2.0), 0.0)
    torch.testing.assert_close(normed, torch.full((1, 8), -2.0))


def test_a_row_of_zeros_stays_zero() -> None:
    normed, _ = add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 8), torch.ones(8), 1e-6)
    assert not normed.any()


def test_rows_of_a_wider_tensor() -> None:
    wide = torch.randn(4, 40)
    assert torch.equal(silu_mul(wide[:, 10:30]), silu_mul(wide[:, 10:30].contiguous()))
    normed, _ = add_rms_norm(wide[:, 8:24], None, torch.ones(16), 1e-6)
    expected, _ = add_rms_norm(wide[:, 8:24].contiguous(), None, torch.ones(16), 1e-6)
    assert torch.equal(normed, expected)


def test_no_rows() -> None:
    normed, stream = add_rms_norm(torch.ones(0, 16), torch.ones(0, 16), torch.ones(16), 1e-6)
    assert normed.shape == stream.shape == (0, 16)
    assert silu_mul(torch.ones(0, 32)).shape == (0, 16)


def test_a_row_longer_than_registers_is_refused() -> None:
    size = LARGEST_ROW + 1
    with pytest.raises(ValueError, match=f"rows of {size} elements"):
        add_rms_norm(torch.zeros(1, size), None, torch.ones(size), 1e-6)


@pytest.mark.parametrize(("rows", "size"), [(3, 33), (4, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_equal_their_reference(dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(size)
    gate_up = (torch.randn(rows, 2 * size) * 4).to(dtype)
    out, expected = silu_mul(gate_up), silu_mul_reference(gate_up)
    assert out.shape == (rows, size) and out.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_a_gate_far_from_zero_is_the_identity_or_nothing() -> None:
    gate_up = torch.tensor([[80.0, -80.0, 0.0, 2.0, 3.0, 4.0]])
    torch.testing.assert_close(silu_mul(gate_up), torch.tensor([[160.0, 0.0, 0.0]]))
