"""The decoder's operations by native kernels, one call each.

For models that a whole native step (`model.py`) does not know: what native code lacks is torch's,
the rest is not. Between two calls Python dispatches and allocates.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.collectives import SINGLE_RANK, Collectives
from baton.engine.kernels.native import library
from baton.engine.kernels.native.interface import AttentionShape, Norm, Pool, Span
from baton.engine.models.decoder import Model
from baton.engine.models.model_config import Activation, ModelConfig
from baton.engine.shard import WHOLE, Shard
from baton.engine.weights.loader import LayerWeights, Weights

ACTIVATIONS = get_args(Activation)  # in the order of `Gate` in src/kernels.h
INT32 = 4  # bytes


class NativeOps(Model):
    """Norms and gates are native, products where weights are packed, attention if `attends`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        attends: bool = True,
        shard: Shard = WHOLE,
        ranks: Collectives = SINGLE_RANK,
    ) -> None:
        """attends: heads and blocks have sizes that native attention takes.

        Raises ConfigError where there is no library.
        """
        of_tables = torch.float32 if attends else dtype
        super().__init__(config, weights, dtype, torch.device("cpu"), of_tables, shard, ranks)
        config = self.config
        self._native = library.require(dtype)
        self._attends = attends
        # With other ranks' heads, which the native step alone exchanges with them.
        self._norms_apart = config.differs.qk_norm == "row" and ranks is not SINGLE_RANK
        self._kv_heads = range(config.num_kv_heads)  # that are used of the pool's
        self._shapes = list(map(self._shape, range(config.num_layers), weights.layers))

    def _add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The residual is added to where it lies."""
        stream, added = (x, None) if residual is None else (residual, x.data_ptr())
        normed = stream if weight is None else torch.empty_like(stream)
        self._native.baton_add_rms_norm(
            torch.get_num_threads(), stream.data_ptr(), added, self._norm(weight),
            self.config.rms_eps, *stream.shape, normed.data_ptr(),
        )  # fmt: skip
        return normed, stream

    def _gated(self, gate_up: Tensor) -> Tensor:
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out, kind = gate_up.new_empty(rows, size), ACTIVATIONS.index(self.config.activation)
        threads, to = torch.get_num_threads(), out.data_ptr()
        self._native.baton_act_mul(threads, gate_up.data_ptr(), rows, size, kind, to)
        return out

    def _place(self, batch: StepBatch, pool: Tensor) -> Any:
        """The spans of the batch's sequences, and the pool."""
        if not self._attends:
            return super()._place(batch, pool)
        query_lens, row = batch.query_lens.tolist(), 0
        spans = (Span * len(query_lens))()
        table, stride = batch.block_tables.data_ptr(), batch.block_tables.shape[1] * INT32
        for at, context in enumerate(batch.context_lens.tolist()):
            spans[at] = Span(row, query_lens[at], context, table + at * stride)
            row += query_lens[at]
        return spans, self._pool(pool)

    def _rope_and_write(
        self, qkv: Tensor, rows: Any, index: int, layer: LayerWeights, pool: Tensor
    ) -> Tensor:
        """`qkv` itself, with its queries normed and turned."""
        if not self._attends:
            return super()._rope_and_write(qkv, rows, index, layer, pool)
        if self._norms_apart:
            q, k, _ = self._split(qkv)
            for x, normed in zip((q, k), self._rows_normed(q, k, layer), strict=True):
                x.copy_(normed)
        spans, paged = rows
        shape, threads = self._shapes[index], torch.get_num_threads()
        self._native.baton_rotate(threads, qkv.data_ptr(), spans, len(spans), shape, paged)
        return qkv

    def _attend(self, q: Tensor, rows: Any, index: int, pool: Tensor) -> Tensor:
        if not self._attends:
            return super()._attend(q, rows, index, pool)
        spans, paged = rows
        out = q.new_empty(len(q), self.config.num_heads * self.config.head_size)
        self._native.baton_attend(
            torch.get_num_threads(), q.data_ptr(), spans, len(spans), self._shapes[index], paged,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def _shape(self, index: int, layer: LayerWeights) -> AttentionShape:
        """Of a layer."""
        config = self.config
        cos, sin = self._tables[self._table_of[index]]
        norms = (None, None) if self._norms_apart else (layer.q_norm, layer.k_norm)
        return AttentionShape(
            *(config.num_heads, index, config.windows[index] or 0),
            *(config.score_scale, config.attention_softcap, config.rms_eps),
            *(cos.data_ptr(), sin.data_ptr(), *map(self._norm, norms)),
            config.differs.qk_norm == "row",
            None if layer.sinks is None else layer.sinks.data_ptr(),
        )

    def _norm(self, weight: Tensor | None) -> Norm:
        return Norm() if weight is None else Norm(weight.data_ptr(), weight.dtype != self.dtype)

    def _pool(self, pool: Tensor) -> Pool:
        _, layers, _, heads, block_size, _ = pool.shape
        int8, mine = pool.dtype == torch.int8, self._kv_heads
        used = (heads, mine.start, len(mine))
        return Pool(pool.data_ptr(), layers, *used, block_size, self.config.head_size, int8)
