"""What a cluster must equal: the same engine in one process; and requests to compare with it."""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.client import AsyncClient, Completion
from baton.config import EngineConfig
from baton.generation.sampling_params import SamplingParams, StructuredOutput
from baton.local.cluster import LocalCluster
from baton.local.single import SingleProcess
from tests.waiting import WAIT_S, LoopLag, eventually

ENGINE = EngineConfig(dtype="float32", kv_cache_bytes=64 << 20)  # float32: tokens can be compared
SIMULATED = replace(ENGINE, simulate="8000,4")
LENGTHS = (1, 15, 16, 17, 500, 1900)
NEW_TOKENS = 24
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 200, "seed": 1234},
}
# Never at its end, so that a case has all its tokens.
_ENDLESS = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    "minItems": 1000,
}
SAMPLING["structured"] = {**SAMPLING["seeded"], "structured_outputs": {"json": _ENDLESS}}
TOKENS_BEFORE_FAULT = 10
# Added to a promised bound: recomputing lost tokens, and a busy machine.
SLACK_S, LAGS = 5.0, 5.0


@dataclass(frozen=True)
class Case:
    """A prompt in tokens and how to sample."""

    prompt: tuple[int, ...]
    sampling: str
    new_tokens: int = NEW_TOKENS

    @property
    def options(self) -> dict[str, Any]:
        """For the SDK."""
        options = {**SAMPLING[self.sampling], "max_tokens": self.new_tokens}
        return {**options, "ignore_eos": self.sampling != "structured"}


class Oracle:
    """Runs cases in this process, each once."""

    def __init__(self, settings: EngineConfig, **changes: Any) -> None:
        self._process = SingleProcess(replace(settings, threads=1, **changes))
        self._known: dict[Case, tuple[int, ...]] = {}

    def __enter__(self) -> Oracle:
        self._process.__enter__()
        self._source = self._process.tokenizer.encode(inspect.getsource(ast) * 2)
        return self

    def __exit__(self, *args: object) -> None:
        self._process.__exit__(*args)

    def case(
        self, length: int, start: int = 0, sampling: str = "greedy", new_tokens: int = NEW_TOKENS
    ) -> Case:
        """A prompt and what comes of it, which is known from now on."""
        case = Case(self.prompt(length, start), sampling, new_tokens)
        self.tokens(case)
        return case

    def prompt(self, length: int, start: int = 0) -> tuple[int, ...]:
        """`length` tokens of Python; other starts share no prefix."""
        return tuple(self._source[start : start + length])

    def mixed(self, count: int, new_tokens: int = 150) -> list[Case]:
        """Prompts that need a handoff, of four lengths, in each way to sample."""
        kinds = tuple(SAMPLING)
        return [
            self.case(20 + 60 * (i // 3 % 4), 0, kinds[i % 3], new_tokens) for i in range(count)
        ]

    def text(self, tokens: tuple[int, ...]) -> str:
        """Text of token ids."""
        return self._process.tokenizer.decode(tokens)

    def tokens(self, case: Case) -> tuple[int, ...]:
        """What a cluster must stream for a case."""
        if case not in self._known:
            options = case.options
            if asked := options.pop("structured_outputs", None):
                options["structured_output"] = StructuredOutput(
                    json_schema=json.dumps(asked["json"])
                )
            self._known[case] = self.generate(case.prompt, **options).token_ids
        return self._known[case]

    def generate(self, prompt: tuple[int, ...], **sampling: Any) -> Completion:
        """What a cluster must give for a prompt; not kept."""
        return self._process.generate(prompt, SamplingParams(**sampling))


async def check(client: AsyncClient, oracle: Oracle, case: Case, **options: Any) -> Completion:
    """Runs a case on a cluster and compares every token."""
    done = await client.generate(case.prompt, **{**case.options, "timeout": WAIT_S, **options})
    assert done.token_ids == oracle.tokens(case), f"{len(case.prompt)} tokens, {case.sampling}"
    return done


async def all_blocks_free(client: AsyncClient) -> None:
    """Returns once no worker holds or quarantines a block; fails after a long time."""

    async def held() -> dict[str, int]:
        workers = (await client.status())["workers"]
        counts = {w["incarnation"]: w["blocks_held"] + w["blocks_quarantined"] for w in workers}
        return {name: count for name, count in counts.items() if count}

    await eventually(held, lambda left: not left, "blocks are still held")


async def start_again(cluster: LocalCluster, name: str, *args: str) -> None:
    """Kills a process and starts it again, once it has ended, with more arguments."""
    process = cluster.processes[name]
    cluster.kill(name)
    await process.wait()
    process.argv += args
    await cluster.start_again(name)


async def decoding_process(cluster: LocalCluster, client: AsyncClient) -> str:
    """The name of the decode worker that runs the only stream."""

    async def names() -> list[str]:
        return await decoding_processes(cluster, client)

    # Another one's report about its last stream's end may still be on its way.
    return (await eventually(names, lambda found: len(found) == 1, "not one worker decodes"))[0]


async def decoding_processes(cluster: LocalCluster, client: AsyncClient) -> list[str]:
    """The names of the decode workers that run streams."""
    workers = (await client.status())["workers"]
    pids = {w["pid"] for w in workers if w["role"] == "decode" and w["running"]}
    return [name for name, process in cluster.processes.items() if process.pid in pids]


@dataclass
class Streams:
    """Runs all cases at once; `midway` is set once a share of them, half, have ten tokens.

    `largest_gap_s` is the longest time between two messages of one stream so far.
    """

    client: AsyncClient
    oracle: Oracle
    cases: Sequence[Case]
    timeout_s: float = WAIT_S
    share: float = 0.5
    midway: asyncio.Event = field(default_factory=asyncio.Event)
    largest_gap_s: float = 0.0
    _lag: LoopLag = field(default_factory=LoopLag)
    # Shared clusters have run the same prompts before: they must not be cached.
    salt: int = field(default_factory=itertools.count().__next__)
    _underway: int = 0

    async def start(self) -> asyncio.Task[list[Completion]]:
        """Runs them in a task; returns it once they are midway."""
        task = asyncio.create_task(self.run())
        midway = asyncio.create_task(self.midway.wait())
        await asyncio.wait((task, midway), return_when=asyncio.FIRST_COMPLETED)
        midway.cancel()
        assert not task.done(), task.exception() or "all streams ended before enough were midway"
        return task

    async def run(self) -> list[Completion]:
        """What came; each has the oracle's tokens."""
        async with self._lag:
            streams = (self._one(number, case) for number, case in enumerate(self.cases))
            return await asyncio.gather(*streams)

    def check_gap(self, promised_s: float) -> None:
        """Fails if a stream paused for longer than promised, on a machine as busy as this one."""
        assert self.largest_gap_s < promised_s + SLACK_S + LAGS * self._lag.largest_s

    async def _one(self, number: int, case: Case) -> Completion:
        clock = asyncio.get_running_loop().time
        tokens, latest_s = 0, None
        salt = f"{self.salt}-{number % 5}"
        options = {**case.options, "cache_salt": salt, "timeout": self.timeout_s}
        async with self.client.stream(case.prompt, **options) as stream:
            async for delta in stream:
                now_s = clock()
                self.largest_gap_s = max(self.largest_gap_s, now_s - (latest_s or now_s))
                latest_s, before = now_s, tokens
                tokens += len(delta.token_ids)
                self._underway += before < TOKENS_BEFORE_FAULT <= tokens
                if self._underway >= int(len(self.cases) * self.share):
                    self.midway.set()
        done = stream.completion
        assert done.token_ids == self.oracle.tokens(case), f"stream {number}, {case.sampling}"
        assert done.usage.completion_tokens == len(done.token_ids)
        return done
