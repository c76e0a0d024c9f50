"""A queue of sequences."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import itemgetter

from baton.engine.sequence import Sequence

_SEQUENCE_OF = itemgetter(2)


class SequenceQueue:
    """Sequences in order of priority, then of arrival.

    Only iteration visits every sequence, so that removing hundreds at once is cheap. A sequence's
    priority must not change while it is queued.
    """

    def __init__(self) -> None:
        self.tokens = 0  # pending tokens, counted when their sequences were added
        self._entries: list[tuple[float, int, Sequence, int]] = []  # (*order, sequence, pending)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return map(_SEQUENCE_OF, self._entries)

    @property
    def first(self) -> Sequence:
        return self._entries[0][2]

    @property
    def last(self) -> Sequence:
        return self._entries[-1][2]

    def add(self, sequence: Sequence) -> None:
        insort(self._entries, (*sequence.order, sequence, sequence.num_pending))
        self.tokens += sequence.num_pending

    def discard(self, sequence: Sequence) -> bool:
        """Removes a sequence; returns whether it was queued."""
        at = bisect_left(self._entries, sequence.order)
        if at == len(self._entries) or self._entries[at][2] is not sequence:
            return False
        self.tokens -= self._entries.pop(at)[3]
        return True
