"""Eight-bit rows by a kernel: equal, to the bit, to those of `baton.engine.weights.quantize`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.ops.triton import row_quantize
from baton.engine.ops.triton.row_quantize import quantize_rows, quantize_rows_reference

FP8 = torch.float8_e4m3fn
KINDS = (torch.int8, FP8)


def assert_equal_to_the_reference(x: Tensor, kind: torch.dtype) -> None:
    """Values and scales, to the bit."""
    (values, scales), (wanted, wanted_scales) = (
        of(x, kind) for of in (quantize_rows, quantize_rows_reference)
    )
    assert values.dtype == kind and values.shape == x.shape
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


@pytest.mark.parametrize(("rows", "size"), [(6, 7), (4, 300), (5, 1)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_equals_its_reference(kind: torch.dtype, rows: int, size: int) -> None:
    magnitudes = torch.logspace(-3, 3, rows)[:, None]
    assert_equal_to_the_reference((torch.randn(rows, size) * magnitudes).half(), kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_too_long_for_registers_is_read_twice(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_quantize, "LARGEST_WHOLE", 100)
    assert_equal_to_the_reference(torch.randn(3, 333), kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_of_zeros_has_scale_zero(kind: torch.dtype) -> None:
    values, scales = quantize_rows(torch.zeros(2, 16), kind)
    assert not values.float().any() and not scales.any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_smallest_and_the_largest_rows(kind: torch.dtype) -> None:
    """Where a division would overflow, and where a scale nearly does."""
    x = torch.randn(5, 32) * torch.tensor([0.0, 1e-40, 1.5e-36, 3e-36, 1e37])[:, None]
    assert_equal_to_the_reference(x, kind)


def test_int8_ties_go_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5]])
    values, scales = quantize_rows(x)
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, 126, -126]]
    assert scales.tolist() == [1.0]


def test_every_number_of_e4m3_and_what_lies_between() -> None:
    """All numbers, the ties between neighbours, and what lies next to a tie; both signs."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = [torch.nextafter(ties, torch.full_like(ties, toward)) for toward in (0.0, 448.0)]
    positive = torch.cat([numbers, ties, *near])
    row = torch.cat([positive, -positive])[None]
    values, scales = quantize_rows(row, FP8)
    assert scales.tolist() == [1.0]
    assert torch.equal(values.view(torch.uint8), row.to(FP8).view(torch.uint8))


def test_rows_of_a_wider_tensor() -> None:
    wide = torch.randn(3, 100)
    assert_equal_to_the_reference(wide[:, 10:50], torch.int8)
