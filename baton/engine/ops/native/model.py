"""The forward pass on a CPU, as one native call a step.

Computes what `baton.engine.models.decoder.Model` computes, which is its reference. In every
precision a row's result is the same to the bit whatever shares its batch or chunk: the kernels add
each row up in an order of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.models.config import ModelConfig
from baton.engine.ops.native.interface import (
    AttentionShape,
    Expert,
    Layer,
    Linear,
    Step,
    WholeModel,
)
from baton.engine.ops.native.ops import NativeOps
from baton.engine.ops.native.packing import PackedWeight
from baton.engine.weights.weight import Weight
from baton.engine.weights.weights import LayerWeights, Weights

_HUGE_PAGE = 2 << 20  # where a workspace begins; elsewhere prompts take up to a tenth longer


class NativeModel(NativeOps):
    """Packed weights, and scratch memory that one thread at a time may use."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype) -> None:
        """All matrices are packed. Raises ConfigError where there is no library."""
        super().__init__(config, weights, dtype)
        self._model = self._whole(weights)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._rows = 0  # that the workspace is for
        self._scores = torch.empty(0, config.vocab_size)

    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a step's rows through the model and writes their K and V to the pool.

        The next-token scores of its `logit_rows`, float32 `[n, vocab]`; valid until the next step.
        """
        rows, wanted = len(batch.token_ids), len(batch.logit_rows)
        if rows > self._rows:
            size = self._native.baton_workspace(self._model, rows)
            room = torch.empty(size + _HUGE_PAGE, dtype=torch.uint8)
            self._workspace, self._rows = room[-room.data_ptr() % _HUGE_PAGE :], rows
        if wanted > len(self._scores):
            self._scores = torch.empty(wanted, self.config.vocab_size)
        inputs = (
            batch.token_ids, batch.context_lens, batch.query_lens, batch.block_tables,
            batch.logit_rows, self._scores, self._workspace,
        )  # fmt: skip
        sizes = (rows, len(batch.query_lens), batch.block_tables.shape[1], wanted)
        step = Step(*(tensor.data_ptr() for tensor in inputs), self._pool(pool), *sizes)
        self._native.baton_step(torch.get_num_threads(), self._model, step)
        return self._scores[:wanted]

    def _whole(self, weights: Weights) -> WholeModel:
        config, experts = self.config, self.config.experts
        assert all(tensor.is_contiguous() for tensor in (weights.embedding, self._tables))
        return WholeModel(
            weights.embedding.data_ptr(),
            self._norm(weights.final_norm),
            (Layer * config.num_layers)(*map(self._layer, weights.layers, self._shapes)),
            _linear(weights.lm_head),
            *(config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads),
            config.head_size,
            *((experts.count, experts.per_token, experts.normed) if experts else (0, 0, 0)),
            config.activation == "gelu_tanh",
            *(config.rms_eps, config.logit_scale, config.logit_softcap),
            *(self._embedding_scale, config.residual_scale),
        )

    def _layer(self, layer: LayerWeights, attention: AttentionShape) -> Layer:
        norms = (layer.input_norm, layer.mlp_norm, layer.attention_norm, layer.output_norm)
        products = [
            _linear(layer.qkv, layer.qkv_bias),
            _linear(layer.o, layer.o_bias),
            _linear(layer.gate_up, layer.gate_up_bias),
            _linear(layer.down, layer.down_bias),
        ]
        router, shared_gate, experts = Linear(), Linear(), None
        if (mixture := layer.experts) is not None:
            router, shared_gate = map(_linear, (mixture.router, mixture.shared_gate))
            each = [Expert(*map(_linear, (one.gate_up, one.down))) for one in mixture.experts]
            experts = (Expert * len(each))(*each)
        return Layer(*map(self._norm, norms), *products, router, shared_gate, experts, attention)


def _linear(weight: Weight | None, bias: Tensor | None = None) -> Linear:
    if weight is None:
        return Linear()
    assert isinstance(weight, PackedWeight), "what native code reads is packed"
    return weight.linear(bias)
