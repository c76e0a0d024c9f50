"""Deadlines, and tasks that outlive the call that started them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from baton.errors import DeadlineExceeded

T = TypeVar("T")


class Deadline:
    """A point in time, passed down to every wait that it bounds."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least one millisecond, for calls that take 0 for "no time-out"."""
        return max(self._end - time.monotonic(), 0.001)

    def left_s(self, cap_s: float = math.inf) -> float:
        """Seconds that one wait may take. Raises DeadlineExceeded if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed during the KV transfer")
        return min(left, cap_s)


def in_background(tasks: set[asyncio.Task[T]], work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts `work` as a task that is in `tasks` until it has ended."""
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work` to its end even if cancelled, then raises the cancellation.

    For work that a thread or the peer carries on with anyway; `work` must bound its own time.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and task.exception() is not None:
            raise cancelled from task.exception()
        raise cancelled
    return task.result()
