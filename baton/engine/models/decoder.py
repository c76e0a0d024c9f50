"""The forward pass over paged KV of every decoder-only transformer that `ModelConfig` describes.

Rows of any mix of sequences go through together; only attention knows which belong together.
Follows Hugging Face transformers' modeling files, which the tests compare it with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.collectives import SINGLE_RANK, Collectives
from baton.engine.kernels.torch.attention import Scoring, attend, place, softcapped, write_kv
from baton.engine.kernels.torch.linear import act_mul
from baton.engine.kernels.torch.moe_routing import route
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.rope import rope_tables
from baton.engine.shard import WHOLE, Shard
from baton.engine.weights.loader import ExpertWeights, LayerWeights, Weights
from baton.engine.weights.weight import Weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[rows, heads, head_size]` turned by its rows' cos and sin `[rows, 1, head_size]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float, mean_square: Tensor | None = None) -> Tensor:
    """x `[..., size]` scaled to unit mean square, in float32, times weight `[size]`.

    It is rounded to x's type before it meets a weight of that type; after that, with a float32 one.
    mean_square: `[..., 1]`, where x is a part of what is normed.
    """
    wide = x.float()
    if mean_square is None:
        mean_square = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(mean_square + eps)
    return (weight * wide.to(weight.dtype)).to(x.dtype)


class Hidden(NamedTuple):
    """The residual stream `[rows, hidden_size]`, and what is to be added to it when it is read."""

    stream: Tensor
    added: Tensor | None = None

    def at(self, rows: Tensor) -> Hidden:
        """Of some rows, int64 `[n]`."""
        added = None if self.added is None else self.added.index_select(0, rows)
        return Hidden(self.stream.index_select(0, rows), added)


class Model:
    """Weights and the arithmetic on them; no state between calls but the pool it is given.

    The operations of a layer are torch's; `baton.engine.backends.gpu.model` has others.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        tables_dtype: torch.dtype | None = None,
        shard: Shard = WHOLE,
        ranks: Collectives = SINGLE_RANK,
    ) -> None:
        """config is of the whole model, weights are the shard's.

        tables_dtype: of cosines and sines, if it is another · ranks: what they compute together.
        """
        self._tokens, self.collectives = shard.tokens(config), ranks
        self._own_experts, self._num_ranks = shard.experts(config), shard.count
        self.config = config = shard.config(config)
        self.dtype = dtype
        self._weights = weights
        tables, self._table_of = rope_tables(config)
        # [ropes, 2, max_context, head_size]
        self._tables = tables.to(device, tables_dtype or dtype)
        self._scoring = [
            Scoring(config.score_scale, window, config.attention_softcap, layer.sinks)
            for window, layer in zip(config.windows, weights.layers, strict=True)
        ]
        self.hidden: Tensor | None = None
        self.expert_tokens: Tensor | None = None
        self._tokens_of: dict[int, Tensor] = {}  # of layers with experts
        if config.experts is not None:
            counts = config.experts.counts
            self.expert_tokens = torch.zeros(counts, dtype=torch.int64, device=device)
            mixing = [index for index, has in enumerate(config.experts.layers) if has]
            self._tokens_of = dict(zip(mixing, self.expert_tokens, strict=True))
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()

    @torch.inference_mode()
    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a batch and writes its K and V into the pool: logits `[logit_rows, vocab_size]`."""
        rows, wanted, self.hidden = len(batch.token_ids), len(batch.logit_rows), None
        hidden = self._forward(batch.token_ids, self._place(batch, pool), pool)
        if not wanted:
            return hidden.stream.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        if wanted < rows:  # as many as there are rows are all of them
            hidden = hidden.at(batch.logit_rows)
        if not batch.wants_hidden:
            return self._logits(hidden).float()
        self.hidden, _ = self._normed(hidden, self._weights.final_norm)
        return self._whole_logits(self._weights.lm_head.apply(self.hidden)).float()

    def close(self) -> None:
        """Nothing runs elsewhere."""

    @property
    def own(self) -> Self:
        """What computes here; ranks have a part of it each."""
        return self

    def together(self, command: str, *arguments: Any) -> AbstractContextManager[None]:
        """Around what other ranks are to begin, too: this one has none to tell it to."""
        return nullcontext()

    def _forward(self, token_ids: Tensor, rows: Any, pool: Tensor) -> Hidden:
        """The rows behind all layers."""
        embedded = self._embedded(token_ids)
        if self._embedding_scale != 1:
            embedded = embedded * self._embedding_scale
        hidden = Hidden(embedded)
        for index, layer in enumerate(self._weights.layers):
            norm, bias = layer.input_norm, layer.qkv_bias
            qkv, hidden = self._normed_product(hidden, norm, layer.qkv, bias)
            q = self._rope_and_write(qkv, rows, index, layer, pool)
            mixed, norm = self._attend(q, rows, index, pool), layer.attention_norm
            hidden = self._added_product(hidden, mixed, layer.o, layer.o_bias, norm)
            hidden = self._mlp(hidden, layer, rows, index)
        return hidden

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding `[rows, hidden_size]`, of which each rank has a part."""
        tokens, embedding = self._tokens, self._weights.embedding
        if len(tokens) == self.config.vocab_size:
            return F.embedding(token_ids, embedding)
        elsewhere = (token_ids < tokens.start) | (token_ids >= tokens.stop)
        local = (token_ids - tokens.start).masked_fill(elsewhere, 0)
        rows = F.embedding(local, embedding).masked_fill(elsewhere[:, None], 0)
        return self.collectives.all_reduce(rows)

    def _mlp(self, hidden: Hidden, layer: LayerWeights, rows: Any, index: int) -> Hidden:
        """With what the MLP adds, or the experts that each row takes."""
        if layer.experts is not None:
            normed, hidden = self._normed(hidden, layer.mlp_norm)
            mixed = self._experts(normed, layer, layer.experts, rows, index)
            return self._added(hidden, mixed, layer.output_norm)
        assert layer.gate_up is not None and layer.down is not None
        norm, bias = layer.mlp_norm, layer.gate_up_bias
        inner, hidden = self._normed_product(hidden, norm, layer.gate_up, bias, is_gate=True)
        norm = layer.output_norm
        return self._added_product(hidden, inner, layer.down, layer.down_bias, norm)

    def _dense(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """The MLP beside experts, which all rows take."""
        assert layer.gate_up is not None and layer.down is not None
        inner = self._gated(layer.gate_up.apply(x, layer.gate_up_bias))
        return layer.down.apply(inner, layer.down_bias)

    def _experts(
        self, x: Tensor, layer: LayerWeights, experts: ExpertWeights, rows: Any, index: int
    ) -> Tensor:
        """The outputs of the experts that rows take, weighed and added up."""
        mixed = self._mix(x, experts, rows, self._tokens_of[index])
        if experts.shared_gate is not None:
            # Not one behind the other: torch's last bits would depend on the number of rows.
            gates = x.new_empty(len(x), 2)[:, :1].copy_(experts.shared_gate.apply(x))
            mixed += torch.sigmoid(gates) * self._dense(x, layer)
        return mixed

    def _mix(self, x: Tensor, experts: ExpertWeights, rows: Any, tokens: Tensor) -> Tensor:
        """The outputs of the experts with the best scores, times shares, in a row's own order.

        Those that other ranks have add nothing here. tokens: int64 `[experts]`, to which the rows
        that took each are added.
        """
        config, own = self.config.experts, self._own_experts
        assert config is not None
        scores = experts.router.apply(x, experts.router_bias)
        shares, taken = route(scores, config.per_token, config.normed)
        tokens += taken.flatten().bincount(minlength=len(tokens))
        outputs = x.new_zeros(*taken.shape, x.shape[1])
        for number in set(taken.unique().tolist()).intersection(own):
            expert = experts.experts[number - own.start]
            of, places = torch.where(taken == number)
            inner = self._gated(expert.gate_up.apply(x[of], expert.gate_up_bias))
            outputs[of, places] = expert.down.apply(inner, expert.down_bias)
        mixed = (outputs[:, 0] * shares[:, :1]).to(x.dtype)
        for at in range(1, taken.shape[1]):
            mixed += (outputs[:, at] * shares[:, at : at + 1]).to(x.dtype)
        return mixed

    def _normed_product(
        self, hidden: Hidden, norm: Tensor | None, weight: Weight, bias: Tensor | None,
        is_gate: bool = False,
    ) -> tuple[Any, Hidden]:  # fmt: skip
        """The product of the stream's norm with a weight, and the stream, all added.

        is_gate: it is the MLP's first, and the gated half is wanted, for `_added_product` alone.
        """
        normed, hidden = self._normed(hidden, norm)
        product = weight.apply(normed, bias)
        return self._gated(product) if is_gate else product, hidden

    def _added_product(
        self, hidden: Hidden, x: Any, weight: Weight, bias: Tensor | None, norm: Tensor | None
    ) -> Hidden:
        """With the product of x, normed if a norm is given, added to the stream."""
        return self._added(hidden, weight.apply(x, bias), norm)

    def _added(self, hidden: Hidden, mixed: Tensor, norm: Tensor | None) -> Hidden:
        """With what a rank's part of attention or MLP adds to the stream."""
        mixed = self.collectives.all_reduce(mixed)
        if norm is not None:
            mixed, _ = self._add_rms_norm(mixed, None, norm)
        scale = self.config.residual_scale
        return Hidden(hidden.stream, mixed if scale == 1 else mixed * scale)

    def _normed(self, hidden: Hidden, norm: Tensor | None) -> tuple[Tensor, Hidden]:
        """The stream's norm, if there is one, and the stream, all added."""
        stream, added = hidden
        first, residual = (stream, None) if added is None else (added, stream)
        normed, stream = self._add_rms_norm(first, residual, norm)
        return normed, Hidden(stream)

    def _logits(self, hidden: Hidden) -> Tensor:
        """Next-token scores `[rows, vocab_size]`, of the model's type."""
        norm = self._weights.final_norm
        return self._whole_logits(
            self._normed_product(hidden, norm, self._weights.lm_head, None)[0]
        )

    def _whole_logits(self, own: Tensor) -> Tensor:
        """Scores of all of the vocabulary, of a rank's own part."""
        logits = self.collectives.gather(own, self.config.vocab_size)
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        return softcapped(logits, self.config.logit_softcap)

    def _gated(self, gate_up: Tensor) -> Tensor:
        """The gated half of `[rows, 2 * size]`."""
        return act_mul(gate_up, self.config.activation)

    def _place(self, batch: StepBatch, pool: Tensor) -> Any:
        """What all layers of a step share: where its rows read and write KV."""
        positions, attention = place(batch, pool.shape[4])
        return attention, self._tables[:, :, positions, None]

    def _add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream with x added, and its norm, if it is normed: (normed, stream)."""
        stream = x if residual is None else residual + x
        return stream if weight is None else rms_norm(stream, weight, self.config.rms_eps), stream

    def _rope_and_write(
        self, qkv: Tensor, rows: Any, index: int, layer: LayerWeights, pool: Tensor
    ) -> Tensor:
        """Queries `[rows, heads, head_size]`, normed and turned; K and V go to the pool."""
        attention, tables = rows
        q, k, v = self._split(qkv)
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if self.config.differs.qk_norm == "row":
            q, k = self._rows_normed(q, k, layer)
            q_norm = k_norm = None
        q, k = self._head_norm(q, q_norm), self._head_norm(k, k_norm)
        cos, sin = tables[self._table_of[index]]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        write_kv(pool, index, attention.slots, k, self._by_head(v))
        return q

    def _by_head(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, self.config.head_size)

    def _split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each `[rows, heads * head_size]`."""
        config = self.config
        q, kv = (heads * config.head_size for heads in (config.num_heads, config.num_kv_heads))
        return torch.split(qkv, [q, kv, kv], dim=1)

    def _head_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Queries or keys `[rows, heads, head_size]`, each head normed."""
        heads = self._by_head(x)
        return heads if weight is None else rms_norm(heads, weight, self.config.rms_eps)

    def _rows_normed(self, q: Tensor, k: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        """Queries and keys with all heads of a row, those of other ranks too, normed together."""
        assert layer.q_norm is not None and layer.k_norm is not None
        squares: Sequence[Tensor | None] = (None, None)
        if self._num_ranks > 1:
            own = torch.cat([x.float().pow(2).mean(-1, keepdim=True) for x in (q, k)], dim=1)
            squares = (self.collectives.all_reduce(own) / self._num_ranks).split(1, dim=1)
        eps, (of_q, of_k) = self.config.rms_eps, squares
        return rms_norm(q, layer.q_norm, eps, of_q), rms_norm(k, layer.k_norm, eps, of_k)

    def _attend(self, q: Tensor, rows: Any, index: int, pool: Tensor) -> Tensor:
        """Attention of all rows: `[rows, heads * head_size]`."""
        return attend(q, pool, index, rows[0], self._scoring[index])
