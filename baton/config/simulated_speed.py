"""The speed of a simulated engine, as `--simulate` gives it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True)
class SimulatedSpeed:
    """Speed of an engine that is simulated, or what `baton advise` has measured of one."""

    prefill_tokens_per_s: float
    step_ms: float  # of a decode step
    ms_per_sequence: float = 0.0  # added to a decode step for each sequence
    ms_per_1000_tokens: float = 0.0  # added to it for each 1,000 tokens of the batch's contexts
    # Tokens of context after which a prompt's tokens take twice as long as its first; 0: none.
    doubled_at: float = 0.0
    mixed: float = 1.0  # duration of a step with prompts and sequences, over the sum of both parts

    @classmethod
    def parse(cls, text: str) -> SimulatedSpeed:
        """Parses the numbers of the class, in order; two at least. Raises ConfigError."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        finite = all(0 <= number < float("inf") for number in numbers)
        most = len(dataclasses.fields(cls))
        if not (2 <= len(numbers) <= most and finite and numbers[0] > 0):
            raise ConfigError(
                f"--simulate {text!r}: write the prefill rate in tokens a second and the time of a "
                "decode step in ms, as 8000,10; a third number is added for each sequence, a "
                "fourth for each 1,000 tokens of context; docs/capacity.md has the others"
            )
        return cls(*numbers)

    def __str__(self) -> str:
        """As it is parsed, with four digits."""
        numbers = dataclasses.astuple(self)
        last = max(i for i, one in enumerate(numbers) if i < 2 or one != (1.0 if i == 5 else 0.0))
        return ",".join(f"{one:.4g}" for one in numbers[: last + 1])

    def step_s(
        self, prompt_tokens: int, sequences: int, context_tokens: float = 0, attended: float = 0
    ) -> float:
        """Duration in seconds of a step.

        context_tokens: of the decoding sequences in sum · attended: sum over the prompt tokens of
        the number of tokens before each.
        """
        prompt_s = decode_s = 0.0
        if prompt_tokens:
            more = attended / self.doubled_at if self.doubled_at else 0.0
            prompt_s = (prompt_tokens + more) / self.prefill_tokens_per_s
        if sequences:
            added_ms = (
                self.ms_per_sequence * sequences + self.ms_per_1000_tokens * context_tokens / 1e3
            )
            decode_s = (self.step_ms + added_ms) / 1e3
        return (prompt_s + decode_s) * (self.mixed if prompt_s and decode_s else 1.0)
