"""Service-level objectives: what a request must keep to for its answer to count as good."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

from baton.bench.outcome import Outcome
from baton.errors import ConfigError

_FIGURES = ("ttft", "tpot", "e2e")


class Goodput(TypedDict):
    """How many requests were answered well."""

    slo: dict[str, float]  # seconds
    share: float  # of all that were sent
    requests_per_s: float
    met: dict[str, float]  # share of all that were sent, for each objective alone


@dataclass(frozen=True)
class Slo:
    """Upper limits in seconds, each for one figure of a request."""

    limits_s: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From "ttft=0.5,tpot=0.05"; raises ConfigError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = 0.0
            if name not in _FIGURES or not 0 < limits[name] < float("inf"):
                raise ConfigError(
                    f"{part!r} is no objective: write {', '.join(_FIGURES)} = seconds, "
                    "as in ttft=0.5,tpot=0.05"
                )
        return cls(tuple(limits.items()))

    def goodput(self, outcomes: Iterable[Outcome], seconds: float) -> Goodput:
        """Over all requests sent: one that failed has met nothing."""
        sent = list(outcomes)
        count = max(1, len(sent))
        good = sum(all(_meets(o, name, most) for name, most in self.limits_s) for o in sent)
        return Goodput(
            slo=dict(self.limits_s),
            share=good / count,
            requests_per_s=good / seconds if seconds else 0.0,
            met={
                name: sum(_meets(o, name, most) for o in sent) / count
                for name, most in self.limits_s
            },
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {most:g} s" for name, most in self.limits_s)


def _meets(outcome: Outcome, name: str, most_s: float) -> bool:
    """An answer of one token has no time per token, and so keeps to any limit on it."""
    if not outcome.ok:
        return False
    value_s: float | None = getattr(outcome, f"{name}_s")
    return value_s is None or value_s <= most_s
