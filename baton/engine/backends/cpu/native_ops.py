"""The decoder by native kernels, one call for each operation.

For models that the native step (`native_model.py`) does not support: operations that native code
lacks are torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton.engine.backends.backend import MAX_NATIVE_SIZE, MAX_QUERIES, MULTIPLE
from baton.engine.backends.cpu.linear_attention import NativeLinearAttention, spans_of
from baton.engine.batch import StepBatch
from baton.engine.collectives import SINGLE_RANK, Collectives
from baton.engine.kernels.native import library
from baton.engine.kernels.native.interface import AttentionShape, Pool
from baton.engine.kernels.native.row_ops import NATIVE_ROW_OPS, c_norm
from baton.engine.kernels.torch.attention import positions_of
from baton.engine.kernels.torch.rms_norm import Norm, rms_norm
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.models.weights import LayerWeights, ModelWeights


class NativeOps(DecoderModel):
    """Norms, gates and products are native, and attention if `attends`."""

    ops = NATIVE_ROW_OPS
    linear_attention = NativeLinearAttention

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        dtype: torch.dtype,
        attends: bool = True,
        shard: Shard = WHOLE,
        ranks: Collectives = SINGLE_RANK,
    ) -> None:
        """attends: whether heads and blocks have sizes that native attention supports.

        Raises ConfigError where there is no library.
        """
        tables_dtype = torch.float32 if attends else dtype
        super().__init__(config, weights, dtype, torch.device("cpu"), tables_dtype, shard, ranks)
        config = self.config
        self._native = library.require(dtype)
        self._attends = attends
        # Over all ranks' heads, which single native calls do not exchange.
        self._norms_in_torch = config.qk_norm == "row" and ranks is not SINGLE_RANK
        self._kv_heads = range(config.num_kv_heads)  # of the pool that are used
        self._shapes = list(map(self._shape, range(config.num_layers), weights.layers))

    def _place(self, batch: StepBatch, pool: Tensor) -> Any:
        """The spans of the batch's sequences, and the pool, for native code."""
        if not self._attends:
            spans = self._spans(batch) if self._attends_latent(pool) else None
            return *super()._place(batch, pool), spans
        scales = None
        if self._query_scales is not None:
            scales = self._query_scales[positions_of(batch)[0]]
        return self._spans(batch), self._pool(pool), scales

    def _spans(self, batch: StepBatch) -> Any:
        """The rows of each sequence."""
        return spans_of(batch.context_lens, batch.query_lens, batch.block_tables)

    def _rope_and_write(
        self, qkv: Tensor, placed: Any, index: int, layer: LayerWeights, pool: Tensor
    ) -> Tensor:
        """Returns `qkv`, with its queries normed and rotated."""
        if not self._attends:
            return super()._rope_and_write(qkv, placed, index, layer, pool)
        if self._query_scales is not None and self.config.ropes[index] is None:
            q = self._split(qkv, index)[0]
            q *= placed[2]
        if self._norms_in_torch:
            q, k, _ = self._split(qkv, index)
            for x, normed in zip((q, k), self._rows_normed(q, k, layer), strict=True):
                x.copy_(normed)
        if self.config.arch.value_norm and not self.config.only_reads(index):
            v = self._split(qkv, index)[2]
            heads = rms_norm(self._by_head(v, index), None, self.config.rms_eps)
            v.copy_(heads.flatten(1))
        spans, paged = placed[:2]
        paged = self._paged(paged, index)
        shape, threads = self._shapes[index], torch.get_num_threads()
        self._native.baton_rotate(threads, qkv.data_ptr(), spans, len(spans), shape, paged)
        return qkv

    def _attend(self, q: Tensor, placed: Any, index: int, pool: Tensor) -> Tensor:
        if not self._attends:
            return super()._attend(q, placed, index, pool)
        spans, paged = placed[:2]
        config = self.config.layer(index)
        out = q.new_empty(len(q), config.num_heads * config.head_size)
        self._native.baton_attend(
            torch.get_num_threads(), q.data_ptr(), spans, len(spans), self._shapes[index],
            self._paged(paged, index), out.data_ptr(),
        )  # fmt: skip
        return out

    def _attends_latent(self, pool: Tensor) -> bool:
        """Whether the pool's rows are latent, and of a size that native attention supports."""
        parts, _, block_size, row_size = pool.shape[2:]
        aligned = not (block_size % MULTIPLE or row_size % MULTIPLE)
        fits = row_size <= MAX_NATIVE_SIZE and self.config.num_heads <= MAX_QUERIES
        return parts == 1 and aligned and fits

    def _attend_latent(
        self, q: Tensor, q_end: Tensor, row: Tensor, norm: Norm, placed: Any, index: int,
        pool: Tensor,
    ) -> Tensor:  # fmt: skip
        spans = placed[3]
        if spans is None:
            return super()._attend_latent(q, q_end, row, norm, placed, index, pool)
        queries = self._write_latent(q, q_end, row, norm, placed, index, pool)
        threads, heads = torch.get_num_threads(), self.config.num_heads
        out = torch.empty_like(queries)
        # A group of heads is one thread's work.
        parts = max(one for one in range(1, min(threads, heads) + 1) if heads % one == 0)
        sizes = (pool.shape[1], 1, 0, parts, *pool.shape[4:])
        paged = Pool(pool.data_ptr(), *sizes, int8=0, groups=self.num_groups, latent=1)
        self._native.baton_attend(
            threads, queries.data_ptr(), spans, len(spans), self._shapes[index], paged,
            out.data_ptr(),
        )  # fmt: skip
        return out[..., : q.shape[2]]

    def _shape(self, index: int, layer: LayerWeights) -> AttentionShape:
        """The attention of a layer, for native code."""
        config, (group, at) = self.config, self._groups.places[index]
        cos, sin = self._tables[self._table_of[index]]
        norms = (None, None) if self._norms_in_torch else (layer.q_norm, layer.k_norm)
        return AttentionShape(
            *(config.num_heads, at, config.windows[index] or 0),
            *(config.score_scale, config.attention_softcap, config.rms_eps),
            *(cos.data_ptr(), sin.data_ptr(), *(c_norm(norm, self.dtype) for norm in norms)),
            config.qk_norm == "row",
            None if layer.sinks is None else layer.sinks.data_ptr(),
            *(group, config.arch.norms_rotated, config.arch.chunked, config.only_reads(index)),
        )

    def _paged(self, paged: Pool, index: int) -> Pool:
        """The pool as a layer sees it."""
        if not self.config.layer_heads:
            return paged
        one, shared_by = self.config.layer_heads[index], self.config.shared_by(index)
        heads = (one.num_kv_heads, 0, one.num_kv_heads)
        return Pool(
            *(paged.data, paged.layers * shared_by, *heads, paged.block_size, one.head_size),
            *(paged.int8, paged.groups, 0, shared_by),
        )

    def _pool(self, pool: Tensor) -> Pool:
        _, layers, _, heads, block_size, _ = pool.shape
        int8, mine = pool.dtype == torch.int8, self._kv_heads
        used = (heads, mine.start, len(mine))
        size = self.config.head_size
        return Pool(pool.data_ptr(), layers, *used, block_size, size, int8, self.num_groups)
