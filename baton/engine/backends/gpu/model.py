"""The decoder over Triton's kernels: few launches, and nothing waits for the device.

A residual is added where the next norm reads it, and rotation, head norms and the write into the
pool are one kernel. `decode` has shapes that depend on its arguments' shapes alone, so that a CUDA
graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from baton.engine.backends.gpu.linear import GpuWeight, prepare
from baton.engine.batch import StepBatch
from baton.engine.collectives import SINGLE_RANK, Collectives
from baton.engine.kernels.triton.activation import act_mul
from baton.engine.kernels.triton.decode_attention import DecodePlan, decode_attention, plan_decode
from baton.engine.kernels.triton.moe_matmul import GroupedWeight
from baton.engine.kernels.triton.moe_routing import Router, add_up, route
from baton.engine.kernels.triton.prefill_attention import plan_tiles, prefill_attention
from baton.engine.kernels.triton.rms_norm import add_rms_norm
from baton.engine.kernels.triton.rope_kv import Rotation, rope_and_write
from baton.engine.kernels.triton.slot_mapping import SlotMapping, map_slots
from baton.engine.models.decoder import Hidden, Model
from baton.engine.models.model_config import ModelConfig
from baton.engine.shard import WHOLE, Shard
from baton.engine.weights.loader import ExpertWeights, LayerWeights, Weights
from baton.engine.weights.weight import DenseWeight, Weight


@dataclass(frozen=True)
class _Rows:
    """Where rows read and write KV: `num_decodes` of their own first, then those of chunks.

    plans: of decode rows, by the window of the layers that they are for; made where first used.
    """

    placed: SlotMapping
    num_decodes: int
    block_tables: Tensor
    context_lens: Tensor
    query_lens: Tensor | None = None
    tiles: Any = None  # of chunks, if there are any
    plans: dict[int | None, DecodePlan] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _GroupedExperts(ExpertWeights):
    """Experts, and where each one's matrices lie.

    few_router: the router where few rows are routed by the launch that scores them.
    """

    gate_up: GroupedWeight
    down: GroupedWeight
    few_router: Router | None

    @classmethod
    def of(cls, held: ExpertWeights, dtype: torch.dtype) -> _GroupedExperts:
        experts, few_router = held.experts, None
        router = prepare(held.router, is_output=False, quantization="none")
        if isinstance(router, DenseWeight):
            weight = router.tensor
            arrived = torch.zeros(1, dtype=torch.int32, device=weight.device)
            few_router = Router(weight, held.router_bias, arrived)
        return cls(
            **{**vars(held), "router": router},
            few_router=few_router,
            gate_up=GroupedWeight.of(
                [one.gate_up for one in experts], [one.gate_up_bias for one in experts], dtype
            ),
            down=GroupedWeight.of(
                [one.down for one in experts], [one.down_bias for one in experts], dtype
            ),
        )


class GpuModel(Model):
    """Weights are on the device; matrices as `linear.prepare` makes them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
        ranks: Collectives = SINGLE_RANK,
    ) -> None:
        layers = tuple(
            replace(layer, experts=layer.experts and _GroupedExperts.of(layer.experts, dtype))
            for layer in weights.layers
        )
        whole = replace(weights, layers=layers)
        super().__init__(config, whole, dtype, device, shard=shard, ranks=ranks)

    @torch.inference_mode()
    def decode(
        self, token_ids: Tensor, context_lens: Tensor, block_tables: Tensor, pool: Tensor
    ) -> Tensor:
        """One row of each sequence: logits `[rows, vocab_size]`, of the model's type.

        token_ids: int32 `[rows]`, valid also where rows are padding · context_lens: int32 `[rows]`,
        tokens before the row; -1 is padding, which touches no block and whose logits mean nothing ·
        block_tables: int32 `[rows, width]`.
        """
        placed = map_slots(context_lens, None, block_tables, len(token_ids), pool.shape[4])
        rows = _Rows(placed, len(token_ids), block_tables, context_lens)
        return self._logits(self._forward(token_ids, rows, pool))

    def _mlp(self, hidden: Hidden, layer: LayerWeights, rows: _Rows, index: int) -> Hidden:
        experts, norm = layer.experts, layer.output_norm
        if experts is None or experts.shared_gate is not None or not self._adds_at_once(norm):
            return super()._mlp(hidden, layer, rows, index)
        normed, hidden = self._normed(hidden, layer.mlp_norm)
        return Hidden(self._mix(normed, experts, rows, self._tokens_of[index], hidden.stream))

    def _mix(
        self, x: Tensor, experts: ExpertWeights, rows: _Rows, tokens: Tensor,
        stream: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """stream: to which it is added, in place."""
        config = self.config.experts
        assert isinstance(experts, _GroupedExperts) and config is not None
        router, scored = experts.few_router, None
        if router is not None and router.takes(x):
            scores, scored = x.new_empty(len(x), config.count), (router, x)
        else:
            scores = experts.router.apply(x, experts.router_bias)
        slots = route(
            scores, config.per_token, config.normed, self._own_experts, rows.placed.lengths, tokens,
            scored=scored,
        )  # fmt: skip
        inner = experts.gate_up.apply(x, slots, self.config.activation)
        return add_up(experts.down.apply(inner, slots), slots, x.dtype, stream)

    def _gated(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = act_mul(gate_up, self.config.activation)
        return gated

    def _normed_product(
        self, hidden: Hidden, norm: Tensor | None, weight: Weight, bias: Tensor | None,
        is_gate: bool = False,
    ) -> tuple[Any, Hidden]:  # fmt: skip
        if not isinstance(weight, GpuWeight):
            return super()._normed_product(hidden, norm, weight, bias, is_gate)
        activation = self.config.activation if is_gate else None
        if norm is None:
            stream, hidden = self._normed(hidden, None)
            return weight.gate_product(stream, bias, activation), hidden
        return weight.normed_product(hidden, norm, self.config.rms_eps, bias, activation)

    def _added_product(
        self, hidden: Hidden, x: Any, weight: Weight, bias: Tensor | None, norm: Tensor | None
    ) -> Hidden:
        if not isinstance(weight, GpuWeight):
            return super()._added_product(hidden, x, weight, bias, norm)
        if self._adds_at_once(norm):
            return weight.added_product(hidden, x, bias)
        return self._added(hidden, weight.apply(weight.gated(x), bias), norm)

    def _adds_at_once(self, norm: Tensor | None) -> bool:
        """Whether what a kernel computes is all that is added to the stream."""
        return norm is None and self._num_ranks == 1 and self.config.residual_scale == 1

    def _place(self, batch: StepBatch, pool: Tensor) -> _Rows:
        rows, num_decodes = len(batch.token_ids), batch.num_decodes
        context_lens, tables = batch.context_lens, batch.block_tables
        query_lens = None if num_decodes == len(batch.query_lens) else batch.query_lens
        placed = map_slots(context_lens, query_lens, tables, rows, pool.shape[4])
        tiles = None
        if query_lens is not None:
            query_lens = query_lens[num_decodes:]
            group = self.config.num_heads // self.config.num_kv_heads
            tiles = plan_tiles(query_lens, rows - num_decodes, group)
        return _Rows(placed, num_decodes, tables, context_lens, query_lens, tiles)

    def _add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if weight is None:
            return super()._add_rms_norm(x, residual, None)
        return add_rms_norm(x, residual, weight, self.config.rms_eps)

    def _rope_and_write(
        self, qkv: Tensor, rows: _Rows, index: int, layer: LayerWeights, pool: Tensor
    ) -> Tensor:
        """Of decode rows alone qkv itself: their attention turns and writes them, too."""
        config, placed = self.config, rows.placed
        if config.differs.qk_norm == "row":  # the kernels norm heads
            q, k, v = self._split(qkv)
            qkv = torch.cat([*self._rows_normed(q, k, layer), v], dim=1)
        if rows.tiles is None:
            return qkv
        heads = config.num_heads, config.num_kv_heads
        rotation = self._rotation(index)
        return rope_and_write(qkv, placed.positions, placed.slots, rotation, pool, index, *heads)

    def _rotation(self, index: int) -> Rotation:
        cos, sin = self._tables[self._table_of[index]]
        if self.config.differs.qk_norm == "row":
            return Rotation(cos, sin)
        layer = self._weights.layers[index]
        return Rotation(cos, sin, layer.q_norm, layer.k_norm, self.config.rms_eps)

    def _rows_normed(self, q: Tensor, k: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        if self._num_ranks > 1:
            return super()._rows_normed(q, k, layer)
        assert layer.q_norm is not None and layer.k_norm is not None
        (q, _), (k, _) = (
            add_rms_norm(x, None, norm, self.config.rms_eps)
            for x, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
        return q, k

    def _attend(self, q: Tensor, rows: _Rows, index: int, pool: Tensor) -> Tensor:
        own, scoring = rows.num_decodes, self._scoring[index]
        out = q.new_empty(len(q), self.config.num_heads, self.config.head_size)
        if own:
            window, tables = scoring.window, rows.block_tables[:own]
            if window not in rows.plans:
                lengths = rows.placed.lengths[:own]
                rows.plans[window] = plan_decode(out[:own], pool, lengths, window)
            plan = rows.plans[window]
            rotation = self._rotation(index) if rows.tiles is None else None
            decode_attention(q[:own], pool, index, tables, plan, scoring, out[:own], rotation)
        if rows.tiles is not None:
            assert rows.query_lens is not None, "chunks have lengths"
            tables, context_lens = rows.block_tables[own:], rows.context_lens[own:]
            chunks = (tables, context_lens, rows.query_lens, rows.tiles, scoring, out[own:])
            prefill_attention(q[own:], pool, index, *chunks)
        return out.view(len(q), -1)
