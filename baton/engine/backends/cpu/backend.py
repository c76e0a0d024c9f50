"""An engine on a CPU: native kernels or torch's, or a simulation."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.config import CPU_KV_CACHE_BYTES, EngineConfig, SimulatedSpeed
from baton.engine.backends.backend import Backend, unsupported
from baton.engine.backends.cpu.native_model import NativeModel, lacking
from baton.engine.backends.cpu.native_ops import NativeOps
from baton.engine.batch import StepModel
from baton.engine.collectives import SINGLE_RANK, GroupCollectives
from baton.engine.kernels.native import library
from baton.engine.kernels.native.packing import PackedWeight
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.mtp_layer import MtpLayer
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.models.weight_loader import load_or_make_weights
from baton.engine.models.weights import ModelWeights
from baton.engine.quantization.config import weight_format
from baton.engine.quantization.linear_weight import LinearWeight
from baton.engine.quantization.methods import quantize_weight
from baton.engine.rank_executor import Exchange
from baton.engine.runner import StepRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.simulated import SimulatedRunner
from baton.errors import ConfigError

log = logging.getLogger(__name__)


class CpuBackend(Backend):
    """Native kernels where they can be had, else torch's; or the time of a model, simulated.

    whole: weights of the model that was loaded, which a layer that predicts further tokens shares;
    None where ranks have parts of them.
    """

    device = torch.device("cpu")
    kv_bytes = CPU_KV_CACHE_BYTES
    whole: ModelWeights | None = None

    def __init__(self, settings: EngineConfig) -> None:
        """Raises ConfigError for settings that no CPU computes."""
        if settings.kernels == "triton":
            raise ConfigError(
                "--kernels triton computes on a GPU, not on a CPU: leave it out, or add "
                "--device cuda"
            )
        for option in ("quantization", "kv_dtype"):
            if getattr(settings, option) == "fp8":
                raise ConfigError(
                    f"--{option.replace('_', '-')} fp8 computes on a GPU only: use int8, or add "
                    "--device cuda"
                )
        if settings.tp > 1 and not (settings.cpus or settings.simulate):
            # Ranks that fill the cores keep to a part each: woken beside another that computes, one
            # waits for a core while a core is idle, and the other waits for it.
            cores = tuple(sorted(os.sched_getaffinity(0)))
            if (settings.threads or torch.get_num_threads()) >= len(cores):
                settings = replace(settings, cpus=cores)
        super().__init__(settings)
        self.shares_pool = settings.tp_backend == "shm"

    def model(self, path: Path, config: ModelConfig, dtype: torch.dtype) -> Any:
        settings = self.settings
        if settings.simulate:
            return config  # all that a simulation needs of it
        if "fp8" in weight_format(settings, config.quantization).split("+"):
            raise ConfigError(
                "the checkpoint's weights are fp8, which computes on a GPU only: add --device "
                "cuda, or take the model in int8 or int4"
            )
        if settings.tp > 1 and self.shares_pool:
            reason = unsupported(config, settings.block_size, "native") or lacking(config)
            if reason or not self._is_native(dtype):
                reason = reason or "they cannot be had here: see `baton doctor`"
                raise ConfigError(
                    f"--tp on a CPU needs native kernels: {reason}; add --tp-backend gloo to "
                    "compute without"
                )
        return super().model(path, config, dtype)

    def shard_model(
        self,
        path: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        exchange: Exchange | None = None,
    ) -> StepModel:
        settings = self.settings
        native = self._is_native(dtype)

        prepared = partial(prepare_weight, quantization=settings.quantization, native=native)
        kernels = "native" if native else "torch"
        shared = self.whole if config.first_layer else None
        weights = load_or_make_weights(
            settings, path, config, dtype, self.device, kernels, prepared, shard, shared
        )
        self.whole = weights if shard.count == 1 else None
        group = exchange if isinstance(exchange, GroupCollectives) else SINGLE_RANK
        if not native:
            kind = MtpLayer if config.first_layer else DecoderModel
            return kind(config, weights, dtype, self.device, shard=shard, ranks=group)
        reason = unsupported(config, settings.block_size, "native")
        if reason:
            log.info("native products, norms and gates, but attention by torch: %s", reason)
        if config.first_layer:
            return NativeMtpLayer(config, weights, dtype, not reason)
        if reason or lacking(config) or isinstance(exchange, GroupCollectives):
            return NativeOps(config, weights, dtype, not reason, shard, group)
        return NativeModel(config, weights, dtype, shard, exchange)

    def runner(self, model: Any, pool: Tensor, sampler: Sampler, max_context: int) -> StepRunner:
        if self.settings.simulate:
            speed = SimulatedSpeed.parse(self.settings.simulate)
            return SimulatedRunner(speed, pool, sampler, model.layer_groups.windows)
        return super().runner(model, pool, sampler, max_context)

    def for_rank(self, place: Shard) -> CpuBackend:
        return CpuBackend(place.settings(self.settings))

    def _is_native(self, dtype: torch.dtype) -> bool:
        """Raises ConfigError if native kernels are asked for and cannot be had."""
        if self.settings.kernels == "native":
            library.require(dtype)
        return self.settings.kernels != "torch" and library.load(dtype) is not None


class NativeMtpLayer(MtpLayer, NativeOps):
    """An MTP layer that runs native kernels."""


def prepare_weight(
    weight: LinearWeight, is_output: bool, quantization: str, native: bool
) -> LinearWeight:
    """Quantises a dense weight as `--quantization` asks, and packs it for native code."""
    weight = quantize_weight(weight, quantization, is_output)
    return PackedWeight.from_weight(weight) if native else weight
