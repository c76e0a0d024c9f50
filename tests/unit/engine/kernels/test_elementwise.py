"""Addition and RMS norm, and the feed-forward gate: as the model's own steps in torch."""

from __future__ import annotations

import pytest
import torch

from baton.engine.models.decoder import rms_norm
from baton.engine.ops.torch.linear import silu_gate
from baton.engine.ops.triton.elementwise import LARGEST_ROW, add_rms_norm, silu_mul


@pytest.mark.parametrize(("rows", "size"), [(5, 48), (3, 1), (9, 257), (0, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_their_references_but_for_the_last_bits(
    dtype: torch.dtype, rows: int, size: int
) -> None:
    """Also for rows of a wider tensor."""
    torch.manual_seed(size)
    tolerance = 4 * torch.finfo(dtype).eps
    wide = (torch.randn(rows, 2 * size + 9) * 3).to(dtype)
    x, weight = wide[:, 3 : 3 + size], torch.randn(size).to(dtype)
    for residual in (torch.randn(rows, size).to(dtype), None):
        wanted = x if residual is None else residual + x
        normed, stream = add_rms_norm(x, residual, weight, 1e-5)
        assert stream is (x if residual is None else residual)
        assert torch.equal(stream, wanted) and normed.dtype == dtype
        expected = rms_norm(wanted, weight, 1e-5)
        torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)
    gate_up = wide[:, 5 : 5 + 2 * size]
    out = silu_mul(gate_up)
    assert out.shape == (rows, size) and out.dtype == dtype
    torch.testing.assert_close(out, silu_gate(gate_up), rtol=tolerance, atol=tolerance)


def test_values_by_hand() -> None:
    normed, _ = add_rms_norm(torch.full((1, 8), -3.0), None, torch.full((8,), 2.0), 0.0)
    torch.testing.assert_close(normed, torch.full((1, 8), -2.0))
    normed, _ = add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 8), torch.ones(8), 1e-6)
    assert not normed.any(), "a row of zeros stays zero"
    gate_up = torch.tensor([[80.0, -80.0, 0.0, 2.0, 3.0, 4.0]])
    torch.testing.assert_close(silu_mul(gate_up), torch.tensor([[160.0, 0.0, 0.0]]))
    size = LARGEST_ROW + 1
    with pytest.raises(ValueError, match=f"rows of {size} elements"):
        add_rms_norm(torch.zeros(1, size), None, torch.ones(size), 1e-6)
