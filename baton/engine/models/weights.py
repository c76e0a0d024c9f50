"""The weights of a model, by layer and field."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.models.lora import LoraSlots
from baton.engine.quantization.linear_weight import LinearWeight


@dataclass(frozen=True)
class ExpertWeights:
    """One expert of a mixture: an MLP."""

    gate_up: LinearWeight
    down: LinearWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class MoeWeights:
    """The experts of a layer.

    router: `[experts, in]`, scores them · experts: this rank's · shared_gate: `[1, in]`, weighs
    the expert that all tokens take · correction: float32 `[experts]`, see
    `baton.engine.kernels.torch.moe_routing.route` · share_scale: `[experts]`, multiplies shares ·
    input_norm, router_norm: of the inputs of experts and router, where these are the stream, and
    not what the MLP has; expert_norm, dense_norm: of the outputs of experts and MLP then.
    """

    router: LinearWeight
    experts: tuple[ExpertWeights, ...]
    router_bias: Tensor | None = None
    shared_gate: LinearWeight | None = None
    correction: Tensor | None = None
    share_scale: Tensor | None = None
    input_norm: Tensor | None = None
    router_norm: Tensor | None = None
    expert_norm: Tensor | None = None
    dense_norm: Tensor | None = None


@dataclass(frozen=True)
class HeadWeights:
    """A matrix `[out, in]` of each head."""

    heads: tuple[LinearWeight, ...]

    def apply(self, x: Tensor) -> Tensor:
        """x `[rows, heads, in]` → `[rows, heads, out]`."""
        products = [one.apply(x[:, head].contiguous()) for head, one in enumerate(self.heads)]
        return torch.stack(products, dim=1)


@dataclass(frozen=True, kw_only=True)
class LatentWeights:
    """The weights of a layer's latent attention beside `qkv`, which makes a token's row.

    q_b: `[heads * query_size, q_rank]`; None where `qkv` makes the queries · keys: each head's
    `[kv_rank, nope_size]`, which takes its queries to where rows are · values: each head's
    `[value_size, kv_rank]`.
    """

    kv_a_norm: Tensor
    keys: HeadWeights
    values: HeadWeights
    q_a_norm: Tensor | None = None
    q_b: LinearWeight | None = None


@dataclass(frozen=True)
class DeltaRuleWeights:
    """Linear attention by the gated delta rule. Outputs and channels are in the order of key heads.

    delta_in: of each key head its query, key, values and output gates · delta_gates: of each key
    head the write strength and the decay of each of its value heads · conv: `[channels, kernel]`
    · log_decay, decay_bias: `[value_heads]` · head_scale: `[value_size]`, of the norm of each value
    head's output.
    """

    delta_in: LinearWeight
    delta_gates: LinearWeight
    delta_out: LinearWeight
    conv: Tensor
    log_decay: Tensor
    decay_bias: Tensor
    head_scale: Tensor


@dataclass(frozen=True)
class LayerInputWeights:
    """What a layer makes of a token's embedding for it: a gate `[size, hidden_size]` multiplies it,
    and `up`, `[hidden_size, size]`, and a norm follow."""

    input_gate: LinearWeight
    input_up: LinearWeight
    layer_input_norm: Tensor


@dataclass(frozen=True)
class TokenInputWeights:
    """Embeddings of tokens for each layer: `[vocab_size, layers * size]`, and a projection
    `[layers * size, hidden_size]` of the usual embedding, which is normed and added."""

    embedding: Tensor
    projection: LinearWeight
    norm: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Absent biases and norms are None; it has either `qkv` and `o` or `delta`.

    Where attention is gated, the outputs of `qkv` end with the gate of each query head; where the
    layer reads another one's K and V, they are queries alone.
    """

    input_norm: Tensor | None = None
    qkv: LinearWeight | None = None
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    o: LinearWeight | None = None
    o_bias: Tensor | None = None
    mlp_norm: Tensor | None = None
    gate_up: LinearWeight | None = None  # in layers with experts, of the one that all tokens take
    gate_up_bias: Tensor | None = None
    down: LinearWeight | None = None
    down_bias: Tensor | None = None
    attention_norm: Tensor | None = None  # of attention's output
    output_norm: Tensor | None = None  # of the MLP's output
    experts: MoeWeights | None = None
    sinks: Tensor | None = None  # float32 `[heads]`
    delta: DeltaRuleWeights | None = None
    latent: LatentWeights | None = None
    layer_input: LayerInputWeights | None = None
    layer_scale: Tensor | None = None  # `[1]`, multiplies the stream behind the layer


@dataclass(frozen=True)
class PredictorWeights:
    """What a layer that predicts further tokens begins with.

    projection: `[hidden_size, 2 * hidden_size]`, of a token's normed embedding and the normed
    hidden state of the token before it.
    """

    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: LinearWeight


@dataclass(frozen=True)
class ModelWeights:
    """A model's weights; a tied `lm_head` shares `embedding`'s tensor, unless it is quantised.

    lora: the memory of adapters, if there may be any · token_inputs: embeddings for each layer ·
    predictor: of a layer that predicts further tokens, whose embedding and output layer are the
    model's.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: LinearWeight
    lora: LoraSlots | None = None
    token_inputs: TokenInputWeights | None = None
    predictor: PredictorWeights | None = None

    @property
    def num_bytes(self) -> int:
        """Size of all that a step reads; of a tied embedding and output layer, the latter."""
        read = self.token_inputs and (self.token_inputs.projection, self.token_inputs.norm)
        return _num_bytes((self.layers, self.final_norm, self.lm_head, self.predictor, read))


def _num_bytes(part: object) -> int:
    """Size of a tensor, of a weight, or of all tensors in a part of a model."""
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, LinearWeight):
        return part.num_bytes
    if part is None:
        return 0
    return sum(map(_num_bytes, part if isinstance(part, tuple) else vars(part).values()))
