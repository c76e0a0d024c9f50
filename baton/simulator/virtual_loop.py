"""An event loop on a virtual clock: where nothing is left to run now, time jumps to what is next.

Everything that takes its time from the loop runs unchanged: sleeps, deadlines, timers.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_COLLECT_AFTER = 50_000  # new objects: requests leave few cycles, and collections took a tenth


class _Clock(selectors.SelectSelector):
    """Waits for nothing: time passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never happens")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. A loop that waits for what no timer brings fails with RuntimeError."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs to the end on a virtual clock of its own."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(coroutine)
    finally:
        gc.set_threshold(*before)
