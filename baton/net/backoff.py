"""Waiting between attempts: longer each time up to a bound, and never in step with others."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """Seconds to wait: `first_s`, doubled after each wait up to `most_s`, half of it random."""

    def __init__(self, first_s: float = 0.05, most_s: float = 1.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    async def wait(self) -> None:
        delay_s = self._next_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret
        self._next_s = min(self._next_s * 2, self._most_s)
        await asyncio.sleep(delay_s)

    def reset(self) -> None:
        """Starts over after a success."""
        self._next_s = self._first_s
