"""An engine on a GPU: which kernels compute, what memory they leave for KV, what is captured."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends import Backend, unsupported
from baton.engine.backends.gpu import memory, warmup
from baton.engine.backends.gpu.cuda_graphs import StepGraphs, StepShape, count_graphs
from baton.engine.backends.gpu.device import Gpu, Waiting, new_stream
from baton.engine.batch import Ints, StepModel
from baton.engine.collectives import SINGLE_RANK, GroupCollectives
from baton.engine.kv_cache import KvLayout, allocate_pool, plan_layout
from baton.engine.models.decoder import Model
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.quantization import weight_format
from baton.engine.ranks import (
    LOAD_S,
    RANK_TIMEOUT_S,
    Channel,
    Exchange,
    Rank,
    RankedModel,
    dtype_named,
    name_of,
)
from baton.engine.runner import StepRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.shard import WHOLE, Shard
from baton.engine.weights.loader import weights_of
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


# Before, torch's product of many fp8 rows ran on another stream there (pytorch#177651).
ADA, FP8_ON_ADA = (8, 9), (2, 12)


class GpuBackend(Backend):
    """Triton's kernels where they can compute, else torch's."""

    def __init__(self, settings: EngineConfig, gpu: Gpu) -> None:
        super().__init__(settings)
        self.device = gpu.device
        self._gpu = gpu

    def model(self, path: Path, config: ModelConfig, dtype: torch.dtype) -> Any:
        model = super().model(path, config, dtype)
        if isinstance(model, RankedModel):
            model.limit_steps(LOAD_S)  # the first ones compile
        return model

    def shard_model(
        self,
        path: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        exchange: Exchange | None = None,
    ) -> StepModel:
        settings = self.settings
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
        if kernels == "torch" and shard.count > 1:
            raise ConfigError("--tp on GPUs needs Triton's kernels: leave out --kernels torch")
        held = weight_format(settings, config.quantization)
        _refuse_formats(settings, held, capability, kernels)
        self._held_before = self._gpu.allocated()
        load = partial(weights_of, settings, path, config, dtype, self.device, kernels)
        if kernels == "torch":
            return Model(config, load(), dtype, self.device)
        quantize = partial(prepare, quantization=settings.quantization, dtype=dtype)
        group = exchange if isinstance(exchange, GroupCollectives) else SINGLE_RANK
        return GpuModel(config, load(quantize, shard), dtype, self.device, shard, group)

    def layout(
        self,
        model: StepModel,
        sampler: Sampler,
        config: ModelConfig,
        kv_dtype: torch.dtype,
        asked: KvLayout | None,
    ) -> KvLayout:
        """Measures the engine's largest steps, which compiles most of its kernels, too."""
        settings, gpu, most = self.settings, self._gpu, config.max_context
        own = Shard(0, settings.tp).config(config)  # of this rank's heads, as many as each has
        block = plan_layout(own, kv_dtype, settings.block_size, 1, 0)
        pool = allocate_pool(block, None, self.device)
        rows = settings.chunk_tokens + settings.max_batch
        log.info("measuring a step of %d tokens; kernels that are new are compiled", rows)
        if isinstance(model, RankedModel):
            model.tell("measure", block.shape, name_of(kv_dtype))
        runner = self.runner(model, pool, sampler, most)
        with _waiting(model)():
            step = gpu.peak_of(lambda: warmup.largest_step(runner, settings, most))
            captured = gpu.peak_of(lambda: warmup.largest_captured(model, pool, settings, most))
        num_graphs = count_graphs(settings, most) if self._kernels == "triton" else 0
        graphs = memory.graphs_reserve(captured, num_graphs, config.num_layers)
        usages = [(gpu.name, self.usage(max(step, captured), graphs))]
        if isinstance(model, RankedModel):
            model.tell("usage", graphs)
            usages += [(name, memory.Usage(*sizes)) for name, sizes in model.answers()]
        if asked is not None:
            asked = replace(self._within(asked, config), num_kv_heads=own.num_kv_heads)
        layouts = [memory.kv_layout(one, settings, own, kv_dtype, asked) for _, one in usages]
        least = min(layouts, key=lambda layout: layout.num_blocks)
        self._max_context = min(most, least.num_tokens - 1)
        for name, usage in usages:
            log.info("%s", memory.summary(name, usage, least, settings, self._max_context))
        return replace(least, num_kv_heads=config.num_kv_heads)

    def usage(self, activations: int, graphs: int) -> memory.Usage:
        """What holds the GPU's memory now that weights are there, and nothing else of this rank."""
        weights = self._gpu.allocated() - self._held_before
        free, total = self._gpu.free_and_total()
        return memory.Usage(total, free, weights, activations, graphs)

    def runner(self, model: Any, pool: Tensor, sampler: Sampler, max_context: int) -> StepRunner:
        if self._kernels == "torch":
            return super().runner(model, pool, sampler, max_context)
        from baton.engine.backends.gpu.runner import GpuRunner  # noqa: PLC0415

        if isinstance(model, RankedModel):
            model.tell("begin", max_context)
        stream = new_stream(pool.device, _waiting(model))
        return GpuRunner(model, pool, sampler, self.settings, max_context, stream)

    def prepare(self, runner: Any) -> None:
        """Compiles every kernel that a step can launch, and captures steps."""
        if self._kernels == "torch":
            return
        with _waiting(runner.model)():
            warmup.warm_up(runner.model, runner.pool, self.settings, self._max_context)
            free, _ = self._gpu.free_and_total()  # once all of that has ended
        if self.settings.graphs:
            runner.capture()
            taken = max(0, free - self._gpu.free_and_total()[0])
            log.info("CUDA graphs of steps keep %.2f GiB of GPU memory", taken / 2**30)
        warmup.scored_decode(runner)
        if isinstance(runner.model, RankedModel):
            runner.model.limit_steps(RANK_TIMEOUT_S)

    def of_rank(self, place: Shard) -> GpuBackend:
        return GpuBackend(place.settings(self.settings), self._gpu.of_rank(place.rank))

    def rank(self, model: Any, connection: Channel) -> Rank:
        return _GpuRank(self, self._gpu, model, connection)


def _waiting(model: Any) -> Waiting:
    """What the host's waits for a model's steps are to be within."""
    return model.waiting if isinstance(model, RankedModel) else nullcontext


class _GpuRank(Rank):
    """One of the other ranks, whose work goes through a stream of its GPU's, as the first's does.

    Nothing waits for it here: its results are what the first rank waits for.
    """

    def __init__(self, backend: GpuBackend, gpu: Gpu, model: Any, connection: Channel) -> None:
        super().__init__(backend, model, connection)
        self._backend, self._gpu = backend, gpu
        self._stream = new_stream(gpu.device)
        self._graphs: StepGraphs | None = None

    def measure(self, shape: tuple[int, ...], dtype_name: str) -> None:
        """Begins to measure what steps over such a pool take."""
        self.pool = torch.zeros(*shape, dtype=dtype_named(dtype_name), device=self.device)
        self._before = self._gpu.reset_peak()

    def usage(self, graphs: int) -> None:
        """Answers with its GPU's name and what was measured."""
        peak = self._gpu.peak() - self._before
        self.connection.send((self._gpu.name, astuple(self._backend.usage(peak, graphs))))

    def begin(self, max_context: int) -> None:
        """Prepares for padded steps over the pool that is here now."""
        settings = self._backend.settings
        with torch.inference_mode():
            self._graphs = StepGraphs(self.model, self.pool, self._stream, settings, max_context)

    def step(self, arrays: list[Ints], num_decodes: int) -> None:
        self._stream.put(partial(super().step, arrays, num_decodes))

    def zero_blocks(self, blocks: list[int]) -> None:
        self._stream.put(partial(super().zero_blocks, blocks))

    def replay(self, *sizes: int) -> None:
        """As `StepGraphs.run` for a `StepShape`; the inputs come from the first rank."""
        assert self._graphs is not None, "it has begun"
        with torch.inference_mode():
            self._stream.put(partial(self._graphs.run, StepShape(*sizes)))

    def capture(self) -> None:
        """As `StepGraphs.capture`."""
        assert self._graphs is not None, "it has begun"
        with torch.inference_mode():
            self._graphs.capture()

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()


def _torch() -> tuple[int, ...]:
    """torch's version, as (2, 12)."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


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
        elif value == "fp8" and asked == option and capability == ADA and _torch() < FP8_ON_ADA:
            needs = ".".join(map(str, FP8_ON_ADA))
            reason = (
                f"on a GPU of compute capability 8.9 it needs torch {needs} or above, and this is "
                f"{torch.__version__}"
            )
        elif capability < least:
            needs, found = (f"{major}.{minor}" for major, minor in (least, capability))
            reason = (
                f"it needs a GPU of compute capability {needs} or above, and this one has {found}"
            )
        if reason:
            raise ConfigError(f"{option} {value}: {reason}; leave it out, or add --device cpu")
