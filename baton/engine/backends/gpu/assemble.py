"""Puts a GPU's engine together: kernels, weights, the budget of its memory, the pool."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.config import EngineConfig
from baton.engine.backends.gpu import memory
from baton.engine.backends.gpu.formats import choose_kernels, refuse_formats
from baton.engine.backends.gpu.makers import Maker, TorchMaker
from baton.engine.backends.gpu.measuring import Gpu
from baton.engine.backends.gpu.memory import Usage
from baton.engine.backends.gpu.profile_run import Trial
from baton.engine.batch import StepModel
from baton.engine.choices import choose_kv_dtype, longest_context, max_context
from baton.engine.kv_cache import Allocate, KvLayout, allocate_pool, plan_layout
from baton.engine.models.config import ModelConfig
from baton.engine.parts import Parts
from baton.engine.sampling.sampler import Sampler
from baton.engine.weights.loading import tell_loaded, weights_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Plan:
    """What is known before anything is on the GPU."""

    settings: EngineConfig
    path: Path
    config: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    gpu: Gpu
    maker: Maker


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
    maker = _maker(settings, config, gpu)
    refuse_formats(settings, gpu.capability, maker)
    plan = _Plan(settings, path, config, dtype, kv_dtype, gpu, maker)
    sampler = Sampler(frozenset(config.eos_token_ids), config.vocab_size)
    before = gpu.allocated()
    try:
        model = _model(plan)
        usage = _measured(plan, model, sampler, gpu.allocated() - before)
    except torch.OutOfMemoryError as error:
        raise memory.too_large(settings) from error
    layout = memory.kv_layout(usage, settings, config, kv_dtype)
    _tell(plan, usage, layout, measured=False)
    try:
        pool = allocate_pool(layout, allocate, gpu.device)
    except torch.OutOfMemoryError as error:  # somebody was quicker
        raise memory.taken(layout, settings) from error
    runner = maker.runner(pool, sampler, max_context(settings, config, layout))

    def prepare() -> None:
        free, _ = gpu.free_and_total()
        maker.capture(_Captured())
        graphs = max(0, free - gpu.free_and_total()[0])
        _tell(plan, dataclasses.replace(usage, graphs=graphs), layout, measured=True)

    return Parts(runner, layout, maker.lookahead, prepare)


def _maker(settings: EngineConfig, config: ModelConfig, gpu: Gpu) -> Maker:
    missing = ""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        missing = f"triton cannot be imported ({error})"
    if choose_kernels(settings, config, gpu.capability, missing) == "torch":
        return TorchMaker(config)
    from baton.engine.backends.gpu.with_triton import TritonMaker  # noqa: PLC0415 - it may not be there

    return TritonMaker(settings, config)


def _model(plan: _Plan) -> StepModel:
    started = time.monotonic()
    settings, path, config, dtype = plan.settings, plan.path, plan.config, plan.dtype
    device, maker = plan.gpu.device, plan.maker
    weights = weights_of(settings, path, config, dtype, device, maker.prepare)
    model = maker.model(weights, dtype, device)
    seconds = time.monotonic() - started
    tell_loaded(settings, path, config, dtype, device, maker.kernels, seconds)
    return model


def _measured(plan: _Plan, model: StepModel, sampler: Sampler, weights: int) -> Usage:
    """What the engine's largest steps take; this compiles most of its kernels, too."""
    settings, config, gpu = plan.settings, plan.config, plan.gpu
    block = plan_layout(config, plan.kv_dtype, settings.block_size, 1, 0)
    context = config.max_context
    trial = Trial(model, sampler, block, context, gpu.device)
    rows = settings.chunk_tokens + settings.max_batch
    drawn = min(rows, settings.max_batch * (1 + settings.speculate))
    log.info("measuring a step of %d tokens; kernels that are new are compiled", rows)
    chunk = gpu.peak_of(lambda: trial.chunk(rows, drawn))
    decode = gpu.peak_of(lambda: trial.decode(settings.max_batch))
    num_graphs = plan.maker.num_graphs(context)
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


def _tell(plan: _Plan, usage: Usage, layout: KvLayout, *, measured: bool) -> None:
    context = max_context(plan.settings, plan.config, layout)
    name = plan.gpu.name
    log.info("%s", memory.table(name, usage, layout, plan.settings, context, measured=measured))


class _Captured:
    """Logs how many graphs are captured, at most once a second."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if done < total and time.monotonic() < self._told + 1.0:
            return
        self._told = time.monotonic()
        log.info("captured %d of %d decode steps as graphs", done, total)
