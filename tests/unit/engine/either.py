"""The same model computed by torch and by native code, for tests that hold for both."""

from __future__ import annotations

import pytest
import torch

from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Model
from baton.engine.ops.native import library
from baton.engine.ops.native.model import NativeModel, unsupported
from baton.engine.weights.weights import Weights

KERNELS = ("torch", "native")


def make(
    kernels: str, config: ModelConfig, weights: Weights, dtype: torch.dtype = torch.float32
) -> Model | NativeModel:
    """The model; skips the test where native code cannot compute it, and says why."""
    if kernels == "torch":
        return Model(config, weights, dtype, torch.device("cpu"))
    if reason := unsupported(config, 16):
        pytest.skip(reason)
    if library.load() is None:
        pytest.skip("no native library can be built here")
    return NativeModel(config, weights, dtype)
