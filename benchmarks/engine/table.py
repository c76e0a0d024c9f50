"""What was measured as a table, and as JSON: medians over the rounds, and how far they spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from benchmarks.engine.work import Measured, Work

SCHEMA = "baton.bench.engine/1"
_NAME_WIDTH, _CELL_WIDTH = 32, 22


class Spread(TypedDict):
    """Values of several rounds."""

    median: float
    min: float
    max: float
    rounds: int


def spread_of(values: Sequence[float]) -> Spread | None:
    """None of none."""
    if not values:
        return None
    return Spread(
        median=statistics.median(values), min=min(values), max=max(values), rounds=len(values)
    )


def rate(measured: Measured, name: str, work: Work) -> Spread | None:
    """Tokens a second."""
    return spread_of([*measured.rates.get(name, {}).get(work, {}).values()])


def ratio(measured: Measured, ours: str, theirs: str, work: Work) -> Spread | None:
    """Our rate over theirs, round by round: the two were measured next to each other."""
    a, b = (measured.rates.get(name, {}).get(work, {}) for name in (ours, theirs))
    return spread_of([a[round_] / b[round_] for round_ in a if round_ in b])


def text_of(
    measured: Measured, works: Sequence[Work], pairs: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """Two tables: rates, then ratios; a cell is a median with its extremes."""
    yield _row("tokens/s: median (min-max)", [work.label for work in works])
    for name in measured.rates:
        yield _row(name, [_cell(rate(measured, name, work), ".0f") for work in works])
    compared = [pair for pair in pairs if all(name in measured.rates for name in pair)]
    if compared:
        yield ""
        yield _row("ratio within a round", [work.label for work in works])
    for ours, theirs in compared:
        cells = [_cell(ratio(measured, ours, theirs, work), ".2f") for work in works]
        yield _row(f"{ours} / {theirs}", cells)
    for name, failures in measured.failures.items():
        for work, failure in failures.items():
            yield f"{name}, {work.label}: failed: {failure}"
    for name, notes in measured.notes.items():
        yield f"{name}: " + "; ".join(f"{work.label}: {note}" for work, note in notes.items())


def json_of(
    measured: Measured, works: Sequence[Work], pairs: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """The same with the value of each round."""
    return {
        "work": [{**work.request(), "label": work.label} for work in works],
        "candidates": [
            {
                "name": name,
                "tokens_per_s": {work.label: rate(measured, name, work) for work in works},
                "rounds": {
                    work.label: list(measured.rates[name].get(work, {}).values()) for work in works
                },
                "notes": _labelled(measured.notes.get(name, {})),
                "failures": _labelled(measured.failures.get(name, {})),
            }
            for name in measured.rates
        ],
        "ratios": [
            {
                "first": ours,
                "second": theirs,
                "first_over_second": {
                    work.label: ratio(measured, ours, theirs, work) for work in works
                },
            }
            for ours, theirs in pairs
            if ours in measured.rates and theirs in measured.rates
        ],
    }


def _labelled(texts: Mapping[Work, str]) -> dict[str, str]:
    return {work.label: text for work, text in texts.items()}


def _cell(spread: Spread | None, form: str) -> str:
    if spread is None:
        return "-"
    return f"{spread['median']:{form}} ({spread['min']:{form}}-{spread['max']:{form}})"


def _row(title: str, cells: Sequence[str]) -> str:
    return title.ljust(_NAME_WIDTH) + "".join(cell.rjust(_CELL_WIDTH) for cell in cells)
