"""Two servers that were asked the same, in turns: how they differ, and whether that is noise."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypedDict

from baton.bench.figures import Figures

# Figure, and whether more of it is better.
_COMPARED = (
    ("ttft_s.p50", False),
    ("ttft_s.p95", False),
    ("itl_s.p50", False),
    ("itl_s.p95", False),
    ("tpot_s.p50", False),
    ("tpot_s.p95", False),
    ("e2e_s.p50", False),
    ("e2e_s.p95", False),
    ("requests_per_s", True),
    ("output_tokens_per_s", True),
    ("goodput.share", True),
    ("requests.failed", False),
)

_BLOCKS_TO_TELL = 4  # of equal servers one is better in all four with a chance of 1 in 8


class Compared(TypedDict):
    """One figure of both; `ratio` is the second server's over the first's.

    `block_ratios` has the ratio in each pair of blocks: where they lie on both sides of 1, the
    difference may be chance. `figure` is a path in the figures, as "ttft_s.p50".
    """

    figure: str
    first: float
    second: float
    ratio: float | None
    block_ratios: list[float]
    better: str  # "first", "second", or "" where blocks do not agree


def compared(
    first: Figures, second: Figures, blocks: Sequence[tuple[Figures, Figures]]
) -> list[Compared]:
    """Each figure that both have."""
    found = []
    for name, more_is_better in _COMPARED:
        look = _look(name)
        a, b = look(first), look(second)
        if a is None or b is None:
            continue
        pairs = [(look(x), look(y)) for x, y in blocks]
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


def _look(name: str) -> Callable[[Figures], float | None]:
    def look(figures: Figures) -> float | None:
        whole: Any = figures
        found = reduce(lambda at, key: at and at[key], name.split("."), whole)
        return None if found is None else float(found)

    return look


def _better(ratios: Sequence[float], more_is_better: bool) -> str:
    """Which one was better in every block."""
    if len(ratios) < _BLOCKS_TO_TELL:
        return ""
    wins, loses = (operator.gt, operator.lt) if more_is_better else (operator.lt, operator.gt)
    if all(wins(ratio, 1) for ratio in ratios):
        return "second"
    return "first" if all(loses(ratio, 1) for ratio in ratios) else ""
