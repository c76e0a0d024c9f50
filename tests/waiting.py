"""How long tests wait, and waiting for another process's state, which reports the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

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
