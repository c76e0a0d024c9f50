"""A request's trace in one line, and how much of the request its spans account for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.local.span_store import AttributeValue, Span

ROUTER = "baton-router"
_ATTEMPT = "router.attempt"
# Spans that measure what others are made of; they are no work of their own.
_MEASURES = frozenset({"router.first_token"})
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class Summary:
    """One request whose trace is kept."""

    trace_id: str
    start_ns: int  # Unix
    took_ms: float
    spans: int
    error: str | None  # why the request failed, possibly empty; None when it did not
    input_tokens: int
    output_tokens: int
    attempts: int


@dataclass(frozen=True)
class Account:
    """How a request's time is accounted for by the spans below it."""

    took_ns: int
    known_ns: int  # while at least one span without children ran
    gaps: tuple[tuple[int, int], ...]  # when none did, the longest first: (start, end), Unix ns

    @property
    def share(self) -> float:
        """Of the request's time, between 0 and 1."""
        return self.known_ns / self.took_ns if self.took_ns else 1.0


def is_trace_id(text: str) -> bool:
    """Whether it could name a trace: 32 hexadecimal digits, lower case, not all of them 0."""
    return len(text) == 32 and _HEX.issuperset(text) and text.strip("0") != ""


def entry_of(spans: Iterable[Span]) -> Span | None:
    """The router's span of the whole request: of several (a router died), the one that ended last.

    None when the trace is not one of a request, or that span has not arrived.
    """
    entries = [span for span in spans if span.is_entry and span.service == ROUTER]
    return max(entries, key=lambda span: span.end_ns, default=None)


def is_whole(spans: Sequence[Span]) -> bool:
    """Whether the request's own span and every parent that others name have arrived.

    The parents of entries may be kept elsewhere: they are the callers'.
    """
    ids = {span.span_id for span in spans}
    entry = entry_of(spans)
    return entry is not None and all(
        span.is_entry or not span.parent_id or span.parent_id in ids for span in spans
    )


def summarize(spans: Sequence[Span]) -> Summary | None:
    """The trace in one line; None when it is not one of a request."""
    if (entry := entry_of(spans)) is None:
        return None
    return Summary(
        trace_id=entry.trace_id,
        start_ns=entry.start_ns,
        took_ms=(entry.end_ns - entry.start_ns) / 1e6,
        spans=len(spans),
        error=entry.error,
        input_tokens=_count(entry.attributes.get("gen_ai.usage.input_tokens")),
        output_tokens=_count(entry.attributes.get("gen_ai.usage.output_tokens")),
        attempts=sum(span.name == _ATTEMPT for span in spans),
    )


def account(spans: Sequence[Span]) -> Account | None:
    """What of the request's time the spans explain; None when it is not one of a request.

    Only spans without children count: one that merely contains others explains nothing.
    """
    if (entry := entry_of(spans)) is None:
        return None
    # A measure's children, if it had any, would not make its parent a leaf.
    parents = {span.parent_id for span in spans if span.name not in _MEASURES}
    leaves = sorted(
        (max(span.start_ns, entry.start_ns), min(span.end_ns, entry.end_ns))
        for span in spans
        if span.span_id not in parents and span.name not in _MEASURES and span is not entry
    )
    known, at, gaps = 0, entry.start_ns, []
    for start, end in leaves:
        if end <= at:
            continue
        if start > at:
            gaps.append((at, start))
        known += end - max(start, at)
        at = end
    if at < entry.end_ns:
        gaps.append((at, entry.end_ns))
    gaps.sort(key=lambda gap: gap[0] - gap[1])
    return Account(entry.end_ns - entry.start_ns, known, tuple(gaps))


def _count(value: AttributeValue | None) -> int:
    return value if isinstance(value, int) else 0
