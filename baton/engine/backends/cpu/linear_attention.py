"""Linear attention by native code (`src/delta_rule.cpp`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels.native import library
from baton.engine.kernels.native.interface import DeltaRule as NativeDeltaRule
from baton.engine.kernels.native.interface import Span
from baton.engine.kernels.torch.delta_rule import DeltaRule, States
from baton.engine.models.linear_attention import LinearAttention
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weights import LayerWeights

INT32 = 4  # bytes
MULTIPLE = 16  # of the sizes of heads; others are torch's


class NativeLinearAttention(LinearAttention):
    """Native code, for heads of sizes that it supports."""

    def __init__(self, config: ModelConfig, layers: Sequence[LayerWeights]) -> None:
        super().__init__(config, layers)
        shape = config.delta_rule.shape if config.delta_rule else None
        self._is_native = shape and not (shape.key_size % MULTIPLE or shape.value_size % MULTIPLE)
        self._convs: dict[int, Tensor] = {}  # by layer, in the order that native code reads

    def _advance(
        self, rule: DeltaRule, mixed: Tensor, gates: Tensor, states: States, pool: Tensor
    ) -> Tensor:
        if not self._is_native:
            return super()._advance(rule, mixed, gates, states, pool)
        spans = spans_of(*states[1:3], states.tables, states.kept_lens)
        shape = rule.layout.shape
        out = mixed.new_empty(len(mixed), shape.value_heads * shape.value_size)
        library.require(mixed.dtype).baton_delta_rule(
            torch.get_num_threads(), mixed.data_ptr(), gates.data_ptr(), spans, len(spans),
            self._structure(rule, pool), out.data_ptr(),
        )  # fmt: skip
        return out

    def _structure(self, rule: DeltaRule, pool: Tensor) -> NativeDeltaRule:
        layout, tensors = rule.layout, rule.tensors
        shape = layout.shape
        if rule.layer not in self._convs:
            by_head = tensors.conv.view(shape.key_heads, -1, shape.kernel)
            self._convs[rule.layer] = by_head.transpose(1, 2).contiguous()
        tensors = tensors._replace(conv=self._convs[rule.layer])
        return NativeDeltaRule(
            *(tensor.data_ptr() for tensor in tensors), pool.data_ptr(),
            *(shape.key_heads, shape.values_per_key, shape.key_size, shape.value_size),
            *(shape.kernel, rule.layer, layout.kv_heads, layout.chunk_rows),
            *(layout.block_chunks, layout.chunk_bytes, rule.eps),
        )  # fmt: skip


def spans_of(
    context_lens: Tensor, query_lens: Tensor, tables: Tensor, kept_lens: Tensor | None = None
) -> Any:
    """The rows of each sequence, and its table, for native code."""
    counts, row = query_lens.tolist(), 0
    kept = counts if kept_lens is None else kept_lens.tolist()
    spans = (Span * len(counts))()
    table, stride = tables.data_ptr(), tables.shape[1] * INT32
    for at, context in enumerate(context_lens.tolist()):
        spans[at] = Span(row, counts[at], context, table + at * stride, kept[at])
        row += counts[at]
    return spans
