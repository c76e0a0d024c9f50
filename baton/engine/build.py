"""Puts an engine together from settings: checkpoint, KV pool, planner, sampler, thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.config import EngineConfig, Pace, model_path
from baton.engine.batch import StepModel
from baton.engine.blocks import BlockPool
from baton.engine.drafts import Drafting
from baton.engine.kv_cache import Allocate, KvLayout, allocate_pool, plan_layout
from baton.engine.loop import Engine
from baton.engine.model import Model
from baton.engine.model_config import ModelConfig, fingerprint
from baton.engine.native import library
from baton.engine.native.model import NativeModel, unsupported
from baton.engine.native.packing import Matrix, PackedWeight
from baton.engine.planner import Plan, Planner, Work
from baton.engine.quantize import Int8Weight
from baton.engine.reports import StepReport
from baton.engine.runner import Runner, StepRunner
from baton.engine.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.engine.simulated import SimulatedRunner
from baton.engine.weights import Prepare, load_weights, random_weights
from baton.errors import ConfigError
from baton.sampling import SamplingParams
from baton.v1 import common_pb2

log = logging.getLogger(__name__)
RANDOM_WEIGHTS_SEED = 0
_SIMULATED_SEED = -1  # so that no simulated worker is paired with a real one


@dataclass(frozen=True)
class Loaded:
    """A model in memory with its KV pool, ready to be driven by an `Engine`."""

    path: Path
    model_config: ModelConfig
    runner: StepRunner
    layout: KvLayout
    descriptor: common_pb2.KvDescriptor
    settings: EngineConfig

    @property
    def max_context(self) -> int:
        """Longest sequence in tokens: what model, settings and pool all allow."""
        longest = self.settings.max_context or self.model_config.max_context
        in_pool = self.layout.num_blocks * self.layout.block_size - 1
        return min(longest, self.model_config.max_context, in_pool)

    def engine(self, publish: Callable[[StepReport], None]) -> Engine:
        """A new engine, not started, over this model and pool."""
        settings = self.settings
        blocks = BlockPool(self.layout.num_blocks, self.layout.block_size, settings.prefix_cache)
        drafting = Drafting(settings.speculate, self.max_context) if settings.speculate else None
        planner = Planner(blocks, settings.chunk_tokens, settings.max_batch, drafting)
        eos = frozenset(self.model_config.eos_token_ids)
        return Engine(self.runner, planner, eos, self.max_context, publish)


def load(settings: EngineConfig, allocate: Allocate | None = None) -> Loaded:
    """Loads the model that `settings` name and allocates its KV pool.

    Raises CheckpointError for a broken checkpoint, ConfigError for impossible settings.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    path = model_path(settings.model)
    config = ModelConfig.load(path)
    device = device_of(settings)
    _check_int8(settings, device)
    dtype = choose_dtype(settings.dtype, config.dtype, device)
    kv_dtype = torch.int8 if settings.kv_dtype == "int8" else dtype
    layout = plan_layout(
        config, kv_dtype, settings.block_size, settings.kv_blocks, settings.kv_cache_bytes
    )
    sampler = Sampler(frozenset(config.eos_token_ids), config.vocab_size)
    pool = allocate_pool(layout, allocate, device)
    runner: StepRunner
    if settings.simulate:
        runner = SimulatedRunner(Pace.parse(settings.simulate), pool, sampler, config.vocab_size)
    else:
        runner = Runner(_model(settings, path, config, dtype, device), pool, sampler)
    log.info(
        "%d KV blocks of %d tokens (%.0f MiB, %s)",
        layout.num_blocks, layout.block_size, layout.num_bytes / 2**20, layout.dtype,
    )  # fmt: skip
    identity = fingerprint(path, _seed(settings))
    descriptor = layout.descriptor(identity, dtype, settings.quantization)
    loaded = Loaded(path, config, runner, layout, descriptor, settings)
    if loaded.max_context < 2:
        raise ConfigError(
            "the KV cache is too small for any request: raise --kv-blocks or --kv-cache"
        )
    return loaded


def _model(
    settings: EngineConfig,
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> StepModel:
    started = time.monotonic()
    native = _native(settings, config, device)
    int8 = settings.quantization == "int8"
    prepare = _preparation(native, int8)
    if settings.random_weights:
        weights = random_weights(config, dtype, device, RANDOM_WEIGHTS_SEED, prepare)
    else:
        weights = load_weights(path, config, dtype, device, _Progress(), prepare)
    model: StepModel = (
        NativeModel(config, weights, dtype) if native else Model(config, weights, dtype, device)
    )
    log.info(
        "loaded %s: %.1f M parameters, %s%s on %s, %s kernels, %.1f s",
        path.name, config.num_parameters / 1e6, "int8 weights, " if int8 else "", dtype, device,
        "native" if native else "torch", time.monotonic() - started,
    )  # fmt: skip
    return model


def _preparation(native: bool, int8: bool) -> Prepare:
    """What is made of each matrix while loading, so that no second copy of all of them exists."""

    def prepare(matrix: Tensor) -> Matrix:
        weight = Int8Weight.of(matrix) if int8 else matrix
        return PackedWeight.of(weight) if native else weight

    return prepare


def _native(settings: EngineConfig, config: ModelConfig, device: torch.device) -> bool:
    """Whether the native kernels compute. Raises ConfigError if they are asked for and cannot."""
    asked = settings.kernels == "native"
    if settings.kernels == "torch" or (device.type != "cpu" and not asked):
        return False
    reason = unsupported(config, settings.block_size)
    if device.type != "cpu":
        reason = f"they compute on a CPU, not on {device}"
    if reason and asked:
        raise ConfigError(f"--kernels native: {reason}; leave it out to compute with torch")
    if reason:
        log.info("computing with torch: %s", reason)
        return False
    if asked:
        library.require()
    return library.load() is not None


def _seed(settings: EngineConfig) -> int | None:
    """What stands for weights that no checkpoint tells of."""
    if settings.simulate:
        return _SIMULATED_SEED
    return RANDOM_WEIGHTS_SEED if settings.random_weights else None


def _check_int8(settings: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError for 8-bit settings where nothing computes them."""
    for option, value in (
        ("--quantization", settings.quantization),
        ("--kv-dtype", settings.kv_dtype),
    ):
        if value == "int8" and device.type != "cpu":
            raise ConfigError(
                f"{option} int8 computes on CPUs only so far: leave it out, or add --device cpu"
            )


def warm_up(loaded: Loaded) -> None:
    """Runs one chunk and one single-token step, so that no request pays for first-time costs.

    Writes into the pool before any sequence owns a block of it.
    """
    chunk = min(loaded.settings.chunk_tokens, loaded.max_context)
    blocks = list(range(-(-chunk // loaded.layout.block_size)))
    sequence = Sequence("warm-up", [1] * chunk, chunk, SamplingParams(), block_ids=blocks)
    loaded.runner.run(Plan([Work(sequence, 0, chunk)]))
    loaded.runner.run(Plan([Work(sequence, chunk - 1, 1)]))


def device_of(settings: EngineConfig) -> torch.device:
    """Where an engine keeps its KV; a simulated one has no use for a GPU."""
    return choose_device("cpu" if settings.simulate else settings.device)


def choose_device(name: str) -> torch.device:
    """The device that a setting names; "auto" is a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The compute type; "auto" is bfloat16 for half-precision checkpoints where it is fast."""
    if name == "auto":
        half = checkpoint in ("bfloat16", "float16")
        fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
        name = "bfloat16" if half and fast else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


class _Progress:
    """Logs how far loading is, at most once a second."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 1.0

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next += 1.0
            log.info("loading weights: %d of %d tensors", done, total)
