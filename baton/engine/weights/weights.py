"""A model's weights: read from safetensors, or random ones for benchmarks.

Query, key and value projections are fused into one matrix, and so are gate and up, while loading:
each part is copied from the mapped file to its place on the device, so memory stays near the
model's size, and a GPU's model takes none of the host's. Matrices that are wanted in another form
are turned into it one by one, as they come, on the device.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.models.config import (
    ModelConfig,
    Part,
    check_tensors,
    embedding,
    expected,
    final_norm,
    layer_parts,
    lm_head,
)
from baton.engine.ops.native.packing import Matrix
from baton.engine.sampling.randomness import RandomTensors
from baton.engine.weights.checkpoint import ELEMENT_BYTES, StoredTensor, stored_tensors
from baton.errors import CheckpointError

RANDOM_STD = 0.02

Prepare = Callable[[Tensor], Matrix]
"""What is done to each matrix as soon as it is read; what it was read into is then given up."""

Progress = Callable[[int, int], None]
"""Called after each tensor with the bytes of the files that were read, and the bytes of all."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; matrices are `[out, in]`. Absent biases and norms are None."""

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Matrix
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


@dataclass(frozen=True)
class Weights:
    """A whole model; a tied `lm_head` is `embedding` itself, unless prepared."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Matrix


Make = Callable[[tuple[Part, ...]], Tensor]
"""Makes the tensor that holds the parts, one after the other along the first axis."""


def _as_read(matrix: Tensor) -> Matrix:
    return matrix


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    prepare: Prepare = _as_read,
) -> Weights:
    """The weights in a model directory, converted to dtype and moved to device.

    `prepare` is applied to what activations are multiplied with; embedding, norms, biases stay.

    Raises CheckpointError naming the file and the tensor when a file is missing, broken, truncated
    or pickled, or when a tensor is missing, unknown or of another shape than the config says.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a model directory: it has no weights to load")
    stored = stored_tensors(path)
    check_tensors(path, config, stored)
    with ExitStack() as files:
        total = sum(_num_bytes(stored[part.name]) for part in expected(config))
        reader = _Reader(stored, files, dtype, device, progress, total)
        return _assemble(config, reader.make, prepare)


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    prepare: Prepare = _as_read,
) -> Weights:
    """Seeded random weights, the same on every machine: for benchmarks that need no real model.

    A GPU's are the same on every GPU, but others than a CPU's: see `RandomTensors`.
    """
    random = _random_on_cpu(dtype, seed)
    if device.type != "cpu":
        tensors = RandomTensors(seed, device)
        random = partial(tensors.uniform, dtype=dtype, std=RANDOM_STD)

    def make(parts: tuple[Part, ...]) -> Tensor:
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        if parts[0].name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        return random(shape)

    return _assemble(config, make, prepare)


def _random_on_cpu(dtype: torch.dtype, seed: int) -> Callable[[tuple[int, ...]], Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=dtype).normal_(std=RANDOM_STD, generator=generator)

    return random


def _assemble(config: ModelConfig, make: Make, prepare: Prepare) -> Weights:
    embeddings = make((embedding(config),))
    layers = tuple(_layer(config, index, make, prepare) for index in range(config.num_layers))
    norm = make((final_norm(config),))
    head = embeddings if config.tie_embeddings else make((lm_head(config),))
    return Weights(embeddings, layers, norm, prepare(head))


def _layer(config: ModelConfig, index: int, make: Make, prepare: Prepare) -> LayerWeights:
    parts = layer_parts(config, index)

    def tensor(*names: str) -> Tensor:
        return make(tuple(parts[name] for name in names))

    def matrix(*names: str) -> Matrix:
        return prepare(tensor(*names))

    def optional(*names: str) -> Tensor | None:
        return tensor(*names) if names[0] in parts else None

    attention, mlp = "self_attn.", "mlp."
    return LayerWeights(
        input_norm=tensor("input_layernorm.weight"),
        qkv=matrix(*(f"{attention}{x}_proj.weight" for x in "qkv")),
        qkv_bias=optional(*(f"{attention}{x}_proj.bias" for x in "qkv")),
        q_norm=optional(f"{attention}q_norm.weight"),
        k_norm=optional(f"{attention}k_norm.weight"),
        o=matrix(f"{attention}o_proj.weight"),
        o_bias=optional(f"{attention}o_proj.bias"),
        post_norm=tensor("post_attention_layernorm.weight"),
        gate_up=matrix(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
        gate_up_bias=optional(f"{mlp}gate_proj.bias", f"{mlp}up_proj.bias"),
        down=matrix(f"{mlp}down_proj.weight"),
        down_bias=optional(f"{mlp}down_proj.bias"),
    )


def _num_bytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape) * ELEMENT_BYTES[stored.dtype]


class _Reader:
    """Copies stored tensors out of their mapped files, which stay open until `files` closes."""

    def __init__(
        self,
        stored: dict[str, StoredTensor],
        files: ExitStack,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
        total: int,
    ) -> None:
        self._stored = stored
        self._files = files
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._total = total
        self._done = 0
        self._open: dict[Path, Any] = {}

    def make(self, parts: tuple[Part, ...]) -> Tensor:
        rows = [part.shape[0] for part in parts]
        shape = (sum(rows), *parts[0].shape[1:])
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        for part, target in zip(parts, whole.split(rows), strict=True):
            stored = self._stored[part.name]
            target.copy_(self._read(stored))
            self._done += _num_bytes(stored)
            if self._progress is not None:
                self._progress(self._done, self._total)
        return whole

    def _read(self, stored: StoredTensor) -> Tensor:
        try:
            if stored.file not in self._open:
                opened = safe_open(stored.file, framework="pt", device="cpu")
                self._open[stored.file] = self._files.enter_context(opened)
            tensor: Tensor = self._open[stored.file].get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{stored.file}: tensor {stored.name}: {error}") from error
        return tensor


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
    kernels: str,
) -> Weights:
    """The weights of the model at `path`, or made-up ones, on the device, prepared one by one.

    kernels: which they are for, to be logged. Raises CheckpointError.
    """
    started, quantization = time.monotonic(), settings.quantization
    seed = random_seed(settings, device)
    if seed is not None:
        weights = random_weights(config, dtype, device, seed, prepare)
    else:
        weights = load_weights(path, config, dtype, device, LoadProgress(), prepare)
    log.info(
        "loaded %s: %.1f M parameters, %s%s on %s, %s kernels, %.1f s",
        path.name, config.num_parameters / 1e6,
        f"{quantization} weights, " if quantization != "none" else "", dtype, device, kernels,
        time.monotonic() - started,
    )  # fmt: skip
    return weights


def random_seed(settings: EngineConfig, device: torch.device) -> int | None:
    """The seed of random weights; None where a checkpoint has them.

    A GPU's are others than a CPU's: workers that hold different ones must never be paired.
    """
    if settings.simulate:
        return _SIMULATED_SEED
    if not settings.random_weights:
        return None
    return _CPU_WEIGHTS_SEED if device.type == "cpu" else _GPU_WEIGHTS_SEED


class LoadProgress:
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
