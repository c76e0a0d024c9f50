"""The forward pass over paged KV of every decoder-only transformer that `ModelConfig` describes.

The rows of all sequences go through together; only attention distinguishes sequences. Follows
Hugging Face transformers' modeling files, which the tests compare it with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.adapters import LoraAdapter
from baton.engine.batch import StepBatch
from baton.engine.collectives import SINGLE_RANK, Collectives
from baton.engine.kernels.activation import Activation
from baton.engine.kernels.torch.attention import (
    Scoring,
    attend,
    place,
    pool_of_layer,
    softcapped,
    write_kv,
)
from baton.engine.kernels.torch.lora import LoraMatrices
from baton.engine.kernels.torch.rms_norm import Norm, rms_norm
from baton.engine.kernels.torch.rope import rotate
from baton.engine.kernels.torch.row_ops import RowOps
from baton.engine.models.layer_inputs import LayerInputs
from baton.engine.models.linear_attention import LinearAttention
from baton.engine.models.lora import LoraSlots
from baton.engine.models.mla import LatentAttention
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.moe import MixtureOfExperts
from baton.engine.models.rope import query_scales, rope_tables
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.models.weights import LayerWeights, ModelWeights
from baton.engine.quantization.linear_weight import LinearWeight, ResidualStream


class DecoderModel(LatentAttention, MixtureOfExperts, LayerInputs):
    """Weights and the arithmetic on them; a step's only state is the KV pool.

    The operations are torch's; `baton.engine.backends` has subclasses with faster ones.
    """

    ops = RowOps()
    linear_attention = LinearAttention

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        dtype: torch.dtype,
        device: torch.device,
        tables_dtype: torch.dtype | None = None,
        shard: Shard = WHOLE,
        ranks: Collectives = SINGLE_RANK,
    ) -> None:
        """config: of the unsharded model · weights: the shard's.

        tables_dtype: of cosines and sines, if not dtype · ranks: connects the shards' ranks.
        """
        self._tokens, self.collectives = shard.tokens(config), ranks
        self._own_experts, self._num_ranks = shard.experts(config), shard.count
        self.config = config = shard.config(config)
        self.dtype = dtype
        self._weights = weights
        tables, self._table_of = rope_tables(config)
        self._tables = [table.to(device, tables_dtype or dtype) for table in tables]
        self._groups = config.layer_groups
        self.num_groups = len(self._groups.windows)
        self._scoring = [
            Scoring(
                config.score_scale,
                window,
                config.attention_softcap,
                layer.sinks,
                config.arch.chunked,
            )
            for window, layer in zip(config.windows, weights.layers, strict=True)
        ]
        self.hidden: Tensor | None = None
        self.expert_tokens: Tensor | None = None
        self._tokens_of: dict[int, Tensor] = {}  # layer → its row of `expert_tokens`
        if config.experts is not None:
            counts = config.experts.counts
            self.expert_tokens = torch.zeros(counts, dtype=torch.int64, device=device)
            moe_layers = [index for index, has in enumerate(config.experts.layers) if has]
            self._tokens_of = dict(zip(moe_layers, self.expert_tokens, strict=True))
        self._query_scales = query_scales(config, device)
        self._linear = self.linear_attention(config, weights.layers)
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()

    @torch.inference_mode()
    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a batch and writes its K and V into the pool: logits `[logit_rows, vocab_size]`."""
        num_rows, num_logits, self.hidden = len(batch.token_ids), len(batch.logit_rows), None
        placed = self._place(batch, pool)
        states = self._linear.states(batch)
        hidden = self._forward(batch.token_ids, placed, pool, batch.lora_slots, states)
        if not num_logits:
            return hidden.rows.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        if num_logits < num_rows:
            hidden = hidden.select(batch.logit_rows)
        if batch.wants_hidden:
            self.hidden = self._normed(hidden, self._weights.final_norm)
        return self._logits(hidden).float()

    def state_blocks(self, pool: Tensor) -> int:
        """See `StepModel`."""
        return self._linear.state_blocks(pool)

    def close(self) -> None:
        """Does nothing: no other process computes."""

    @property
    def local_shard(self) -> Self:
        """This rank's part of the model: all of it."""
        return self

    def on_all_ranks(self, command: Any) -> AbstractContextManager[None]:
        """See `TensorParallelModel`; here there are no other ranks."""
        return nullcontext()

    @property
    def lora(self) -> LoraSlots:
        """The memory of adapters."""
        assert self._weights.lora is not None, "adapters have slots"
        return self._weights.lora

    def write_lora(self, slot: int, adapter: LoraAdapter) -> None:
        """Writes an adapter to a slot that no sequence uses."""
        self.lora.write(slot, adapter)

    def _forward(
        self, token_ids: Tensor, placed: Any, pool: Tensor, lora_slots: Tensor | None = None,
        states: Any = None,
    ) -> ResidualStream:  # fmt: skip
        """The residual stream after all layers. placed: as `_place` returned it."""
        embedded = self._embed(token_ids, self._weights.embedding)
        if self._embedding_scale != 1:
            embedded = embedded * self._embedding_scale
        hidden = ResidualStream(embedded, lora_slots=lora_slots)
        if (token_inputs := self._weights.token_inputs) is not None:
            looked_up = self._embed(token_ids, token_inputs.embedding)
            inputs = self._token_inputs(token_inputs, looked_up, embedded)
        for index, layer in enumerate(self._weights.layers):
            if layer.delta is None:
                self._add_attention(hidden, layer, placed, index, pool)
            else:
                assert states is not None, "a model with states has them"
                self._add_linear_attention(hidden, layer, states, index, pool)
            self._add_mlp(hidden, layer, placed, index)
            if layer.layer_input is not None:
                self._add_layer_input(hidden, layer.layer_input, inputs[:, index])
            if layer.layer_scale is not None:
                hidden.rows = hidden.read() * layer.layer_scale
        return hidden

    def _add_attention(
        self, hidden: ResidualStream, layer: LayerWeights, placed: Any, index: int, pool: Tensor
    ) -> None:
        """Adds the output of attention to the stream, and writes K and V."""
        assert layer.qkv is not None and layer.o is not None
        lora, gates = self._lora(hidden, index), None
        qkv = self._normed_product(
            hidden, layer.input_norm, layer.qkv, layer.qkv_bias, lora=lora.get("qkv")
        )
        if self.config.arch.gated_attention:
            size = self.config.num_heads * self.config.head_size
            gates, qkv = qkv[:, -size:], qkv[:, :-size].contiguous()
        attended = self._attention(qkv, placed, index, layer, pool)
        if gates is not None:
            attended = self.ops.sigmoid_mul(attended, gates)
        norm = layer.attention_norm
        self._add_product(hidden, attended, layer.o, layer.o_bias, norm, lora.get("o"))

    def _add_linear_attention(
        self, hidden: ResidualStream, layer: LayerWeights, states: Any, index: int, pool: Tensor
    ) -> None:
        """Adds the output of linear attention to the stream, and updates states."""
        delta, lora = layer.delta, self._lora(hidden, index)
        assert delta is not None
        x = self._normed(hidden, layer.input_norm)
        mixed = self._adapted(hidden, x, delta.delta_in, None, lora.get("delta_in"))
        gates = self._adapted(hidden, x, delta.delta_gates, None, lora.get("delta_gates"))
        out, norm = self._linear.run(index, mixed, gates, states, pool), layer.attention_norm
        self._add_product(hidden, out, delta.delta_out, None, norm, lora.get("delta_out"))

    def _lora(self, hidden: ResidualStream, index: int) -> Mapping[str, LoraMatrices]:
        """What adapters add to a layer's products, by field; empty where no row has an adapter."""
        slots = self._weights.lora
        return {} if slots is None or hidden.lora_slots is None else slots.layers[index]

    def _embed(self, token_ids: Tensor, embedding: Tensor) -> Tensor:
        """Rows of an embedding `[rows, size]`, of which each rank has a part."""
        tokens = self._tokens
        if len(tokens) == self.config.vocab_size:
            return F.embedding(token_ids, embedding)
        elsewhere = (token_ids < tokens.start) | (token_ids >= tokens.stop)
        local = (token_ids - tokens.start).masked_fill(elsewhere, 0)
        rows = F.embedding(local, embedding).masked_fill(elsewhere[:, None], 0)
        return self.collectives.all_reduce(rows)

    def _add_mlp(
        self, hidden: ResidualStream, layer: LayerWeights, placed: Any, index: int
    ) -> None:
        """Adds the output of the MLP, or of the experts that each row takes, to the stream."""
        if layer.experts is not None:
            normed = self._normed(hidden, layer.mlp_norm)
            if layer.experts.input_norm is not None:
                self._add_experts_beside_mlp(hidden, normed, layer, layer.experts, placed, index)
                return
            mixed = self._experts(normed, layer, layer.experts, placed, index)
            self._add(hidden, mixed, layer.output_norm)
            return
        assert layer.gate_up is not None and layer.down is not None
        act, lora = self.config.activation, self._lora(hidden, index)
        inner = self._normed_product(
            hidden, layer.mlp_norm, layer.gate_up, layer.gate_up_bias, act, lora.get("gate_up")
        )
        norm = layer.output_norm
        self._add_product(hidden, inner, layer.down, layer.down_bias, norm, lora.get("down"))

    def _normed_product(
        self, hidden: ResidualStream, norm: Tensor | None, weight: LinearWeight,
        bias: Tensor | None, act: Activation | None = None, lora: LoraMatrices | None = None,
    ) -> Any:  # fmt: skip
        """The product of the stream, normed if the layer has a norm there, with a weight.

        Adapters change what is behind the norm and before the gate, so nothing is fused with it.
        """
        if lora is not None:
            x = self._normed(hidden, norm)
            y = self._adapted(hidden, x, weight, bias, lora)
            return y if act is None else self.ops.act_mul(y, act)
        if norm is None:
            return weight.product(hidden.read(), bias, act=act)
        return weight.product(hidden, bias, norm=Norm(norm, self.config.rms_eps), act=act)

    def _add_product(
        self, hidden: ResidualStream, x: Any, weight: LinearWeight, bias: Tensor | None,
        norm: Tensor | None, lora: LoraMatrices | None = None,
    ) -> None:  # fmt: skip
        """Adds the product of x, normed if the layer has a norm there, to the stream."""
        if lora is None and self._adds_directly(norm):
            weight.product(x, bias, residual=hidden)
        else:
            self._add(hidden, self._adapted(hidden, x, weight, bias, lora), norm)

    def _adapted(
        self, hidden: ResidualStream, x: Tensor, weight: LinearWeight, bias: Tensor | None,
        lora: LoraMatrices | None,
    ) -> Tensor:  # fmt: skip
        """The product of x with what the rows' adapters add to it."""
        y: Tensor = weight.product(x, bias)
        if lora is not None and hidden.lora_slots is not None:
            self.ops.add_lora(y, x, hidden.lora_slots, lora)
        return y

    def _adds_directly(self, norm: Tensor | None) -> bool:
        """Whether a product is added to the stream without a reduction, norm or scale."""
        return norm is None and self._num_ranks == 1 and self.config.residual_scale == 1

    def _add(self, hidden: ResidualStream, output: Tensor, norm: Tensor | None) -> None:
        """Adds a rank's part of the output of attention or MLP to the stream."""
        output = self.collectives.all_reduce(output)
        if norm is not None:
            output, _ = self.ops.add_rms_norm(output, None, Norm(norm, self.config.rms_eps))
        scale = self.config.residual_scale
        hidden.add(output if scale == 1 else output * scale)

    def _normed(self, hidden: ResidualStream, norm: Tensor | None) -> Tensor:
        """The stream, normed if the layer has a norm there."""
        if norm is None:
            return hidden.read()
        return hidden.normed(Norm(norm, self.config.rms_eps), self.ops)

    def _logits(self, hidden: ResidualStream) -> Tensor:
        """Next-token scores `[rows, vocab_size]`, of the model's type."""
        weights = self._weights
        own = self._normed_product(hidden, weights.final_norm, weights.lm_head, None)
        return self._gather_logits(own)

    def _gather_logits(self, own: Tensor) -> Tensor:
        """Scores of the whole vocabulary, from each rank's part of it."""
        logits = self.collectives.gather(own, self.config.vocab_size)
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        return softcapped(logits, self.config.logit_softcap)

    def _place(self, batch: StepBatch, pool: Tensor) -> Any:
        """Where a step's rows read and write KV, for all layers."""
        positions, attention = place(batch, pool.shape[4], self.num_groups)
        scales = None if self._query_scales is None else self._query_scales[positions]
        return attention, [table[:, positions, None] for table in self._tables], scales

    def _attention(
        self, qkv: Tensor, placed: Any, index: int, layer: LayerWeights, pool: Tensor
    ) -> Tensor:
        """Writes KV and attends: `[rows, heads * value_size]`."""
        if layer.latent is not None:
            return self._latent_attention(qkv, placed, index, layer.latent, pool)
        q = self._rope_and_write(qkv, placed, index, layer, pool)
        return self._attend(q, placed, index, pool)

    def _rope_and_write(
        self, qkv: Tensor, placed: Any, index: int, layer: LayerWeights, pool: Tensor
    ) -> Tensor:
        """Norms and rotates queries and keys, and writes K and V: `[rows, heads, head_size]`."""
        (attention, at), tables = self._in_pool(placed[0], index), placed[1]
        q, *kv = self._split(qkv, index)
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if self.config.qk_norm == "row":
            q, kv[0] = self._rows_normed(q, kv[0], layer)
            q_norm = k_norm = None
        cos, sin = tables[self._table_of[index]]
        queries = self._rotated(q, q_norm, index, cos, sin)
        if self.config.ropes[index] is None and placed[2] is not None:
            queries = (queries * placed[2][:, :, None]).to(q.dtype)
        if kv:
            k = self._rotated(kv[0], k_norm, index, cos, sin)
            v = self._by_head(kv[1], index)
            if self.config.arch.value_norm:
                v = rms_norm(v, None, self.config.rms_eps)
            pool, at = self._pool_of(pool, at, index)
            write_kv(pool, at, attention.slots, k, v)
        return queries

    def _pool_of(self, pool: Tensor, at: int, index: int) -> tuple[Tensor, int]:
        """The pool as a layer sees it, and its index there."""
        if not self.config.layer_heads:
            return pool, at
        one = self.config.layer_heads[index]
        return pool_of_layer(pool, at, one.num_kv_heads, one.head_size)

    def _by_head(self, x: Tensor, index: int) -> Tensor:
        return x.reshape(len(x), -1, self.config.layer(index).head_size)

    def _split(self, qkv: Tensor, index: int) -> tuple[Tensor, ...]:
        """Queries, keys and values, each `[rows, heads * head_size]`; queries alone, if the layer
        reads another one's K and V."""
        config = self.config.layer(index)
        q, kv = (heads * config.head_size for heads in (config.num_heads, config.num_kv_heads))
        return torch.split(qkv, [q] if config.only_reads(index) else [q, kv, kv], dim=1)

    def _rotated(
        self, x: Tensor, weight: Tensor | None, index: int, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Queries or keys `[rows, heads, head_size]`, each head rotated, and normed if it has a
        norm."""
        heads, last = self._by_head(x, index), self.config.arch.norms_rotated
        if weight is None:
            return rotate(heads, cos, sin)
        if last:
            return rms_norm(rotate(heads, cos, sin), weight, self.config.rms_eps)
        return rotate(rms_norm(heads, weight, self.config.rms_eps), cos, sin)

    def _rows_normed(self, q: Tensor, k: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        """Queries and keys, each normed over all heads of a row, other ranks' included."""
        assert layer.q_norm is not None and layer.k_norm is not None
        squares: Sequence[Tensor | None] = (None, None)
        if self._num_ranks > 1:
            own = torch.cat([x.float().pow(2).mean(-1, keepdim=True) for x in (q, k)], dim=1)
            squares = (self.collectives.all_reduce(own) / self._num_ranks).split(1, dim=1)
        eps, (q_squares, k_squares) = self.config.rms_eps, squares
        return rms_norm(q, layer.q_norm, eps, q_squares), rms_norm(k, layer.k_norm, eps, k_squares)

    def _attend(self, q: Tensor, placed: Any, index: int, pool: Tensor) -> Tensor:
        """Attention of all rows: `[rows, heads * head_size]`."""
        attention, at = self._in_pool(placed[0], index)
        pool, at = self._pool_of(pool, at, index)
        return attend(q, pool, at, attention, self._scoring[index])
