"""Draws a `View` for a terminal. Pure: a view in, something that rich can print out.

On a narrow terminal the columns that matter least are left out, on a low one rows are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.local.top.columns import (
    BAD,
    PAIR_COLUMNS,
    QUIET,
    ROUTER_COLUMNS,
    Column,
    Line,
    legend,
    worker_columns,
)
from baton.local.top.view import EventLine, View, WorkerLine
from baton.v1 import fleet_pb2

ROLES = ("all", "prefill", "decode")
SORTS = ("name", "queue", "blocks", "tokens")
_NAME = "bold"
_EVENT_NAMES = {
    fleet_pb2.EVENT_KIND_FAILOVER: ("failover", "yellow"),
    fleet_pb2.EVENT_KIND_REFUSAL: ("refused", "magenta"),
    fleet_pb2.EVENT_KIND_FAILURE: ("failed", BAD),
}
_MOST_EVENTS = 6
_TRACES_FROM = 100  # columns: on less the text needs them all
_OTHER_LINES = 9  # the title, three heads of tables, what blocks mean, lines between
_GAP = 2  # between columns
_LEAST_ROWS = 3  # of a table that is cut


@dataclass(frozen=True)
class Look:
    """How it is looked at; keys change it."""

    interval_s: float
    role: str = ROLES[0]
    sort: str = SORTS[0]
    paused: bool = False
    keys: bool = True  # whether to tell of them

    def next_role(self) -> Look:
        """Workers of the next role alone."""
        return replace(self, role=_next(ROLES, self.role))

    def next_sort(self) -> Look:
        """Workers in the next order."""
        return replace(self, sort=_next(SORTS, self.sort))


def frame(view: View, look: Look, width: int, height: int) -> Group:
    """One picture of at most `width` columns and, if it can be, `height` lines."""
    workers, troubles = _arranged(view.workers, look), _troubles(view)
    events = view.events[:_MOST_EVENTS]
    told = len(view.routers) + len(troubles) + len(events) + sum(bool(w.reason) for w in workers)
    fixed = told + _OTHER_LINES
    room = max(height - fixed, 2 * _LEAST_ROWS)
    pairs = _first(view.pairs, max(_LEAST_ROWS, room - len(workers)))
    workers_shown = _first(workers, max(_LEAST_ROWS, room - len(pairs)))
    parts: list[RenderableType] = [
        _title(view, look),
        _table(ROUTER_COLUMNS, view.routers, width),
        *troubles,
        Text(),
        *_section(worker_columns(width), workers_shown, width, len(workers), "workers"),
        legend(),
        *(Text(f"  {w.record.incarnation}: {w.reason}", "red") for w in workers_shown if w.reason),
    ]
    if pairs:
        parts += [Text(), *_section(PAIR_COLUMNS, pairs, width, len(view.pairs), "pairs")]
    if events:
        parts += [Text(), *(_event(line, len(view.routers) > 1, width) for line in events)]
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


def _title(view: View, look: Look) -> Text:
    status = next((router.status for router in view.routers if router.status), None)
    title = Text()
    title.append("baton top", _NAME)
    if status is not None:
        title.append(f"  cluster {status.cluster}, model {status.model}")
    when = time.strftime("%H:%M:%S", time.localtime(view.unix_s))
    title.append(f"  {when}", QUIET)
    if look.paused:
        title.append("  PAUSED", "reverse")
    if look.keys:
        title.append("  q quit  p pause", QUIET)
        title.append(f"  r role: {look.role}  s sort: {look.sort}", QUIET)
    return title


def _troubles(view: View) -> list[Text]:
    """What a person must know before believing the rest."""
    texts = []
    for router in view.routers:
        if router.failure:
            since = f" for {router.silent_s:.0f} s" if router.status else ""
            text = f"router {router.address} does not answer{since}: {router.failure}"
            texts.append(Text(" ".join(text.split()), BAD))
        elif router.status and not router.status.registry_connected:
            texts.append(Text(f"router {router.address} does not reach the registry", BAD))
    if view.routers and not view.answering and view.answered:
        texts.append(Text("no router answers: what follows is old", BAD))
    return texts


def _event(line: EventLine, several: bool, width: int) -> Text:
    """In one line; the trace's id is whole or left out, so that `baton trace` can be given it."""
    event = line.event
    name, style = _EVENT_NAMES.get(event.kind, ("event", ""))
    text = Text(time.strftime("%H:%M:%S ", time.localtime(event.time_ms / 1e3)))
    text.append(name, style)
    text.append(f" x{event.times}" if event.times > 1 else "")
    text.append(f" at {line.address}" if several else "", QUIET)
    text.append(f" {' '.join(event.text.split())}")
    if event.trace_id and width >= _TRACES_FROM:
        trace = f"  trace {event.trace_id}"
        text.truncate(width - len(trace), overflow="ellipsis")
        text.append(trace, QUIET)
    return text


def _section(
    columns: Sequence[Column[Line]], lines: Sequence[Line], width: int, count: int, what: str
) -> list[RenderableType]:
    """A table, and how many rows did not find room."""
    if not count:
        return [Text(f"no {what}", "yellow")]
    parts: list[RenderableType] = [_table(columns, lines, width)]
    if len(lines) < count:
        parts.append(Text(f"… and {count - len(lines)} more {what}", QUIET))
    return parts


def _table(columns: Sequence[Column[Line]], lines: Sequence[Line], width: int) -> Table:
    """The columns that fit, all of which are as wide as what they say."""
    shown = [(column, [_text(column.cell(line)) for line in lines]) for column in columns]
    while _columns_of(shown) > width and any(column.rank for column, _ in shown):
        shown.remove(max(shown, key=lambda cells: cells[0].rank))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style=QUIET)
    for column, _ in shown:
        justify = "left" if column.left else "right"
        table.add_column(column.title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for cells in zip(*(cells for _, cells in shown), strict=True):
        table.add_row(*cells)
    return table


def _columns_of(shown: Sequence[tuple[Column[Line], Sequence[Text]]]) -> int:
    """How wide a terminal must be for a table."""
    widths = [
        max(len(column.title), *(cell.cell_len for cell in cells), 0) for column, cells in shown
    ]
    return sum(widths) + _GAP * (len(widths) - 1)


def _text(cell: str | Text) -> Text:
    """A string would be read as rich's markup: "[::1]:7700" is none."""
    return Text(cell) if isinstance(cell, str) else cell


def _arranged(workers: Iterable[WorkerLine], look: Look) -> list[WorkerLine]:
    """The workers that are looked at, in the order asked for; prefill first where it is by name."""
    shown = [worker for worker in workers if look.role in (ROLES[0], worker.role)]
    measures: dict[str, Callable[[WorkerLine], float]] = {
        "queue": lambda w: w.load.queue_tokens,
        "blocks": lambda w: w.load.blocks_held / (w.blocks_total or 1),
        "tokens": lambda w: w.computed_per_s or 0.0,
    }
    if measure := measures.get(look.sort):
        shown.sort(key=measure, reverse=True)
    return shown


def _first(lines: Sequence[Line], most: int) -> Sequence[Line]:
    return lines if len(lines) <= most else lines[: most - 1]  # a line tells of the others


def _next(values: Sequence[str], value: str) -> str:
    return values[(values.index(value) + 1) % len(values)]
