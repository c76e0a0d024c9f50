"""The Llama family's forward pass over paged KV: Llama, Mistral, Qwen2, Qwen3.

Rows of any mix of sequences go through together; only attention knows which belong together.
Follows Hugging Face transformers' modeling files, which the tests compare it with.

Rotary frequencies are those of transformers' `modeling_rope_utils`: default, linear
(https://arxiv.org/abs/2306.15595) and llama3 (Llama 3.1's interpolation by wavelength).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.models.config import ModelConfig, Rope
from baton.engine.ops.torch.attention import attend, place, write_kv
from baton.engine.ops.torch.linear import silu_gate
from baton.engine.weights.weights import LayerWeights, Weights


def inverse_frequencies(rope: Rope, head_size: int) -> Tensor:
    """Radians per position for each pair of dimensions: float32 `[head_size // 2]`."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "none":
        return frequencies
    # llama3: long waves slowed down by the factor, short ones kept, those between interpolated.
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_context / rope.high_freq_factor
    shortest_slowed = rope.original_context / rope.low_freq_factor
    slowed = torch.where(wavelengths > shortest_slowed, frequencies / rope.factor, frequencies)
    share = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_slowed)
    interpolated = (1 - share) * slowed / rope.factor + share * slowed
    return torch.where(between, interpolated, slowed)


def rope_tables(rope: Rope, head_size: int, max_context: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) of every position's angles, float32 `[max_context, head_size]` on the CPU.

    The cosine is taken in float64 and rounded: in float32 its last bit depends on how torch splits
    the table between threads, and workers with different thread counts must agree.
    """
    positions = torch.arange(max_context, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_size)).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=1), torch.cat((sin, sin), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[rows, heads, head_size]` turned by its rows' cos and sin `[rows, 1, head_size]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x `[..., size]` scaled to unit mean square, in float32, times weight `[size]`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class Model:
    """Weights and the arithmetic on them; no state between calls but the pool it is given.

    What a layer does beside its products is torch's; `baton.engine.backends.gpu.model` has other
    kernels.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._weights = weights
        self._scale = config.head_size**-0.5
        tables = rope_tables(config.rope, config.head_size, config.max_context)
        self._cos, self._sin = (table.to(device, dtype) for table in tables)

    @torch.inference_mode()
    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a batch and writes its K and V into the pool: logits `[logit_rows, vocab_size]`."""
        rows, wanted = len(batch.token_ids), len(batch.logit_rows)
        hidden, residual = self._forward(batch.token_ids, self._place(batch, pool), pool)
        if not wanted:
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        if wanted < rows:  # as many as there are rows are all of them
            hidden, residual = (x.index_select(0, batch.logit_rows) for x in (hidden, residual))
        return self._logits(hidden, residual)

    def _forward(self, token_ids: Tensor, rows: Any, pool: Tensor) -> tuple[Tensor, Tensor]:
        """All layers: what the last one adds, and the residual that it is to be added to."""
        hidden, residual = F.embedding(token_ids, self._weights.embedding), None
        for index, layer in enumerate(self._weights.layers):
            normed, residual = self._add_rms_norm(hidden, residual, layer.input_norm)
            qkv = layer.qkv.apply(normed, layer.qkv_bias)
            q = self._rope_and_write(qkv, rows, index, layer, pool)
            hidden = layer.o.apply(self._attend(q, rows, index, pool), layer.o_bias)
            normed, residual = self._add_rms_norm(hidden, residual, layer.post_norm)
            gate_up = layer.gate_up.apply(normed, layer.gate_up_bias)
            hidden = layer.down.apply(self._silu_mul(gate_up), layer.down_bias)
        assert residual is not None, "a model has layers"
        return hidden, residual

    def _logits(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Next-token scores, float32 `[rows, vocab_size]`."""
        normed, _ = self._add_rms_norm(hidden, residual, self._weights.final_norm)
        return self._weights.lm_head.apply(normed).float()

    _silu_mul = staticmethod(silu_gate)

    def _place(self, batch: StepBatch, pool: Tensor) -> Any:
        """What all layers of a step share: where its rows read and write KV."""
        positions, attention = place(batch, pool.shape[4])
        return attention, (self._cos[positions][:, None], self._sin[positions][:, None])

    def _add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The residual stream with x added, and its norm: (normed, stream)."""
        stream = x if residual is None else residual + x
        return rms_norm(stream, weight, self.config.rms_eps), stream

    def _rope_and_write(
        self, qkv: Tensor, rows: Any, index: int, layer: LayerWeights, pool: Tensor
    ) -> Tensor:
        """Queries `[rows, heads, head_size]`, normed and turned; K and V go to the pool."""
        (attention, angles), config = rows, self.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = qkv.view(len(qkv), -1, config.head_size).split(heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, config.rms_eps)
            k = rms_norm(k, layer.k_norm, config.rms_eps)
        q, k = rotate(q, *angles), rotate(k, *angles)
        write_kv(pool, index, attention.slots, k, v)
        return q

    def _attend(self, q: Tensor, rows: Any, index: int, pool: Tensor) -> Tensor:
        """Attention of all rows: `[rows, heads * head_size]`."""
        return attend(q, pool, index, rows[0], self._scale, self.config.windows[index])
