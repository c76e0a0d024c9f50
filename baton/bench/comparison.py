"""Across stages and servers: how two servers differ beyond noise, and where a sweep bends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, TypedDict

from baton.bench.stats import Stats

# What is compared, and whether more of it is better.
_COMPARED = {
    **{f"{name}_s.{p}": False for name in ("ttft", "itl", "tpot", "e2e") for p in ("p50", "p95")},
    "requests_per_s": True,
    "output_tokens_per_s": True,
    "goodput.share": True,
    "requests.failed": False,
}
_MIN_BLOCKS = 4  # of equal servers one is better in all four with a chance of 1 in 8
_GOOD_SHARE = 0.9


class Compared(TypedDict):
    """One value of both servers; `ratio` is the second server's over the first's.

    `block_ratios` has the ratio in each pair of blocks: where they lie on both sides of 1, the
    difference may be chance. `figure` is a path in the statistics, as "ttft_s.p50".
    """

    figure: str
    first: float
    second: float
    ratio: float | None
    block_ratios: list[float]
    better: str  # "first", "second", or "" where blocks do not agree


def compared(first: Stats, second: Stats, blocks: Sequence[tuple[Stats, Stats]]) -> list[Compared]:
    """Each value that both have."""
    found = []
    for name, more_is_better in _COMPARED.items():
        a, b = _value(first, name), _value(second, name)
        if a is None or b is None:
            continue
        pairs = [(_value(x, name), _value(y, name)) for x, y in blocks]
        ratios = [y / x for x, y in pairs if x and y is not None]
        found.append(
            Compared(
                figure=name,
                first=a,
                second=b,
                ratio=b / a if a else None,
                block_ratios=ratios,
                better=_better(ratios, more_is_better),
            )
        )
    return found


def _value(stats: Stats, path: str) -> float | None:
    whole: Any = stats
    found = reduce(lambda at, key: at and at[key], path.split("."), whole)
    return None if found is None else float(found)


def _better(ratios: Sequence[float], more_is_better: bool) -> str:
    """Which one was better in every block."""
    if len(ratios) < _MIN_BLOCKS:
        return ""
    if all(ratio > 1 for ratio in ratios):
        return "second" if more_is_better else "first"
    if all(ratio < 1 for ratio in ratios):
        return "first" if more_is_better else "second"
    return ""


class Knee(TypedDict):
    """The stage beyond which a server should not be driven."""

    value: float  # of the sweep
    by: str  # "slo": the last with 90 % of requests good; "shape": where the curve bends


def knee_of(stages: Sequence[tuple[float, Stats]]) -> Knee | None:
    """Of one server's stages, in any order; None where there is none."""
    stages = sorted(stages, key=lambda stage: stage[0])
    if any(stats["goodput"] for _, stats in stages):
        return _knee_by_slo(stages)
    return _knee_by_shape(stages)


def _knee_by_slo(stages: Sequence[tuple[float, Stats]]) -> Knee | None:
    """The stage before the first that is not good; none if all are, or the first is not."""
    before = None
    for value, stats in stages:
        goodput = stats["goodput"]
        if goodput is None or goodput["share"] < _GOOD_SHARE:
            return None if before is None else Knee(value=before, by="slo")
        before = value
    return None


def _knee_by_shape(stages: Sequence[tuple[float, Stats]]) -> Knee | None:
    """The point farthest below the line from the first to the last.

    Source: V. Satopaa et al., "Finding a 'Kneedle' in a Haystack", without its smoothing.
    """
    points = [
        (stats["requests_per_s"], stats["e2e_s"]["p95"], value)
        for value, stats in stages
        if stats["e2e_s"]
    ]
    if len(points) < 3:
        return None
    (x0, y0, _), (x1, y1, _) = points[0], points[-1]
    if x1 <= x0 or y1 <= y0:
        return None
    depth, value = max(((x - x0) / (x1 - x0) - (y - y0) / (y1 - y0), v) for x, y, v in points)
    return Knee(value=value, by="shape") if depth > 0 else None
