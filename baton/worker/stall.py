"""Notices when an engine step takes far longer than steps take, and when it has ended after all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

LEAST_S = 30.0  # no shorter step counts as stalled
STEPS = 50  # mean steps that a step may take


class StallWatch:
    """Watches one engine. Event-loop thread only."""

    def __init__(self, step_age_s: Callable[[], float], mean_step_s: Callable[[], float]) -> None:
        self._step_age_s = step_age_s
        self._mean_step_s = mean_step_s
        self._stepped = asyncio.Event()

    def stepped(self) -> None:
        """A step has ended."""
        self._stepped.set()

    async def follow(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Runs until cancelled; tells True when a step stalls and False when it has ended."""
        while True:
            await self._until_stalled()
            log.error("the engine's step has been running for %.0f s", self._step_age_s())
            await tell(True)
            await self._stepped.wait()
            log.warning("the engine's step has ended")
            await tell(False)

    async def _until_stalled(self) -> None:
        """Looks again when the step that runs now, or one that begins now, would be too old."""
        while (left_s := self._limit_s - self._step_age_s()) > 0:  # noqa: ASYNC110 - exactly then
            await asyncio.sleep(left_s)
        self._stepped.clear()

    @property
    def _limit_s(self) -> float:
        return max(LEAST_S, STEPS * self._mean_step_s())
