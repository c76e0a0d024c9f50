"""Where a sweep bends: the highest rate that a server still serves well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from baton.bench.figures import Figures

_GOOD_SHARE = 0.9


class Knee(TypedDict):
    """The stage at which a server should not be driven harder."""

    value: float  # of the sweep
    by: str  # "slo": the last with 90 % of requests good; "shape": where the curve bends


def knee_of(stages: Sequence[tuple[float, Figures]]) -> Knee | None:
    """Of one server's stages, in any order; None where there is none."""
    stages = sorted(stages, key=lambda stage: stage[0])
    if any(figures["goodput"] for _, figures in stages):
        return _by_slo(stages)
    return _by_shape(stages)


def _by_slo(stages: Sequence[tuple[float, Figures]]) -> Knee | None:
    """The stage before the first that is not good; none if all are, or the first is not."""
    before = None
    for value, figures in stages:
        goodput = figures["goodput"]
        if goodput is None or goodput["share"] < _GOOD_SHARE:
            return None if before is None else Knee(value=before, by="slo")
        before = value
    return None


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
