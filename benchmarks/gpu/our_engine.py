"""Baton's engine with made-up weights.

It is put together here and not by `baton.engine.build.load`, so that it also runs on a CPU, where
its kernels are interpreted, and without protobuf.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baton.config import EngineConfig
from baton.engine.backends.gpu.linear import prepare
from baton.engine.backends.gpu.model import GpuModel
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.build import Loaded
from baton.engine.kv_cache import KvLayout, plan_layout
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Model
from baton.engine.ops.triton.attention_specs import random_pool
from baton.engine.runner import Runner, StepRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.weights.weights import random_weights
from benchmarks.engine.driver import Driver
from benchmarks.shapes import Shape

BLOCK_SIZE = EngineConfig.block_size
NO_DESCRIPTOR: Any = None  # it is protobuf's, for other workers


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
                on_gpu.capture()
        return Driver(
            Loaded(
                Path(), self._config, runner, self._layout, NO_DESCRIPTOR, settings, context,
                prepare=lambda: None,
            )
        )  # fmt: skip
