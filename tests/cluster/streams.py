"""Many streams at once, each compared with the oracle; what their callers feel of an accident."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.client import AsyncClient, Completion
from tests.cluster.oracle import Case, Oracle

TOKENS_BEFORE_ACCIDENT = 10


def mixed_cases(oracle: Oracle, count: int, new_tokens: int = 150) -> list[Case]:
    """Prompts that need a handoff, of four lengths, greedy and seeded, long enough to be hit."""
    kinds = ("greedy", "seeded")
    cases = [
        Case(oracle.prompt(20 + 60 * (i // 2 % 4)), kinds[i % 2], new_tokens) for i in range(count)
    ]
    for case in cases:
        oracle.tokens(case)
    return cases


@dataclass
class Streams:
    """Runs all cases at once; `midway` is set once half of them have ten tokens.

    `largest_gap_s` is the longest time between two messages of one stream so far.
    """

    client: AsyncClient
    oracle: Oracle
    cases: Sequence[Case]
    timeout_s: float = 90.0
    midway: asyncio.Event = field(default_factory=asyncio.Event)
    largest_gap_s: float = 0.0
    _underway: int = 0

    async def run(self) -> list[Completion]:
        """What came; each has the oracle's tokens."""
        streams = (self._one(number, case) for number, case in enumerate(self.cases))
        return await asyncio.gather(*streams)

    async def _one(self, number: int, case: Case) -> Completion:
        clock = asyncio.get_running_loop().time
        tokens, latest_s = 0, None
        stream = self.client.stream(
            case.prompt, **case.options, cache_salt=f"{number % 5}", timeout=self.timeout_s
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
        self._underway += before < TOKENS_BEFORE_ACCIDENT <= after
        if self._underway >= len(self.cases) // 2:
            self.midway.set()
