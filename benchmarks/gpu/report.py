"""What was measured as text and as JSON. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.job import Cell, Event, Failed, Note, Row
from benchmarks.gpu.targets import VERDICTS, verdicts

SCHEMA = "baton.bench.gpu/1"
_OF, _SHARES = "of ", ("of ", "x ")  # how columns begin that hold shares of something
DRY = "dry run on the CPU, kernels interpreted: the figures mean nothing"


def text_of(events: Sequence[Event], head: Mapping[str, Any]) -> Iterator[str]:
    """Tables in the order in which they began, then what failed, and the targets last."""
    yield f"bench gpu, {head['date']}, {head['seconds']:.0f} s"
    if head["smoke"]:
        yield DRY
    for table in dict.fromkeys(event.table for event in events):
        here = [event for event in events if event.table == table]
        yield ""
        yield from _table(table, here)
    failures = [event for event in events if isinstance(event, Failed)]
    if failures:
        yield ""
        yield f"failed: {len(failures)}"
        yield from (f"  {one.table}, {one.name}: {one.error}" for one in failures)
        for part, lines in head.get("logs", {}).items():
            if lines:
                yield f"\nthe end of what {part} printed:"
                yield from (f"  {line}" for line in lines)
    if not head["smoke"] and any(event.table == "ceilings" for event in events):
        yield ""
        yield from _targets(verdicts(events))


def brief(row: Row) -> str:
    """A row's first figure and its shares, behind a dash; nothing where it has no figure."""
    cells = {name: value for name, value in row.cells.items() if isinstance(value, int | float)}
    told = [
        f"{_cell(name, value)} {name}"
        for at, (name, value) in enumerate(cells.items())
        if at == 0 or name.startswith(_SHARES)
    ]
    return f" - {', '.join(told)}" if told else ""


def json_of(events: Iterable[Event], head: Mapping[str, Any]) -> dict[str, Any]:
    """The same; of a dry run no target is judged."""
    events = list(events)
    tables: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if isinstance(event, Row):
            tables.setdefault(event.table, []).append({"name": event.name, **event.cells})
    return {
        "schema": SCHEMA,
        **head,
        "tables": tables,
        "targets": [] if head["smoke"] else verdicts(events),
        "notes": [{"table": e.table, "text": e.text} for e in events if isinstance(e, Note)],
        "failed": [
            {"table": e.table, "name": e.name, "error": e.error}
            for e in events
            if isinstance(e, Failed)
        ],
    }


def _table(title: str, events: Sequence[Event]) -> Iterator[str]:
    rows = [event for event in events if isinstance(event, Row)]
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    if len(rows) == 1 and any(isinstance(cell, str) for cell in rows[0].cells.values()):
        yield title
        yield from (f"  {name}: {_cell(name, rows[0].cells[name])}" for name in columns)
    elif rows:
        lines = [[title, *columns]]
        lines += [
            [row.name, *(_cell(name, row.cells.get(name)) for name in columns)] for row in rows
        ]
        yield from _aligned(lines)
    else:
        yield title
    for event in events:
        if isinstance(event, Note):
            yield f"  {event.text}"
        if isinstance(event, Failed):
            yield f"  {event.name}: FAILED: {event.error}"


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    for line in lines:
        first, *others = zip(line, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        yield "  ".join(cells).rstrip()


def _cell(column: str, value: Cell) -> str:
    """Shares as percentages, counts without places, all else to three figures."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if column.startswith(_OF):
        return f"{value:.1%}"
    if column in ("error", "bound"):
        return f"{value:.1e}"
    if abs(value) >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _targets(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    lines = [["target", "wanted", "measured", "verdict"]]
    for one in found:
        cell, sign = one["cell"], "<=" if one["at_most"] else ">="
        wanted = f"{sign} {_cell(cell, one['bound'])}"
        lines.append([one["target"], wanted, _cell(cell, one["value"]), one["verdict"]])
    yield from _aligned(lines)
    counts = Counter(one["verdict"] for one in found)
    yield f"targets: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}"
