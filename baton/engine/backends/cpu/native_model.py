"""The forward pass on a CPU as one native call a step.

Its reference is `baton.engine.models.decoder.DecoderModel`. In every precision a row's result is
the same to the bit in any batch or chunk, because a row's order of additions depends on it alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from baton.engine.backends.cpu.native_ops import NativeOps
from baton.engine.batch import StepBatch
from baton.engine.kernels.activation import ACTIVATIONS
from baton.engine.kernels.moe_routing import Routing
from baton.engine.kernels.native.interface import (
    AttentionShape,
    Embedding,
    Expert,
    Layer,
    Linear,
    Model,
    Ranks,
    RoutingOptions,
    Step,
)
from baton.engine.kernels.native.packing import PackedWeight, address
from baton.engine.kernels.native.row_ops import c_lora, c_norm
from baton.engine.kernels.torch.lora import LoraMatrices
from baton.engine.models.lora import FIELDS
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.models.weights import LayerWeights, ModelWeights
from baton.engine.quantization.linear_weight import DenseWeight, LinearWeight
from baton.engine.runner import RunnerFailed

_HUGE_PAGE = 2 << 20  # where a workspace begins; elsewhere prompts take up to a tenth longer


def lacking(config: ModelConfig) -> str:
    """What of a model one native call cannot compute; empty if it can."""
    if config.layer_heads:
        return "heads of several sizes"
    if config.query_scaling is not None:
        return "queries scaled by position"
    if config.experts is not None and config.experts.scales_inputs:
        return "experts whose inputs are scaled"
    return "linear attention" if config.delta_rule is not None else ""


class NativeModel(NativeOps):
    """Packed weights, and scratch memory for one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        exchange: int | None = None,
    ) -> None:
        """config: of the unsharded model · weights: the shard's, packed.

        exchange: address of the ranks' shared memory. Raises ConfigError where there is no library.
        """
        assert not lacking(config) and config.latent is None, "native code would write elsewhere"
        super().__init__(config, weights, dtype, shard=shard)
        self._kv_heads = shard.kv_heads(config)
        self._ranks = Ranks(exchange, shard.rank, shard.count)
        self._routers: list[PackedWeight | None] = []  # and shared gates, packed here
        self._model = self._c_model(weights)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._rows = 0  # that the workspace has room for
        self._logit_buffer = torch.empty(0, config.vocab_size)
        self._own_logit_buffer = torch.empty(0, len(self._tokens))

    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a batch and writes its K and V to the pool.

        Returns the logits of its `logit_rows`, float32 `[n, vocab]`, on the first rank, valid until
        the next step. Raises RunnerFailed when another rank does not answer.
        """
        rows, num_logits = len(batch.token_ids), len(batch.logit_rows)
        if rows > self._rows:
            self._rows = max(rows, 2 * self._rows)  # so that it seldom grows again
            size = self._native.baton_workspace(self._model, self._rows)
            memory = torch.empty(size + _HUGE_PAGE, dtype=torch.uint8)
            self._workspace = memory[-memory.data_ptr() % _HUGE_PAGE :]
        if num_logits > len(self._logit_buffer):
            self._logit_buffer = torch.empty(num_logits, self.config.vocab_size)
            self._own_logit_buffer = torch.empty(num_logits, len(self._tokens))
        self.hidden = None
        if batch.wants_hidden:
            self.hidden = torch.empty(num_logits, self.config.hidden_size, dtype=self.dtype)
        inputs = (
            batch.token_ids, batch.context_lens, batch.query_lens, batch.block_tables,
            batch.logit_rows, batch.lora_slots, self._logit_buffer, self._own_logit_buffer,
            self.hidden, self._workspace,
        )  # fmt: skip
        sizes = (rows, len(batch.query_lens), batch.block_tables.shape[1], num_logits)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in inputs)
        step = Step(*pointers, self._pool(pool), *sizes)
        if not self._native.baton_step(torch.get_num_threads(), self._model, step):
            raise RunnerFailed("a rank of this worker has ended or hangs: the step is lost")
        return self._logit_buffer[:num_logits]

    def _c_model(self, weights: ModelWeights) -> Model:
        config, experts, own = self.config, self.config.experts, self._own_experts
        assert all(tensor.is_contiguous() for tensor in (weights.embedding, *self._tables))
        counted = iter(() if self.expert_tokens is None else self.expert_tokens)
        none: list[dict[str, LoraMatrices]] = [{} for _ in weights.layers]
        lora = weights.lora.layers if weights.lora else none
        tokens = (next(counted) if layer.experts else None for layer in weights.layers)
        return Model(
            Embedding(weights.embedding.data_ptr(), self._tokens.start, len(self._tokens)),
            c_norm(weights.final_norm, self.dtype),
            (Layer * config.num_layers)(
                *map(self._layer, weights.layers, self._shapes, tokens, lora)
            ),
            _linear(weights.lm_head),
            self._ranks,
            *(
                config.vocab_size,
                config.num_layers,
                config.hidden_size,
                config.num_heads,
                config.num_kv_heads,
            ),
            config.head_size,
            *(experts.count if experts else 0, own.start, len(own)),
            _routing(experts.routing) if experts else RoutingOptions(),
            ACTIVATIONS.index(config.activation),
            *(config.rms_eps, config.logit_scale, config.logit_softcap),
            *(self._embedding_scale, config.residual_scale),
        )

    def _layer(
        self, layer: LayerWeights, attention: AttentionShape, expert_tokens: Tensor | None,
        lora: Mapping[str, LoraMatrices],
    ) -> Layer:  # fmt: skip
        norms = (layer.input_norm, layer.mlp_norm, layer.attention_norm, layer.output_norm)
        products = [
            _linear(layer.qkv, layer.qkv_bias),
            _linear(layer.o, layer.o_bias),
            _linear(layer.gate_up, layer.gate_up_bias),
            _linear(layer.down, layer.down_bias),
        ]
        router, shared_gate, experts, tokens, correction = Linear(), Linear(), None, None, None
        if (mixture := layer.experts) is not None:
            assert expert_tokens is not None
            packed, packed_gate = (
                None if one is None else PackedWeight.from_weight(_of_type(one, self.dtype))
                for one in (mixture.router, mixture.shared_gate)
            )
            correction = address(mixture.correction)
            self._routers += packed, packed_gate
            router, shared_gate = _linear(packed, mixture.router_bias), _linear(packed_gate)
            tokens = expert_tokens.data_ptr()
            each = [
                Expert(
                    _linear(one.gate_up, one.gate_up_bias),
                    _linear(one.down, one.down_bias),
                )
                for one in mixture.experts
            ]
            experts = (Expert * len(each))(*each)
        products += router, shared_gate
        return Layer(
            *(c_norm(norm, self.dtype) for norm in norms), *products, correction, tokens, experts,
            attention,
            *(c_lora(lora.get(field)) for field in FIELDS),
        )  # fmt: skip


def _routing(routing: Routing) -> RoutingOptions:
    return RoutingOptions(
        *(routing.per_token, routing.normed, routing.sigmoid),
        *(routing.groups, routing.taken_groups, routing.group_top, routing.scale),
    )


def _of_type(weight: LinearWeight, dtype: torch.dtype) -> LinearWeight:
    """A router in the activations' type: its products are added up and kept in float32."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.tensor.to(dtype))
    return weight


def _linear(weight: LinearWeight | None, bias: Tensor | None = None) -> Linear:
    if weight is None:
        return Linear()
    assert isinstance(weight, PackedWeight), "what native code reads is packed"
    return weight.linear(bias)
