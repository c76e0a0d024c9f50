"""The Llama family's forward pass on a GPU: Llama, Mistral, Qwen2, Qwen3 over Triton's kernels.

Computes what `baton.engine.models.decoder.Model` computes, which is its reference, in few launches:
a residual is added where the next norm reads it, and rotation, head norms and the write into the
pool are one kernel. Nothing here waits for the device; `decode` has shapes that depend on its
arguments' shapes alone, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.backends.gpu.linear import linear
from baton.engine.batch import StepBatch
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import rope_tables
from baton.engine.ops.triton.decode_attention import decode_attention
from baton.engine.ops.triton.elementwise import add_rms_norm, silu_mul
from baton.engine.ops.triton.placement import Placement, place_rows
from baton.engine.ops.triton.prefill_attention import plan_tiles, prefill_attention
from baton.engine.ops.triton.rope_kv import rope_and_write
from baton.engine.weights.weights import LayerWeights, Weights

Attend = Callable[[Tensor, int, int | None], Tensor]
"""Attention of all rows: (q `[rows, heads, head_size]`, layer, window) → like q."""


@dataclass(frozen=True)
class _Rows:
    """What all layers of a step share."""

    token_ids: Tensor
    placed: Placement
    attend: Attend


class GpuModel:
    """Weights and the arithmetic on them; no state between calls but the pool it is given."""

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Weights are on the device; matrices as `linear.prepare` makes them."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self._weights = weights
        self._scale = config.head_size**-0.5
        block_tables = rope_tables(config.rope, config.head_size, config.max_context)
        self._cos, self._sin = (table.to(device, dtype) for table in block_tables)

    @torch.inference_mode()
    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a batch and writes its K and V into the pool: logits `[logit_rows, vocab_size]`."""
        rows, wanted = len(batch.token_ids), len(batch.logit_rows)
        single = batch.num_decodes == len(batch.query_lens)
        query_lens = None if single else batch.query_lens
        placed = place_rows(batch.context_lens, query_lens, batch.block_tables, rows, pool.shape[4])
        attend = self._attention_over(batch, placed, pool)
        hidden, residual = self._forward(_Rows(batch.token_ids, placed, attend), pool)
        if not wanted:
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        if wanted < rows:  # as many as there are rows are all of them
            hidden, residual = (x.index_select(0, batch.logit_rows) for x in (hidden, residual))
        return self._logits(hidden, residual)

    @torch.inference_mode()
    def decode(
        self, token_ids: Tensor, context_lens: Tensor, block_tables: Tensor, pool: Tensor
    ) -> Tensor:
        """One row of each sequence: logits, float32 `[rows, vocab_size]`.

        token_ids: int32 `[rows]`, valid also where rows are padding · context_lens: int32 `[rows]`,
        tokens before the row; -1 is padding, which touches no block and whose logits mean nothing ·
        block_tables: int32 `[rows, width]`.
        """
        placed = place_rows(context_lens, None, block_tables, len(token_ids), pool.shape[4])

        def attend(q: Tensor, layer: int, window: int | None) -> Tensor:
            return decode_attention(
                q, pool, layer, block_tables, placed.lengths, self._scale, window
            )

        return self._logits(*self._forward(_Rows(token_ids, placed, attend), pool))

    def _attention_over(self, batch: StepBatch, placed: Placement, pool: Tensor) -> Attend:
        """Attention of a mixed batch: rows of their own first, then those of chunks."""
        num_decodes, config = batch.num_decodes, self.config
        rows, sequences = len(batch.token_ids), len(batch.query_lens)
        block_tables, chunk_tables = (
            batch.block_tables[:num_decodes],
            batch.block_tables[num_decodes:],
        )
        lengths = placed.lengths[:num_decodes]
        context_lens, query_lens = batch.context_lens[num_decodes:], batch.query_lens[num_decodes:]
        group = config.num_heads // config.num_kv_heads
        tiles = (
            plan_tiles(query_lens, rows - num_decodes, group) if num_decodes < sequences else None
        )

        def attend(q: Tensor, layer: int, window: int | None) -> Tensor:
            parts = []
            if num_decodes:
                own = q[:num_decodes]
                parts.append(
                    decode_attention(own, pool, layer, block_tables, lengths, self._scale, window)
                )
            if tiles is not None:
                chunks = (context_lens, query_lens, tiles, self._scale, window)
                parts.append(prefill_attention(q[num_decodes:], pool, layer, chunk_tables, *chunks))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attend

    def _forward(self, rows: _Rows, pool: Tensor) -> tuple[Tensor, Tensor]:
        """All layers: what the last one adds, and the residual that it is to be added to."""
        eps = self.config.rms_eps
        hidden = F.embedding(rows.token_ids, self._weights.embedding)
        residual: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            normed, residual = add_rms_norm(hidden, residual, layer.input_norm, eps)
            hidden = self._attention(normed, index, layer, rows, pool)
            normed, residual = add_rms_norm(hidden, residual, layer.post_norm, eps)
            gate_up = linear(normed, layer.gate_up, layer.gate_up_bias)
            hidden = linear(silu_mul(gate_up), layer.down, layer.down_bias)
        assert residual is not None, "a model has layers"
        return hidden, residual

    def _attention(
        self, normed: Tensor, index: int, layer: LayerWeights, rows: _Rows, pool: Tensor
    ) -> Tensor:
        config, placed = self.config, rows.placed
        q = rope_and_write(
            linear(normed, layer.qkv, layer.qkv_bias),
            placed.positions,
            placed.slots,
            self._cos,
            self._sin,
            pool,
            index,
            config.num_heads,
            config.num_kv_heads,
            layer.q_norm,
            layer.k_norm,
            config.rms_eps,
        )
        out = rows.attend(q, index, config.windows[index])
        return linear(out.view(len(out), -1), layer.o, layer.o_bias)

    def _logits(self, hidden: Tensor, residual: Tensor) -> Tensor:
        normed, _ = add_rms_norm(hidden, residual, self._weights.final_norm, self.config.rms_eps)
        return linear(normed, self._weights.lm_head).float()
