"""Mean and percentiles of many values, as numpy and the public load generators compute them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypedDict

PERCENTILES = (50, 90, 95, 99)


class Spread(TypedDict):
    """How values are spread; seconds where the name of the figure ends in _s."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float


def columns(spread: Spread | None, names: Iterable[str]) -> list[float | None]:
    """Some of its values; None for each where there is none."""
    return [spread[name] if spread else None for name in names]  # type: ignore[literal-required]


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values there are; None of none."""
    ranked = sorted(value for value in values if value is not None)
    if not ranked:
        return None
    p50, p90, p95, p99 = (_interpolated(ranked, percent) for percent in PERCENTILES)
    mean = math.fsum(ranked) / len(ranked)
    return Spread(
        count=len(ranked), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99,
        min=ranked[0], max=ranked[-1],
    )  # fmt: skip


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear between the two nearest ranks (numpy's default); NaN of none."""
    ranked = sorted(values)
    return _interpolated(ranked, percent) if ranked else math.nan


def quantiles(values: Iterable[float | None], steps: int = 100) -> list[float]:
    """`steps` + 1 values from the smallest to the largest, evenly spaced in rank; none of none."""
    ranked = sorted(value for value in values if value is not None)
    return [_interpolated(ranked, 100 * i / steps) for i in range(steps + 1)] if ranked else []


def _interpolated(ranked: Sequence[float], percent: float) -> float:
    rank = (len(ranked) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (rank - below)
