"""Callers: each asks for one wish after the other, sometimes for many, and times the answers.

Uses the SDK as a program would. Judges nothing: endings go to whoever wants them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.client import AsyncClient, AsyncStream
from baton.errors import BatonError, RetryableError
from tests.chaos.wishes import Ending, Run, Wish, wish

SLACK_S = 10.0  # after its deadline, until a request counts as one that never ends
BURST = 12
BURST_SHARE = 0.03  # of a caller's turns
PAUSE_S = 0.3  # at most, between two turns
PAUSE_AFTER_FAILURE_S = 1.5

OnEnd = Callable[[Wish, Ending], None]


class Load:
    """`callers` of them; `running` and `ended` count requests."""

    def __init__(
        self, client: AsyncClient, runs: Sequence[Run], seed: int, callers: int, on_end: OnEnd
    ) -> None:
        self.running = 0
        self.ended = 0
        self._client = client
        self._runs = runs
        self._seed = seed
        self._callers = callers
        self._on_end = on_end

    async def run(self, until_s: float) -> None:
        """Asks until the loop's clock says `until_s`; returns when the last request has ended."""
        callers = (self._caller(number, until_s) for number in range(self._callers))
        await asyncio.gather(*callers)

    async def _caller(self, number: int, until_s: float) -> None:
        dice = random.Random(self._seed * 1000 + number)
        clock = asyncio.get_running_loop().time
        while clock() < until_s:
            count = BURST if dice.random() < BURST_SHARE else 1
            asked = (self._ask(wish(dice, self._runs)) for _ in range(count))
            endings = await asyncio.gather(*asked)
            failed = any(isinstance(one.error, RetryableError) for one in endings)
            await asyncio.sleep(PAUSE_AFTER_FAILURE_S if failed else dice.random() * PAUSE_S)

    async def _ask(self, wish: Wish) -> Ending:
        self.running += 1
        try:
            ending = await ask(self._client, wish)
        finally:
            self.running -= 1
        self.ended += 1
        self._on_end(wish, ending)
        return ending


async def ask(client: AsyncClient, wish: Wish) -> Ending:
    """Runs one request to whatever end it has."""
    clock = asyncio.get_running_loop().time
    seen = _Seen(clock())
    stream = client.stream(wish.run.prompt, **wish.options)
    try:
        async with asyncio.timeout(wish.timeout_s + SLACK_S):
            cancelled = await _read(stream, wish, seen)
    except TimeoutError:
        return seen.ending(clock(), over=False)
    except BatonError as error:
        return seen.ending(clock(), error=error)
    if cancelled:
        return seen.ending(clock(), cancelled=True)
    return seen.ending(clock(), completion=stream.completion)


async def _read(stream: AsyncStream, wish: Wish, seen: _Seen) -> bool:
    """Reads until the end or until the caller has enough; whether it had."""
    clock = asyncio.get_running_loop().time
    async with stream:
        async for delta in stream:
            seen.times.append(clock())
            seen.token_ids += delta.token_ids
            if wish.cancel_after is not None and len(seen.token_ids) > wish.cancel_after:
                return True
    return False


@dataclass
class _Seen:
    """What has come of one answer, and when."""

    began_s: float
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def ending(self, ended_s: float, **how: Any) -> Ending:
        """All of it, at the end."""
        gaps = (after - before for before, after in zip(self.times, self.times[1:], strict=False))
        return Ending(
            tuple(self.token_ids),
            self.began_s,
            ended_s,
            ttft_s=self.times[0] - self.began_s if self.times else 0.0,
            largest_gap_s=max(gaps, default=0.0),
            **how,
        )
