"""Whole models with made-up weights in the same loop: Baton's engine, and transformers.

The engine is built from its parts and not by `baton.engine.build`, so that it also runs on a CPU,
where its kernels are interpreted, and without protobuf.
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
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends.gpu.linear import prepare
from baton.engine.backends.gpu.model import GpuModel
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.blocks import BlockPool
from baton.engine.kv_cache import plan_layout
from baton.engine.loop import Engine, StepReport
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Model
from baton.engine.ops.triton.attention_specs import random_pool
from baton.engine.overlap import OverlappedEngine
from baton.engine.planner import Planner
from baton.engine.runner import Runner, StepRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.engine.weights.weights import random_weights
from baton.sampling import SamplingParams
from benchmarks.shapes import Shape

BLOCK_SIZE = 16
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


@dataclass(frozen=True)
class Limits:
    """What an engine is built for. Tokens, but for `batch`, which counts sequences."""

    batch: int
    context: int
    chunk: int
    warm_up: int = 8  # steps of each measurement that are not counted


class OurEngine:
    """Weights and a pool, and drivers over them: one for decoding, with graphs, one for prompts."""

    def __init__(
        self, shape: Shape, formats: Formats, device: torch.device, num_blocks: int
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(shape.config()), encoding="utf-8")
            self.config = config = ModelConfig.load(path)
        self._dtype, self._device, kv = formats.dtype, device, formats.kv
        form = partial(prepare, quantization=formats.quantization)
        self._weights = random_weights(config, self._dtype, device, 1, form)
        layout = plan_layout(config, kv, BLOCK_SIZE, num_blocks, 0)
        self._sampler = Sampler(frozenset(), config.vocab_size)
        # Random numbers: steps on zeros would take less power.
        sizes = (config.num_layers, config.num_kv_heads, config.head_size)
        self._pool = random_pool(layout.num_blocks, *sizes, kv, device)
        assert tuple(self._pool.shape) == layout.shape

    def driver(self, limits: Limits, *, graphs: bool) -> Driver:
        """An engine as a worker runs it: steps are launched ahead, decode steps are graphs."""
        settings = EngineConfig(max_batch=limits.batch, block_size=BLOCK_SIZE)
        model = GpuModel(self.config, self._weights, self._dtype, self._device)
        runner = GpuRunner(model, self._pool, self._sampler, settings, limits.context)
        if graphs:
            runner.capture()
        return self._driver(runner, limits, OverlappedEngine)

    def reference(self, limits: Limits) -> Driver:
        """The same weights and the model in plain torch, step after step."""
        model = Model(self.config, self._weights, self._dtype, self._device)
        runner = Runner(model, torch.zeros_like(self._pool), self._sampler)
        return self._driver(runner, limits, Engine)

    def _driver(self, runner: StepRunner, limits: Limits, kind: type[Engine]) -> Driver:
        blocks = BlockPool(len(self._pool), BLOCK_SIZE, prefix_cache=False)
        planner = Planner(blocks, limits.chunk, limits.batch)
        return Driver(runner, planner, self.config.vocab_size, limits, kind)


class Driver:
    """One engine, with its thread, planner, sampler and reports, for one measurement at a time.

    No prompt is computed for decode steps: each sequence begins as if its KV had come from
    elsewhere.
    """

    def __init__(
        self, runner: StepRunner, planner: Planner, vocab: int, limits: Limits, kind: type[Engine]
    ) -> None:
        self._vocab, self._warm_up, self._device = vocab, limits.warm_up, runner.pool.device
        self._names, self._dice = map(str, itertools.count()), random.Random(0)
        self._reports: queue.SimpleQueue[tuple[float, StepReport]] = queue.SimpleQueue()
        self._engine = kind(
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

    def decode(
        self, batch: int, context: int, steps: int, *, temperature: float = 0.0, top_p: float = 1.0
    ) -> float:
        """Seconds of a step in which `batch` sequences of that context get a token each."""
        run = self._warm_up + steps + 1
        params = SamplingParams(
            temperature=temperature, top_p=top_p, seed=1, ignore_eos=True, max_tokens=run + 1
        )
        sequences = [self._sequence(self._prompt(context), params) for _ in range(batch)]
        for sequence in sequences:
            self._engine.reserve(sequence).result()

        def start() -> None:
            for sequence in sequences:
                self._engine.resume(sequence.seq_id, context, 7)

        self._engine.submit(start).result()
        ends: list[float] = []
        while len(ends) < run:
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


class Transformers:
    """Hugging Face transformers: its model, its cache, and the loop of `generate`.

    Greedy, bfloat16, SDPA, without what `generate` does around a step, and without torch.compile.
    Of its static and its dynamic cache the one that is faster is taken for each size.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        """Raises ImportError where transformers is not installed."""
        import transformers  # noqa: PLC0415 - it may not be there

        self._transformers, self._device, self._vocab = transformers, device, shape.vocab
        config = transformers.AutoConfig.for_model(**shape.config())
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                made: Any = transformers.AutoModelForCausalLM
                model = made.from_config(config, attn_implementation="sdpa")
        finally:
            torch.set_default_dtype(default)
        self._model = model.to(torch.bfloat16).eval()
        self._best: dict[tuple[int, int], str] = {}

    def measure(self, batch: int, context: int, steps: int) -> tuple[float, str]:
        """Seconds of a step behind a prompt, or of the prompt for no steps; and which cache."""
        size = (batch, context)
        if size not in self._best:
            few = min(steps, 2)
            tried = {}
            for kind in ("static", "dynamic"):
                self._run(kind, batch, context, few)  # first-time costs
                tried[kind] = self._run(kind, batch, context, few)
            self._best[size] = min(tried, key=tried.__getitem__)
        return self._run(self._best[size], batch, context, steps), self._best[size]

    @torch.inference_mode()
    def _run(self, kind: str, batch: int, context: int, steps: int) -> float:
        config, made = self._model.config, self._transformers
        if kind == "dynamic":
            cache = made.DynamicCache(config=config)
        else:
            cache = made.StaticCache(config=config, max_cache_len=context + steps + 2)
        tokens = torch.randint(self._vocab, (batch, context), device=self._device)
        if steps:  # the prompt, and a first step, are not counted
            tokens = self._step(self._step(tokens, cache, 0), cache, context)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        for at in range(context + 1, context + 1 + steps):
            tokens = self._step(tokens, cache, at)
        (tokens if steps else self._step(tokens, cache, 0)).tolist()
        return (time.perf_counter() - began) / max(steps, 1)

    def _step(self, ids: Tensor, cache: Any, at: int) -> Tensor:
        """The next token of each row: `[rows, 1]`."""
        places = torch.arange(at, at + ids.shape[1], device=self._device)[None]
        logits: Tensor = self._model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1,
            position_ids=places.expand(ids.shape[0], -1),
        ).logits  # fmt: skip
        return logits[:, -1].argmax(-1, keepdim=True)
