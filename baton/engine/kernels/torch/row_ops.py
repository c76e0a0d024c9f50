"""What a device computes of rows beside products: norm, gate and adapters; torch's functions."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.kernels.activation import Activation
from baton.engine.kernels.torch.activation import act_mul, rowwise
from baton.engine.kernels.torch.lora import LoraMatrices, add_lora
from baton.engine.kernels.torch.rms_norm import Norm, rms_norm


class RowOps:
    """A device's norm, gates and products of adapters. These are torch's."""

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """Adds x to the residual stream, if there is one: (norm of the stream, stream)."""
        stream = x if residual is None else residual + x
        return rms_norm(stream, *norm), stream

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """The norm of rows that are not added to a stream. weight: of a layer that has the norm."""
        assert weight is not None, "the layer has this norm"
        return self.add_rms_norm(x, None, Norm(weight, eps))[0]

    def act_mul(self, gate_up: Tensor, act: Activation) -> Tensor:
        """The gated half of `[rows, 2 * size]`; see `act_mul`."""
        return act_mul(gate_up, act)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x `[rows, size]` times the sigmoid of a gate of the same shape."""
        return x * rowwise(torch.sigmoid, gate)

    def add_lora(self, y: Tensor, x: Tensor, slots: Tensor, lora: LoraMatrices) -> None:
        """Adds to y what the rows' adapters compute from x; see `add_lora`."""
        add_lora(y, x, slots, lora)
