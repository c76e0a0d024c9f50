"""Where a sweep bends: the highest rate that a server still serves well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from baton.bench.figures import Figures

_GOOD_SHARE = 0.9


class Knee(TypedDict):
    """The stage at which a server should not be driven harder."""

    value: float  # of the sweep
    by: str  # "slo": the last value with 90 % of requests good; "shape": where the curve bends


def knee_of(stages: Sequence[tuple[float, Figures]]) -> Knee | None:
    """Of one server's stages, in rising order; None where there is none."""
    if any(figures["goodput"] for _, figures in stages):
        return _by_slo(stages)
    return _by_shape(stages)


def _by_slo(stages: Sequence[tuple[float, Figures]]) -> Knee | None:
    best = None
    for value, figures in stages:
        goodput = figures["goodput"]
        if goodput is None or goodput["share"] < _GOOD_SHARE:
            break
        best = value
    return None if best is None else Knee(value=best, by="slo")


def _by_shape(stages: Sequence[tuple[float, Figures]]) -> Knee | None:
    """The point farthest below the line from the first to the last.

    Source: V. Satopaa et al., "Finding a 'Kneedle' in a Haystack", without its smoothing.
    """
    points = [
        (figures["requests_per_s"], figures["e2e_s"]["p95"], value)
        for value, figures in stages
        if figures["e2e_s"]
    ]
    if len(points) < 3:
        return None
    (x0, y0, _), (x1, y1, _) = points[0], points[-1]
    if x1 <= x0 or y1 <= y0:
        return None
    depths = [((x - x0) / (x1 - x0) - (y - y0) / (y1 - y0), value) for x, y, value in points]
    depth, value = max(depths)
    return Knee(value=value, by="shape") if depth > 0 else None
