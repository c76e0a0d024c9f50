"""What was measured as text and as JSON, beside the targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.part import Cell, Event

SCHEMA = "baton.bench.gpu/1"
DRY = "dry run on the CPU, kernels interpreted: the figures mean nothing"
VERDICTS = ("met", "missed", "not measured")


class Target(NamedTuple):
    """A bound for one cell of a table: at least, or at most."""

    text: str
    table: str
    row: str
    cell: str
    bound: float
    at_most: bool = False


TARGETS = (
    Target("decode attention: 80 % of the copy rate at batch 64, context 4096",
           "decode attention", "bf16, batch 64, context 4096", "of copy rate", 0.80),
    Target("prefill attention: 0.8 of SDPA's rate, 2048 tokens",
           "prefill attention", "2048 tokens", "of SDPA", 0.8),
    Target("prefill attention: 0.8 of SDPA's rate, 8192 tokens",
           "prefill attention", "8192 tokens", "of SDPA", 0.8),
    Target("decode step, 8B, batch 1: 80 % of its floor",
           "decode", "8B bf16, batch 1", "of floor", 0.80),
    Target("decode step, 8B, batch 64: 65 % of its floor",
           "decode", "8B bf16, batch 64", "of floor", 0.65),
    Target("decode, 8B, batch 64: 3 times transformers",
           "decode", "8B bf16, batch 64", "x transformers", 3.0),
    Target("prefill, 8B, 2048 tokens: 60 % of the matmul rate",
           "prefill", "8B bf16, 2048 tokens", "of matmul rate", 0.60),
    Target("cuda_ipc: 80 % of the copy rate for 512 MB of blocks",
           "transfer", "cuda_ipc", "of copy rate", 0.80),
    Target("handoff: bookkeeping p50 of 3 ms at most",
           "handoff", "cuda_ipc", "bookkeeping p50 ms", 3.0, at_most=True),
)  # fmt: skip


def verdicts(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Each target with its value and verdict."""
    rows = {(event.table, event.name): event.cells for event in events if event.kind == "row"}
    found = []
    for text, table, row, cell, bound, at_most in TARGETS:
        value: Any = rows.get((table, row), {}).get(cell)
        met, missed, unknown = VERDICTS
        verdict = unknown
        if value is not None:
            verdict = met if (value <= bound if at_most else value >= bound) else missed
        found.append(
            {
                "target": text, "cell": cell, "value": value, "bound": bound, "at_most": at_most,
                "verdict": verdict,
            }
        )  # fmt: skip
    return found


def text_of(events: Sequence[Event], head: Mapping[str, Any]) -> Iterator[str]:
    """Tables in the order in which they began, then what failed, and the targets last."""
    yield f"bench gpu, {head['date']}, {head['seconds']:.0f} s"
    if head["smoke"]:
        yield DRY
    for table in dict.fromkeys(event.table for event in events):
        yield ""
        yield from _table(table, [event for event in events if event.table == table])
    failures = [event for event in events if event.kind == "failed"]
    if failures:
        yield f"\nfailed: {len(failures)}"
        yield from (f"  {one.table}, {one.name}: {one.text}" for one in failures)
        for part, lines in head.get("logs", {}).items():
            if lines:
                yield f"\nthe end of what {part} printed:"
                yield from (f"  {line}" for line in lines)
    if not head["smoke"] and any(event.table == "ceilings" for event in events):
        found = verdicts(events)
        lines = [["target", "wanted", "measured", "verdict"]]
        for one in found:
            wanted = f"{'<=' if one['at_most'] else '>='} {_cell(one['cell'], one['bound'])}"
            measured = _cell(one["cell"], one["value"])
            lines.append([one["target"], wanted, measured, one["verdict"]])
        yield ""
        yield from _aligned(lines)
        counts = Counter(one["verdict"] for one in found)
        yield f"targets: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}"


def json_of(events: Sequence[Event], head: Mapping[str, Any]) -> dict[str, Any]:
    """The same; of a dry run no target is judged."""
    tables: dict[str, list[dict[str, Any]]] = {}
    notes, failed = [], []
    for event in events:
        if event.kind == "row":
            tables.setdefault(event.table, []).append({"name": event.name, **event.cells})
        elif event.kind == "note":
            notes.append({"table": event.table, "text": event.text})
        else:
            failed.append({"table": event.table, "name": event.name, "error": event.text})
    targets = [] if head["smoke"] else verdicts(events)
    return {
        "schema": SCHEMA, **head, "tables": tables, "targets": targets, "notes": notes,
        "failed": failed,
    }  # fmt: skip


def line_of(event: Event) -> str:
    """An event in one line, for progress: of a row its first figure and its shares."""
    if event.kind == "note":
        return f"  {event.table}: {event.text}"
    if event.kind == "failed":
        return f"  {event.table}: {event.name}: FAILED: {event.text}"
    figures = [(name, cell) for name, cell in event.cells.items() if isinstance(cell, int | float)]
    shown = [
        f"{_cell(name, value)} {name}"
        for at, (name, value) in enumerate(figures)
        if at == 0 or name.startswith(("of ", "x "))
    ]
    return f"  {event.table}: {event.name}" + (f" - {', '.join(shown)}" if shown else "")


def _table(title: str, events: Sequence[Event]) -> Iterator[str]:
    rows = [event for event in events if event.kind == "row"]
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    if title == "machine" and rows:  # a list of words, not of figures
        yield title
        yield from (f"  {name}: {_cell(name, rows[0].cells[name])}" for name in columns)
    else:
        cells = [[row.name, *(_cell(n, row.cells.get(n)) for n in columns)] for row in rows]
        yield from _aligned([[title, *columns], *cells])
    for event in events:
        if event.kind != "row":
            yield f"  {event.name + ': FAILED: ' if event.kind == 'failed' else ''}{event.text}"


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()


def _cell(column: str, value: Cell) -> str:
    """Shares as percentages, counts without places, all else to three figures."""
    if value is None or isinstance(value, str):
        return value or "-"
    if column.startswith("of "):
        return f"{value:.1%}"
    if abs(value) >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"
