"""Kernels on rows as the model's own steps in torch, and eight-bit rows equal to the bit."""

from __future__ import annotations

import pytest
import torch

from baton.engine.models.decoder import rms_norm
from baton.engine.ops.torch.linear import silu_gate
from baton.engine.ops.triton import rows as kernels
from baton.engine.ops.triton.rows import add_rms_norm, quantize_rows, silu_mul
from baton.engine.weights import quantize

FP8 = torch.float8_e4m3fn


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


def rows_of(kind: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs of every sort; for fp8 all its numbers, the ties between them, and what is beside."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = [torch.nextafter(ties, torch.full_like(ties, toward)) for toward in (0.0, 448.0)]
    positive = torch.cat([numbers, ties, *near])
    return {
        "several magnitudes": (torch.randn(6, 300) * torch.logspace(-3, 3, 6)[:, None]).half(),
        "one number each": torch.randn(5, 1),
        "zeros": torch.zeros(2, 16),
        # Where a division would overflow, and where a scale nearly does.
        "extremes": torch.randn(5, 32) * torch.tensor([0.0, 1e-40, 1.5e-36, 3e-36, 1e37])[:, None],
        "part of a wider tensor": torch.randn(3, 100)[:, 10:50],
        "ties": torch.cat([positive, -positive])[None]
        if kind == FP8
        else torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5]]),
    }


@pytest.mark.parametrize("longest", [kernels.LARGEST_WHOLE, 20], ids=["whole", "read twice"])
@pytest.mark.parametrize("kind", [torch.int8, FP8], ids=str)
def test_equals_its_reference_to_the_bit(
    kind: torch.dtype, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LARGEST_WHOLE", longest)
    for name, x in rows_of(kind).items():
        values, scales = quantize_rows(x, kind)
        wanted, wanted_scales = quantize.quantize_rows(x, kind)
        assert values.dtype == kind and values.shape == x.shape
        assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8)), name
        assert torch.equal(scales, wanted_scales), name
        if name == "ties":
            assert scales.tolist() == [1.0]
            by_torch = x.to(FP8) if kind == FP8 else x.round().to(torch.int8)
            assert torch.equal(values.view(torch.uint8), by_torch.view(torch.uint8))
        if name == "zeros":
            assert not values.float().any() and not scales.any()
