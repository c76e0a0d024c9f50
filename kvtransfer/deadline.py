"""Waits and tasks of the control side: within the request's deadline, or to the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from baton.errors import DeadlineExceeded

T = TypeVar("T")


class Deadline:
    """The time at which a request expires, passed down to every wait of it."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def left_s(self, cap_s: float) -> float:
        """Seconds one wait may take. Raises DeadlineExceeded when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed during the KV transfer")
        return min(left, cap_s)


def in_background(tasks: set[asyncio.Task[T]], work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts `work`, which is in `tasks` until it has ended."""
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work` to its end even when cancelled, then raises the cancellation.

    For work that a thread or the peer carries on with anyway, so `work` must bound its own time.
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
