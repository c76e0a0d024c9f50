"""Percentiles: numpy is the judge, since public load generators use it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.spread import percentile, quantiles, spread_of

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


@given(VALUES, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


@given(VALUES)
def test_a_spread_is_what_numpy_says(values: list[float]) -> None:
    spread = spread_of(values)
    assert spread is not None
    expected = {
        "count": len(values), "mean": np.mean(values), "min": min(values), "max": max(values),
        **{f"p{p}": np.percentile(values, p) for p in (50, 90, 95, 99)},
    }  # fmt: skip
    assert spread == {name: pytest.approx(value, abs=1e-6) for name, value in expected.items()}


def test_by_hand() -> None:
    """Rank 0.95 * 4 = 3.8 of 1, 2, 3, 4, 10: from 4, eight tenths of the way to 10."""
    spread = spread_of([10, 1, 3, None, 2, 4])
    assert spread is not None
    assert (spread["count"], spread["mean"], spread["p50"]) == (5, 4, 3)
    assert spread["p95"] == pytest.approx(8.8)


def test_of_nothing() -> None:
    assert spread_of([]) is None and spread_of([None]) is None
    assert quantiles([None]) == []
    assert math.isnan(percentile([], 50))


def test_quantiles_are_evenly_spaced_in_rank() -> None:
    assert quantiles([4, 0, 2], steps=4) == [0, 1, 2, 3, 4]
    assert len(quantiles([1.0])) == 101
