"""How a stage went over time: its latencies, tokens and errors in short spans."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import TypedDict

from baton.bench.request import INTERRUPTED, Outcome
from baton.bench.stats import percentile

_MAX_SPANS = 60
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
    width_s = next((w for w in _WIDTHS_S if last_s / w <= _MAX_SPANS), _WIDTHS_S[-1])
    number = math.floor(last_s / width_s) + 1 if outcomes else 0
    sent, ended_ok, failed, tokens = ([0] * number for _ in range(4))
    ttfts: list[list[float]] = [[] for _ in range(number)]
    gaps: list[list[float]] = [[] for _ in range(number)]
    for outcome in outcomes:
        times_s = [outcome.sent_s, *(outcome.sent_s + at for at in outcome.token_times_s)]
        first, *spans = (min(int(at / width_s), number - 1) for at in times_s)
        last = min(int((outcome.sent_s + outcome.ended_s) / width_s), number - 1)
        sent[first] += 1
        ended_ok[last] += outcome.ok
        failed[last] += not outcome.ok and outcome.status != INTERRUPTED
        for span, count in zip(spans, outcome.token_counts, strict=True):
            tokens[span] += count
        for span, gap_s in zip(spans[1:], outcome.gaps_s, strict=False):
            gaps[span].append(gap_s)
        if spans:
            ttfts[spans[0]].append(outcome.token_times_s[0])
    begins_s = sorted(o.sent_s for o in outcomes)
    ends_s = sorted(o.sent_s + o.ended_s for o in outcomes)
    closes_s = [(i + 1) * width_s for i in range(number)]
    return Timeline(
        width_s=width_s,
        begin_s=[close_s - width_s for close_s in closes_s],
        sent=sent,
        ended_ok=ended_ok,
        failed=failed,
        running=[
            bisect.bisect_right(begins_s, at) - bisect.bisect_right(ends_s, at) for at in closes_s
        ],
        output_tokens=tokens,
        ttft_p50_s=[_percentile(values, 50) for values in ttfts],
        ttft_p95_s=[_percentile(values, 95) for values in ttfts],
        itl_p50_s=[_percentile(values, 50) for values in gaps],
        itl_p95_s=[_percentile(values, 95) for values in gaps],
    )


def _percentile(values: list[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None
