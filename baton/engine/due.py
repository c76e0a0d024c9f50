"""Sequences in the order in which they are due."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from baton.engine.sequence import Sequence


class _Entry(NamedTuple):
    due: float
    arrival: int  # unique: nothing behind it is ever compared
    sequence: Sequence
    tokens: int


class DueQueue:
    """The one that is due first in front; of equals the one that came first.

    Nothing but iterating looks at every sequence, so that hundreds that leave at once cost nobody
    time. A sequence's turn does not change while it is here.
    """

    def __init__(self) -> None:
        self.tokens = 0  # that were pending when their sequences came, over all that are here
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry.sequence for entry in self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._place(sequence) is not None

    @property
    def first(self) -> Sequence:
        """The one that is due first."""
        return self._entries[0].sequence

    @property
    def last(self) -> Sequence:
        """The one that is due last."""
        return self._entries[-1].sequence

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in."""
        insort(self._entries, _Entry(*sequence.turn, sequence, sequence.num_pending))
        self.tokens += sequence.num_pending

    def discard(self, sequence: Sequence) -> bool:
        """Lets a sequence go; whether it was here."""
        at = self._place(sequence)
        if at is None:
            return False
        self.tokens -= self._entries.pop(at).tokens
        return True

    def _place(self, sequence: Sequence) -> int | None:
        at = bisect_left(self._entries, sequence.turn, key=_turn)
        here = at < len(self._entries) and self._entries[at].sequence is sequence
        return at if here else None


def _turn(entry: _Entry) -> tuple[float, int]:
    return entry[:2]
