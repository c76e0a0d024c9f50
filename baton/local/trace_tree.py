"""Draws a trace as a tree with times and a waterfall, for a terminal. Pure: spans in, text out.

client  generate                       0.0   412.3 ms |████████████████████|
└─ router  Generate                    0.9   410.8 ms |████████████████████|
   │  tokens_out=64
   └─ prefill  prefill                12.0    80.1 ms | ███                |
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.local.span_store import AttributeValue, Span

_BAR_COLUMNS = 20
_RIGHT_COLUMNS = len("  12345.7  12345.7 ms ||") + _BAR_COLUMNS + 1  # right of the names
_LEAST_WIDTH = 60
_MOST_LINES = 3  # of one span's attributes
_HIDDEN = ("rpc.", "network.", "server.", "client.", "otel.", "thread.", "code.", "net.")
_MISSING_MARK = "? "
_ERROR_MARK = "! "


@dataclass(frozen=True)
class _Line:
    span: Span
    stem: str  # drawn before the span's own name
    below: str  # drawn before what belongs to the span: attributes and children
    mark: str


def render(spans: Sequence[Span], width: int = 100) -> str:
    """The trace as lines of at most `width` columns (60 or more), without a final newline.

    Children are sorted by start. A span whose parent never arrived hangs under the root, marked
    "?"; a failed span is marked "!". Times are milliseconds, counted from the trace's first start.
    """
    if not spans:
        return "(no spans)"
    width = max(width, _LEAST_WIDTH)
    first_ns = min(span.start_ns for span in spans)
    last_ns = max(span.end_ns for span in spans)
    name_columns = width - _RIGHT_COLUMNS
    total_ms = (last_ns - first_ns) / 1e6
    text = [
        f"trace {spans[0].trace_id}: {len(spans)} spans, {total_ms:.1f} ms",
        f"{'service  span':<{name_columns}}  {'start':>8} {'took':>8} ms",
    ]
    lines = list(_walk(spans))
    for line in lines:
        text.append(_span_line(line, name_columns, first_ns, last_ns))
        left = f"{line.below}  "
        attributes = _attribute_text(line.span)
        wrapped = textwrap.wrap(
            attributes, max(width - len(left), 20), max_lines=_MOST_LINES, placeholder=" …"
        )
        text += [_fit(left + part, width) for part in wrapped]
    if any(line.mark for line in lines):
        text.append("? = the parent span did not arrive")
    return "\n".join(text)


def _walk(spans: Sequence[Span]) -> Iterator[_Line]:
    """The spans depth first, with what is drawn to the left of each."""
    ids = {span.span_id for span in spans}
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id)):
        children.setdefault(span.parent_id, []).append(span)
    orphans = [span for span in spans if span.parent_id and span.parent_id not in ids]
    orphans.sort(key=lambda span: (span.start_ns, -span.end_ns, span.span_id))
    tops = children.get("", [])
    if not tops and orphans:  # the caller's own span is kept elsewhere
        tops, orphans = orphans[:1], orphans[1:]
    seen: set[str] = set()
    for number, top in enumerate(tops):
        hangers = orphans if number == 0 else []
        yield from _branch(top, children, hangers, ("", ""), seen)


def _branch(
    span: Span,
    children: dict[str, list[Span]],
    orphans: Sequence[Span],
    stems: tuple[str, str],
    seen: set[str],
    mark: str = "",
) -> Iterator[_Line]:
    """`span` and everything below it; `orphans` hang below it last, marked."""
    if span.span_id in seen:  # malformed: a span below itself
        return
    seen.add(span.span_id)
    stem, below = stems
    under = [(child, "") for child in children.get(span.span_id, [])]
    under += [(orphan, _MISSING_MARK) for orphan in orphans]
    yield _Line(span, stem, below + ("│" if under else " "), mark)
    for number, (child, child_mark) in enumerate(under):
        last = number == len(under) - 1
        stems = (below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))
        yield from _branch(child, children, (), stems, seen, child_mark)


def _span_line(line: _Line, name_columns: int, first_ns: int, last_ns: int) -> str:
    span = line.span
    service = span.service.removeprefix("baton-")
    error = _ERROR_MARK if span.error is not None else ""
    name = _fit(f"{line.stem}{line.mark}{error}{service}  {span.name}", name_columns)
    start_ms, took_ms = (span.start_ns - first_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
    bar = _bar(span, first_ns, last_ns)
    return f"{name:<{name_columns}}  {start_ms:8.1f} {took_ms:8.1f} ms |{bar}|"


def _bar(span: Span, first_ns: int, last_ns: int) -> str:
    """`_BAR_COLUMNS` columns for the whole trace; the span fills its own, at least one."""
    whole = max(last_ns - first_ns, 1)
    begin = min(int((span.start_ns - first_ns) * _BAR_COLUMNS / whole), _BAR_COLUMNS - 1)
    end = min(max(round((span.end_ns - first_ns) * _BAR_COLUMNS / whole), begin + 1), _BAR_COLUMNS)
    return " " * begin + "█" * (end - begin) + " " * (_BAR_COLUMNS - end)


def _attribute_text(span: Span) -> str:
    """The span's attributes but for those that repeat how a call travelled; the error first."""
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
