"""Baton's engine with made-up weights, driven for one measurement at a time.

It is put together here and not by `baton.engine.build.load`, so that it also runs on a CPU, where
its kernels are interpreted, and without protobuf.
"""

from __future__ import annotations

import itertools
import json
import queue
import random
import tempfile
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from baton.config import EngineConfig
from baton.engine.backends.gpu.linear import prepare
from baton.engine.backends.gpu.model import GpuModel
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.build import Loaded
from baton.engine.kv_cache import KvLayout, plan_layout
from baton.engine.loop import StepReport
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Model
from baton.engine.ops.triton.attention_specs import random_pool
from baton.engine.runner import Runner, StepRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.engine.weights.weights import random_weights
from baton.sampling import SamplingParams
from benchmarks.shapes import Shape

BLOCK_SIZE = EngineConfig.block_size
NO_DESCRIPTOR: Any = None  # it is protobuf's, for other workers
_STEP_S = 60.0  # longer than any step takes


@dataclass(frozen=True)
class Formats:
    """Of what weights, KV and everything else are made."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    kv: torch.dtype = torch.bfloat16
    quantization: str = "none"

    @property
    def weight_bytes(self) -> int:
        """Of an element of a matrix."""
        return self.dtype.itemsize if self.quantization == "none" else 1

    def layout(self, shape: Shape, num_blocks: int = 1) -> KvLayout:
        """Of a pool."""
        sizes = (shape.layers, shape.kv_heads, BLOCK_SIZE, shape.head_size)
        return KvLayout(num_blocks, *sizes, self.kv)


class OurEngine:
    """Weights and a pool, and drivers over them: one for decoding, with graphs, one for prompts."""

    def __init__(
        self, shape: Shape, formats: Formats, device: torch.device, num_blocks: int
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(shape.config()), encoding="utf-8")
            self._config = config = ModelConfig.load(path)
        form = partial(prepare, quantization=formats.quantization)
        weights = random_weights(config, formats.dtype, device, 1, form)
        self._model_args = (config, weights, formats.dtype, device)
        self._layout = plan_layout(config, formats.kv, BLOCK_SIZE, num_blocks, 0)
        self._sampler = Sampler(frozenset(), config.vocab_size)
        # Random numbers: steps on zeros would take less power.
        sizes = (config.num_layers, config.num_kv_heads, config.head_size)
        self._pool = random_pool(num_blocks, *sizes, formats.kv, device)
        assert tuple(self._pool.shape) == self._layout.shape

    def driver(
        self, batch: int, context: int, chunk: int, *, graphs: bool = False, reference: bool = False
    ) -> Driver:
        """An engine as a worker runs it: steps are launched ahead, decode steps are graphs.

        reference: the model in plain torch, step after step.
        """
        settings = EngineConfig(max_batch=batch, chunk_tokens=chunk, prefix_cache=False)
        runner: StepRunner
        if reference:
            pool = torch.zeros_like(self._pool)
            runner = Runner(Model(*self._model_args), pool, self._sampler)
        else:
            model = GpuModel(*self._model_args)
            runner = on_gpu = GpuRunner(model, self._pool, self._sampler, settings, context)
            if graphs:
                on_gpu.capture(lambda done, total: None)
        return Driver(
            Loaded(
                Path(), self._config, runner, self._layout, NO_DESCRIPTOR, settings, context,
                prepare=lambda: None,
            )
        )  # fmt: skip


class Driver:
    """One engine, with its thread, planner, sampler and reports, for one measurement at a time.

    No prompt is computed for decode steps: each sequence begins as if its KV had come from
    elsewhere.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._vocab = loaded.model_config.vocab_size
        self._names, self._dice = map(str, itertools.count()), random.Random(0)
        self._reports: queue.SimpleQueue[tuple[float, StepReport]] = queue.SimpleQueue()
        self._engine = loaded.engine(
            lambda report: self._reports.put((time.perf_counter(), report))
        )

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.stop()

    def decode(
        self, batch: int, context: int, warm_up: int, steps: int, **sampling: float
    ) -> float:
        """Seconds of a step in which `batch` sequences of that context get a token each."""
        run = warm_up + steps + 1
        params = SamplingParams(seed=1, ignore_eos=True, max_tokens=run + 1, **sampling)  # type: ignore[arg-type]
        sequences = [self._sequence(self._prompt(context), params) for _ in range(batch)]
        for sequence in sequences:
            self._engine.reserve(sequence).result()

        def start() -> None:
            for sequence in sequences:
                self._engine._sequences.resume(sequence.seq_id, context, 7)

        self._engine.submit(start).result()
        ends: list[float] = []
        while len(ends) < run:
            ended, report = self._next()
            if len(report.progress) == batch:
                ends.append(ended)
        counted = ends[warm_up - 1 : -1]  # the last one frees everything
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
            if failed := [one.abort_reason for one in report.progress if one.abort_reason]:
                raise RuntimeError(failed[0])
            if report.progress:
                return ended, report
