"""Attention over latent KV (MLA): the part of `DecoderModel` for models that have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from baton.engine.kernels.torch.attention import Scoring, attend, write_kv
from baton.engine.kernels.torch.rms_norm import Norm
from baton.engine.kernels.torch.rope import rotate
from baton.engine.kernels.torch.row_ops import RowOps
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weights import LatentWeights
from baton.kv_groups import LayerGroups

Placed = TypeVar("Placed")
_EPS = 1e-6  # of the norms within attention, whatever the model's other norms have


class LatentAttention:
    """Methods of a `DecoderModel`, with torch's operations or those of `ops`."""

    ops: RowOps
    config: ModelConfig
    _groups: LayerGroups
    _scoring: list[Scoring]
    _table_of: Sequence[int]

    def _in_pool(self, by_group: Sequence[Placed], index: int) -> tuple[Placed, int]:
        """What a layer's group has, and the layer's index in the blocks of the group."""
        group, at = self._groups.places[index]
        return by_group[group], at

    def _latent_attention(
        self, projected: Tensor, placed: Any, index: int, weights: LatentWeights, pool: Tensor
    ) -> Tensor:
        """Attention over latent rows, of which each head's keys and values are projections.

        The projections are absorbed: a query is projected to where rows are, and the sum of rows to
        a value, so that one row serves all heads, and rows of the context are never expanded.
        Prompts are computed so, too: a token's result is then the same to the bit, whether a prompt
        or a decode step computed it.
        """
        latent, size = self.config.latent, self.config.head_size
        assert latent is not None
        q, row = projected.split([projected.shape[1] - size, size], dim=1)
        if weights.q_b is not None:
            assert weights.q_a_norm is not None
            norm = Norm(weights.q_a_norm, _EPS)
            q = weights.q_b.apply(self.ops.add_rms_norm(q.contiguous(), None, norm)[0])
        q, q_end = q.view(len(q), -1, latent.query_size).split(
            [latent.nope_size, latent.rope_size], dim=2
        )
        norm = Norm(weights.kv_a_norm, _EPS)
        sums = self._attend_latent(weights.keys.apply(q), q_end, row, norm, placed, index, pool)
        return weights.values.apply(sums).flatten(1)

    def _attend_latent(
        self, q: Tensor, q_end: Tensor, row: Tensor, norm: Norm, placed: Any, index: int,
        pool: Tensor,
    ) -> Tensor:  # fmt: skip
        """Norms, rotates and writes latent rows, and attends: `[rows, heads, kv_rank]`.

        q: `[rows, heads, kv_rank]` · q_end: `[rows, heads, rope_size]` · row: `[rows, head_size]`.
        """
        queries = self._write_latent(q, q_end, row, norm, placed, index, pool)
        attention, at = self._in_pool(placed[0], index)
        attended = attend(queries, pool, at, attention, self._scoring[index])
        return attended.view(queries.shape)[..., : q.shape[2]]

    def _write_latent(
        self, q: Tensor, q_end: Tensor, row: Tensor, norm: Norm, placed: Any, index: int,
        pool: Tensor,
    ) -> Tensor:  # fmt: skip
        """The first part of `_attend_latent`: queries `[rows, heads, head_size]`."""
        rank, (cos, sin) = q.shape[2], placed[1][self._table_of[index]]
        normed, _ = self.ops.add_rms_norm(row[:, :rank].contiguous(), None, norm)
        row_end = rotate(row[:, None, rank:], cos, sin)
        rows = torch.cat((normed[:, None], row_end), dim=2)
        attention, at = self._in_pool(placed[0], index)
        write_kv(pool, at, attention.slots, rows)
        return torch.cat((q, rotate(q_end, cos, sin)), dim=2)
