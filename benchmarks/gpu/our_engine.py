"""Baton's engine on a GPU with made-up weights: model, pool, graphs, and an engine that runs them.

Built from its parts and not by `baton.engine.build`, so that it can run on a CPU, too, where its
kernels are interpreted, and without protobuf.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from baton.engine.backends.gpu.launches import GpuSettings
from baton.engine.backends.gpu.linear import prepare
from baton.engine.backends.gpu.model import GpuModel
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.kv_cache import KvLayout, plan_layout
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Model
from baton.engine.runner import Runner
from baton.engine.sampling.sampler import Sampler
from baton.engine.weights.weights import Weights, random_weights
from benchmarks.gpu import paged
from benchmarks.gpu.driving import Driver, Limits
from benchmarks.gpu.floors import Storage
from benchmarks.gpu.paged import Geometry
from benchmarks.shapes import Shape

BLOCK_SIZE = 16
_SEED = 1


@dataclass(frozen=True)
class Formats:
    """Of what weights, KV and everything else are made."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    quantization: str = "none"
    kv_dtype: torch.dtype | None = None  # None: dtype

    @property
    def kv(self) -> torch.dtype:
        """Of the pool."""
        return self.kv_dtype or self.dtype

    @property
    def storage(self) -> Storage:
        """Bytes for floors."""
        weight = self.dtype.itemsize if self.quantization == "none" else 1
        return Storage(weight, self.kv.itemsize)


BF16 = Formats("bf16")
FP8 = Formats("fp8", quantization="fp8", kv_dtype=torch.float8_e4m3fn)
FLOAT32 = Formats("f32", dtype=torch.float32)


def config_of(shape: Shape) -> ModelConfig:
    """As the engine reads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(shape.config()), encoding="utf-8")
        return ModelConfig.load(path)


class OurEngine:
    """Weights and a pool, and drivers over them: one for decoding, with graphs, one for prompts."""

    def __init__(
        self,
        shape: Shape,
        formats: Formats,
        device: torch.device,
        num_blocks: int,
        *,
        graphs: bool,
        weights: Callable[[ModelConfig], Weights] | None = None,
        config: ModelConfig | None = None,
    ) -> None:
        self.shape, self.formats, self._device, self._graphs = shape, formats, device, graphs
        self.config = config or config_of(shape)
        self.weights = (weights or self._made_up)(self.config)
        self.layout = plan_layout(self.config, formats.kv, BLOCK_SIZE, num_blocks, 0)
        self.sampler = Sampler(frozenset(), self.config.vocab_size)

    def _made_up(self, config: ModelConfig) -> Weights:
        formats = self.formats
        form = partial(prepare, quantization=formats.quantization)
        return random_weights(config, formats.dtype, self._device, _SEED, form)

    @cached_property
    def model(self) -> GpuModel:
        """The forward pass over Triton's kernels."""
        return GpuModel(self.config, self.weights, self.formats.dtype, self._device)

    @cached_property
    def pool(self) -> torch.Tensor:
        """KV of random numbers: steps on zeros would take less power."""
        config, formats = self.config, self.formats
        g = Geometry(
            config.num_heads, config.num_kv_heads, config.head_size, BLOCK_SIZE, formats.dtype,
            formats.kv,
        )  # fmt: skip
        pool = paged.random_pool(g, self.layout.num_blocks, config.num_layers, self._device)
        assert tuple(pool.shape) == self.layout.shape
        return pool

    def driver(self, limits: Limits, *, graphs: bool | None = None) -> Driver:
        """An engine as a worker runs it: steps are launched ahead, decode steps are graphs."""
        settings = GpuSettings(
            max_batch=limits.batch,
            max_context=limits.context,
            block_size=BLOCK_SIZE,
            graphs=self._graphs if graphs is None else graphs,
        )
        runner = GpuRunner(self.model, self.pool, self.sampler, settings)
        runner.prepare(lambda done, total: None)
        return Driver(runner, self.layout, self.config.vocab_size, limits, lookahead=1)

    def reference(self, limits: Limits) -> Driver:
        """The same weights and the model in plain torch, step after step."""
        model = Model(self.config, self.weights, self.formats.dtype, self._device)
        runner = Runner(model, torch.zeros_like(self.pool), self.sampler)
        return Driver(runner, self.layout, self.config.vocab_size, limits, lookahead=0)


def blocks_for(sequences: int, tokens: int) -> int:
    """Blocks of so many sequences of so many tokens each."""
    return sequences * -(-tokens // BLOCK_SIZE)


def layout_bytes(shape: Shape, formats: Formats, num_blocks: int) -> int:
    """Bytes of a pool."""
    one = KvLayout(
        1, shape.layers, shape.kv_heads, BLOCK_SIZE, shape.head_size, formats.kv
    ).num_bytes
    return num_blocks * one
