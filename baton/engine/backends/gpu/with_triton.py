"""An engine on Triton's kernels: its formats, its model, and what drives that.

Imports triton, so it is imported only where that can be had and its kernels can run the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends.gpu.graphs import batch_sizes, table_widths
from baton.engine.backends.gpu.launches import GpuSettings
from baton.engine.backends.gpu.linear import prepare, supported
from baton.engine.backends.gpu.makers import Progress
from baton.engine.backends.gpu.model import GpuModel
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.models.config import ModelConfig
from baton.engine.ops.native.packing import Matrix
from baton.engine.sampling.sampler import Sampler
from baton.engine.weights.weights import Weights


class TritonMaker:
    """Makes the parts of one engine; see `Maker`."""

    kernels = "triton"

    def __init__(self, settings: EngineConfig, config: ModelConfig) -> None:
        self._settings = settings
        self._config = config
        self.lookahead = int(
            settings.overlap
        )  # a step that is launched ahead writes one token's KV

    def refusal(self, value: str, capability: tuple[int, int]) -> str:
        """Why a GPU is too old for the format; empty if it is not."""
        return supported(value, capability) or ""

    def prepare(self, matrix: Tensor) -> Matrix:
        """The weight, quantised if that was asked for."""
        return prepare(matrix, self._settings.quantization)

    def model(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> GpuModel:
        """The model over its weights."""
        self._model = GpuModel(self._config, weights, dtype, device)
        return self._model

    def num_graphs(self, context: int) -> int:
        """One for each batch size and table width."""
        if not self._settings.graphs:
            return 0
        width = -(-context // self._settings.block_size)
        return len(batch_sizes(self._settings.max_batch)) * len(table_widths(width))

    def runner(self, pool: Tensor, sampler: Sampler, max_context: int) -> GpuRunner:
        """What drives the model over the pool."""
        settings = self._settings
        limits = GpuSettings(
            max_batch=settings.max_batch,
            max_context=max_context,
            block_size=settings.block_size,
            graphs=settings.graphs,
            overlap=settings.overlap,
            chunk_tokens=settings.chunk_tokens,
        )
        self._runner = GpuRunner(self._model, pool, sampler, limits)
        return self._runner

    def capture(self, progress: Progress) -> None:
        """Captures the graphs."""
        self._runner.prepare(progress)
