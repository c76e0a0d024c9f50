"""The GPU backend: chooses kernels, sizes the KV cache, warms up and captures CUDA graphs."""

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
from baton.engine import rank_executor
from baton.engine.backends.backend import Backend, unsupported
from baton.engine.backends.gpu import memory, warmup
from baton.engine.backends.gpu.cuda_graphs import StepGraphs, StepShape, shapes_of
from baton.engine.backends.gpu.device import Gpu, Waiting, new_stream
from baton.engine.batch import StepModel
from baton.engine.collectives import SINGLE_RANK, GroupCollectives
from baton.engine.kv_cache import KvLayout, allocate_pool, plan_layout
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.models.weight_loader import load_or_make_weights
from baton.engine.quantization.config import weight_format
from baton.engine.runner import Runner
from baton.engine.sampling.sampler import Sampler
from baton.engine.tensor_parallel import LOAD_S, RANK_TIMEOUT_S, TensorParallelModel
from baton.errors import ConfigError
from baton.net.object_connection import ObjectConnection

log = logging.getLogger(__name__)
Capability = tuple[int, int]
LEAST_CAPABILITY: dict[str, Capability] = {
    "none": (8, 0),
    "fp8": (8, 9),
}  # of other formats as of none
# Compute capabilities with 99 KB of shared memory a program; larger heads need more.
SMALL_MEMORY, SMALL_HEAD_SIZE = ((8, 6), (8, 9), (12, 0), (12, 1)), 128

# Before torch 2.12, products of many fp8 rows ran on another stream on Ada (pytorch#177651).
ADA, FP8_ON_ADA = (8, 9), (2, 12)


class GpuBackend(Backend):
    """Computes with Triton kernels, or with torch's where those do not support GPU or model."""

    def __init__(self, settings: EngineConfig, gpu: Gpu) -> None:
        super().__init__(settings)
        self.device = gpu.device
        self._gpu = gpu

    def model(self, path: Path, config: ModelConfig, dtype: torch.dtype) -> Any:
        model = super().model(path, config, dtype)
        if isinstance(model, TensorParallelModel):
            model.limit_steps(LOAD_S)  # the first steps compile kernels
        return model

    def shard_model(
        self, path: Path, config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE,
        exchange: rank_executor.Exchange | None = None,
    ) -> StepModel:  # fmt: skip
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
        if held == "gguf":
            log.warning(
                "GGUF's types but Q4_0 are converted to %s, and take that much memory", dtype
            )
        self._held_before = self._gpu.allocated()
        load = partial(load_or_make_weights, settings, path, config, dtype, self.device, kernels)
        if kernels == "torch":
            return DecoderModel(config, load(), dtype, self.device)
        quantize = partial(prepare, quantization=settings.quantization, dtype=dtype)
        group = exchange if isinstance(exchange, GroupCollectives) else SINGLE_RANK
        return GpuModel(config, load(quantize, shard), dtype, self.device, shard, group)

    def layout(
        self, model: StepModel, sampler: Sampler, config: ModelConfig, kv_dtype: torch.dtype,
        asked: KvLayout | None,
    ) -> KvLayout:  # fmt: skip
        """The KV pool's layout, from a profile run of the largest steps, which also compiles
        kernels."""
        settings, gpu, most = self.settings, self._gpu, config.max_context
        own = Shard(0, settings.tp).config(config)  # every rank has as many heads
        block = plan_layout(own, kv_dtype, settings.block_size, 1, 0)
        pool = allocate_pool(block, None, self.device)
        rows = settings.chunk_tokens + settings.max_batch
        log.info("measuring a step of %d tokens; kernels that are new are compiled", rows)
        if isinstance(model, TensorParallelModel):
            model.on_other_ranks(
                rank_executor.MeasureMemory(block.shape, rank_executor.name_of(kv_dtype))
            )
        runner = self.runner(model, pool, sampler, most)
        with _waiting(model)():
            step = gpu.peak_of(lambda: warmup.largest_step(runner, settings, most))
            captured = gpu.peak_of(lambda: warmup.largest_captured(model, pool, settings, most))
        num_graphs = len(shapes_of(settings, most)) if self._kernels == "triton" else 0
        graphs = memory.graphs_reserve(captured, num_graphs, config.num_layers)
        usages = [(gpu.name, self.usage(max(step, captured), graphs))]
        if isinstance(model, TensorParallelModel):
            model.on_other_ranks(rank_executor.ReportMemory(graphs))
            usages += [(one.gpu, memory.MemoryProfile(*one.usage)) for one in model.answers()]
        if asked is not None:
            asked = replace(self._within(asked, config), num_kv_heads=own.num_kv_heads)
        layouts = [memory.kv_layout(one, settings, own, kv_dtype, asked) for _, one in usages]
        least = min(layouts, key=lambda layout: layout.num_blocks)
        self._max_context = min(most, least.num_tokens - 1)
        for name, usage in usages:
            log.info("%s", memory.summary(name, usage, least, settings, self._max_context))
        return replace(least, num_kv_heads=config.num_kv_heads)

    def usage(self, activations: int, graphs: int) -> memory.MemoryProfile:
        """The GPU's memory after weights were loaded, with the measured sizes."""
        weights = self._gpu.allocated() - self._held_before
        free, total = self._gpu.free_and_total()
        return memory.MemoryProfile(total, free, weights, activations, graphs)

    def runner(self, model: Any, pool: Tensor, sampler: Sampler, max_context: int) -> Runner:
        if self._kernels == "torch":
            return Runner(model, pool, sampler)
        from baton.engine.backends.gpu.runner import GpuRunner  # noqa: PLC0415

        if isinstance(model, TensorParallelModel):
            model.on_other_ranks(rank_executor.PrepareGraphs(max_context))
        stream = new_stream(pool.device, _waiting(model))
        return GpuRunner(model, pool, sampler, self.settings, max_context, stream)

    def prepare(self, runner: Any) -> None:
        """Compiles all kernels that steps launch, and captures CUDA graphs."""
        if self._kernels == "torch":
            return
        with _waiting(runner.model)():
            warmup.warm_up(runner.model, runner.pool, self.settings, self._max_context)
            free, _ = self._gpu.free_and_total()  # waits for the warm-up
        if self.settings.graphs:
            runner.capture()
            taken = max(0, free - self._gpu.free_and_total()[0])
            log.info("CUDA graphs of steps keep %.2f GiB of GPU memory", taken / 2**30)
        warmup.scored_decode(runner)
        if isinstance(runner.model, TensorParallelModel):
            runner.model.limit_steps(RANK_TIMEOUT_S)

    def for_rank(self, place: Shard) -> GpuBackend:
        return GpuBackend(place.settings(self.settings), self._gpu.of_rank(place.rank))

    def executor(self, model: Any, connection: ObjectConnection) -> rank_executor.RankExecutor:
        return _GpuRankExecutor(self, self._gpu, model, connection)


def _waiting(model: Any) -> Waiting:
    """The context for the host's waits for steps of a model."""
    return model.waiting if isinstance(model, TensorParallelModel) else nullcontext


class _GpuRankExecutor(rank_executor.RankExecutor):
    """Executes commands on a stream of the rank's GPU.

    Its host does not wait: the first rank waits for the results.
    """

    def __init__(
        self, backend: GpuBackend, gpu: Gpu, model: Any, connection: ObjectConnection
    ) -> None:
        super().__init__(gpu.device, model, connection)
        self._backend, self._gpu = backend, gpu
        self._stream = new_stream(gpu.device)
        self._graphs: StepGraphs | None = None

    def execute(self, command: Any) -> None:
        match command:
            case rank_executor.MeasureMemory(shape, dtype):
                self.pool = torch.zeros(
                    *shape, dtype=rank_executor.dtype_named(dtype), device=self.device
                )
                self._before = self._gpu.reset_peak()
            case rank_executor.ReportMemory(graph_bytes):
                usage = self._backend.usage(self._gpu.peak() - self._before, graph_bytes)
                self.connection.send(rank_executor.MemoryReport(self._gpu.name, astuple(usage)))
            case rank_executor.PrepareGraphs(max_context):
                settings, stream = self._backend.settings, self._stream
                with torch.inference_mode():
                    self._graphs = StepGraphs(self.model, self.pool, stream, settings, max_context)
            case rank_executor.CaptureGraphs():
                assert self._graphs is not None, "PrepareGraphs comes first"
                with torch.inference_mode():
                    self._graphs.capture()
            case rank_executor.ReplayStep(shape):
                assert self._graphs is not None, "PrepareGraphs comes first"
                with torch.inference_mode():
                    self._stream.put(partial(self._graphs.run, StepShape._make(shape)))
            case _:
                super().execute(command)

    def run_step(self, command: rank_executor.RunStep) -> None:
        self._stream.put(partial(super().run_step, command))

    def write_lora(self, command: rank_executor.WriteLora) -> None:
        self._stream.put(partial(super().write_lora, command))

    def zero_blocks(self, blocks: list[int]) -> None:
        self._stream.put(partial(super().zero_blocks, blocks))

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()


def _torch() -> tuple[int, ...]:
    """torch's version, as (2, 12)."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def choose_kernels(
    settings: EngineConfig, config: ModelConfig, capability: Capability, missing: str
) -> str:
    """Chooses "triton" or "torch"; missing: why Triton cannot be imported, or empty.

    Raises ConfigError for kernels that are asked for and cannot run here."""
    if settings.kernels == "native":
        raise ConfigError(
            "--kernels native runs on a CPU only: leave it out to use Triton's on a GPU"
        )
    if settings.kernels == "torch":
        return "torch"
    reason = missing or refused(config, settings.block_size, capability)
    if not reason:
        return "triton"
    if settings.kernels == "triton":
        raise ConfigError(f"--kernels triton: {reason}; leave it out to compute with torch")
    log.warning("using torch's kernels, which are slow: %s", reason)
    return "torch"


def refused(config: ModelConfig, block_size: int, capability: Capability) -> str:
    """Why Triton's kernels cannot run a model here; empty if they can."""
    gpu = f"a GPU of compute capability {'.'.join(map(str, capability))}"
    if capability < LEAST_CAPABILITY["none"]:
        return f"{gpu}, and Triton's kernels need 8.0"
    largest = max(config.layer(index).head_size for index in range(config.num_layers))
    if config.latent is None and largest > SMALL_HEAD_SIZE and capability in SMALL_MEMORY:
        return (
            f"heads of {largest} elements, and {gpu} has shared memory for tiles of "
            f"{SMALL_HEAD_SIZE}"
        )
    return unsupported(config, block_size, "Triton's")


def _refuse_formats(
    settings: EngineConfig, held: str, capability: Capability, kernels: str
) -> None:
    """Raises ConfigError for formats that the kernels or the GPU do not support."""
    asked = "--quantization" if settings.quantization != "none" else "the checkpoint's weights are"
    values = [(asked, value) for value in held.split("+")]
    for option, value in (*values, ("--kv-dtype", settings.kv_dtype)):
        if value in ("none", "auto"):
            continue
        reason, least = "", LEAST_CAPABILITY.get(value, LEAST_CAPABILITY["none"])
        if kernels == "torch":
            reason = "it needs Triton's kernels on a GPU, and torch's are used"
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
