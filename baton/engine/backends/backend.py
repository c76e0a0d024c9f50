"""What loads a model and runs its steps on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.kv_cache import Allocate, KvLayout, allocate_pool
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.rank_executor import Exchange, RankExecutor, RemoteRanks
from baton.engine.runner import Runner, StepRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.tensor_parallel import TensorParallelModel
from baton.net.object_connection import ObjectConnection

MULTIPLE = 16  # of head sizes and block sizes
MAX_HEAD_SIZE = 512  # that Triton's attention takes
MAX_NATIVE_SIZE = 640  # elements of a head, or of a latent row, that native attention takes
MAX_QUERIES = 128  # heads that share a KV head; a quarter of it in Triton's with wide heads
WIDE_HEAD = 256


def unsupported(config: ModelConfig, block_size: int, kernels: str) -> str:
    """Why the attention kernels do not support a model; empty if they do."""
    need = f"{kernels} kernels need a multiple of {MULTIPLE}"
    if config.latent is not None and kernels == "native":
        return "latent KV, which the native step has not"
    most = MAX_HEAD_SIZE if kernels == "Triton's" else MAX_NATIVE_SIZE
    layers = [config.layer(index) for index in range(config.num_layers)]
    for size in sorted({one.head_size for one in layers if one.latent is None}):
        if size % MULTIPLE or size > most:
            return f"heads of {size} elements, and {need} up to {most}"
    for one in layers if config.latent is None else ():
        queries, most = one.num_heads // one.num_kv_heads, MAX_QUERIES
        if kernels == "Triton's" and one.head_size > WIDE_HEAD:
            most //= 4
        if queries > most:
            return f"{queries} heads share a KV head, and {kernels} kernels take up to {most}"
    return f"blocks of {block_size} tokens, and {need}" if block_size % MULTIPLE else ""


class Backend:
    """Loads a model and runs its steps on one device; `build.load` calls its methods in this order.

    kv_bytes: default size of the KV cache; 0 if it depends on the device's memory · shares_pool:
    whether all ranks share one KV pool · remote_ranks: ranks on other hosts.
    """

    device: torch.device
    kv_bytes = 0
    shares_pool = False
    remote_ranks = RemoteRanks()

    def __init__(self, settings: EngineConfig) -> None:
        self.settings = settings

    def model(self, path: Path, config: ModelConfig, dtype: torch.dtype) -> Any:
        """Loads the model on all ranks. Raises ConfigError if that is not possible."""
        if self.settings.tp > 1:
            return TensorParallelModel(self, path, config, dtype)
        return self.shard_model(path, config, dtype)

    def shard_model(
        self, path: Path, config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE,
        exchange: Exchange | None = None,
    ) -> Any:  # fmt: skip
        """Loads the model, or one rank's part of it; exchange: with the other ranks."""
        raise NotImplementedError

    def layout(
        self, model: Any, sampler: Sampler, config: ModelConfig, kv_dtype: torch.dtype,
        asked: KvLayout | None,
    ) -> KvLayout:  # fmt: skip
        """The layout of the KV pool that is asked for, or of the largest that fits. Raises
        ConfigError."""
        assert asked is not None, "without one, the backend's `kv_bytes` are asked for"
        return self._within(asked, config)

    def _within(self, asked: KvLayout, config: ModelConfig) -> KvLayout:
        """Limits the pools of all ranks to the bytes of one, if several ranks hold each head."""
        ranks, heads = self.settings.tp, config.num_kv_heads
        if self.shares_pool or ranks <= heads or self.settings.kv_blocks:
            return asked
        return replace(asked, num_blocks=max(asked.num_blocks * heads // ranks, 1))

    def pools(self, model: Any, layout: KvLayout, allocate: Allocate | None) -> tuple[Tensor, ...]:
        """Allocates zeroed KV pools, one for each rank that has its own, this process's first."""
        if isinstance(model, TensorParallelModel):
            return model.pools(layout, allocate)
        return (allocate_pool(layout, allocate, self.device),)

    def runner(self, model: Any, pool: Tensor, sampler: Sampler, max_context: int) -> StepRunner:
        """Runs the model's steps; max_context: maximum tokens of a sequence."""
        return Runner(model, pool, sampler)

    def prepare(self, runner: Any) -> None:
        """Warms up before the first step."""

    def for_rank(self, place: Shard) -> Backend:
        """The backend of another rank on this host, for its process; place: that rank's number."""
        raise NotImplementedError

    def executor(self, model: Any, connection: ObjectConnection) -> RankExecutor:
        """Executes the first rank's commands in another rank's process."""
        return RankExecutor(self.device, model, connection)
