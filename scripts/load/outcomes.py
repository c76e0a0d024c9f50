"""What became of each request, and the figures that sum many of them up."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OK, REFUSED = "OK", "RESOURCE_EXHAUSTED"


@dataclass
class Outcome:
    """One request as its caller saw it; times are seconds."""

    at_s: float  # when it was to be sent
    late_s: float = 0.0  # how much later the generator sent it
    status: str = OK
    message: str = ""
    retry_after_s: float = 0.0
    ttft_s: float = 0.0  # 0: no token came
    ended_s: float = 0.0  # from sending it to its end
    prompt_tokens: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    prefill: str = ""  # incarnations; empty: decode prefilled by itself
    decode: str = ""
    attempts: int = 0

    @property
    def finished(self) -> bool:
        """Whether it ended with all its tokens."""
        return self.status == OK


@dataclass
class Run:
    """All requests of a run, and how well the generator kept time."""

    outcomes: list[Outcome]
    seconds: float  # from the first to the last end
    loop_late_s: list[float] = field(default_factory=list)  # how late the generator's loop was

    @property
    def finished(self) -> list[Outcome]:
        """Those that ended with all their tokens."""
        return [outcome for outcome in self.outcomes if outcome.finished]

    @property
    def refused(self) -> list[Outcome]:
        """Those that were told to come again later."""
        return [outcome for outcome in self.outcomes if outcome.status == REFUSED]

    @property
    def statuses(self) -> Counter[str]:
        """How many ended in which way."""
        return Counter(outcome.status for outcome in self.outcomes)

    @property
    def lag(self) -> str:
        """How late requests were sent and how late the generator's own loop ran."""
        late = spread([outcome.late_s for outcome in self.outcomes])
        return f"requests sent late by {late}, its event loop late by {spread(self.loop_late_s)}"

    def to_json(self) -> dict[str, Any]:
        """For the process that asked for the run."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Run:
        """What `to_json` made."""
        return cls(**{**value, "outcomes": [Outcome(**o) for o in value["outcomes"]]})


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of them do not exceed; NaN of none."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


def spread(values: Sequence[float]) -> str:
    """p50, p99 and maximum of seconds, in ms."""
    p50, p99, most = (percentile(values, p) * 1e3 for p in (50, 99, 100))
    return f"p50 {p50:.1f} p99 {p99:.1f} max {most:.1f} ms"


def ttfts(outcomes: Iterable[Outcome]) -> list[float]:
    """Times to first token of those that had one."""
    return [outcome.ttft_s for outcome in outcomes if outcome.ttft_s]


def hit_ratio(outcomes: Iterable[Outcome]) -> float:
    """Share of prompt tokens that came from a prefix cache."""
    kept = list(outcomes)
    return sum(o.cached_tokens for o in kept) / max(1, sum(o.prompt_tokens for o in kept))


def medians(rounds: Sequence[Run], figure: Callable[[Run], float]) -> float:
    """The median over rounds of one figure."""
    return statistics.median(figure(run) for run in rounds)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it can be read as text too."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if not i else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w if not i else "-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(lines[0]), line(rule), *map(line, lines[1:])])
