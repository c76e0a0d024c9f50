"""Tasks of asyncio that run beside others, or outlive the call that started them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Runs a task inside, and cancels it at the end. If it has failed, asyncio logs its error."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def wait_at_most(seconds: float, work: Awaitable[object]) -> bool:
    """Awaits `work`, which is cancelled if it takes longer; whether it ended in time."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits for their end. Their errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_on(thread: Executor, make: Callable[[], T], discard: Callable[[T], object]) -> T:
    """Calls `make` on an executor. If this is cancelled, the result goes to `discard`, usually on a
    thread of the executor, so that its resources are freed."""
    making = thread.submit(make)

    def unused(made: Future[T]) -> None:
        if not made.cancelled() and made.exception() is None:
            discard(made.result())

    try:
        return await asyncio.wrap_future(making)
    except asyncio.CancelledError:
        making.add_done_callback(unused)
        raise


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
