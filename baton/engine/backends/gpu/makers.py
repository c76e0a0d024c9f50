"""What assembles an engine of one kind of kernels, and the kind that needs nothing but torch.

The other kind is `baton.engine.backends.gpu.with_triton`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.batch import StepModel
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Model
from baton.engine.ops.native.packing import Matrix
from baton.engine.runner import Runner, StepRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.weights.weights import Weights

Progress = Callable[[int, int], None]
"""Called with how many are done, and of how many."""


class Maker(Protocol):
    """Makes the parts of one engine, in this order."""

    kernels: str  # as `--kernels` calls them
    lookahead: int  # slots that decoding sequences get beforehand; see `Planner`

    def refusal(self, value: str, capability: tuple[int, int]) -> str:
        """Why the 8-bit format `value` cannot be computed on such a GPU; empty if it can."""

    def prepare(self, matrix: Tensor) -> Matrix:
        """A weight as the model takes it."""

    def model(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> StepModel:
        """The model over its weights."""

    def num_graphs(self, context: int) -> int:
        """How many decode steps are captured where sequences have up to `context` tokens."""

    def runner(self, pool: Tensor, sampler: Sampler, max_context: int) -> StepRunner:
        """What drives the model over the pool."""

    def capture(self, progress: Progress) -> None:
        """Does what the runner has to do before its first step."""


class TorchMaker:
    """Torch's own kernels: slow, but on any GPU and for any model."""

    kernels = "torch"
    lookahead = 0

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def refusal(self, value: str, capability: tuple[int, int]) -> str:
        """On a GPU none of the 8-bit formats."""
        return "it needs Triton's kernels on a GPU, and torch's compute here"

    def prepare(self, matrix: Tensor) -> Matrix:
        """The weight itself."""
        return matrix

    def model(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> Model:
        """The reference of all models."""
        self._model = Model(self._config, weights, dtype, device)
        return self._model

    def num_graphs(self, context: int) -> int:
        """None."""
        return 0

    def runner(self, pool: Tensor, sampler: Sampler, max_context: int) -> Runner:
        """The same as on a CPU."""
        return Runner(self._model, pool, sampler)

    def capture(self, progress: Progress) -> None:
        """Nothing."""
