"""Every kernel as its reference, for all the cases that its spec declares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.engine.kernels.triton.specs import (
    Key,
    error_of,
    relative_error,
    small,
    specs_in,
    text_of,
)

CASES = [
    pytest.param(spec, small(shape), id=f"{spec.name} {text_of(shape)}")
    for spec in specs_in(["kvtransfer.kernels.blocks"])
    for shape in spec.cases
]


@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_kernel_equals_its_reference_and_reads_nothing_else(spec: Any, shape: Key) -> None:
    torch.manual_seed(0)
    assert error_of(spec.trial(shape, torch.device("cpu"))) <= 1


def test_error_is_relative_over_all_and_of_the_worst_row() -> None:
    wanted = torch.ones(4, 2, 8)
    found = wanted.clone()
    found[2] += 0.5
    assert relative_error(found, wanted, 0.25) == pytest.approx(1.0)
    found[2, 0] += 2.0
    assert relative_error(found, wanted, 1.0) > 0.45, "of a row, four times as much is allowed"
    exact = torch.randn(64, 256)
    assert relative_error((exact * 1.001).bfloat16(), exact.bfloat16()) <= 1
    assert relative_error((exact * 1.02).bfloat16(), exact.bfloat16()) > 1
    ones = torch.ones(3, 4)
    for other, tolerance, reason in (
        (torch.ones(4, 3), None, "not"),
        (ones.double(), None, "not"),
        (ones * torch.nan, None, "finite"),
        (ones * 1.0000001, 0.0, "bit"),
    ):
        with pytest.raises(ValueError, match=reason):
            relative_error(other, ones, tolerance)
