"""The gate of the MLP in plain torch, the reference of native code and of Triton's `activation`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from baton.engine.kernels.torch.linear import is_exact

# torch runs an elementwise operation on fewer elements than this on one thread.
SERIAL_ELEMENTS = 32768
_VECTOR_ELEMENTS = 64  # a multiple of what torch computes at a time


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
