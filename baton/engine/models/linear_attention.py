"""Layers with linear attention by the gated delta rule: products, and the rule over states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.kernels.torch.delta_rule import DeltaRule, DeltaRuleTensors, States, layout_of
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weights import DeltaRuleWeights, LayerWeights


class LinearAttention:
    """Linear attention of the layers that have it, by torch. Config and weights are a shard's."""

    def __init__(self, config: ModelConfig, layers: Sequence[LayerWeights]) -> None:
        self._config = config
        self._weights = [layer.delta for layer in layers]
        self._rules: dict[int, DeltaRule] = {}  # by layer

    def state_blocks(self, pool: Tensor) -> int:
        """See `StepModel`."""
        rule = self._config.delta_rule
        return layout_of(rule.shape, sum(rule.layers), pool).num_blocks if rule else 0

    def states(self, batch: StepBatch) -> Any:
        """The states of a step's sequences, for all layers; None in models without states."""
        if batch.state_tables is None:
            return None
        return States(batch.state_tables, batch.context_lens, batch.query_lens, batch.kept_lens)

    def run(self, index: int, mixed: Tensor, gates: Tensor, states: Any, pool: Tensor) -> Tensor:
        """Advances states by rows: `[rows, value_heads * value_size]`.

        mixed, gates: products with `delta_in` and `delta_gates` · states: as `states` returned them
        · pool: always of blocks of the same shape.
        """
        if index not in self._rules:
            weights = self._weights[index]
            assert weights is not None, "the layer has linear attention"
            self._rules[index] = self._rule(index, weights, pool)
        return self._advance(self._rules[index], mixed, gates, states, pool)

    def _rule(self, index: int, weights: DeltaRuleWeights, pool: Tensor) -> DeltaRule:
        config = self._config.delta_rule
        assert config is not None
        layer = config.state_layers[index]
        assert layer is not None
        layout = layout_of(config.shape, sum(config.layers), pool)
        conv, decay = weights.conv.float().contiguous(), -weights.log_decay.exp()
        tensors = DeltaRuleTensors(conv, decay, weights.decay_bias, weights.head_scale)
        return DeltaRule(layout, tensors, layer, self._config.rms_eps)

    def _advance(
        self, rule: DeltaRule, mixed: Tensor, gates: Tensor, states: Any, pool: Tensor
    ) -> Tensor:
        return rule.run(mixed, gates, states, pool)
