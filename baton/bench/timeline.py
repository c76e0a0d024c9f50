"""How a stage went over time: its latencies, tokens and errors in short spans."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import TypedDict

from baton.bench.outcome import INTERRUPTED, Outcome
from baton.bench.spread import percentile

_SPANS_AT_MOST = 60
_WIDTHS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Timeline(TypedDict):
    """Spans of equal width; None where nothing happened. Lists are as long as `begin_s`."""

    width_s: float
    begin_s: list[float]
    sent: list[int]
    ended_ok: list[int]
    failed: list[int]
    running: list[int]  # at the span's end
    output_tokens: list[int]
    ttft_p50_s: list[float | None]  # of first tokens that came in the span
    ttft_p95_s: list[float | None]
    itl_p50_s: list[float | None]  # of gaps that ended in the span
    itl_p95_s: list[float | None]


def timeline_of(outcomes: Sequence[Outcome]) -> Timeline:
    """Of one stage; `sent_s` of all outcomes counts from the same moment."""
    last_s = max((o.sent_s + o.ended_s for o in outcomes), default=0.0)
    width_s = _width_s(last_s)
    spans = [_Span() for _ in range(math.floor(last_s / width_s) + 1)] if outcomes else []
    for outcome in outcomes:
        _note(spans, width_s, outcome)
    begins_s, ends_s = (
        sorted(o.sent_s for o in outcomes), sorted(o.sent_s + o.ended_s for o in outcomes)
    )  # fmt: skip
    closes_s = [(i + 1) * width_s for i in range(len(spans))]
    return Timeline(
        width_s=width_s,
        begin_s=[close_s - width_s for close_s in closes_s],
        sent=[span.sent for span in spans],
        ended_ok=[span.ended_ok for span in spans],
        failed=[span.failed for span in spans],
        running=[
            bisect.bisect_right(begins_s, at) - bisect.bisect_right(ends_s, at) for at in closes_s
        ],
        output_tokens=[span.output_tokens for span in spans],
        ttft_p50_s=[_of(span.ttfts_s, 50) for span in spans],
        ttft_p95_s=[_of(span.ttfts_s, 95) for span in spans],
        itl_p50_s=[_of(span.gaps_s, 50) for span in spans],
        itl_p95_s=[_of(span.gaps_s, 95) for span in spans],
    )


class _Span:
    def __init__(self) -> None:
        self.sent = self.ended_ok = self.failed = self.output_tokens = 0
        self.ttfts_s: list[float] = []
        self.gaps_s: list[float] = []


def _width_s(last_s: float) -> float:
    return next((w for w in _WIDTHS_S if last_s / w <= _SPANS_AT_MOST), _WIDTHS_S[-1])


def _note(spans: list[_Span], width_s: float, outcome: Outcome) -> None:
    def at(after_s: float) -> _Span:
        return spans[min(int((outcome.sent_s + after_s) / width_s), len(spans) - 1)]

    at(0.0).sent += 1
    if outcome.ok:
        at(outcome.ended_s).ended_ok += 1
    elif outcome.status != INTERRUPTED:
        at(outcome.ended_s).failed += 1
    before_s: float | None = None
    for time_s, count in zip(outcome.token_times_s, outcome.token_counts, strict=True):
        span = at(time_s)
        span.output_tokens += count
        if before_s is None:
            span.ttfts_s.append(time_s)
        else:
            span.gaps_s.append(time_s - before_s)
        before_s = time_s


def _of(values: list[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None
