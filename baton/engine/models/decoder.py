"""The Llama family's forward pass over paged KV: Llama, Mistral, Qwen2, Qwen3.

Rows of any mix of sequences go through together; only attention knows which belong together.
Follows Hugging Face transformers' modeling files, which the tests compare it with. Callers of
anything but `step` hold `torch.inference_mode`.

Rotary frequencies are those of transformers' `modeling_rope_utils`: default, linear
(https://arxiv.org/abs/2306.15595) and llama3 (Llama 3.1's interpolation by wavelength).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.models.config import ModelConfig, Rope
from baton.engine.ops.torch.attention import AttentionBatch, attend, place, write_kv
from baton.engine.ops.torch.linear import linear, silu_gate
from baton.engine.weights.weights import LayerWeights, Weights


def inverse_frequencies(rope: Rope, head_size: int) -> Tensor:
    """Radians per position for each pair of dimensions: float32 `[head_size // 2]`."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3_frequencies(frequencies, rope)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long waves slowed down by the factor, short ones kept, those between interpolated."""
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
    """Weights and the arithmetic on them; no state between calls but the pool it is given."""

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
        rows = place(batch, pool.shape[4])
        hidden = self.forward(rows.token_ids, rows.positions, rows.attention, pool)
        if not len(batch.logit_rows):
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return self.logits(hidden[batch.logit_rows.long()])

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, pool: Tensor
    ) -> Tensor:
        """Runs rows through all layers and writes their K and V into the pool.

        token_ids, positions: int64 `[rows]`, decode rows first as in `batch` → hidden states after
        the final norm, `[rows, hidden_size]`.
        """
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        hidden = self._weights.embedding[token_ids]
        for index, layer in enumerate(self._weights.layers):
            hidden = hidden + self._attention(hidden, index, layer, (cos, sin), batch, pool)
            hidden = hidden + self._mlp(hidden, layer)
        return rms_norm(hidden, self._weights.final_norm, self.config.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores, float32 `[rows, vocab_size]`, of hidden `[rows, hidden_size]`."""
        return linear(hidden, self._weights.lm_head).float()

    def _attention(
        self,
        hidden: Tensor,
        index: int,
        layer: LayerWeights,
        rope: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        pool: Tensor,
    ) -> Tensor:
        config = self.config
        normed = rms_norm(hidden, layer.input_norm, config.rms_eps)
        qkv = linear(normed, layer.qkv, layer.qkv_bias).view(len(hidden), -1, config.head_size)
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = qkv.split(heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, config.rms_eps)
            k = rms_norm(k, layer.k_norm, config.rms_eps)
        q, k = rotate(q, *rope), rotate(k, *rope)
        write_kv(pool, index, batch.slots, k, v)
        out = attend(q, pool, index, batch, self._scale, config.windows[index])
        return linear(out, layer.o, layer.o_bias)

    def _mlp(self, hidden: Tensor, layer: LayerWeights) -> Tensor:
        normed = rms_norm(hidden, layer.post_norm, self.config.rms_eps)
        gate_up = linear(normed, layer.gate_up, layer.gate_up_bias)
        return linear(silu_gate(gate_up), layer.down, layer.down_bias)
