"""The columns of `baton top`: what it tells of routers, workers and pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.text import Text

from baton.client.results import transport_name
from baton.local.top.view import PairLine, RouterLine, WorkerLine
from baton.local.trace_tree import bytes_text
from baton.v1 import fleet_pb2

GOOD, BAD, QUIET = "green", "bold red", "dim"
_STATE_STYLES = {
    **dict.fromkeys(("READY", "SERVING", "OPEN"), GOOD),
    **dict.fromkeys(("DRAINING", "STARTING"), "yellow"),
}
# What a block is, how it is drawn, and in which colour; in the bar's order.
_BLOCKS = (("held", "█", "cyan"), ("cached", "▓", "blue"), ("quarantined", "▒", "red"))
_FREE = "░"

Line = TypeVar("Line")


@dataclass(frozen=True)
class Column(Generic[Line]):
    """A column: its title, what it says, and how soon it is left out for want of room."""

    title: str
    cell: Callable[[Line], str | Text]
    rank: int = 0  # the highest goes first; 0 stays
    left: bool = False


def _router_state(line: RouterLine) -> Text:
    if line.failure:
        return Text("NO ANSWER", BAD)
    return _state_text(line.status.state) if line.status else Text("…", QUIET)


def _of_status(read: Callable[[fleet_pb2.RouterStatus], str]) -> Callable[[RouterLine], str]:
    return lambda line: read(line.status) if line.status else "-"


def _times(latency: fleet_pb2.Latency, p50: float, p95: float) -> str:
    return f"{_number(p50)}/{_number(p95)}" if latency.requests else "-"


ROUTER_COLUMNS: Sequence[Column[RouterLine]] = (
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


def worker_columns(width: int) -> Sequence[Column[WorkerLine]]:
    """The workers' columns; the bar is as long as the terminal's width allows."""
    bar = 8 if width < 90 else 16 if width < 140 else 24
    return (
        Column("role", lambda w: w.role, 1, left=True),
        Column("worker", lambda w: w.record.incarnation, left=True),
        Column("state", lambda w: _state_text(w.state), left=True),
        Column("batch", lambda w: f"{w.load.running}/{w.record.max_batch}"),
        Column("wait", lambda w: str(w.load.waiting), 5),
        Column("queue tok", lambda w: str(w.load.queue_tokens), 3),
        Column("KV blocks", lambda w: blocks_bar(w, bar), left=True),
        Column("used", _used, 4),
        Column("tok/s", lambda w: _rate(w.computed_per_s), 2),
        Column("drawn/s", lambda w: _rate(w.generated_per_s), 8),
        Column("prefill cap.", lambda w: _measured(w.load.prefill_tokens_per_s), 9),
        Column("step ms", lambda w: _measured(w.load.step_ms), 6),
        Column("preempt", lambda w: str(w.load.preemptions), 7),
    )


def legend() -> Text:
    """What the parts of a bar mean."""
    text = Text("KV blocks:", QUIET)
    for name, sign, style in _BLOCKS:
        text.append(f" {sign}", style).append(f" {name}", QUIET)
    return text.append(f" {_FREE} free", QUIET)


def blocks_bar(worker: WorkerLine, columns: int) -> Text:
    """The pool as a bar: what is held, cached, quarantined, and the rest free.

    What there is of a kind, however little, is seen: it gets a column.
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
    return bar.append(_FREE * (columns - sum(parts)), QUIET)


PAIR_COLUMNS: Sequence[Column[PairLine]] = (
    Column("prefill", lambda p: p.status.prefill, left=True),
    Column("decode", lambda p: p.status.decode, left=True),
    Column("over", lambda p: transport_name(p.status.transport) or "-", left=True),
    Column("link", lambda p: _state_text(p.status.state), left=True),
    Column("KV/s", lambda p: "-" if p.bytes_per_s is None else bytes_text(p.bytes_per_s), 1),
    Column("wire GB/s", lambda p: _wire(p.wire_bytes_per_s), 3),
    Column("sent", lambda p: bytes_text(p.status.sent_bytes), 2),
)


def _state_text(state: str) -> Text:
    return Text(state, _STATE_STYLES.get(state, BAD))


def _used(worker: WorkerLine) -> str:
    """Share of the blocks that nobody else can have now."""
    if not (total := worker.blocks_total):
        return "-"
    return f"{(worker.load.blocks_held + worker.load.blocks_quarantined) / total:.0%}"


def _wire(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else _number(value)


def _measured(value: float) -> str:
    """0 stands for "not measured yet"."""
    return _number(value) if value else "-"


def _number(value: float) -> str:
    """Three digits are enough to follow: 0.25, 12.3, 1,234."""
    if value == 0:
        return "0"
    digits = 2 if value < 1 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"
