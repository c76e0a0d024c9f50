"""Brings the weights that settings ask for into memory, and tells how far it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from baton.config import EngineConfig
from baton.engine.models.config import ModelConfig
from baton.engine.weights.weights import Prepare, Weights, load_weights, random_weights

log = logging.getLogger(__name__)
_CPU_WEIGHTS_SEED, _GPU_WEIGHTS_SEED = 0, 1
_SIMULATED_SEED = -1  # so that no simulated worker is paired with a real one
_GIB = float(1 << 30)


def weights_of(
    settings: EngineConfig,
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    prepare: Prepare,
) -> Weights:
    """The weights of the model at `path`, or made-up ones, on the device, prepared one by one.

    Raises CheckpointError.
    """
    seed = random_seed(settings, device)
    if seed is not None:
        return random_weights(config, dtype, device, seed, prepare)
    return load_weights(path, config, dtype, device, Progress(), prepare)


def random_seed(settings: EngineConfig, device: torch.device) -> int | None:
    """What stands for weights that no checkpoint tells of; None where one does.

    A GPU makes others up than a CPU: workers that hold different ones must never be paired.
    """
    if settings.simulate:
        return _SIMULATED_SEED
    if not settings.random_weights:
        return None
    return _CPU_WEIGHTS_SEED if device.type == "cpu" else _GPU_WEIGHTS_SEED


class Progress:
    """Logs how far loading is, at most once a second: bytes, their rate, the time that is left."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._began = now_s()
        self._told = self._began

    def __call__(self, done: int, total: int) -> None:
        """Takes in that so many bytes of all are there."""
        now = self._now_s()
        if now < self._told + 1.0:
            return
        self._told = now
        rate = done / (now - self._began)
        log.info(
            "loading weights: %.2f of %.2f GiB, %.2f GiB/s, %.0f s left",
            done / _GIB, total / _GIB, rate / _GIB, (total - done) / rate,
        )  # fmt: skip


def tell_loaded(
    settings: EngineConfig,
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str,
    seconds: float,
) -> None:
    """Logs what was loaded."""
    quantization = settings.quantization
    log.info(
        "loaded %s: %.1f M parameters, %s%s on %s, %s kernels, %.1f s",
        path.name, config.num_parameters / 1e6,
        f"{quantization} weights, " if quantization != "none" else "", dtype, device, kernels,
        seconds,
    )  # fmt: skip
