"""The share of its time that a worker spends on prompts, which its streams wait for."""

from __future__ import annotations

import math

_SHARE_S = 3.0  # over which it is measured


class BusyShare:
    """The share of the time of the last seconds that something took, in sixteenths.

    Times are seconds of any clock. Time counts less the longer ago it was.
    """

    def __init__(self) -> None:
        self._sum_s = self._at = 0.0

    def add(self, ended: float, seconds: float) -> None:
        """Adds work of `seconds` that ended at `ended`."""
        self._sum_s = self._left(ended) + seconds
        self._at = ended

    def share(self, now: float) -> float:
        """The share at `now`, rounded so that not every step changes what is reported."""
        return round(min(1.0, self._left(now) / _SHARE_S) * 16) / 16

    def _left(self, now: float) -> float:
        return self._sum_s * math.exp(min(0.0, self._at - now) / _SHARE_S)
