"""Kernels on rows as the model's own steps in torch, and eight-bit rows equal to the bit."""

from __future__ import annotations

import pytest
import torch

from baton.engine.kernels.torch import row_quantization
from baton.engine.kernels.triton import row_quantization as kernels
from baton.engine.kernels.triton.row_quantization import quantize_rows

FP8 = torch.float8_e4m3fn


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
        wanted, wanted_scales = row_quantization.quantize_rows(x, kind)
        assert values.dtype == kind and values.shape == x.shape
        assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8)), name
        assert torch.equal(scales, wanted_scales), name
        if name == "ties":
            assert scales.tolist() == [1.0]
            by_torch = x.to(FP8) if kind == FP8 else x.round().to(torch.int8)
            assert torch.equal(values.view(torch.uint8), by_torch.view(torch.uint8))
        if name == "zeros":
            assert not values.float().any() and not scales.any()
