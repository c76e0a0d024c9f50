"""A real engine over a runner: its thread, planner, batches, sampler and reports; no server.

No prompt is computed for decode steps: each sequence begins as if its KV had come from elsewhere.
"""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from baton.engine.blocks import BlockPool
from baton.engine.kv_cache import KvLayout
from baton.engine.loop import Engine, StepReport
from baton.engine.planner import Planner
from baton.engine.runner import StepRunner
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams

_STEP_S = 60.0  # longer than any step takes


@dataclass(frozen=True)
class Limits:
    """What an engine is built for. Tokens, but for `batch`, which counts sequences."""

    batch: int
    context: int
    chunk: int
    warm_up: int = 8  # steps of each measurement that are not counted


class Driver:
    """One engine, asked for one thing at a time."""

    def __init__(
        self, runner: StepRunner, layout: KvLayout, vocab: int, limits: Limits, lookahead: int
    ) -> None:
        self._vocab, self._warm_up = vocab, limits.warm_up
        self._device = runner.pool.device
        self._names = map(str, itertools.count())
        self._dice = random.Random(0)
        self._reports: queue.SimpleQueue[tuple[float, StepReport]] = queue.SimpleQueue()
        blocks = BlockPool(layout.num_blocks, layout.block_size, prefix_cache=False)
        planner = Planner(blocks, limits.chunk, limits.batch, lookahead=lookahead)
        self._engine = Engine(
            runner, planner, frozenset(), limits.context,
            lambda report: self._reports.put((time.perf_counter(), report)),
        )  # fmt: skip

    def __enter__(self) -> Self:
        self._engine.start()
        if self._device.type == "cuda":  # CUDA keeps it for each thread
            self._engine.submit(partial(torch.cuda.set_device, self._device)).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.stop()

    def all_steps(self, steps: int) -> int:
        """How many steps are run to measure so many."""
        return self._warm_up + steps + 1

    def decode(
        self, batch: int, context: int, steps: int, *, temperature: float = 0.0, top_p: float = 1.0
    ) -> float:
        """Seconds of a step in which `batch` sequences of that context get a token each."""
        params = SamplingParams(
            temperature=temperature, top_p=top_p, seed=1, ignore_eos=True,
            max_tokens=self.all_steps(steps) + 1,
        )  # fmt: skip
        sequences = [self._sequence(self._prompt(context), params) for _ in range(batch)]
        for sequence in sequences:
            self._engine.reserve(sequence).result()

        def start() -> None:
            for sequence in sequences:
                self._engine._sequences.resume(sequence.seq_id, context, 7)

        self._engine.submit(start).result()
        ends: list[float] = []
        while len(ends) < self.all_steps(steps):
            ended, report = self._next()
            if len(report.progress) == batch:
                ends.append(ended)
        counted = ends[self._warm_up - 1 : -1]  # the last one frees everything
        return (counted[-1] - counted[0]) / (len(counted) - 1)

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt's submission to its first token."""
        sequence = self._sequence(self._prompt(tokens), SamplingParams(max_tokens=1))
        began = time.perf_counter()
        self._engine.add(sequence).result()
        while True:
            ended, report = self._next()
            if any(progress.token_ids for progress in report.progress):
                return ended - began

    def generate(self, prompts: Items[list[int]], new_tokens: int) -> list[tuple[int, ...]]:
        """Greedy tokens for each prompt, all of them at once."""
        params = SamplingParams(ignore_eos=True, max_tokens=new_tokens)
        sequences = [self._sequence(list(prompt), params) for prompt in prompts]
        for sequence in sequences:
            self._engine.add(sequence).result()
        found: dict[str, tuple[int, ...]] = {sequence.seq_id: () for sequence in sequences}
        while any(len(tokens) < new_tokens for tokens in found.values()):
            for progress in self._next()[1].progress:
                found[progress.seq_id] += progress.token_ids
        return [found[sequence.seq_id] for sequence in sequences]

    def _sequence(self, tokens: list[int], params: SamplingParams) -> Sequence:
        return Sequence(next(self._names), tokens, len(tokens), params)

    def _prompt(self, tokens: int) -> list[int]:
        return [self._dice.randrange(self._vocab) for _ in range(tokens)]

    def _next(self) -> tuple[float, StepReport]:
        """The next step that computed something. Raises RuntimeError for one that failed."""
        while True:
            try:
                ended, report = self._reports.get(timeout=_STEP_S)
            except queue.Empty:
                raise RuntimeError(f"no step ended within {_STEP_S:g} s") from None
            for progress in report.progress:
                if progress.abort_reason:
                    raise RuntimeError(progress.abort_reason)
            if report.progress:
                return ended, report
