"""The decoder with Triton kernels: few launches, none of which waits for the device.

A residual is added by the next norm, and head norms, rotation and the KV write are one kernel.
Shapes in `decode` depend only on its arguments' shapes, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from baton.engine.backends.gpu.linear import TRITON_ROW_OPS, prepare, unwrapped
from baton.engine.batch import StepBatch
from baton.engine.collectives import SINGLE_RANK, Collectives
from baton.engine.kernels.torch.delta_rule import DeltaRule
from baton.engine.kernels.torch.rms_norm import Norm
from baton.engine.kernels.triton.decode_attention import DecodePlan, decode_attention, plan_decode
from baton.engine.kernels.triton.delta_rule import RowStates, delta_rule, row_states
from baton.engine.kernels.triton.fused_moe import MoeWeight
from baton.engine.kernels.triton.mla import (
    Angles,
    latent_attention,
    plan_latent,
    write_latent,
)
from baton.engine.kernels.triton.moe_routing import FusedRouter, moe_sum, route
from baton.engine.kernels.triton.prefill_attention import Tiles, plan_tiles, prefill_attention
from baton.engine.kernels.triton.rms_norm import add_rms_norm
from baton.engine.kernels.triton.rope_kv import Rotation, rope_and_write
from baton.engine.kernels.triton.slot_mapping import SlotMapping, map_slots
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.linear_attention import LinearAttention
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.models.weights import (
    HeadWeights,
    LatentWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
)
from baton.engine.quantization.linear_weight import DenseWeight, ResidualStream


@dataclass(frozen=True)
class _PlacedRows:
    """Where a step's rows read and write KV: `num_decodes` decode rows first, then those of chunks.

    groups: for each group of layers, the rows' slots and the block tables `[sequences, width]` ·
    query_lens: of chunks, if there are any · tiles: of chunks, by the heads that share a KV head,
    and their size · plans: of decode rows, by window, KV heads and head size; both made where first
    used · latent_plan: of all rows, over latent KV · owners: int32 `[rows]`, the sequence of each
    row; None: one each.
    """

    groups: list[tuple[SlotMapping, Tensor]]
    num_decodes: int
    context_lens: Tensor
    query_lens: Tensor | None = None
    tiles: dict[tuple[int, int], Tiles] = field(default_factory=dict)
    plans: dict[tuple[int | None, int, int], DecodePlan] = field(default_factory=dict)
    latent_plan: DecodePlan | None = None
    owners: Tensor | None = None

    @property
    def has_chunks(self) -> bool:
        """Whether some rows are those of chunks, of a model without latent KV."""
        return self.query_lens is not None

    @property
    def lengths(self) -> Tensor:
        """Of each row, as of `SlotMapping`, whatever its group."""
        return self.groups[0][0].lengths


@dataclass(frozen=True, kw_only=True)
class _MoeExperts(MoeWeights):
    """Experts with their matrices prepared for the MoE kernel.

    few_router: the router for few rows, which `route` scores itself; None if it cannot."""

    gate_up: MoeWeight
    down: MoeWeight
    few_router: FusedRouter | None

    @classmethod
    def from_weights(cls, held: MoeWeights, dtype: torch.dtype) -> _MoeExperts:
        experts, few_router = held.experts, None
        router = prepare(held.router, is_output=False, quantization="none")
        if isinstance(router, DenseWeight):
            weight = router.tensor
            arrived = torch.zeros(1, dtype=torch.int32, device=weight.device)
            few_router = FusedRouter(weight, held.router_bias, arrived)
        return cls(
            **{**vars(held), "router": router},
            few_router=few_router,
            gate_up=MoeWeight.from_weights(
                [unwrapped(one.gate_up) for one in experts],
                [one.gate_up_bias for one in experts],
                dtype,
            ),
            down=MoeWeight.from_weights(
                [unwrapped(one.down) for one in experts], [one.down_bias for one in experts], dtype
            ),
        )


@dataclass(frozen=True)
class _StackedHeads(HeadWeights):
    """Matrices that one product of a batch takes: `[heads, in, out]`."""

    matrices: Tensor

    def apply(self, x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:2], self.matrices.shape[2])
        torch.bmm(x.transpose(0, 1), self.matrices, out=out.transpose(0, 1))
        return out


def _stacked(weights: LatentWeights) -> LatentWeights:
    """Latent weights with the matrices of all heads in one tensor, unless they are quantised."""

    def stack(held: HeadWeights) -> HeadWeights:
        heads = [unwrapped(one) for one in held.heads]
        dense = [one.tensor.T for one in heads if isinstance(one, DenseWeight)]
        return _StackedHeads((), torch.stack(dense)) if len(dense) == len(heads) else held

    return replace(weights, keys=stack(weights.keys), values=stack(weights.values))


class _TritonLinearAttention(LinearAttention):
    """Linear attention by Triton's kernels."""

    def states(self, batch: StepBatch) -> RowStates | None:
        if batch.state_tables is None:
            return None
        decodes = batch.num_decodes == len(batch.query_lens)
        query_lens = None if decodes else batch.query_lens
        return row_states(batch.state_tables, batch.context_lens, query_lens, len(batch.token_ids))

    def _advance(
        self, rule: DeltaRule, mixed: Tensor, gates: Tensor, states: RowStates, pool: Tensor
    ) -> Tensor:
        return delta_rule(rule, mixed.contiguous(), gates.contiguous(), states, pool)


class GpuModel(DecoderModel):
    """Weights are on the device; matrices as `linear.prepare` makes them."""

    ops = TRITON_ROW_OPS
    linear_attention = _TritonLinearAttention

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, dtype: torch.dtype, device: torch.device,
        shard: Shard = WHOLE, ranks: Collectives = SINGLE_RANK,
    ) -> None:  # fmt: skip
        layers = tuple(
            replace(
                layer,
                experts=layer.experts and _MoeExperts.from_weights(layer.experts, dtype),
                latent=layer.latent and _stacked(layer.latent),
            )
            for layer in weights.layers
        )
        whole = replace(weights, layers=layers)
        super().__init__(config, whole, dtype, device, shard=shard, ranks=ranks)

    @torch.inference_mode()
    def decode(
        self, token_ids: Tensor, context_lens: Tensor, block_tables: Tensor, pool: Tensor,
        lora_slots: Tensor | None = None, state_tables: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes one row of each sequence: logits `[rows, vocab_size]`, of the model's type.

        token_ids: int32 `[rows]`, valid also where rows are padding · context_lens: int32 `[rows]`,
        tokens before the row; -1 is padding, which touches no block and whose logits mean nothing ·
        block_tables: int32 `[rows, width]` · lora_slots, state_tables: as
        `StepBatch`'s.
        """
        groups = self._map_groups(context_lens, None, block_tables, len(token_ids), pool)
        plan = self._latent_plan(groups[0][0])
        placed = _PlacedRows(groups, len(token_ids), context_lens, latent_plan=plan)
        states = None
        if state_tables is not None:
            states = row_states(state_tables, context_lens, None, len(token_ids))
        return self._logits(self._forward(token_ids, placed, pool, lora_slots, states))

    def _map_groups(
        self, context_lens: Tensor, query_lens: Tensor | None, block_tables: Tensor, num_rows: int,
        pool: Tensor,
    ) -> list[tuple[SlotMapping, Tensor]]:  # fmt: skip
        """As `_PlacedRows.groups`."""
        count = self.num_groups
        tables = [block_tables]
        if count > 1:  # `contiguous` would leave a single entry the stride of the whole table
            parts = (block_tables[:, group::count] for group in range(count))
            tables = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        return [
            (map_slots(context_lens, query_lens, table, num_rows, pool.shape[4]), table)
            for table in tables
        ]

    def _add_mlp(
        self, hidden: ResidualStream, layer: LayerWeights, placed: _PlacedRows, index: int
    ) -> None:
        experts, norm = layer.experts, layer.output_norm
        if experts is None or layer.gate_up is not None or not self._adds_directly(norm):
            return super()._add_mlp(hidden, layer, placed, index)
        normed = self._normed(hidden, layer.mlp_norm)
        tokens = self._tokens_of[index]
        hidden.rows = self._mix(normed, experts, placed, tokens, stream=hidden.rows)
        return None

    def _mix(
        self, x: Tensor, experts: MoeWeights, placed: _PlacedRows, tokens: Tensor,
        routed: Tensor | None = None, stream: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """stream: the residual stream that the result is added to, in place."""
        config = self.config.experts
        assert isinstance(experts, _MoeExperts) and config is not None
        router, scored = experts.few_router, None
        wide = self._router_input(x if routed is None else routed)
        if router is not None and router.takes(wide):
            scores, scored = wide.new_empty(len(x), config.count), (router, wide)
        else:
            scores = experts.router.apply(wide, experts.router_bias)
        slots = route(
            scores, config.routing, self._own_experts, experts.correction, placed.lengths, tokens,
            scored=scored, share_scale=experts.share_scale,
        )  # fmt: skip
        inputs = slots
        if config.scales_inputs:  # a row for each slot
            scaled = x[:, None] * slots.shares[:, :, None].to(x.dtype)
            x, inputs = scaled.flatten(0, 1), replace(slots, taken=slots.taken.view(-1, 1))
            slots = replace(slots, shares=torch.ones_like(slots.shares))
        inner = experts.gate_up.apply(x, inputs, self.config.activation)
        return moe_sum(experts.down.apply(inner, slots), slots, x.dtype, stream)

    def _place(self, batch: StepBatch, pool: Tensor) -> _PlacedRows:
        num_rows, num_decodes = len(batch.token_ids), batch.num_decodes
        context_lens, tables = batch.context_lens, batch.block_tables
        query_lens = None if num_decodes == len(batch.query_lens) else batch.query_lens
        groups = self._map_groups(context_lens, query_lens, tables, num_rows, pool)
        owners = None
        if query_lens is not None and self.config.latent is not None:
            ends = query_lens.cumsum(0, dtype=torch.int32)
            numbers = torch.arange(num_rows, dtype=torch.int32, device=ends.device)
            owners = (ends <= numbers[:, None]).sum(1, dtype=torch.int32)
        query_lens = None if query_lens is None else query_lens[num_decodes:]
        plan = self._latent_plan(groups[0][0])
        return _PlacedRows(
            groups, num_decodes, context_lens, query_lens, latent_plan=plan, owners=owners
        )

    def _latent_plan(self, rows: SlotMapping) -> DecodePlan | None:
        if self.config.latent is None:
            return None
        return plan_latent(rows.lengths, self.config.num_heads)

    def _attend_latent(
        self, q: Tensor, q_end: Tensor, row: Tensor, norm: Norm, placed: _PlacedRows, index: int,
        pool: Tensor,
    ) -> Tensor:  # fmt: skip
        (rows, block_tables), at = self._in_pool(placed.groups, index)
        angles = Angles(*self._tables[self._table_of[index]].unbind())
        write_latent(row, norm, angles, rows.positions, rows.slots, pool, at)
        assert placed.latent_plan is not None
        return latent_attention(
            q, q_end, pool, at, block_tables, placed.owners, placed.latent_plan, angles,
            self._scoring[index].scale,
        )  # fmt: skip

    def _rope_and_write(
        self, qkv: Tensor, placed: _PlacedRows, index: int, layer: LayerWeights, pool: Tensor
    ) -> Tensor:
        """See `DecoderModel`. Of decode rows alone qkv is returned: their attention kernel rotates
        it."""
        config, ((rows, _), at) = self.config.layer(index), self._in_pool(placed.groups, index)
        if config.qk_norm == "row":  # the kernels norm heads
            q, k, v = self._split(qkv, index)
            qkv = torch.cat([*self._rows_normed(q, k, layer), v], dim=1)
        if not placed.has_chunks:
            return qkv
        heads, (pool, at) = (config.num_heads, config.num_kv_heads), self._pool_of(pool, at, index)
        return rope_and_write(
            qkv, rows.positions, rows.slots, self._rotation(index), pool, at, *heads,
            only_reads=config.only_reads(index),
        )  # fmt: skip

    def _rotation(self, index: int) -> Rotation:
        cos, sin = self._tables[self._table_of[index]]
        if self.config.qk_norm == "row":
            return Rotation(cos, sin)
        layer, arch = self._weights.layers[index], self.config.arch
        scales = self._query_scales if self.config.ropes[index] is None else None
        return Rotation(
            cos, sin, layer.q_norm, layer.k_norm, self.config.rms_eps, scales, arch.norms_rotated,
            arch.value_norm,
        )  # fmt: skip

    def _rows_normed(self, q: Tensor, k: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        if self._num_ranks > 1:
            return super()._rows_normed(q, k, layer)
        assert layer.q_norm is not None and layer.k_norm is not None
        (q, _), (k, _) = (
            add_rms_norm(x, None, norm, self.config.rms_eps)
            for x, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
        return q, k

    def _attend(self, q: Tensor, placed: _PlacedRows, index: int, pool: Tensor) -> Tensor:
        own, scoring, config = placed.num_decodes, self._scoring[index], self.config.layer(index)
        (_, block_tables), at = self._in_pool(placed.groups, index)
        pool, at = self._pool_of(pool, at, index)
        out = q.new_empty(len(q), config.num_heads, config.head_size)
        if own:
            kind = scoring.window, config.num_kv_heads, config.head_size
            if kind not in placed.plans:
                placed.plans[kind] = plan_decode(
                    out[:own], pool, placed.lengths[:own], scoring.window, chunked=scoring.chunked
                )
            rotation = None if placed.has_chunks else self._rotation(index)
            decode_attention(
                q[:own], pool, at, block_tables[:own], placed.plans[kind], scoring, out[:own],
                rotation, only_reads=config.only_reads(index),
            )  # fmt: skip
        if placed.query_lens is not None:
            group = config.num_heads // config.num_kv_heads, config.head_size
            if group not in placed.tiles:
                placed.tiles[group] = plan_tiles(placed.query_lens, len(q) - own, *group)
            tables, context_lens = block_tables[own:], placed.context_lens[own:]
            chunks = (tables, context_lens, placed.query_lens, placed.tiles[group], scoring)
            prefill_attention(q[own:], pool, at, *chunks, out[own:])
        return out.view(len(q), -1)
