"""Many streams at once, each compared with the oracle; the largest gap between two messages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.client import AsyncClient, Completion
from baton.local.cluster import LocalCluster
from tests.cluster.oracle import Case, Oracle
from tests.waiting import eventually

TOKENS_BEFORE_FAULT = 10
# Added to a promised bound: recomputing lost tokens, and a busy machine.
SLACK_S, LAGS, _TICK_S = 1.0, 5.0, 0.02


def mixed_cases(oracle: Oracle, count: int, new_tokens: int = 150) -> list[Case]:
    """Prompts that need a handoff, of four lengths, greedy and seeded, long enough to be hit."""
    kinds = ("greedy", "seeded")
    cases = [
        Case(oracle.prompt(20 + 60 * (i // 2 % 4)), kinds[i % 2], new_tokens) for i in range(count)
    ]
    for case in cases:
        oracle.tokens(case)
    return cases


async def decoding_process(cluster: LocalCluster, client: AsyncClient) -> str:
    """The name of the decode worker that runs the only stream."""

    async def pids() -> set[int]:
        workers = (await client.status())["workers"]
        return {w["pid"] for w in workers if w["role"] == "decode" and w["running"]}

    (pid,) = await eventually(pids, bool, "no worker decodes", 20.0)
    return next(name for name, process in cluster.processes.items() if process.pid == pid)


@dataclass
class Streams:
    """Runs all cases at once; `midway` is set once half of them have ten tokens.

    `largest_gap_s` is the longest time between two messages of one stream so far, and
    `largest_lag_s` the longest delay of this process's own loop: the share of a busy machine.
    """

    client: AsyncClient
    oracle: Oracle
    cases: Sequence[Case]
    timeout_s: float = 90.0
    midway: asyncio.Event = field(default_factory=asyncio.Event)
    largest_gap_s: float = 0.0
    largest_lag_s: float = 0.0
    # Shared clusters have run the same prompts before: they must not be cached.
    salt: int = field(default_factory=itertools.count().__next__)
    _underway: int = 0

    async def start(self) -> asyncio.Task[list[Completion]]:
        """Runs them in a task; returns it once they are midway."""
        task = asyncio.create_task(self.run())
        await self.midway.wait()
        return task

    async def run(self) -> list[Completion]:
        """What came; each has the oracle's tokens."""
        lag = asyncio.create_task(self._measure_lag())
        try:
            streams = (self._one(number, case) for number, case in enumerate(self.cases))
            return await asyncio.gather(*streams)
        finally:
            lag.cancel()

    def check_gap(self, promised_s: float) -> None:
        """Fails if a stream paused for longer than promised, on a machine as busy as this one."""
        assert self.largest_gap_s < promised_s + SLACK_S + LAGS * self.largest_lag_s

    async def _measure_lag(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            before_s = clock()
            await asyncio.sleep(_TICK_S)
            self.largest_lag_s = max(self.largest_lag_s, clock() - before_s - _TICK_S)

    async def _one(self, number: int, case: Case) -> Completion:
        clock = asyncio.get_running_loop().time
        tokens, latest_s = 0, None
        stream = self.client.stream(
            case.prompt,
            **case.options,
            cache_salt=f"{self.salt}-{number % 5}",
            timeout=self.timeout_s,
        )
        async with stream:
            async for delta in stream:
                now_s = clock()
                self.largest_gap_s = max(self.largest_gap_s, now_s - (latest_s or now_s))
                latest_s = now_s
                self._note(tokens, tokens + len(delta.token_ids))
                tokens += len(delta.token_ids)
        done = stream.completion
        assert done.token_ids == self.oracle.tokens(case), f"stream {number}, {case.sampling}"
        assert done.usage.completion_tokens == len(done.token_ids)
        return done

    def _note(self, before: int, after: int) -> None:
        self._underway += before < TOKENS_BEFORE_FAULT <= after
        if self._underway >= len(self.cases) // 2:
            self.midway.set()
