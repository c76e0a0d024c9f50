"""What candidates are asked to do, in rounds: one piece of work, everybody in turn, then the next.

Neighbours in time are compared with each other, so that a machine that slows down favours nobody;
who begins changes with each round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engine.conversation import Failed

DECODE, PREFILL = "decode", "prefill"
_DECODED_TOKENS, _FEWEST_STEPS, _MOST_STEPS = 384, 12, 48


@dataclass(frozen=True)
class Work:
    """Decode steps of `size` sequences, or a prompt of `size` tokens."""

    kind: str
    size: int
    context: int = 0  # tokens before the first step
    steps: int = 0

    @property
    def tokens(self) -> int:
        """What it produces (decode) or takes in (prefill)."""
        return self.size * self.steps if self.kind == DECODE else self.size

    @property
    def label(self) -> str:
        """A column's head."""
        return f"batch {self.size}" if self.kind == DECODE else f"prompt {self.size}"

    def request(self) -> dict[str, Any]:
        """The line that asks for it."""
        if self.kind == PREFILL:
            return {"do": PREFILL, "tokens": self.size}
        return {"do": DECODE, "batch": self.size, "context": self.context, "steps": self.steps}


def works(batches: Sequence[int], context: int, prompts: Sequence[int]) -> list[Work]:
    """Decoding in each batch size, then each prompt length."""
    return [
        *(Work(DECODE, size, context, steps_of(size)) for size in batches),
        *(Work(PREFILL, size) for size in prompts),
    ]


def steps_of(batch: int) -> int:
    """The same for everybody: enough to time, few enough for the slowest."""
    return max(_FEWEST_STEPS, min(_MOST_STEPS, _DECODED_TOKENS // batch))


@dataclass
class Measured:
    """Tokens per second of each candidate and work, by round; what failed has fewer rounds."""

    rates: dict[str, dict[Work, dict[int, float]]] = field(default_factory=dict)
    notes: dict[str, dict[Work, str]] = field(default_factory=dict)
    failures: dict[str, dict[Work, str]] = field(default_factory=dict)


Ask = Callable[[str, Work], tuple[float, str]]  # (seconds, note); raises Failed


def measure(
    names: Sequence[str], todo: Sequence[Work], rounds: int, ask: Ask, say: Callable[[str], None]
) -> Measured:
    """Warms everybody up with each piece of work, then measures it in `rounds` rounds.

    Work that failed is not asked of the same candidate again.
    """
    measured = Measured({name: {} for name in names})
    for round_ in range(rounds + 1):
        began = round_ % len(names)
        for work in todo:
            for name in [*names[began:], *names[:began]]:
                if work not in measured.failures.get(name, ()):
                    say(_told(round_, rounds, name, work))
                    _ask(measured, name, work, round_, ask)
    return measured


def _ask(measured: Measured, name: str, work: Work, round_: int, ask: Ask) -> None:
    try:
        seconds, note = ask(name, work)
    except Failed as failure:
        measured.failures.setdefault(name, {})[work] = str(failure)
        return
    if round_:  # the one before the first warms up
        measured.rates[name].setdefault(work, {})[round_] = work.tokens / seconds
    if note:
        measured.notes.setdefault(name, {})[work] = note


def _told(round_: int, rounds: int, name: str, work: Work) -> str:
    which = f"round {round_} of {rounds}" if round_ else "warm-up"
    return f"{which}: {work.label}, {name}"
