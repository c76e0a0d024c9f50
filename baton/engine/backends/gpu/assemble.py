"""Puts a GPU's engine together: kernels, weights, the budget of its memory, the pool."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import time
from functools import partial
from pathlib import Path

import torch

from baton.config import EngineConfig
from baton.engine.backends.gpu import memory
from baton.engine.backends.gpu.device import Gpu
from baton.engine.backends.gpu.graphs import DecodeModel, batch_sizes, table_widths
from baton.engine.backends.gpu.launches import GpuSettings
from baton.engine.backends.gpu.memory import Usage
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.backends.gpu.warmup import ProfileRun
from baton.engine.batch import StepModel
from baton.engine.kv_cache import Allocate, allocate_pool, plan_layout
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Model
from baton.engine.runner import Runner
from baton.engine.sampling.sampler import Sampler
from baton.engine.settings import Parts, choose_kv_dtype, longest_context, max_context
from baton.engine.weights.weights import log_loaded, weights_of
from baton.errors import ConfigError

log = logging.getLogger(__name__)
Capability = tuple[int, int]
LEAST_CAPABILITY: dict[str, Capability] = {"none": (8, 0), "int8": (8, 0), "fp8": (8, 9)}
MULTIPLE = 16  # of heads' and blocks' sizes
MAX_HEAD_SIZE = 256
# GPUs with 99 KB of shared memory for a program; tiles of larger heads need more.
SMALL_MEMORY, SMALL_HEAD_SIZE = ((8, 6), (8, 9), (12, 0), (12, 1)), 128
MAX_QUERIES = 128  # heads that share a KV head


def assemble(
    settings: EngineConfig,
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    gpu: Gpu,
    allocate: Allocate | None,
) -> Parts:
    """Loads a model onto a GPU, which becomes the calling thread's.

    Raises ConfigError for what the GPU or its memory cannot do, CheckpointError.
    """
    gpu.use()
    kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype)
    # What a model keeps for each position, it keeps for those that a sequence can have here.
    context = _longest_context(settings, config, kv_dtype)
    config = dataclasses.replace(config, max_context=context)
    kernels = choose_kernels(settings, config, gpu.capability, _missing_triton())
    _refuse_formats(settings, gpu.capability, kernels)
    sampler = Sampler(frozenset(config.eos_token_ids), config.vocab_size)
    before = gpu.allocated()
    try:
        model = _load_model(settings, path, config, dtype, gpu.device, kernels)
        weights = gpu.allocated() - before
        usage = _profile(settings, config, kv_dtype, gpu, model, sampler, kernels, weights)
    except torch.OutOfMemoryError as error:
        raise memory.too_large(settings) from error
    layout = memory.kv_layout(usage, settings, config, kv_dtype)
    context = max_context(settings, config, layout)
    log.info(
        "%s", memory.summary(gpu.name, usage, layout, settings, context, graphs_measured=False)
    )
    try:
        pool = allocate_pool(layout, allocate, gpu.device)
    except torch.OutOfMemoryError as error:  # another process was quicker
        raise memory.taken(layout, settings) from error
    if kernels == "torch":
        return Parts(Runner(model, pool, sampler), layout)
    limits = GpuSettings(
        max_batch=settings.max_batch,
        max_context=context,
        block_size=settings.block_size,
        graphs=settings.graphs,
        overlap=settings.overlap,
        chunk_tokens=settings.chunk_tokens,
    )
    assert isinstance(model, DecodeModel), "Triton's kernels have a step of their own for decoding"
    runner = GpuRunner(model, pool, sampler, limits)

    def prepare() -> None:
        free, _ = gpu.free_and_total()
        runner.prepare(_CaptureProgress())
        taken = max(0, free - gpu.free_and_total()[0])
        measured = dataclasses.replace(usage, graphs=taken)
        log.info(
            "%s",
            memory.summary(gpu.name, measured, layout, settings, context, graphs_measured=True),
        )

    # An async launch writes one token's KV.
    return Parts(runner, layout, int(settings.overlap), prepare)


def _missing_triton() -> str:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return ""


def choose_kernels(
    settings: EngineConfig, config: ModelConfig, capability: Capability, missing: str
) -> str:
    """ "triton" or "torch"; `missing` says why Triton cannot be imported, if it cannot.

    Raises ConfigError for kernels that are asked for and cannot compute here.
    """
    if settings.kernels == "native":
        raise ConfigError(
            "--kernels native: they compute on a CPU, not on a GPU; leave it out for Triton's"
        )
    if settings.kernels == "torch":
        return "torch"
    reason = missing or unsupported(config, settings.block_size, capability)
    if not reason:
        return "triton"
    if settings.kernels == "triton":
        raise ConfigError(f"--kernels triton: {reason}; leave it out to compute with torch")
    log.warning("computing with torch's own kernels, which is slow: %s", reason)
    return "torch"


def unsupported(config: ModelConfig, block_size: int, capability: Capability) -> str:
    """Why Triton's kernels cannot run a model here; empty if they can."""
    least_capability = LEAST_CAPABILITY["none"]
    if capability < least_capability:
        found, least = (f"{major}.{minor}" for major, minor in (capability, least_capability))
        return f"a GPU of compute capability {found}, and Triton's kernels need {least}"
    if config.head_size % MULTIPLE or config.head_size > MAX_HEAD_SIZE:
        return (
            f"heads of {config.head_size} elements, and Triton's kernels need a multiple of "
            f"{MULTIPLE} up to {MAX_HEAD_SIZE}"
        )
    if config.head_size > SMALL_HEAD_SIZE and capability in SMALL_MEMORY:
        major, minor = capability
        return (
            f"heads of {config.head_size} elements, and a GPU of compute capability {major}.{minor}"
            f" has shared memory for tiles of {SMALL_HEAD_SIZE}"
        )
    if (group := config.num_heads // config.num_kv_heads) > MAX_QUERIES:
        return f"{group} heads share a KV head, and Triton's kernels take {MAX_QUERIES}"
    if block_size % MULTIPLE:
        return f"blocks of {block_size} tokens, and Triton's kernels need a multiple of {MULTIPLE}"
    return ""


def unsupported_format(value: str, capability: Capability) -> str:
    """Why a GPU cannot compute in "int8" or "fp8"; empty if it can."""
    if capability >= LEAST_CAPABILITY[value]:
        return ""
    least, found = (f"{major}.{minor}" for major, minor in (LEAST_CAPABILITY[value], capability))
    return f"{value} needs a GPU of compute capability {least} or above, and this one has {found}"


def _refuse_formats(settings: EngineConfig, capability: Capability, kernels: str) -> None:
    """Raises ConfigError for 8-bit formats that these kernels or this GPU do not compute in."""
    for option, value in (
        ("--quantization", settings.quantization),
        ("--kv-dtype", settings.kv_dtype),
    ):
        if value in ("none", "auto"):
            continue
        reason = unsupported_format(value, capability)
        if kernels == "torch":
            reason = "it needs Triton's kernels on a GPU, and torch's compute here"
        if reason:
            raise ConfigError(f"{option} {value}: {reason}; leave it out, or add --device cpu")


def _load_model(
    settings: EngineConfig,
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str,
) -> StepModel:
    started = time.monotonic()
    model: StepModel
    if kernels == "torch":
        weights = weights_of(settings, path, config, dtype, device, lambda matrix: matrix)
        model = Model(config, weights, dtype, device)
    else:
        # These import triton, which may not be installed.
        from baton.engine.backends.gpu.linear import prepare  # noqa: PLC0415
        from baton.engine.backends.gpu.model import GpuModel  # noqa: PLC0415

        quantize = partial(prepare, quantization=settings.quantization)
        weights = weights_of(settings, path, config, dtype, device, quantize)
        model = GpuModel(config, weights, dtype, device)
    log_loaded(settings, path, config, dtype, device, kernels, time.monotonic() - started)
    return model


def _profile(
    settings: EngineConfig,
    config: ModelConfig,
    kv_dtype: torch.dtype,
    gpu: Gpu,
    model: StepModel,
    sampler: Sampler,
    kernels: str,
    weights: int,
) -> Usage:
    """What the engine's largest steps take; this compiles most of its kernels, too."""
    block = plan_layout(config, kv_dtype, settings.block_size, 1, 0)
    profile_run = ProfileRun(model, sampler, block, config.max_context, gpu.device)
    rows = settings.chunk_tokens + settings.max_batch
    sampled = min(rows, settings.max_batch * (1 + settings.speculate))
    log.info("measuring a step of %d tokens; kernels that are new are compiled", rows)
    chunk = gpu.peak_of(lambda: profile_run.chunk(rows, sampled))
    decode = gpu.peak_of(lambda: profile_run.decode(settings.max_batch))
    num_graphs = 0
    if settings.graphs and kernels == "triton":
        width = -(-config.max_context // settings.block_size)
        num_graphs = len(batch_sizes(settings.max_batch)) * len(table_widths(width))
    graphs = memory.graphs_reserve(decode, num_graphs, config.num_layers)
    free, total = gpu.free_and_total()
    return Usage(total, free, weights, max(chunk, decode), graphs)


def _longest_context(settings: EngineConfig, config: ModelConfig, kv_dtype: torch.dtype) -> int:
    """As far as is known before the pool is: in tokens, at least 2."""
    if not (settings.kv_blocks or settings.kv_cache_bytes):
        return longest_context(settings, config)
    asked = plan_layout(
        config, kv_dtype, settings.block_size, settings.kv_blocks, settings.kv_cache_bytes
    )
    return max(2, max_context(settings, config, asked))


class _CaptureProgress:
    """Logs how many graphs are captured, at most once a second."""

    def __init__(self) -> None:
        self._logged = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if done < total and time.monotonic() < self._logged + 1.0:
            return
        self._logged = time.monotonic()
        log.info("captured %d of %d decode steps as graphs", done, total)
