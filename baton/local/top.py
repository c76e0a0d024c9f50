"""`baton top`: draws the cluster's state with rich, anew at each answer and each key.

A narrow terminal shows fewer columns, a low one fewer lines. The terminal's state is restored
however the program ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from baton import tables
from baton.client.results import route_of, transport_name
from baton.config import shares_text, shown_name
from baton.errors import ConfigError, Unavailable
from baton.local import top_view
from baton.local.top_view import PolledRouter, Status, WorkerLine, polling
from baton.local.trace_tree import bytes_text
from baton.net.tasks import wait_at_most
from baton.v1 import fleet_pb2

_PLAIN_WIDTH = 160  # without a terminal
_SEQUENCE = re.compile(rb"\x1b(\[[0-9;]*[A-Za-z~]|O.)?")  # arrow and function keys
_DRAW_S = 0.05  # shortest time between two frames: routers answer at about the same time

ROLES = ("all", "prefill", "decode", "mixed")
SORTS: dict[str, Callable[[WorkerLine], float] | None] = {
    "name": None,
    "queue": lambda w: w.load.queue_tokens,
    "blocks": lambda w: w.load.blocks_held / (w.blocks_total or 1),
    "tokens": lambda w: w.rate("tokens_computed") or 0.0,
}
_GOOD, _BAD, _QUIET = "green", "bold red", "dim"
_EVENT_NAMES = {
    fleet_pb2.EVENT_KIND_FAILOVER: ("failover", "yellow"),
    fleet_pb2.EVENT_KIND_REFUSAL: ("refused", "magenta"),
    fleet_pb2.EVENT_KIND_FAILURE: ("failed", _BAD),
    fleet_pb2.EVENT_KIND_CANARY: ("canary", "cyan"),
}
# State of a block, its sign and colour, in the bar's order.
_BLOCKS = (("held", "█", "cyan"), ("cached", "▓", "blue"), ("quarantined", "▒", "red"))
_FREE = "░"
_STYLES = {  # of words and signs in tables
    r"\b(READY|SERVING|OPEN)\b": _GOOD,
    r"\b(DRAINING|STARTING)\b|\S+ \([\w-]+\)$": "yellow",
    r"\b(NO ANSWER|MISMATCH|UNREACHABLE|SILENT|STALLED|EJECTED|QUARANTINED|NOT_SERVING)\b": _BAD,
    **{f"{sign}+": style for _, sign, style in _BLOCKS},
    f"{_FREE}+": _QUIET,
}
_MAX_LINES = 6  # of each kind of problem
_MIN_TRACE_WIDTH = 100  # columns from which trace ids are shown


@dataclass
class View:
    """Display settings, which keys change."""

    role: str = ROLES[0]
    sort: str = "name"
    keys: bool = True  # whether the keys are listed
    left: bool = False

    def press(self, key: str) -> None:
        if key in ("q", "Q", "\x04"):
            self.left = True
        elif key == "r":
            self.role = ROLES[(ROLES.index(self.role) + 1) % len(ROLES)]
        elif key == "s":
            names = list(SORTS)
            self.sort = names[(names.index(self.sort) + 1) % len(names)]


class Moment(NamedTuple):
    """The routers' state at a time."""

    routers: Sequence[PolledRouter]
    at: float  # time.monotonic()
    unix_s: float


async def once(
    addresses: Sequence[str], interval_s: float, api_key: str | None, width: int | None
) -> str:
    """One frame as text, with rates over one interval. Raises Unavailable if no router answers."""
    answered = asyncio.Event()
    async with polling(addresses, interval_s, api_key, answered.set) as routers:
        while any(router.polls < 2 for router in routers):
            answered.clear()
            await answered.wait()
    if not any(router.last for router in routers):
        why = "; ".join(f"{router.address}: {router.failure}" for router in routers)
        raise Unavailable(f"no router answers: {why}")
    console = Console(width=width or _PLAIN_WIDTH, color_system=None)
    moment = Moment(tuple(top_view.processes(routers)), time.monotonic(), time.time())
    with console.capture() as captured:
        console.print(frame(moment, View(keys=False), console.width))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


async def watch(addresses: Sequence[str], interval_s: float, api_key: str | None) -> int:
    """Shows the live screen until q; returns 0. Raises ConfigError without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("`baton top` draws on a terminal: --once prints one frame anywhere")
    view, changed, console = View(), asyncio.Event(), Console()
    async with polling(addresses, interval_s, api_key, changed.set) as routers:
        with _keys(view, changed), Live(console=console, screen=True, auto_refresh=False) as live:
            while not view.left:
                changed.clear()
                moment = Moment(tuple(top_view.processes(routers)), time.monotonic(), time.time())
                live.update(frame(moment, view, console.width), refresh=True)
                # Redrawn without an answer, too: clock and time since the last answer go on.
                await wait_at_most(interval_s, changed.wait())
                await asyncio.sleep(_DRAW_S)
    return 0


@contextlib.contextmanager
def _keys(view: View, changed: asyncio.Event) -> Iterator[None]:
    """Passes keys, without Enter, and terminating signals to the view while the block runs."""
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

    def press(keys: str) -> None:
        for key in keys:
            view.press(key)
        changed.set()

    def read() -> None:
        try:
            pressed = os.read(stdin, 64)
        except OSError:
            pressed = b""
        # Nothing to read: the terminal is gone.
        press(_SEQUENCE.sub(b"", pressed).decode(errors="replace") if pressed else "q")

    handlers = {
        **dict.fromkeys((signal.SIGTERM, signal.SIGHUP), "q"),
        signal.SIGWINCH: "",
        signal.SIGTSTP: "",  # ignored: ctrl-Z would leave the terminal in raw mode
    }
    before = termios.tcgetattr(stdin)
    try:
        tty.setcbreak(stdin)  # keys arrive at once and without echo; ctrl-C still interrupts
        loop.add_reader(stdin, read)
        for number, keys in handlers.items():
            loop.add_signal_handler(number, press, keys)
        yield
    finally:
        loop.remove_reader(stdin)
        for number in handlers:
            loop.remove_signal_handler(number)
        with contextlib.suppress(termios.error, OSError):  # the terminal is gone
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def frame(moment: Moment, view: View, width: int) -> Group:
    """A frame of at most `width` columns; problems come before long tables."""
    routers = moment.routers
    pairs, events = top_view.pairs(routers), top_view.events(routers)[:_MAX_LINES]
    workers = [w for w in top_view.workers(routers) if view.role in (ROLES[0], w.role)]
    if measure := SORTS[view.sort]:
        workers.sort(key=measure, reverse=True)
    several, failing = len(routers) > 1, [worker for worker in workers if worker.reason]
    signs = [part for name, sign, style in _BLOCKS for part in ((sign, style), f" {name} ")]
    parts: list[Text] = [
        _title(moment, view),
        *_table(_ROUTER_COLUMNS, [router for router in routers if router.last], width),
        *_problems(moment),
        *(Text(f"  {w.name}: {w.reason}", "red") for w in failing[:_MAX_LINES]),
        *(_event(at if several else "", one, width) for at, one in events),
        Text(),
        *_table(_worker_columns(width, workers), workers, width),
        *([] if workers else [Text("no workers", "yellow")]),
        Text.assemble("KV blocks: ", *signs, f"{_FREE} free", style=_QUIET),
    ]
    parts += _decisions(moment)
    if pairs:
        parts += [Text(), *_table(_PAIR_COLUMNS, pairs, width)]
    for part in parts:
        part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


def _title(moment: Moment, view: View) -> Text:
    last = next((router.last for router in moment.routers if router.last), None)
    return Text.assemble(
        ("baton top", "bold"),
        f"  cluster {last.router.cluster}, model {', '.join(last.router.models)}" if last else "",
        (f"  {_clock(moment.unix_s)}", _QUIET),
        (f"  q quit  r role: {view.role}  s sort: {view.sort}" if view.keys else "", _QUIET),
    )


def _decisions(moment: Moment) -> Iterator[Text]:
    """Routes with their canaries, and the planner's plan: a line for each name and version."""
    status = next((status for _, status in top_view.answers(moment.routers)), None)
    if status is None or not (status.router.routes or status.router.plan.roles):
        return
    yield Text()
    for route in map(route_of, status.router.routes):
        canary = route["canary"] or {}
        state = canary.get("state", "")
        why = f"  canary {state.replace('_', ' ')}: {canary['reason']}" if state else ""
        style = _BAD if state == "rolled_back" else "cyan" if state == "running" else _QUIET
        yield Text.assemble(f"route {route['name']}: {shares_text(route['targets'])}", (why, style))
    for version, roles in itertools.groupby(
        status.router.plan.roles, lambda one: shown_name(one.model, one.version)
    ):
        text = Text(f"plan for {version}:")
        for one in roles:
            short = one.wanted != one.ready
            of = f" {one.role} {one.ready}, wanted {one.wanted}, needed {one.need:.2f};"
            text.append(of, "yellow" if short else "")
        text.rstrip()
        text.right_crop(1)
        yield text


def _problems(moment: Moment) -> Iterator[Text]:
    for router in moment.routers:
        if router.failure:
            since = f" for {moment.at - router.samples[-1][0]:.0f} s" if router.last else ""
            text = f"router {router.address} does not answer{since}: {router.failure}"
            yield Text(" ".join(text.split()), _BAD)
        elif not router.last:
            yield Text(f"router {router.address}: no answer yet", _QUIET)
        elif not router.last.router.registry_connected:
            yield Text(f"router {router.address} does not reach the registry", _BAD)
    if all(router.failure for router in moment.routers) and top_view.answers(moment.routers):
        yield Text("no router answers: the tables below are old", _BAD)


def _event(address: str, event: fleet_pb2.RouterEvent, width: int) -> Text:
    """An event in one line; the trace id is complete or omitted, to be used with `baton trace`."""
    text = Text.assemble(
        f"{_clock(event.time_ms / 1e3)} ",
        _EVENT_NAMES.get(event.kind, "event"),
        f" x{event.times}" if event.times > 1 else "",
        (f" at {address}" if address else "", _QUIET),
        f" {' '.join(event.text.split())}",
    )
    if event.trace_id and width >= _MIN_TRACE_WIDTH:
        trace = f"  trace {event.trace_id}"
        text.truncate(width - len(trace), overflow="ellipsis")
        text.append(trace, _QUIET)
    return text


class Column(NamedTuple):
    """A table column: title, cells, and the order in which it is omitted on narrow terminals.

    A cell is a text, a count, a rate (a float), or None if unknown.
    """

    title: str
    cell: Callable[[Any], str | float | None]
    rank: int = 0  # the highest is omitted first; 0 never
    left: bool = False


def _table(columns: Sequence[Column], lines: Sequence[Any], width: int) -> list[Text]:
    """The columns that fit into `width`; those of the highest rank are left out first."""
    shown = {
        column: [column.title, *(_text(column.cell(line)) for line in lines)] for column in columns
    }
    widths = {column: max(map(len, texts)) + tables.GAP for column, texts in shown.items()}
    while sum(widths[c] for c in shown) - tables.GAP > width and any(c.rank for c in shown):
        del shown[max(shown, key=lambda column: column.rank)]
    left = {number for number, column in enumerate(shown) if column.left}
    header, *rows = tables.align([*zip(*shown.values(), strict=True)], left)
    return [Text(header, _QUIET), *map(_coloured, rows)]


def _text(cell: str | float | None) -> str:
    return _rate(cell) if isinstance(cell, float) else "-" if cell is None else str(cell)


def _coloured(row: str) -> Text:
    text = Text(row)
    for pattern, style in _STYLES.items():
        text.highlight_regex(pattern, style)
    return text


def _rate(value: float) -> str:
    digits = 0 if value == 0 else 2 if value < 1 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def blocks_bar(worker: WorkerLine, columns: int) -> str | None:
    """The KV pool as a bar of held, cached, quarantined and free blocks.

    Each state that any block has gets at least one column.
    """
    if not (total := worker.blocks_total):
        return None
    counts = [getattr(worker.load, f"blocks_{name}") for name, _, _ in _BLOCKS]
    parts = [max(1, round(count * columns / total)) if count else 0 for count in counts]
    while sum(parts) > columns:  # rounded up
        parts[parts.index(max(parts))] -= 1
    bar = "".join(sign * part for (_, sign, _), part in zip(_BLOCKS, parts, strict=True))
    return bar.ljust(columns, _FREE)


def _used(worker: WorkerLine) -> str | None:
    """Share of the blocks that are held or quarantined."""
    if not (total := worker.blocks_total):
        return None
    return f"{(worker.load.blocks_held + worker.load.blocks_quarantined) / total:.0%}"


def _worker_columns(width: int, workers: Sequence[WorkerLine]) -> Sequence[Column]:
    """The workers' columns; the length of the bar depends on the terminal's width."""
    several = len({worker.model for worker in workers}) > 1
    bar = 8 if width < 90 else 16 if width < 140 else 24
    return (
        Column("role", lambda w: w.role, 6, left=True),
        Column("worker", lambda w: w.name, left=True),
        *([Column("model", lambda w: w.model, 1, left=True)] if several else ()),
        Column("state", lambda w: w.state, left=True),
        Column("batch", lambda w: f"{w.load.running}/{w.status.record.max_batch}"),
        Column("wait", lambda w: w.load.waiting, 5),
        Column("queue tok", lambda w: w.load.queue_tokens, 3),
        Column("KV blocks", lambda w: blocks_bar(w, bar), left=True),
        Column("used", _used, 4),
        Column("tok/s", lambda w: w.rate("tokens_computed"), 2),
        Column("sampled/s", lambda w: w.rate("tokens_generated"), 8),
        # 0 stands for "not measured yet".
        Column("prefill cap.", lambda w: w.load.prefill_tokens_per_s or None, 9),
        Column("step ms", lambda w: w.load.step_ms or None, 6),
        Column("preempt", lambda w: w.load.preemptions, 7),
    )


def _latency(status: Status, what: str) -> str | None:
    latency = status.router.latency
    p50, p95 = (getattr(latency, f"{what}_p{share}_ms") for share in (50, 95))
    return f"{_rate(p50)}/{_rate(p95)}" if latency.requests else None


def _good_share(status: Status) -> str | None:
    """Share of goodput in all requests since the router's start; None without targets."""
    total = top_view.ended(status) if status.router.counts.with_target else 0
    return f"{top_view.good(status) / total:.1%}" if total else None


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


_ROUTER_COLUMNS = (
    Column("router", lambda r: r.name, left=True),
    Column("state", lambda r: "NO ANSWER" if r.failure else r.last.router.state,
           left=True),
    Column("running", lambda r: r.last.router.running),
    Column("queued", lambda r: r.last.router.queued),
    Column("req/s", lambda r: r.rate(top_view.ended)),
    Column("good/s", lambda r: r.rate(top_view.good) if _good_share(r.last) else None, 3),
    Column("good", lambda r: _good_share(r.last), 2),
    Column("tok/s in", lambda r: r.rate(lambda s: s.router.counts.prompt_tokens), 8),
    Column("out", lambda r: r.rate(lambda s: s.router.counts.output_tokens), 1),
    Column("TTFT p50/95 ms", lambda r: _latency(r.last, "ttft"), 4),
    Column("TPOT p50/95 ms", lambda r: _latency(r.last, "tpot"), 7),
    Column("refused", lambda r: r.last.router.counts.refused, 5),
    Column("failovers", lambda r: r.last.router.counts.failovers, 6),
)  # fmt: skip


def _shown(value: float | None, text: Callable[[float], str]) -> str | None:
    return None if value is None else text(value)


def _transport(pair: top_view.PairLine) -> str | None:
    """The link's transport; a fallback with the transport that was expected."""
    name, fallback = transport_name(pair.status.transport), pair.status.fallback
    return f"{name} ({fallback.partition(':')[0]})" if fallback else name


_PAIR_COLUMNS = (
    Column("prefill", lambda p: p.status.prefill, left=True),
    Column("decode", lambda p: p.status.decode, left=True),
    Column("over", _transport, left=True),
    Column("link", lambda p: p.status.state, left=True),
    Column("KV/s", lambda p: _shown(p.rate("sent_bytes"), bytes_text), 1),
    Column("wire GB/s", lambda p: _shown(p.wire_gb_per_s, "{:.2f}".format), 3),
    Column("sent", lambda p: bytes_text(p.status.sent_bytes), 2),
)
