"""What proposes tokens for decoding sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Tokens

from baton.engine.sequence import Sequence


class Proposer(ABC):
    """Proposes tokens for decoding sequences. Used by the engine thread only.

    State is kept by sequence object, and recreated from its tokens if missing.
    """

    def __init__(self, most: int, max_context: int) -> None:
        """most: longest proposal, in tokens · max_context: longest sequence, in tokens."""
        self.most = most
        self._max_context = max_context

    def limit(self, sequence: Sequence) -> int:
        """The longest proposal for a sequence; one more token is sampled after it."""
        return max(0, min(self.most, sequence.tokens_left(self._max_context) - 1))

    @abstractmethod
    def propose(
        self, sequences: list[Sequence], limits: list[int], rows: int
    ) -> list[tuple[int, ...]]:
        """Proposes up to its limit for each sequence, as many tokens as are worth their cost.

        rows: of the step, without proposed tokens. The scheduler may shorten proposals.
        """

    @abstractmethod
    def learn(self, sequence: Sequence, sampled: Tokens[int]) -> None:
        """Updates acceptance rates with the tokens that a step sampled for a sequence."""

    @abstractmethod
    def record_step(self, rows: int, proposed: int, seconds: float) -> None:
        """Records a step's duration. rows: without proposed tokens · proposed: their number."""
