"""Waiting for another process's state to become visible: bounded, and it reports the last state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(
    look: Callable[[], Awaitable[T]],
    good: Callable[[T], bool],
    message: str,
    timeout_s: float = 10.0,
) -> T:
    """Looks until what is seen is good. For state of other processes, which sends no event here."""
    end = asyncio.get_running_loop().time() + timeout_s
    while not good(seen := await look()):
        assert asyncio.get_running_loop().time() < end, f"{message}: {seen}"
        await asyncio.sleep(0.05)
    return seen
