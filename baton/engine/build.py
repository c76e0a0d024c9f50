"""Puts an engine together from settings: checkpoint, KV pool, planner, sampler, thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.config import CPU_KV_CACHE_BYTES, EngineConfig, SimulatedSpeed, model_path
from baton.engine.batch import StepModel
from baton.engine.blocks import BlockPool
from baton.engine.kv_cache import Allocate, KvLayout, allocate_pool, plan_layout
from baton.engine.loop import Engine, StepReport
from baton.engine.models.config import ModelConfig, fingerprint
from baton.engine.models.decoder import Model
from baton.engine.ops.native import library
from baton.engine.ops.native.model import NativeModel, unsupported
from baton.engine.ops.native.packing import Matrix, PackedWeight
from baton.engine.planner import Plan, Planner, Work
from baton.engine.runner import Runner, StepRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.engine.settings import (
    Parts,
    choose_dtype,
    choose_kv_dtype,
    device_of,
    do_nothing,
    longest_context,
    max_context,
)
from baton.engine.simulated import SimulatedRunner
from baton.engine.speculative.ngram import SpeculativeConfig
from baton.engine.weights.quantize import Int8Weight
from baton.engine.weights.weights import Prepare, log_loaded, random_seed, weights_of
from baton.errors import ConfigError
from baton.sampling import SamplingParams
from baton.v1 import common_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model in memory with its KV pool, ready to be driven by an `Engine`.

    lookahead, prepare: see `Parts`.
    """

    path: Path
    model_config: ModelConfig
    runner: StepRunner
    layout: KvLayout
    descriptor: common_pb2.KvDescriptor
    settings: EngineConfig
    lookahead: int = 0
    prepare: Callable[[], None] = do_nothing

    @property
    def max_context(self) -> int:
        """Longest sequence in tokens: what model, settings and pool all allow."""
        return max_context(self.settings, self.model_config, self.layout)

    def engine(self, publish: Callable[[StepReport], None]) -> Engine:
        """A new engine, not started, over this model and pool."""
        settings = self.settings
        blocks = BlockPool(self.layout.num_blocks, self.layout.block_size, settings.prefix_cache)
        speculation = (
            SpeculativeConfig(settings.speculate, self.max_context) if settings.speculate else None
        )
        planner = Planner(
            blocks,
            settings.chunk_tokens,
            settings.max_batch,
            speculation,
            lookahead=self.lookahead,
        )
        eos = frozenset(self.model_config.eos_token_ids)
        engine = Engine(self.runner, planner, eos, self.max_context, publish)
        device = self.runner.pool.device
        if device.type == "cuda":  # CUDA keeps it for each thread: the engine's first work
            engine.submit(partial(torch.cuda.set_device, device))
        return engine


def load(settings: EngineConfig, allocate: Allocate | None = None) -> Loaded:
    """Loads the model that `settings` name and allocates its KV pool.

    A GPU becomes that of the calling thread. Raises CheckpointError for a broken checkpoint,
    ConfigError for impossible settings.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    path = model_path(settings.model)
    config = ModelConfig.load(path)
    device = device_of(settings)
    dtype = choose_dtype(settings.dtype, config.dtype, device)
    parts = (_on_gpu if device.type == "cuda" else _on_cpu)(
        settings, path, config, dtype, device, allocate
    )
    log.info(
        "%d KV blocks of %d tokens (%.0f MiB, %s)",
        parts.layout.num_blocks, parts.layout.block_size, parts.layout.num_bytes / 2**20,
        parts.layout.dtype,
    )  # fmt: skip
    identity = fingerprint(path, random_seed(settings, device))
    descriptor = parts.layout.descriptor(identity, dtype, settings.quantization)
    loaded = Loaded(
        path, config, parts.runner, parts.layout, descriptor, settings, parts.lookahead,
        parts.prepare,
    )  # fmt: skip
    if loaded.max_context < 2:
        raise ConfigError(
            "the KV cache is too small for any request: raise --kv-blocks or --kv-cache"
        )
    return loaded


def _on_gpu(
    settings: EngineConfig,
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    allocate: Allocate | None,
) -> Parts:
    # What only a GPU needs is imported only for one.
    from baton.engine.backends.gpu.assemble import assemble  # noqa: PLC0415
    from baton.engine.backends.gpu.device import Gpu  # noqa: PLC0415

    return assemble(settings, path, config, dtype, Gpu(device), allocate)


def _on_cpu(
    settings: EngineConfig,
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    allocate: Allocate | None,
) -> Parts:
    _refuse_what_needs_a_gpu(settings)
    layout = plan_layout(
        config,
        choose_kv_dtype(settings.kv_dtype, dtype),
        settings.block_size,
        settings.kv_blocks,
        settings.kv_cache_bytes or CPU_KV_CACHE_BYTES,
    )
    sampler = Sampler(frozenset(config.eos_token_ids), config.vocab_size)
    pool = allocate_pool(layout, allocate, device)
    if settings.simulate:
        speed = SimulatedSpeed.parse(settings.simulate)
        return Parts(SimulatedRunner(speed, pool, sampler, config.vocab_size), layout)
    # What a model keeps for each position, it keeps for those that can be had here.
    slots = layout.num_blocks * layout.block_size
    config = replace(config, max_context=min(longest_context(settings, config), slots))
    return Parts(Runner(_model(settings, path, config, dtype, device), pool, sampler), layout)


def _model(
    settings: EngineConfig,
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> StepModel:
    started = time.monotonic()
    native = _native(settings, config, dtype)
    prepare = _preparation(native, settings.quantization == "int8")
    weights = weights_of(settings, path, config, dtype, device, prepare)
    model: StepModel = (
        NativeModel(config, weights, dtype) if native else Model(config, weights, dtype, device)
    )
    kernels = "native" if native else "torch"
    log_loaded(settings, path, config, dtype, device, kernels, time.monotonic() - started)
    return model


def _preparation(native: bool, int8: bool) -> Prepare:
    """What is made of each matrix while loading, so that no second copy of all of them exists."""

    def prepare(matrix: Tensor) -> Matrix:
        weight = Int8Weight.of(matrix) if int8 else matrix
        return PackedWeight.of(weight) if native else weight

    return prepare


def _native(settings: EngineConfig, config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether the native kernels compute. Raises ConfigError if they are asked for and cannot."""
    asked = settings.kernels == "native"
    if settings.kernels == "torch":
        return False
    reason = unsupported(config, settings.block_size)
    if reason and asked:
        raise ConfigError(f"--kernels native: {reason}; leave it out to compute with torch")
    if reason:
        log.info("computing with torch: %s", reason)
        return False
    if asked:
        library.require(dtype)
    return library.load(dtype) is not None


def _refuse_what_needs_a_gpu(settings: EngineConfig) -> None:
    """Raises ConfigError for settings that no CPU computes."""
    if settings.kernels == "triton":
        raise ConfigError(
            "--kernels triton computes on a GPU, not on a CPU: leave it out, or add --device cuda"
        )
    for option, value in (
        ("--quantization", settings.quantization),
        ("--kv-dtype", settings.kv_dtype),
    ):
        if value == "fp8":
            raise ConfigError(
                f"{option} fp8 computes on a GPU only: use int8, or add --device cuda"
            )


def warm_up(loaded: Loaded) -> None:
    """Runs the largest step and a single-token one, so that no request pays for first-time costs.

    Writes into the pool before any sequence owns a block of it. A GPU's graphs are captured first.
    """
    loaded.prepare()
    chunk = min(loaded.settings.chunk_tokens, loaded.max_context)
    blocks = list(range(-(-chunk // loaded.layout.block_size)))
    sequence = Sequence("warm-up", [1] * chunk, chunk, SamplingParams(), block_ids=blocks)
    single = Work(Sequence("warm-up", [1], 1, SamplingParams(), block_ids=blocks[:1]), 0, 1)
    loaded.runner.run(Plan([single] * loaded.settings.max_batch + [Work(sequence, 0, chunk)]))
    loaded.runner.run(Plan([Work(sequence, chunk - 1, 1)]))
