"""Small models with 8-bit weights and pools, computed by either kind of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kv_cache import KvLayout, allocate_pool
from baton.engine.models.config import ModelConfig
from baton.engine.ops.torch.linear import Matrix
from baton.engine.weights.quantize import Int8Weight
from baton.engine.weights.weights import LayerWeights, Weights, random_weights
from tests.unit.engine import either
from tests.unit.engine.paged import NUM_BLOCKS, PagedRun, PagedSequence
from tests.unit.engine.small_config import small_config

CPU = torch.device("cpu")
MATRICES = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Kind:
    """How a model is computed, and what of it is held in 8 bits."""

    kernels: str
    dtype: torch.dtype = torch.float32
    weights: bool = False
    kv: bool = False

    def __str__(self) -> str:
        held = "+".join(name for name in ("weights", "kv") if getattr(self, name))
        return f"{self.kernels}-{str(self.dtype).removeprefix('torch.')}-{held or 'plain'}"


def qwen_config(window: int | None = None, tied: bool = False) -> ModelConfig:
    return small_config(window, architecture="Qwen2ForCausalLM", qkv_bias=True, tie_embeddings=tied)


def run_of(kind: Kind, window: int | None = None) -> PagedRun:
    """A pool and a model with weights wide enough for sharp attention."""
    config = qwen_config(window)
    weights = random_weights(config, kind.dtype, CPU, seed=3)
    weights = Weights(
        weights.embedding,
        tuple(_widened(layer, kind.weights) for layer in weights.layers),
        weights.final_norm,
        _held(weights.lm_head * 8, kind.weights),
    )
    run = PagedRun(either.make(kind.kernels, config, weights, kind.dtype))
    if kind.kv:
        sizes = (config.num_layers, config.num_kv_heads, run.block_size, config.head_size)
        run.pool = allocate_pool(KvLayout(NUM_BLOCKS, *sizes, torch.int8), None, CPU)
        run.pool[0] = 3  # nobody's, as in every run: finite garbage
    return run


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def feed(run: PagedRun, sequence: PagedSequence, chunk: int) -> Tensor:
    """Logits of all tokens, computed `chunk` at a time."""
    parts = []
    while left := len(sequence.tokens) - sequence.computed:
        parts += run.step((sequence, min(chunk, left)))
    return torch.cat(parts)


def _widened(layer: LayerWeights, int8: bool) -> LayerWeights:
    fields = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
    return LayerWeights(**fields | {name: _held(fields[name] * 8, int8) for name in MATRICES})


def _held(weight: Matrix, int8: bool) -> Matrix:
    assert isinstance(weight, Tensor)
    return Int8Weight.of(weight) if int8 else weight
