"""What a window of time looked like to those who were streaming: tokens, gaps, waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

from baton.bench.outcome import INTERRUPTED, Outcome
from baton.bench.spread import Spread, spread_of

LONG_GAP_S = 0.2


@dataclass(frozen=True)
class Window:
    """Seconds since the run began."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s

    def holds(self, at_s: float) -> bool:
        """Whether that moment is in it."""
        return self.begin_s <= at_s < self.end_s

    def overlap_s(self, begin_s: float, end_s: float) -> float:
        """How much of that span is in it."""
        return max(0.0, min(end_s, self.end_s) - max(begin_s, self.begin_s))


class StreamFigures(TypedDict):
    """The streams of one window. A gap is the time between two messages of one request."""

    tokens_per_s: float
    itl_s: Spread | None  # gaps that ended in the window
    long_gap_share: float  # of the time that requests spent between their first and last message
    ttft_s: Spread | None  # of requests sent in the window
    tpot_s: Spread | None  # of those that were sent in it and ended
    failed: int


def stream_figures(outcomes: Sequence[Outcome], window: Window) -> StreamFigures:
    """What happened to these requests inside the window; what happened outside does not count.

    Requests that were given up at the end of the run count with what they had got.
    """
    spans = list(_gaps(outcomes))
    streamed_s = sum(window.overlap_s(*span) for span in spans)
    waited_s = sum(window.overlap_s(begin, end) for begin, end in spans if end - begin > LONG_GAP_S)
    messages = sum(window.holds(o.sent_s + at) for o in outcomes for at in o.token_times_s)
    sent = [outcome for outcome in outcomes if window.holds(outcome.sent_s)]
    return StreamFigures(
        tokens_per_s=messages * tokens_per_message(outcomes) / window.seconds,
        itl_s=spread_of(end - begin for begin, end in spans if window.holds(end)),
        long_gap_share=waited_s / streamed_s if streamed_s else 0.0,
        ttft_s=spread_of(outcome.ttft_s for outcome in sent),
        tpot_s=spread_of(outcome.tpot_s for outcome in sent if outcome.ok),
        failed=_failed(outcomes),
    )


class PromptFigures(TypedDict):
    """The requests that a window's load consists of, whenever they ended."""

    sent: int
    failed: int
    ttft_s: Spread | None
    e2e_s: Spread | None


def prompt_figures(outcomes: Sequence[Outcome]) -> PromptFigures:
    """Waits of all of them: one that was given up has none, and counts as failed."""
    return PromptFigures(
        sent=len(outcomes),
        failed=sum(not outcome.ok for outcome in outcomes),
        ttft_s=spread_of(outcome.ttft_s for outcome in outcomes if outcome.ok),
        e2e_s=spread_of(outcome.e2e_s for outcome in outcomes if outcome.ok),
    )


def long_gap_share(outcomes: Sequence[Outcome]) -> float:
    """Of all time between first and last messages, what was spent in gaps over LONG_GAP_S."""
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s]
    whole = sum(gaps)
    return sum(gap for gap in gaps if gap > LONG_GAP_S) / whole if whole else 0.0


def tokens_per_message(outcomes: Sequence[Outcome]) -> float:
    """Over HTTP a message may bring several tokens; only a request's end says how many it had."""
    ended = [outcome for outcome in outcomes if outcome.ok]
    messages = sum(len(outcome.token_times_s) for outcome in ended)
    return sum(outcome.output_tokens for outcome in ended) / messages if messages else 1.0


def _gaps(outcomes: Sequence[Outcome]) -> Iterator[tuple[float, float]]:
    """(begin, end) of each, seconds since the run began."""
    for outcome in outcomes:
        for earlier, later in pairwise(outcome.token_times_s):
            yield outcome.sent_s + earlier, outcome.sent_s + later


def _failed(outcomes: Sequence[Outcome]) -> int:
    return sum(not outcome.ok and outcome.status != INTERRUPTED for outcome in outcomes)
