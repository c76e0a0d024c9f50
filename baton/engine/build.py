"""Builds an engine from settings: checkpoint, kernels, KV pool, scheduler, sampler, thread.

A backend decides what differs between a CPU, a GPU and a simulation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from baton.config import EngineConfig, model_path
from baton.engine import draft_model
from baton.engine.backends.backend import Backend
from baton.engine.backends.cpu.backend import CpuBackend
from baton.engine.backends.gpu import memory
from baton.engine.backends.gpu.backend import GpuBackend
from baton.engine.backends.gpu.device import Gpu
from baton.engine.block_manager import BlockManager
from baton.engine.checkpoint.tensor_headers import fingerprint
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.cpu_affinity import pin_thread
from baton.engine.draft_model import (
    CATCH_UP_SHARE,
    MIN_CATCH_UP,
    DraftModel,
    DraftProposer,
    load_draft,
)
from baton.engine.engine import Engine
from baton.engine.kernels.torch.row_quantization import FP8
from baton.engine.kv_cache import Allocate, KvLayout, plan_layout
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import Shard
from baton.engine.models.weight_loader import random_seed
from baton.engine.mtp import MtpProposer
from baton.engine.rank_executor import RemoteRanks
from baton.engine.runner import Runner, StepRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.scheduler import ScheduledSequence, ScheduledStep, Scheduler
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import NgramProposer
from baton.engine.speculative.proposer import Proposer
from baton.engine.state_cache import StateBlockManager
from baton.engine.step_report import StepReport
from baton.engine.tensor_parallel import TensorParallelModel
from baton.errors import ConfigError
from baton.generation.sampling_params import SamplingParams
from baton.v1 import common_pb2

log = logging.getLogger(__name__)


class _Chunks(NamedTuple):
    """A chunk's duration beside running sequences and without, and its minimum of tokens."""

    seconds: float
    alone_s: float
    min_tokens: int


# On a GPU (derived, not measured) fewer tokens take as long, as all weights are read: up to 295 on
# an H100 in bfloat16. Without sequences only shorter prompts wait for a chunk.
_CHUNKS = {"cpu": _Chunks(0.060, 0.060, 64), "cuda": _Chunks(0.025, 0.100, 256)}


@dataclass(frozen=True)
class Loaded:
    """A model in memory with its KV pool, ready to be driven by an `Engine`.

    dtype: of its computation · fingerprint: of its weights · max_context: tokens of a sequence that
    model, settings and pool all allow · prepare: to be called once, before the first step · draft:
    the draft model, if there is one.
    """

    path: Path
    model_config: ModelConfig
    runner: StepRunner
    layout: KvLayout
    dtype: torch.dtype
    fingerprint: str
    settings: EngineConfig
    max_context: int
    prepare: Callable[[], None]
    draft: DraftModel | None = None

    @property
    def descriptor(self) -> common_pb2.KvDescriptor:
        """What another worker must match to exchange KV."""
        return self.layout.descriptor(self.fingerprint, self.dtype, self.settings.quantization)

    @property
    def chunk_s(self) -> float:
        """Target duration of a chunk."""
        return self.settings.chunk_ms / 1e3 or _CHUNKS[self.runner.pool.device.type].seconds

    def engine(self, publish: Callable[[StepReport], None]) -> Engine:
        """A new engine, not started, over this model and pool."""
        settings, runner, most = self.settings, self.runner, self.max_context
        blocks = self._block_manager()
        proposer = self._proposer()
        usual = _CHUNKS[runner.pool.device.type]
        alone_s = 0.0 if settings.chunk_ms else usual.alone_s
        chunk = ChunkBudget(settings.chunk_tokens, self.chunk_s, usual.min_tokens, alone_s)
        scheduler = Scheduler(blocks, chunk, settings.max_batch, proposer)
        eos = frozenset(self.model_config.eos_token_ids)
        overlap = settings.overlap and not proposer  # proposals need known tokens
        engine = Engine(runner, scheduler, eos, most, publish, overlap, settings.lora_slots)
        if (ranks := runner.ranks) is not None:
            ranks.on_failure = partial(engine.submit, ranks.check)
        # The first work of the engine's thread.
        engine.submit(partial(pin_thread, settings.cpus, settings.nice))
        device = runner.pool.device
        if device.type == "cuda":
            engine.submit(partial(torch.cuda.set_device, device))
        return engine

    def _block_manager(self) -> BlockManager:
        layout, runner, cache = self.layout, self.runner, self.settings.prefix_cache
        sizes = layout.num_blocks, layout.block_size
        if not layout.state_blocks:
            return BlockManager(*sizes, cache, layout.windows)
        cache = cache and len(runner.pools) == self.settings.tp  # other hosts' are not copied
        memory_of = runner.zero_blocks, runner.copy_blocks
        return StateBlockManager(*sizes, cache, layout.state_blocks, *memory_of)

    def _proposer(self) -> Proposer | None:
        settings, tokens = self.settings, (self.settings.most_proposed, self.max_context)
        if self.draft is not None:
            chunk = ChunkBudget(settings.chunk_tokens, CATCH_UP_SHARE * self.chunk_s, MIN_CATCH_UP)
            if settings.is_mtp:
                return self._mtp_proposer(MtpProposer(*tokens, self.draft, chunk))
            return DraftProposer(*tokens, self.draft, chunk, settings.prefix_cache)
        return NgramProposer(*tokens) if settings.speculate else None

    def _mtp_proposer(self, proposer: MtpProposer) -> MtpProposer:
        """Gives the proposer the hidden states of all steps."""
        assert isinstance(self.runner, Runner), "the model is on a CPU"
        self.runner.keep_hidden(proposer.take_hidden)
        return proposer


def load(
    settings: EngineConfig,
    allocate: Allocate | None = None,
    backend: Backend | None = None,
    remote_ranks: RemoteRanks | None = None,
) -> Loaded:
    """Loads the model that `settings` name and allocates its KV pool.

    backend: by default that of the settings' device, which becomes the calling thread's GPU ·
    remote_ranks: those on other hosts. Raises CheckpointError for a broken checkpoint,
    ConfigError for impossible settings.
    """
    remote_ranks = remote_ranks or RemoteRanks()
    ranks_here = settings.tp - len(remote_ranks.connections)
    path = model_path(settings.model)
    config = ModelConfig.load(path)
    config.check_settings(settings)
    backend = backend or backend_of(settings, ranks_here)
    config.check_device(settings, backend.device.type)
    backend.remote_ranks = remote_ranks
    settings = Shard(0, ranks_here).settings(backend.settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    dtype = choose_dtype(settings.dtype, config.dtype, backend.device)
    kv_dtype = kv_dtype_of(settings, dtype)
    sampler = Sampler(frozenset(config.eos_token_ids), config.vocab_size)
    longest = config.longest_context(settings)
    kv_bytes, layout = settings.kv_cache_bytes or backend.kv_bytes, None
    if settings.kv_blocks or kv_bytes:
        size = settings.block_size, settings.kv_blocks, kv_bytes, settings.chunk_tokens
        layout = plan_layout(config, kv_dtype, *size)
        _check_context(settings, layout)
        longest = min(longest, layout.num_tokens)
    # Tables by position cover only the positions that are possible here.
    limited = replace(config, max_context=longest)
    try:
        model = backend.model(path, limited, dtype)
        layout = backend.layout(model, sampler, limited, kv_dtype, layout)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the model and a step of it do not fit the GPU's memory; "
            f"{memory.advice(settings, None)}"
        ) from error
    _check_context(settings, layout)
    max_context = min(longest, layout.num_tokens - 1)
    if max_context < 2:
        raise ConfigError(
            "the KV cache is too small for any request: raise --kv-blocks or --kv-cache"
        )
    try:
        pools = backend.pools(model, layout, allocate)
    except torch.OutOfMemoryError as error:  # another process allocated meanwhile
        raise memory.lost(layout, settings) from error
    log.info(
        "%d KV blocks of %d tokens (%.0f MiB, %s; windows of groups of layers: %s), contexts of up "
        "to %d tokens",
        layout.num_blocks, layout.block_size, layout.num_bytes / 2**20, layout.dtype,
        ", ".join(str(window or "none") for window in layout.windows), max_context,
    )  # fmt: skip
    if max_context < config.max_context and not settings.max_context:
        log.warning(
            "contexts end at %d tokens, and the model's at %d: %s holds those",
            max_context, config.max_context, _kv_for(settings, layout, config.max_context),
        )  # fmt: skip
    runner = backend.runner(model, pools[0], sampler, max_context)
    runner.pools = pools
    runner.ranks = model if isinstance(model, TensorParallelModel) else None
    identity = fingerprint(path, random_seed(settings, backend.device))
    prepare, draft = partial(backend.prepare, runner), None
    if settings.speculative_model:
        draft = load_draft(settings, backend, config, layout, dtype, max_context, sampler)
    return Loaded(
        path, config, runner, layout, dtype, identity, settings, max_context, prepare, draft
    )


def _check_context(settings: EngineConfig, layout: KvLayout) -> None:
    """Raises ConfigError if the pool is smaller than a state, or than the requested context."""
    if layout.num_tokens < 1:
        raise ConfigError(
            f"the state of a sequence takes {layout.state_blocks} KV blocks, and there are "
            f"{layout.num_blocks}: give the KV cache {_kv_for(settings, layout, layout.block_size)}"
        )
    if settings.max_context >= layout.num_tokens:
        raise ConfigError(
            f"--max-context {settings.max_context} does not fit the KV cache, which holds "
            f"{layout.num_tokens} tokens, one more than a context: give it "
            f"{_kv_for(settings, layout, settings.max_context)}, or lower --max-context to "
            f"{layout.num_tokens - 1}"
        )


def _kv_for(settings: EngineConfig, layout: KvLayout, context: int) -> str:
    """The option for a pool of this context length; --kv-blocks where that sizes the pool."""
    needed = layout.bytes_of(context + layout.block_size)
    if settings.kv_blocks:
        return f"--kv-blocks {needed // layout.block_bytes}"
    return f"--kv-cache {math.ceil(needed / 2**20)}MiB"


def warm_up(loaded: Loaded) -> None:
    """Runs a large step and a single-token one, so that no request pays for first-time costs.

    Not the largest step, which takes seconds on slow machines. It writes into the pool, before any
    sequence has blocks.
    """
    loaded.prepare()
    if loaded.draft is not None:
        draft_model.warm_up(loaded.draft)
    chunk = min(512, loaded.settings.chunk_tokens, loaded.max_context)
    groups, num_blocks = len(loaded.layout.windows), loaded.layout.num_blocks
    blocks = list(range(-(-chunk // loaded.layout.block_size) * groups))
    states = list(range(num_blocks - loaded.layout.state_blocks, num_blocks))
    params = SamplingParams()
    sequence = Sequence(
        "warm-up", [1] * chunk, chunk, params, block_ids=blocks, state_blocks=states
    )
    single = ScheduledSequence(
        Sequence("warm-up", [1], 1, params, block_ids=blocks[:groups], state_blocks=states), 0, 1
    )
    loaded.runner.run(
        ScheduledStep(
            [single] * loaded.settings.max_batch + [ScheduledSequence(sequence, 0, chunk)]
        )
    )
    loaded.runner.run(ScheduledStep([ScheduledSequence(sequence, chunk - 1, 1)]))
    # They may hold KV next; on a GPU the first was every block of a state.
    loaded.runner.zero_blocks([0, *states] if states else [])


def backend_of(settings: EngineConfig, ranks: int) -> Backend:
    """The backend of the settings' device. ranks: on this host. Raises ConfigError."""
    device = device_of(settings, ranks)
    on_gpu = device.type == "cuda"
    return GpuBackend(settings, Gpu(device)) if on_gpu else CpuBackend(settings)


def device_of(settings: EngineConfig, ranks: int = 0) -> torch.device:
    """The device of an engine: "auto" is a GPU where there is one, "cuda" the first.

    A GPU has a number, that of the first rank's; a simulated engine uses none. ranks: on this host,
    all by default. Raises ConfigError for a GPU that torch does not see.
    """
    name, count = settings.device, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if settings.simulate or (name == "auto" and not count):
        name = "cpu"
    device = torch.device("cuda" if name == "auto" else name)
    if device.type != "cuda":
        return device
    index, ranks = device.index or 0, ranks or settings.tp
    if index + ranks <= count:
        return torch.device("cuda", index)
    if index < count:
        reason = f"{ranks} ranks take a GPU each, from this one on, and torch sees {count}"
    elif count:
        names = (f"cuda:{at} ({torch.cuda.get_device_name(at)})" for at in range(count))
        reason = f"torch sees only {', '.join(names)}"
    elif torch.version.cuda is None:
        reason = (
            f"torch sees no GPU here, because torch {torch.__version__} was built without CUDA; "
            "install one with it, or use --device cpu"
        )
    else:
        reason = (
            "torch sees no GPU here (nvidia-smi shows those that the driver knows, and "
            "CUDA_VISIBLE_DEVICES may hide some); use --device cpu"
        )
    raise ConfigError(f"--device {name}: {reason}")


def choose_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The compute dtype; "auto" is bfloat16 for half-precision checkpoints where it is fast."""
    if name == "auto":
        half = checkpoint in ("bfloat16", "float16")
        fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
        name = "bfloat16" if half and fast else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def kv_dtype_of(settings: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of KV. dtype: of the computation."""
    return {"int8": torch.int8, "fp8": FP8}.get(settings.kv_dtype, dtype)
