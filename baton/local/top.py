"""`baton top` on a terminal: a `View` drawn with rich, again at each answer and each key.

On a narrow terminal the columns that matter least are left out, on a low one rows are. Whatever
ends it, the terminal is restored as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.client.results import transport_name
from baton.errors import ConfigError, Unavailable
from baton.local.top_view import (
    EventLine,
    PairLine,
    PolledRouter,
    RouterLine,
    View,
    WorkerLine,
    polling,
    view_of,
)
from baton.local.trace_tree import bytes_text
from baton.v1 import fleet_pb2

_PLAIN_WIDTH = 160  # where there is no terminal; nothing is left out for want of height
_PLAIN_HEIGHT = 10_000
_SEQUENCE = re.compile(rb"\x1b(\[[0-9;]*[A-Za-z~]|O.)?")  # of arrows and their like
_DRAW_S = 0.05  # at least between two frames: routers answer at about the same time

ROLES = ("all", "prefill", "decode")
SORTS: dict[str, Callable[[WorkerLine], float] | None] = {
    "name": None,
    "queue": lambda w: w.load.queue_tokens,
    "blocks": lambda w: w.load.blocks_held / (w.blocks_total or 1),
    "tokens": lambda w: w.computed_per_s or 0.0,
}
_GOOD, _BAD, _QUIET = "green", "bold red", "dim"
_STATE_STYLES = {
    **dict.fromkeys(("READY", "SERVING", "OPEN"), _GOOD),
    **dict.fromkeys(("DRAINING", "STARTING"), "yellow"),
}
_EVENT_NAMES = {
    fleet_pb2.EVENT_KIND_FAILOVER: ("failover", "yellow"),
    fleet_pb2.EVENT_KIND_REFUSAL: ("refused", "magenta"),
    fleet_pb2.EVENT_KIND_FAILURE: ("failed", _BAD),
}
# What a block is, how it is drawn, and in which colour; in the bar's order.
_BLOCKS = (("held", "█", "cyan"), ("cached", "▓", "blue"), ("quarantined", "▒", "red"))
_FREE = "░"
_MAX_EVENTS = 6
_MIN_TRACE_WIDTH = 100  # columns: on less the text needs them all
_OTHER_LINES = 9  # the title, three heads of tables, what blocks mean, lines between
_GAP = 2  # between columns
_MIN_ROWS = 3  # of a table that is cut

Line = TypeVar("Line")


async def watch(addresses: Sequence[str], interval_s: float) -> int:
    """The live screen until q; the exit status. Raises ConfigError without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("`baton top` draws on a terminal: --once prints one frame anywhere")
    screen = Screen(Options(interval_s))
    async with polling(addresses, interval_s, screen.changed.set) as routers:
        with screen.open():
            await screen.run(routers)
    return 0


async def once(addresses: Sequence[str], interval_s: float, width: int | None) -> str:
    """One frame as text, with rates over one interval. Raises Unavailable when none answers."""
    answered = asyncio.Event()
    async with polling(addresses, interval_s, answered.set) as routers:
        while any(router.polls < 2 for router in routers):
            answered.clear()
            await answered.wait()
        view = view_of(routers, time.monotonic(), time.time())
    if not view.answered:
        why = "; ".join(f"{router.address}: {router.failure}" for router in view.routers)
        raise Unavailable(f"no router answers: {why}")
    console = Console(width=width or _PLAIN_WIDTH, height=_PLAIN_HEIGHT, color_system=None)
    with console.capture() as captured:
        console.print(frame(view, Options(interval_s, keys=False), console.width, _PLAIN_HEIGHT))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


@dataclass(frozen=True)
class Options:
    """How the view is shown; keys change it."""

    interval_s: float
    role: str = ROLES[0]
    sort: str = "name"
    paused: bool = False
    keys: bool = True  # whether to list them

    def next_role(self) -> Options:
        """Workers of the next role alone."""
        return replace(self, role=ROLES[(ROLES.index(self.role) + 1) % len(ROLES)])

    def next_sort(self) -> Options:
        """Workers in the next order."""
        sorts = list(SORTS)
        return replace(self, sort=sorts[(sorts.index(self.sort) + 1) % len(sorts)])


class Screen:
    """The live screen: draws frames and reads keys."""

    def __init__(self, options: Options) -> None:
        self.changed = asyncio.Event()
        self._options = options
        self._frozen: View | None = None
        self._left = False
        self._console = Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """The alternate screen and keys without Enter, while the block runs."""
        loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
        before = termios.tcgetattr(stdin)
        try:
            tty.setcbreak(stdin)  # keys at once and unseen; ctrl-C still interrupts
            mode = termios.tcgetattr(stdin)
            mode[6][termios.VSUSP] = b"\x00"  # ctrl-Z would leave the screen half-way
            termios.tcsetattr(stdin, termios.TCSADRAIN, mode)
            loop.add_reader(stdin, self._read, stdin)
            loop.add_signal_handler(signal.SIGWINCH, self.changed.set)
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self.press, "q")
            with self._live:
                yield
        finally:
            loop.remove_reader(stdin)
            for number in (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
            with contextlib.suppress(termios.error, OSError):  # the terminal is gone
                termios.tcsetattr(stdin, termios.TCSADRAIN, before)

    async def run(self, routers: Sequence[PolledRouter]) -> None:
        """Draws whenever there is something new, until a key ends it."""
        while not self._left:
            self.changed.clear()
            view = self._frozen or view_of(routers, time.monotonic(), time.time())
            self._frozen = view if self._options.paused else None
            width, height = self._console.size
            self._live.update(frame(view, self._options, width, height), refresh=True)
            with contextlib.suppress(TimeoutError):  # the clock goes on, and so does a silence
                async with asyncio.timeout(self._options.interval_s):
                    await self.changed.wait()
            await asyncio.sleep(_DRAW_S)

    def press(self, key: str) -> None:
        """What a key does; others do nothing."""
        if key in ("q", "Q", "\x04"):
            self._left = True
        elif key in ("p", " "):
            self._options = replace(self._options, paused=not self._options.paused)
            self._frozen = None
        elif key == "r":
            self._options = self._options.next_role()
        elif key == "s":
            self._options = self._options.next_sort()
        self.changed.set()

    def _read(self, stdin: int) -> None:
        try:
            pressed = os.read(stdin, 64)
        except OSError:
            pressed = b""
        # Nothing to read: the terminal is gone.
        for key in _SEQUENCE.sub(b"", pressed).decode(errors="replace") if pressed else "q":
            self.press(key)


def frame(view: View, options: Options, width: int, height: int) -> Group:
    """One picture of at most `width` columns and, if it can be, `height` lines."""
    workers = [w for w in view.workers if options.role in (ROLES[0], w.role)]
    if measure := SORTS[options.sort]:
        workers.sort(key=measure, reverse=True)
    problems, events = list(_problems(view)), view.events[:_MAX_EVENTS]
    fixed = len(view.routers) + len(problems) + len(events) + sum(bool(w.reason) for w in workers)
    room = max(height - fixed - _OTHER_LINES, 2 * _MIN_ROWS)
    pairs = _first(view.pairs, max(_MIN_ROWS, room - len(workers)))
    shown = _first(workers, max(_MIN_ROWS, room - len(pairs)))
    legend = Text("KV blocks:", _QUIET)
    for name, sign, style in _BLOCKS:
        legend.append(f" {sign}", style).append(f" {name}", _QUIET)
    parts: list[RenderableType] = [
        _title(view, options),
        _table(_ROUTER_COLUMNS, view.routers, width),
        *problems,
        Text(),
        *_section(_worker_columns(width), shown, width, len(workers), "workers"),
        legend.append(f" {_FREE} free", _QUIET),
        *(Text(f"  {w.record.incarnation}: {w.reason}", "red") for w in shown if w.reason),
    ]
    if pairs:
        parts += [Text(), *_section(_PAIR_COLUMNS, pairs, width, len(view.pairs), "pairs")]
    if events:
        parts += [Text(), *(_event(line, len(view.routers) > 1, width) for line in events)]
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


def _title(view: View, options: Options) -> Text:
    status = next((router.status for router in view.routers if router.status), None)
    title = Text().append("baton top", "bold")
    if status is not None:
        title.append(f"  cluster {status.cluster}, model {status.model}")
    title.append(f"  {_clock(view.unix_s)}", _QUIET)
    if options.paused:
        title.append("  PAUSED", "reverse")
    if options.keys:
        keys = f"  q quit  p pause  r role: {options.role}  s sort: {options.sort}"
        title.append(keys, _QUIET)
    return title


def _problems(view: View) -> Iterator[Text]:
    """What makes the rest less reliable."""
    for router in view.routers:
        if router.failure:
            since = f" for {router.silent_s:.0f} s" if router.status else ""
            text = f"router {router.address} does not answer{since}: {router.failure}"
            yield Text(" ".join(text.split()), _BAD)
        elif router.status and not router.status.registry_connected:
            yield Text(f"router {router.address} does not reach the registry", _BAD)
    if view.is_old and view.answered:
        yield Text("no router answers: what follows is old", _BAD)


def _event(line: EventLine, several: bool, width: int) -> Text:
    """In one line; the trace's id is whole or left out, so that `baton trace` can take it."""
    event = line.event
    name, style = _EVENT_NAMES.get(event.kind, ("event", ""))
    text = Text(f"{_clock(event.time_ms / 1e3)} ").append(name, style)
    text.append(f" x{event.times}" if event.times > 1 else "")
    text.append(f" at {line.address}" if several else "", _QUIET)
    text.append(f" {' '.join(event.text.split())}")
    if event.trace_id and width >= _MIN_TRACE_WIDTH:
        trace = f"  trace {event.trace_id}"
        text.truncate(width - len(trace), overflow="ellipsis")
        text.append(trace, _QUIET)
    return text


@dataclass(frozen=True)
class Column(Generic[Line]):
    """A column: its title, its cells, and how soon it is left out for want of room."""

    title: str
    cell: Callable[[Line], str | Text]
    rank: int = 0  # the highest goes first; 0 stays
    left: bool = False


def _section(
    columns: Sequence[Column[Line]], lines: Sequence[Line], width: int, count: int, what: str
) -> Iterator[RenderableType]:
    """A table, and how many rows did not find room."""
    if not count:
        yield Text(f"no {what}", "yellow")
        return
    yield _table(columns, lines, width)
    if len(lines) < count:
        yield Text(f"… and {count - len(lines)} more {what}", _QUIET)


def _table(columns: Sequence[Column[Line]], lines: Sequence[Line], width: int) -> Table:
    """The columns that fit, all of which are as wide as their cells."""
    shown = []
    for column in columns:
        cells = [column.cell(line) for line in lines]
        # A string would be read as rich's markup: "[::1]:7700" is none.
        texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        widest = max(len(column.title), *(text.cell_len for text in texts), 0)
        shown.append((column, texts, widest + _GAP))
    while sum(widest for *_, widest in shown) - _GAP > width and any(c.rank for c, *_ in shown):
        shown.remove(max(shown, key=lambda entry: entry[0].rank))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style=_QUIET)
    for column, *_ in shown:
        justify = "left" if column.left else "right"
        table.add_column(column.title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in zip(*(texts for _, texts, _ in shown), strict=True):
        table.add_row(*row)
    return table


def _first(lines: Sequence[Line], most: int) -> Sequence[Line]:
    return lines if len(lines) <= most else lines[: most - 1]  # a line counts the others


def blocks_bar(worker: WorkerLine, columns: int) -> Text:
    """The pool as a bar: blocks held, cached, quarantined, and the rest free.

    A kind with any blocks at all gets at least one column.
    """
    if not (total := worker.blocks_total):
        return Text("-")
    counts = [getattr(worker.load, f"blocks_{name}") for name, _, _ in _BLOCKS]
    parts = [max(1, round(count * columns / total)) if count else 0 for count in counts]
    while sum(parts) > columns:  # rounded up
        parts[parts.index(max(parts))] -= 1
    bar = Text()
    for (_, sign, style), part in zip(_BLOCKS, parts, strict=True):
        bar.append(sign * part, style)
    return bar.append(_FREE * (columns - sum(parts)), _QUIET)


def _worker_columns(width: int) -> Sequence[Column[WorkerLine]]:
    """The workers' columns; the bar is as long as the terminal's width allows."""
    bar = 8 if width < 90 else 16 if width < 140 else 24
    return (
        Column("role", lambda w: w.role, 6, left=True),
        Column("worker", lambda w: w.record.incarnation, left=True),
        Column("state", lambda w: _state_text(w.state), left=True),
        Column("batch", lambda w: f"{w.load.running}/{w.record.max_batch}"),
        Column("wait", lambda w: str(w.load.waiting), 5),
        Column("queue tok", lambda w: str(w.load.queue_tokens), 3),
        Column("KV blocks", lambda w: blocks_bar(w, bar), left=True),
        Column("used", _used, 4),
        Column("tok/s", lambda w: _rate(w.computed_per_s), 2),
        Column("sampled/s", lambda w: _rate(w.sampled_per_s), 8),
        # 0 stands for "not measured yet".
        Column("prefill cap.", lambda w: _rate(w.load.prefill_tokens_per_s or None), 9),
        Column("step ms", lambda w: _rate(w.load.step_ms or None), 6),
        Column("preempt", lambda w: str(w.load.preemptions), 7),
    )


def _of_status(read: Callable[[fleet_pb2.RouterStatus], str]) -> Callable[[RouterLine], str]:
    return lambda line: read(line.status) if line.status else "-"


def _times(latency: fleet_pb2.Latency, p50: float, p95: float) -> str:
    return f"{_rate(p50)}/{_rate(p95)}" if latency.requests else "-"


def _router_state(line: RouterLine) -> Text:
    if line.failure:
        return Text("NO ANSWER", _BAD)
    return _state_text(line.status.state) if line.status else Text("…", _QUIET)


def _state_text(state: str) -> Text:
    return Text(state, _STATE_STYLES.get(state, _BAD))


def _used(worker: WorkerLine) -> str:
    """Share of the blocks that are not available to others now."""
    if not (total := worker.blocks_total):
        return "-"
    return f"{(worker.load.blocks_held + worker.load.blocks_quarantined) / total:.0%}"


def _rate(value: float | None) -> str:
    """Three digits are enough to follow: 0.25, 12.3, 1,234; "-" for None."""
    if value is None:
        return "-"
    digits = 0 if value == 0 else 2 if value < 1 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


_ROUTER_COLUMNS: Sequence[Column[RouterLine]] = (
    Column("router", lambda r: r.address, left=True),
    Column("state", _router_state, left=True),
    Column("running", _of_status(lambda s: str(s.running))),
    Column("queued", _of_status(lambda s: str(s.queued))),
    Column("req/s", lambda r: _rate(r.requests_per_s)),
    Column("good/s", lambda r: _rate(r.good_per_s), 3),
    Column("good", lambda r: "-" if r.good_share is None else f"{r.good_share:.1%}", 2),
    Column("tok/s in", lambda r: _rate(r.prompt_tokens_per_s), 8),
    Column("out", lambda r: _rate(r.output_tokens_per_s), 1),
    Column(
        "TTFT p50/95 ms",
        _of_status(lambda s: _times(s.latency, s.latency.ttft_p50_ms, s.latency.ttft_p95_ms)),
        4,
    ),
    Column(
        "TPOT p50/95 ms",
        _of_status(lambda s: _times(s.latency, s.latency.tpot_p50_ms, s.latency.tpot_p95_ms)),
        7,
    ),
    Column("refused", _of_status(lambda s: str(s.counts.refused)), 5),
    Column("failovers", _of_status(lambda s: str(s.counts.failovers)), 6),
)

_PAIR_COLUMNS: Sequence[Column[PairLine]] = (
    Column("prefill", lambda p: p.status.prefill, left=True),
    Column("decode", lambda p: p.status.decode, left=True),
    Column("over", lambda p: transport_name(p.status.transport) or "-", left=True),
    Column("link", lambda p: _state_text(p.status.state), left=True),
    Column("KV/s", lambda p: "-" if p.bytes_per_s is None else bytes_text(p.bytes_per_s), 1),
    Column(
        "wire GB/s",
        lambda p: "-" if p.wire_bytes_per_s is None else f"{p.wire_bytes_per_s / 1e9:.2f}",
        3,
    ),
    Column("sent", lambda p: bytes_text(p.status.sent_bytes), 2),
)
