"""Mixtures of experts: the part of `DecoderModel` for layers that have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton.engine.collectives import Collectives
from baton.engine.kernels.torch.moe_routing import route
from baton.engine.kernels.torch.row_ops import RowOps
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weights import LayerWeights, MoeWeights
from baton.engine.quantization.linear_weight import ResidualStream


class MixtureOfExperts:
    """Methods of a `DecoderModel`, with torch's operations or those of `ops`."""

    ops: RowOps
    config: ModelConfig
    collectives: Collectives
    _own_experts: range
    _tokens_of: dict[int, Tensor]  # layer → counts of the rows that took each expert

    def _shared_expert(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """The output of the expert that all rows take."""
        assert layer.gate_up is not None and layer.down is not None
        inner = layer.gate_up.product(x, layer.gate_up_bias, act=self.config.activation)
        out: Tensor = layer.down.product(inner, layer.down_bias)
        return out

    def _experts(
        self, x: Tensor, layer: LayerWeights, experts: MoeWeights, placed: Any, index: int
    ) -> Tensor:
        """The weighted sum of the outputs of the experts that rows take."""
        mixed = self._mix(x, experts, placed, self._tokens_of[index])
        if layer.gate_up is None:
            return mixed
        shared = self._shared_expert(x, layer)
        if experts.shared_gate is not None:
            # Not contiguous: torch's last bits would depend on the number of rows.
            gates = x.new_empty(len(x), 2)[:, :1].copy_(experts.shared_gate.apply(x))
            shared = torch.sigmoid(gates) * shared
        mixed += shared
        return mixed

    def _add_experts_beside_mlp(
        self, hidden: ResidualStream, normed: Tensor, layer: LayerWeights, experts: MoeWeights,
        placed: Any, index: int,
    ) -> None:  # fmt: skip
        """Adds the outputs of the MLP and of experts, with norms of their own, to the stream."""
        norm, eps, reduce = self.ops.rms_norm, self.config.rms_eps, self.collectives.all_reduce
        x, routed = (
            norm(hidden.rows, one, eps) for one in (experts.input_norm, experts.router_norm)
        )
        mixed = reduce(self._mix(x, experts, placed, self._tokens_of[index], routed))
        dense = norm(reduce(self._shared_expert(normed, layer)), experts.dense_norm, eps)
        both = dense + norm(mixed, experts.expert_norm, eps)
        hidden.add(norm(both, layer.output_norm, eps))

    def _mix(
        self, x: Tensor, experts: MoeWeights, placed: Any, tokens: Tensor,
        routed: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The outputs of each row's best experts times their shares, added in the row's own order.

        Other ranks' experts add nothing here. tokens: int64 `[experts]`, counts of the rows that
        took each expert, which are updated · routed: what the router scores, if not x.
        """
        config, own = self.config.experts, self._own_experts
        assert config is not None
        logits = experts.router.apply(
            self._router_input(x if routed is None else routed), experts.router_bias
        )
        shares, taken = route(logits, config.routing, experts.correction)
        if experts.share_scale is not None:
            shares = shares * experts.share_scale[taken]
        tokens += taken.flatten().bincount(minlength=len(tokens))
        outputs = x.new_zeros(*taken.shape, x.shape[1])
        for number in set(taken.unique().tolist()).intersection(own):
            expert = experts.experts[number - own.start]
            rows, slots = torch.where(taken == number)
            act = self.config.activation
            own_x = x[rows]
            if config.scales_inputs:
                own_x = own_x * shares[rows, slots, None].to(x.dtype)
            inner = expert.gate_up.product(own_x, expert.gate_up_bias, act=act)
            outputs[rows, slots] = expert.down.product(inner, expert.down_bias)
        if config.scales_inputs:
            shares = torch.ones_like(shares)
        mixed = (outputs[:, 0] * shares[:, :1]).to(x.dtype)
        for at in range(1, taken.shape[1]):
            mixed += (outputs[:, at] * shares[:, at : at + 1]).to(x.dtype)
        return mixed

    def _router_input(self, x: Tensor) -> Tensor:
        """x in the type of the router's weight."""
        names = self.config.arch.experts
        return x.float() if names is not None and names.float32_router else x
