"""What servers did as text: medians over the rounds, and how far they spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engine.table import Spread, spread_of
from benchmarks.serving.interference import InterferenceFigures
from benchmarks.serving.mixed import MixedFigures

SCHEMA = "baton.bench.comparison/1"
_NAME_WIDTH, _CELL_WIDTH = 38, 24
_MS = 1e3


@dataclass
class Measured:
    """One server's figures, a value for each round."""

    interference: list[InterferenceFigures] = field(default_factory=list)
    mixed: list[MixedFigures] = field(default_factory=list)
    capacity: float | None = None  # requests of the mixed load a second


# Title, where it lies in the figures, factor, format.
Row = tuple[str, Callable[[Any], float | None], float, str]


def _at(*path: str) -> Callable[[Any], float | None]:
    """The value at that place; None where a part of the way is missing."""

    def look(figures: Any) -> float | None:
        for key in path:
            if figures is None:
                return None
            figures = figures[key]
        return None if figures is None else float(figures)

    return look


INTERFERENCE: Sequence[Row] = (
    ("streams alone, tokens/s", _at("alone", "tokens_per_s"), 1, ".0f"),
    ("streams beside prompts, tokens/s", _at("beside", "tokens_per_s"), 1, ".0f"),
    ("share of tokens/s kept, %", _at("kept"), 100, ".1f"),
    ("alone: ITL p50, ms", _at("alone", "itl_s", "p50"), _MS, ".1f"),
    ("alone: ITL p99, ms", _at("alone", "itl_s", "p99"), _MS, ".1f"),
    ("alone: ITL max, ms", _at("alone", "itl_s", "max"), _MS, ".0f"),
    ("beside: ITL p50, ms", _at("beside", "itl_s", "p50"), _MS, ".1f"),
    ("beside: ITL p99, ms", _at("beside", "itl_s", "p99"), _MS, ".1f"),
    ("beside: ITL max, ms", _at("beside", "itl_s", "max"), _MS, ".0f"),
    ("alone: time in gaps over 200 ms, %", _at("alone", "long_gap_share"), 100, ".2f"),
    ("beside: time in gaps over 200 ms, %", _at("beside", "long_gap_share"), 100, ".2f"),
    ("streams' TTFT p50 alone, ms", _at("alone", "ttft_s", "p50"), _MS, ".0f"),
    ("streams' TTFT p50 beside, ms", _at("beside", "ttft_s", "p50"), _MS, ".0f"),
    ("long prompts' TTFT p50, ms", _at("prompts", "ttft_s", "p50"), _MS, ".0f"),
    ("long prompts' TTFT p95, ms", _at("prompts", "ttft_s", "p95"), _MS, ".0f"),
    ("long prompts not answered", _at("prompts", "failed"), 1, ".0f"),
)
MIXED: Sequence[Row] = (
    ("requests/s finished", _at("figures", "requests_per_s"), 1, ".2f"),
    ("output tokens/s", _at("figures", "output_tokens_per_s"), 1, ".0f"),
    ("TTFT p50, ms", _at("figures", "ttft_s", "p50"), _MS, ".0f"),
    ("TTFT p95, ms", _at("figures", "ttft_s", "p95"), _MS, ".0f"),
    ("TPOT p50, ms", _at("figures", "tpot_s", "p50"), _MS, ".1f"),
    ("TPOT p95, ms", _at("figures", "tpot_s", "p95"), _MS, ".1f"),
    ("ITL p50, ms", _at("figures", "itl_s", "p50"), _MS, ".1f"),
    ("ITL p99, ms", _at("figures", "itl_s", "p99"), _MS, ".1f"),
    ("ITL max, ms", _at("figures", "itl_s", "max"), _MS, ".0f"),
    ("time in gaps over 200 ms, %", _at("long_gap_share"), 100, ".2f"),
    ("goodput, requests/s", _at("figures", "goodput", "requests_per_s"), 1, ".2f"),
    ("goodput, % of requests", _at("figures", "goodput", "share"), 100, ".1f"),
    ("failed requests", _at("figures", "requests", "failed"), 1, ".0f"),
)


def text_of(measured: Mapping[str, Measured]) -> Iterator[str]:
    """One table for each load; a cell is a median with its extremes."""
    every = measured.items()
    yield from _load("interference", INTERFERENCE, {n: m.interference for n, m in every})
    yield from _load("mixed", MIXED, {n: m.mixed for n, m in every})
    for name, one in every:
        if one.capacity is not None:
            yield f"capacity of {name} for the mixed load: {one.capacity:.2f} requests/s"


def _load(title: str, rows: Sequence[Row], rounds: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    shown = {name: found for name, found in rounds.items() if found}
    if not shown:
        return
    yield _row(f"{title}: median (min-max)", list(shown))
    for row in rows:
        yield _row(f"  {row[0]}", [_cell(row, found) for found in shown.values()])
    yield ""


def spread(row: Row, rounds: Sequence[Any]) -> Spread | None:
    """One row's value over the rounds, in its unit."""
    _, look, factor, _ = row
    values = [look(figures) for figures in rounds]
    return spread_of([value * factor for value in values if value is not None])


def json_of(measured: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """All of it: medians by title, and every round as it was."""
    return [
        {
            "server": name,
            "capacity_requests_per_s": one.capacity,
            "medians": {
                "interference": {row[0]: spread(row, one.interference) for row in INTERFERENCE},
                "mixed": {row[0]: spread(row, one.mixed) for row in MIXED},
            },
            "interference": one.interference,
            "mixed": one.mixed,
        }
        for name, one in measured.items()
    ]


def _cell(row: Row, rounds: Sequence[Any]) -> str:
    found, form = spread(row, rounds), row[3]
    if found is None:
        return "-"
    return f"{found['median']:{form}} ({found['min']:{form}}-{found['max']:{form}})"


def _row(title: str, cells: Sequence[str]) -> str:
    return title.ljust(_NAME_WIDTH) + "".join(cell.rjust(_CELL_WIDTH) for cell in cells)
