"""Speculation: tokens proposed for the sequences of a step, which computes and verifies them.

A proposed token is computed in the same step as the last known one, and what is sampled at each
position is compared with it (`verify`): a step yields as many tokens as were accepted, and one
more. No token changes: it is a function of logits, settings, the tokens so far and the position,
randomness included. Torch-free; knows no block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Tokens

from baton.engine.sequence import Sequence


class Proposer(ABC):
    """Proposes tokens for a batch of decoding sequences. Used by the engine thread only.

    A sequence's tokens only ever grow, and what is proposed follows from them: whatever is kept of
    a sequence is kept for the object, weakly, and made anew where it is missing.
    """

    def __init__(self, most: int, max_context: int) -> None:
        """most: tokens for a sequence in a step · max_context: of a sequence, in tokens."""
        self._most = most
        self._max_context = max_context

    def limit(self, sequence: Sequence) -> int:
        """The most tokens to propose: behind the last of them one more is sampled."""
        return max(0, min(self._most, sequence.tokens_left(self._max_context) - 1))

    @abstractmethod
    def propose(
        self, sequences: list[Sequence], limits: list[int], rows: int
    ) -> list[tuple[int, ...]]:
        """What may follow each sequence's tokens, up to its limit, as far as it pays.

        rows: of the step, proposed tokens apart. Not all that is proposed may find room in it.
        """

    @abstractmethod
    def learn(self, sequence: Sequence, sampled: Tokens[int]) -> None:
        """A step gave a sequence these tokens, if any."""

    @abstractmethod
    def took(self, rows: int, proposed: int, seconds: float) -> None:
        """A step of so many rows, and of proposed ones besides, took so long."""


def verify(proposed: Tokens[int], sampled: Tokens[int]) -> int:
    """How many of `sampled` the sequence accepts: up to and with the first that was not proposed.

    `sampled` has one token more than `proposed`: the one behind the last known token, then those
    behind each proposed one.
    """
    assert len(sampled) == len(proposed) + 1, "a token is sampled behind each proposed one"
    for right, (guess, token) in enumerate(zip(proposed, sampled, strict=False)):
        if guess != token:
            return right + 1
    return len(sampled)
