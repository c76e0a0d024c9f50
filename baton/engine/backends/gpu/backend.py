"""An engine on a GPU: which kernels compute, what memory they leave for KV, what is captured."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends import Backend, unsupported
from baton.engine.backends.gpu import memory, warmup
from baton.engine.backends.gpu.device import Gpu
from baton.engine.backends.gpu.graphs import count_graphs
from baton.engine.batch import StepModel
from baton.engine.kv_cache import KvLayout, allocate_pool, plan_layout
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Model
from baton.engine.models.quantization import weight_format
from baton.engine.runner import StepRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.weights.weights import weights_of
from baton.errors import ConfigError

log = logging.getLogger(__name__)
Capability = tuple[int, int]
LEAST_CAPABILITY: dict[str, Capability] = {
    "none": (8, 0),
    "int8": (8, 0),
    "fp8": (8, 9),
    "int4": (8, 0),
    "fp8_block": (8, 0),
}
# GPUs with 99 KB of shared memory for a program; tiles of larger heads need more.
SMALL_MEMORY, SMALL_HEAD_SIZE = ((8, 6), (8, 9), (12, 0), (12, 1)), 128


class GpuBackend(Backend):
    """Triton's kernels where they can compute, else torch's."""

    def __init__(self, settings: EngineConfig, gpu: Gpu) -> None:
        super().__init__(settings)
        if settings.tp > 1:
            raise ConfigError("--tp computes on CPUs only: leave it out, or add --device cpu")
        self.device = gpu.device
        self._gpu = gpu

    def model(self, path: Path, config: ModelConfig, dtype: torch.dtype) -> StepModel:
        settings = self._settings
        self._gpu.use()
        try:  # these import triton, which may not be installed
            from baton.engine.backends.gpu.linear import prepare  # noqa: PLC0415
            from baton.engine.backends.gpu.model import GpuModel  # noqa: PLC0415
        except ImportError as error:
            missing = f"triton cannot be imported ({error})"
        else:
            missing = ""
        capability = self._gpu.capability
        self._kernels = kernels = choose_kernels(settings, config, capability, missing)
        held = weight_format(settings, config.quantization)
        _refuse_formats(settings, held, capability, kernels)
        self._held_before = self._gpu.allocated()
        load = partial(weights_of, settings, path, config, dtype, self.device, kernels)
        if kernels == "torch":
            return Model(config, load(), dtype, self.device)
        quantize = partial(prepare, quantization=settings.quantization)
        return GpuModel(config, load(quantize), dtype, self.device)

    def layout(
        self,
        model: StepModel,
        sampler: Sampler,
        config: ModelConfig,
        kv_dtype: torch.dtype,
        asked: KvLayout | None,
    ) -> KvLayout:
        """Measures the engine's largest steps, which compiles most of its kernels, too."""
        settings, gpu, most = self._settings, self._gpu, config.max_context
        weights = gpu.allocated() - self._held_before
        block = plan_layout(config, kv_dtype, settings.block_size, 1, 0)
        pool = allocate_pool(block, None, self.device)
        rows = settings.chunk_tokens + settings.max_batch
        log.info("measuring a step of %d tokens; kernels that are new are compiled", rows)
        runner = self.runner(model, pool, sampler, most)
        step = gpu.peak_of(lambda: warmup.largest_step(runner, settings, most))
        decode = gpu.peak_of(lambda: warmup.largest_decode(model, pool, settings, most))
        num_graphs = count_graphs(settings, most) if self._kernels == "triton" else 0
        graphs = memory.graphs_reserve(decode, num_graphs, config.num_layers)
        free, total = gpu.free_and_total()
        usage = memory.Usage(total, free, weights, max(step, decode), graphs)
        layout = memory.kv_layout(usage, settings, config, kv_dtype, asked)
        self._max_context = min(most, layout.num_tokens - 1)
        log.info("%s", memory.summary(gpu.name, usage, layout, settings, self._max_context))
        return layout

    def runner(self, model: Any, pool: Tensor, sampler: Sampler, max_context: int) -> StepRunner:
        if self._kernels == "torch":
            return super().runner(model, pool, sampler, max_context)
        from baton.engine.backends.gpu.runner import GpuRunner  # noqa: PLC0415

        return GpuRunner(model, pool, sampler, self._settings, max_context)

    def prepare(self, runner: Any) -> None:
        """Compiles every kernel that a step can launch, and captures decode steps."""
        if self._kernels == "torch":
            return
        warmup.warm_up(runner.model, runner.pool, self._settings, self._max_context)
        if self._settings.graphs:
            free, _ = self._gpu.free_and_total()  # once all of that has ended
            runner.capture()
            taken = max(0, free - self._gpu.free_and_total()[0])
            log.info("decode steps as graphs keep %.2f GiB of GPU memory", taken / 2**30)


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
    reason = missing or refused(config, settings.block_size, capability)
    if not reason:
        return "triton"
    if settings.kernels == "triton":
        raise ConfigError(f"--kernels triton: {reason}; leave it out to compute with torch")
    log.warning("computing with torch's own kernels, which is slow: %s", reason)
    return "torch"


def refused(config: ModelConfig, block_size: int, capability: Capability) -> str:
    """Why Triton's kernels cannot run a model here; empty if they can."""
    gpu = f"a GPU of compute capability {'.'.join(map(str, capability))}"
    if capability < LEAST_CAPABILITY["none"]:
        return f"{gpu}, and Triton's kernels need 8.0"
    if config.head_size > SMALL_HEAD_SIZE and capability in SMALL_MEMORY:
        return (
            f"heads of {config.head_size} elements, and {gpu} has shared memory for tiles of "
            f"{SMALL_HEAD_SIZE}"
        )
    return unsupported(config, block_size, "Triton's")


def _refuse_formats(
    settings: EngineConfig, held: str, capability: Capability, kernels: str
) -> None:
    """Raises ConfigError for formats that these kernels or this GPU do not compute in."""
    asked = "--quantization" if settings.quantization != "none" else "the checkpoint's weights are"
    for option, value in ((asked, held), ("--kv-dtype", settings.kv_dtype)):
        if value in ("none", "auto"):
            continue
        reason, least = "", LEAST_CAPABILITY[value]
        if kernels == "torch":
            reason = "it needs Triton's kernels on a GPU, and torch's compute here"
        elif capability < least:
            needs, found = (f"{major}.{minor}" for major, minor in (least, capability))
            reason = (
                f"it needs a GPU of compute capability {needs} or above, and this one has {found}"
            )
        if reason:
            raise ConfigError(f"{option} {value}: {reason}; leave it out, or add --device cpu")
