"""How many prompt tokens a step may compute, by the measured rate."""

from __future__ import annotations

from typing import Protocol


class StepSize(Protocol):
    """How much a step computes."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_chunk_tokens(self) -> int: ...


class ChunkBudget:
    """How many prompt tokens a step may compute: about as many as take `seconds`, or `alone_s` in a
    step without decoding sequences.

    max_tokens: upper limit, which memory is planned for · min_tokens: lower limit, also used before
    anything is measured; fewer tokens would take as long. The rate is tokens over seconds, both
    summed with weights that decay from step to step: a long step weighs more than a short one, and
    chunks after a long context, which take longer, get smaller at once.
    """

    _DECAY = 0.8  # of earlier steps' weight, with each step
    _MIN_MEASURED = 32  # prompt tokens of a step that is measured

    def __init__(
        self, max_tokens: int, seconds: float = 0.060, min_tokens: int = 64, alone_s: float = 0.0
    ) -> None:
        """alone_s: 0 stands for `seconds`."""
        self.max_tokens = max_tokens
        self._seconds, self._min_tokens = seconds, min_tokens
        self._alone_s = alone_s or seconds
        self._sum_tokens = self._sum_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Measured tokens a second; 0 before any measurement."""
        return self._sum_tokens / self._sum_s if self._sum_s else 0.0

    @property
    def tokens(self) -> int:
        """Beside running sequences."""
        return self._tokens(self._seconds)

    @property
    def alone_tokens(self) -> int:
        """Without running sequences."""
        return self._tokens(self._alone_s)

    def _tokens(self, seconds: float) -> int:
        return min(self.max_tokens, max(self._min_tokens, int(self.tokens_per_s * seconds)))

    def estimate_s(self, step: StepSize) -> float:
        """Estimated seconds of a step with chunks; 0 for one without, or before any measurement."""
        return (
            step.num_tokens / self.tokens_per_s
            if step.num_chunk_tokens and self.tokens_per_s
            else 0.0
        )

    def record_step(self, step: StepSize, seconds: float) -> None:
        if step.num_chunk_tokens >= self._MIN_MEASURED:
            self._sum_tokens = self._sum_tokens * self._DECAY + step.num_tokens
            self._sum_s = self._sum_s * self._DECAY + seconds
