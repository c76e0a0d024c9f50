"""What a cluster must equal: the same model, run by one process, and prompts to try it with."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, replace
from typing import Any

from baton.client import AsyncClient, Completion
from baton.config import EngineConfig
from baton.local.single import SingleProcess
from baton.sampling import SamplingParams
from tests.waiting import eventually

LENGTHS = (1, 15, 16, 17, 500, 1900)
NEW_TOKENS = 24
PLAIN = EngineConfig(dtype="float32")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 200, "seed": 1234},
}


@dataclass(frozen=True)
class Case:
    """A prompt in tokens and how to sample."""

    prompt: tuple[int, ...]
    sampling: str
    new_tokens: int = NEW_TOKENS

    @property
    def options(self) -> dict[str, Any]:
        """For the SDK."""
        return {**SAMPLING[self.sampling], "max_tokens": self.new_tokens, "ignore_eos": True}


class Oracle:
    """Runs cases in this process, each once."""

    def __init__(self, settings: EngineConfig = PLAIN) -> None:
        self._process = SingleProcess(replace(settings, threads=1))
        self._known: dict[Case, tuple[int, ...]] = {}

    def __enter__(self) -> Oracle:
        self._process.__enter__()
        self._source = self._process.tokenizer.encode(inspect.getsource(ast) * 2)
        return self

    def __exit__(self, *args: object) -> None:
        self._process.__exit__(*args)

    def prompt(self, length: int, start: int = 0) -> tuple[int, ...]:
        """`length` tokens of Python; other starts share no prefix."""
        return tuple(self._source[start : start + length])

    def text(self, tokens: tuple[int, ...]) -> str:
        """Text of token ids."""
        return self._process.tokenizer.decode(tokens)

    def tokens(self, case: Case) -> tuple[int, ...]:
        """What a cluster must stream for a case."""
        if case not in self._known:
            params = SamplingParams(
                **SAMPLING[case.sampling], max_tokens=case.new_tokens, ignore_eos=True
            )
            self._known[case] = self._process.generate(list(case.prompt), params).token_ids
        return self._known[case]


async def check(client: AsyncClient, oracle: Oracle, case: Case, **options: Any) -> Completion:
    """Runs a case on a cluster and compares every token."""
    done = await client.generate(case.prompt, **{**case.options, **options}, timeout=120.0)
    assert done.token_ids == oracle.tokens(case), f"{len(case.prompt)} tokens, {case.sampling}"
    return done


async def all_blocks_free(client: AsyncClient) -> None:
    """Returns once no worker holds or quarantines a block; fails after some seconds."""

    async def held() -> dict[str, int]:
        status = await client.status()
        return {
            worker["incarnation"]: worker["blocks_held"] + worker["blocks_quarantined"]
            for worker in status["workers"]
            if worker["blocks_held"] + worker["blocks_quarantined"]
        }

    await eventually(held, lambda left: not left, "blocks are still held")
