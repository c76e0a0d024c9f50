"""Summarises traces, and draws one as a tree with a waterfall.

client  generate                       0.0   412.3 ms |████████████████████|
└─ router  Generate                    0.9   410.8 ms |████████████████████|
   │  tokens_out=64
   └─ prefill  prefill                12.0    80.1 ms | ███                |
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.local.span_store import AttributeValue, Span, is_request

# Spans that only measure an interval which other spans make up: the router's waits for workers,
# whose own spans say what they did.
_MEASURES = frozenset({"router.first_token", "router.prefill", "router.stream"})
_HEX = frozenset("0123456789abcdef")

_BAR_COLUMNS = 20
_RIGHT_COLUMNS = len("  12345.7  12345.7 ms ||") + _BAR_COLUMNS + 1  # right of the names
_MIN_WIDTH = 60
_MAX_ATTRIBUTE_LINES = 3  # of one span
_MAX_GAPS = 3
_HIDDEN = ("rpc.", "network.", "server.", "client.", "otel.", "thread.", "code.", "net.")


@dataclass(frozen=True)
class Coverage:
    """The part of a request's time that its spans account for."""

    took_ns: int
    known_ns: int  # during which at least one span without children ran
    gaps: tuple[tuple[int, int], ...]  # without one, the longest first: (start, end), Unix ns

    @property
    def share(self) -> float:
        return self.known_ns / self.took_ns if self.took_ns else 1.0


@dataclass(frozen=True)
class TraceSummary:
    """A request whose trace is kept; `error` is None if it succeeded."""

    trace_id: str
    start_ns: int  # Unix time
    took_ms: float
    spans: int
    error: str | None
    input_tokens: int
    output_tokens: int
    attempts: int


def is_trace_id(text: str) -> bool:
    """Whether it is a valid trace id: 32 hexadecimal digits, lower case, not all 0."""
    return len(text) == 32 and _HEX.issuperset(text) and text.strip("0") != ""


def entry_of(spans: Iterable[Span]) -> Span | None:
    """The router's span of the request; if a router died, there are several, and the last counts.

    None if the trace is not one of a request, or the span has not arrived.
    """
    return max(filter(is_request, spans), key=lambda span: span.end_ns, default=None)


def summarize(spans: Sequence[Span]) -> TraceSummary | None:
    """Summarises a trace; None if it is not one of a request."""
    if (entry := entry_of(spans)) is None:
        return None
    return TraceSummary(
        trace_id=entry.trace_id,
        start_ns=entry.start_ns,
        took_ms=(entry.end_ns - entry.start_ns) / 1e6,
        spans=len(spans),
        error=entry.error,
        input_tokens=int(entry.attributes.get("gen_ai.usage.input_tokens", 0)),
        output_tokens=int(entry.attributes.get("gen_ai.usage.output_tokens", 0)),
        attempts=sum(span.name == "router.attempt" for span in spans),
    )


def summaries(traces: Iterable[Sequence[Span]], slowest: bool, most: int) -> Sequence[TraceSummary]:
    """The `most` requests that took longest or ended last, in that order."""
    found = [summary for spans in traces if (summary := summarize(spans))]
    found.sort(key=lambda one: one.took_ms if slowest else one.start_ns + one.took_ms * 1e6)
    return found[::-1][:most]


def coverage(spans: Sequence[Span]) -> Coverage | None:
    """Computes the coverage of a request's trace; None if it is not one of a request.

    Only spans without children count: a span that contains others does not show what took time.
    """
    if (entry := entry_of(spans)) is None:
        return None
    # Children of a measuring span would not make its parent a leaf.
    parents = {span.parent_id for span in spans if span.name not in _MEASURES}
    leaves = sorted(
        (max(span.start_ns, entry.start_ns), min(span.end_ns, entry.end_ns))
        for span in spans
        if span.span_id not in parents and span.name not in _MEASURES and span is not entry
    )
    known, at, gaps = 0, entry.start_ns, []
    for start, end in [*leaves, (entry.end_ns, entry.end_ns)]:
        if start > at:
            gaps.append((at, start))
        if end > at:
            known += end - max(start, at)
        at = max(at, end)
    gaps.sort(key=lambda gap: gap[0] - gap[1])
    return Coverage(entry.end_ns - entry.start_ns, known, tuple(gaps))


def width() -> int:
    """Number of columns: the terminal's, or 100 for a file."""
    return min(shutil.get_terminal_size().columns, 160) if sys.stdout.isatty() else 100


def render(spans: Sequence[Span], width: int = 100, with_coverage: bool = False) -> str:
    """The trace as lines of at most `width` columns (60 or more), without a final newline.

    Children are sorted by start. A span whose parent did not arrive is drawn under the root, marked
    "?"; a failed span is marked "!". Times are milliseconds since the start of the trace.
    `with_coverage` adds the share of a request's time that is accounted for, and the largest gaps.
    """
    if not spans:
        return "(no spans)"
    width = max(width, _MIN_WIDTH)
    first_ns = min(span.start_ns for span in spans)
    last_ns = max(span.end_ns for span in spans)
    columns = width - _RIGHT_COLUMNS
    total_ms = (last_ns - first_ns) / 1e6
    text = [
        f"trace {spans[0].trace_id}: {len(spans)} spans, {total_ms:.1f} ms",
        f"{'service  span':<{columns}}  {'start':>8} {'took':>8} ms",
    ]
    has_orphans = False
    for span, stem, below, is_orphan in _walk(spans):
        has_orphans |= is_orphan
        marks = ("? " if is_orphan else "") + ("! " if span.error is not None else "")
        service = span.service.removeprefix("baton-")
        name = _fit(f"{stem}{marks}{service}  {span.name}", columns)
        start_ms, took_ms = (span.start_ns - first_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
        bar = _bar(span, first_ns, last_ns)
        text.append(f"{name:<{columns}}  {start_ms:8.1f} {took_ms:8.1f} ms |{bar}|")
        left = f"{below}  "
        wrapped = textwrap.wrap(
            _attributes(span),
            max(width - len(left), 20),
            max_lines=_MAX_ATTRIBUTE_LINES,
            placeholder=" …",
        )
        text += [_fit(left + part, width) for part in wrapped]
    if has_orphans:
        text.append("? = the parent span did not arrive")
    if with_coverage and (known := coverage(spans)):
        gaps = [
            f"{(end - start) / 1e6:.1f} ms at {(start - first_ns) / 1e6:.1f}"
            for start, end in known.gaps[:_MAX_GAPS]
        ]
        said = f"spans account for {known.share:.1%} of the request's {known.took_ns / 1e6:.1f} ms"
        said += f"; longest gaps: {', '.join(gaps)}" if gaps else ""
        text += textwrap.wrap(said, width)
    return "\n".join(text)


def _walk(spans: Sequence[Span]) -> Iterator[tuple[Span, str, str, bool]]:
    """The spans depth first, each with the lines drawn before its name and before its children, and
    whether its parent is missing."""
    ids = {span.span_id for span in spans}
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id)):
        children.setdefault(span.parent_id if span.parent_id in ids else "", []).append(span)
    tops = children.pop("", [])
    # Without a root the first span is drawn as one: the caller's span may be stored elsewhere.
    roots = [span for span in tops if not span.parent_id] or tops[:1]
    orphans = [span for span in tops if span not in roots]

    waiting = [(root, "", "", False) for root in reversed(roots)]
    while waiting:  # a loop, because spans may be nested without limit
        span, stem, below, lost = waiting.pop()
        under = [(child, False) for child in children.pop(span.span_id, [])]
        if span is roots[0]:
            under += [(orphan, True) for orphan in orphans]
        yield span, stem, below + ("│" if under else " "), lost
        first, rest = "└─ ", "   "
        for child, is_lost in reversed(under):
            waiting.append((child, below + first, below + rest, is_lost))
            first, rest = "├─ ", "│  "


def _bar(span: Span, first_ns: int, last_ns: int) -> str:
    """The span's place in the trace as a bar of `_BAR_COLUMNS` columns, at least one filled."""
    whole = max(last_ns - first_ns, 1)
    begin = min(int((span.start_ns - first_ns) * _BAR_COLUMNS / whole), _BAR_COLUMNS - 1)
    end = min(max(round((span.end_ns - first_ns) * _BAR_COLUMNS / whole), begin + 1), _BAR_COLUMNS)
    return " " * begin + "█" * (end - begin) + " " * (_BAR_COLUMNS - end)


def _attributes(span: Span) -> str:
    """The span's attributes, the error first, without those of the RPC system."""
    parts = [] if not span.error else [f"error={span.error}"]
    for key, value in span.attributes.items():
        if not key.startswith(_HIDDEN):
            name = key.removeprefix("baton.").removeprefix("gen_ai.")
            parts.append(f"{name}={_value_text(key, value)}")
    return " ".join(parts)


def _value_text(key: str, value: AttributeValue) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if key.endswith("bytes") and isinstance(value, int):
        return bytes_text(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def bytes_text(count: float) -> str:
    """A number of bytes for people: "512 B", "3.2 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _fit(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 1] + "…"
