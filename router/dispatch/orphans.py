"""Sequences that a worker still sends tokens of though nobody here waits for them any more.

Their Cancel was lost. Without another they would hold blocks until their last token.
"""

from __future__ import annotations

MOST = 1024  # remembered at a time; the others are seen again
BATCH = 256  # named in one Cancel


class Strays:
    """Tells a lost Cancel from one that is still on its way: events come for two turns."""

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._now: set[str] = set()

    def saw(self, handoff_id: str) -> None:
        """An event came for a sequence that nobody waits for."""
        if len(self._now) < MOST:
            self._now.add(handoff_id)

    def turn(self) -> list[str]:
        """Ends a turn: those to cancel, at most a batch."""
        lasting = sorted(self._before & self._now)[:BATCH]
        self._before, self._now = self._now, set()
        return lasting
