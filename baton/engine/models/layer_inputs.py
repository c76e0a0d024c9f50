"""Embeddings of tokens for each layer: the part of `DecoderModel` for models that have them."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.kernels.torch.row_ops import RowOps
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weights import LayerInputWeights, TokenInputWeights
from baton.engine.quantization.linear_weight import ResidualStream


class LayerInputs:
    """Methods of a `DecoderModel`, with torch's operations or those of `ops`."""

    ops: RowOps
    config: ModelConfig

    def _token_inputs(
        self, weights: TokenInputWeights, looked_up: Tensor, embedded: Tensor
    ) -> Tensor:
        """Each row's inputs of layers, `[rows, layers, size]`: of its token, and a projection.

        looked_up: the token's `[rows, layers * size]` · embedded: its usual embedding.
        """
        config, size = self.config, self.config.layer_input_size
        projected = weights.projection.apply(embedded) * config.hidden_size**-0.5
        projected = self.ops.rms_norm(projected.view(-1, size), weights.norm, config.rms_eps)
        inputs: Tensor = (projected + looked_up.view(-1, size) * float(size**0.5)) * 2.0**-0.5
        return inputs.view(len(embedded), -1, size)

    def _add_layer_input(
        self, hidden: ResidualStream, weights: LayerInputWeights, inputs: Tensor
    ) -> None:
        """Adds what the stream's gate lets through of the layer's inputs `[rows, size]`."""
        gate = weights.input_gate.apply(hidden.read())
        gated = self.ops.act_mul(torch.cat((gate, inputs), dim=1), self.config.activation)
        output = weights.input_up.apply(gated)
        hidden.add(self.ops.rms_norm(output, weights.layer_input_norm, self.config.rms_eps))
