"""How long tests wait, and waiting for another process's state, which reports the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

T = TypeVar("T")

# For what should take milliseconds: a machine may be slow and busy. The suite's own end, `timeout`
# in pyproject.toml, is later, so that a test says what it has waited for.
WAIT_S = 300.0


async def eventually(
    look: Callable[[], Awaitable[T]],
    good: Callable[[T], bool],
    message: str,
    timeout_s: float = WAIT_S,
) -> T:
    """Looks until what is seen is good. For state of other processes, which sends no event here."""
    end = asyncio.get_running_loop().time() + timeout_s
    while not good(seen := await look()):
        assert asyncio.get_running_loop().time() < end, f"{message}: {seen}"
        await asyncio.sleep(0.05)
    return seen


class LoopLag:
    """Measures inside `async with` how late this process's own loop is: its share of a busy
    machine."""

    TICK_S = 0.02
    WORTH_S = 0.1  # shorter lags are not kept by their time

    def __init__(self) -> None:
        self.largest_s = 0.0
        self._lags: list[tuple[float, float]] = []  # (when it ended, seconds)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._measure())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def within_s(self, from_s: float, until_s: float) -> float:
        """The largest lag between two times of the loop's clock."""
        return max(
            (lag_s for at_s, lag_s in self._lags if from_s <= at_s and at_s - lag_s <= until_s),
            default=0.0,
        )

    async def _measure(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            before_s = clock()
            await asyncio.sleep(self.TICK_S)
            lag_s = (now_s := clock()) - before_s - self.TICK_S
            self.largest_s = max(self.largest_s, lag_s)
            if lag_s > self.WORTH_S:
                self._lags.append((now_s, lag_s))
