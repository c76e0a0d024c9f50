"""Every kernel as its reference, for all the cases that its spec declares."""

from __future__ import annotations

import pytest
import torch

from baton.engine.ops.triton.check import specs_in
from baton.engine.ops.triton.spec import KernelSpec, Key, relative_error, text_of

CPU = torch.device("cpu")
SPECS = specs_in(())

# What is slow to interpret has smaller cases in tests of its own.
ATTENTION = ("decode_attention", "prefill_attention")
CASES = [
    pytest.param(spec, shape, id=f"{spec.name} {text_of(shape)}")
    for spec in SPECS
    for shape, _ in spec.cases[: 2 if spec.name in ATTENTION else None]
    if int(shape.get("size", 0)) <= 16384
]


@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_it_equals_its_reference(spec: KernelSpec, shape: Key) -> None:
    torch.manual_seed(0)
    assert spec.trial(shape, CPU).error() <= 1


def test_error_is_relative_over_all_and_of_the_worst_row() -> None:
    wanted = torch.ones(4, 2, 8)
    found = wanted.clone()
    found[2] += 0.5
    assert relative_error(found, wanted, 0.25) == pytest.approx(1.0)
    found[2, 0] += 2.0
    assert relative_error(found, wanted, 1.0) > 0.45, "of a row, four times as much is allowed"
    assert relative_error(torch.zeros(2, 3), torch.zeros(2, 3)) == 0
    assert relative_error(torch.full((2, 3), 1e-3), torch.zeros(2, 3)) > 1


def test_rounding_is_allowed_and_what_is_more_is_not() -> None:
    exact = torch.randn(64, 256)
    assert relative_error((exact * 1.001).bfloat16(), exact.bfloat16()) <= 1
    assert relative_error((exact * 1.02).bfloat16(), exact.bfloat16()) > 1


def test_results_of_another_kind_are_refused() -> None:
    ones = torch.ones(3, 4)
    for other in (torch.ones(4, 3), torch.ones(3, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="not"):
            relative_error(other, ones)
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            relative_error(ones * value, ones)
    with pytest.raises(ValueError, match="bit"):
        relative_error(torch.tensor([-0.0]), torch.tensor([0.0]), 0.0)
