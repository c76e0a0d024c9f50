"""Operations on rows in plain torch: RMS norm, the gate of the MLP, rotary embedding.

They are the reference of `kernels/native/src/rows.cpp` and of Triton's `rms_norm`, `activation` and
`rope_kv`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from baton.engine.kernels.torch.linear import is_exact
from baton.engine.kernels.torch.lora import LoraMatrices, add_lora

# torch runs an elementwise operation on fewer elements than this on one thread.
SERIAL_ELEMENTS = 32768
_VECTOR_ELEMENTS = 64  # a multiple of what torch computes at a time


class Norm(NamedTuple):
    """An RMS norm. weight: `[size]`, of the rows' type or float32."""

    weight: Tensor
    eps: float


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


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, mean_square: Tensor | None = None
) -> Tensor:
    """x `[..., size]` scaled to unit mean square, in float32, times weight `[size]`, if any.

    Rounded to x's type before the multiplication with a weight of that type, and after it with a
    float32 weight. mean_square: `[..., 1]`, where x is a part of the normed row.
    """
    wide = x.float()
    if mean_square is None:
        mean_square = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(mean_square + eps)
    return (wide if weight is None else weight * wide.to(weight.dtype)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: x `[rows, heads, head_size]` by cos and sin `[rows, 1, head_size]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def act_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """`activation(gate) * up` of gate_up `[rows, 2 * size]` (gate first) → `[rows, size]`.

    "swigluoai" is gpt-oss's: `gate * sigmoid(1.702 * gate) * (up + 1)`, both clamped to 7 first.

    torch splits large elementwise work between threads at any element, and computes the elements
    beside the split with other last bits. To keep the promise of `is_exact`, float32 rows on the
    CPU are processed in groups too small to be split.
    """
    size = gate_up.shape[1] // 2
    gate, up = gate_up.split(size, dim=1)
    if activation == "swigluoai":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    exact = is_exact(gate_up)
    functions = {
        "silu": F.silu,
        "gelu_tanh": _gelu_by_silu if exact else partial(F.gelu, approximate="tanh"),
        "swigluoai": _swish,
    }
    function = functions[activation]
    if not exact:
        return torch.mul(function(gate), up)
    group = max(1, (SERIAL_ELEMENTS - 1) // size)
    return torch.cat([function(rows) for rows in gate.split(group)]).mul_(up)


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of each element of x `[rows, size]`, whose last bits depend on it alone.

    torch computes the elements at the end of a part, which depends on their number and on threads,
    in another way than those before.
    """
    size = x.shape[1]
    wide = F.pad(x, (0, -size % _VECTOR_ELEMENTS))
    group = max(1, (SERIAL_ELEMENTS - 1) // wide.shape[1])
    return torch.cat([function(rows) for rows in wide.split(group)])[:, :size]


def _swish(x: Tensor) -> Tensor:
    return F.silu(torch.mul(x, SWIGLU_ALPHA, out=_strided_like(x))) / SWIGLU_ALPHA


def _gelu_by_silu(x: Tensor) -> Tensor:
    """gelu by tanh, whose last bits do not depend on the number of rows, as those of torch's do.

    (1 + tanh(y)) / 2 is the sigmoid of 2y, here of x * slope.
    """
    slope = x * x * (0.044715 * _TWICE) + _TWICE
    return F.silu(torch.mul(x, slope, out=_strided_like(x))) / slope


def _strided_like(x: Tensor) -> Tensor:
    """An empty tensor of x's shape whose rows are not contiguous: silu then computes row by row."""
    return x.new_empty(len(x), 2 * x.shape[1])[:, : x.shape[1]]


_TWICE = 2 * math.sqrt(2 / math.pi)
