"""Matrix products and the gate in plain torch: the reference of faster kernels.

Knows neither layers nor batches, nor formats of weights.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.models.model_config import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation

# From this many rows on, a float32 product on the CPU gives each row the same bits whatever its
# neighbours are.
MIN_EXACT_ROWS = 16

# torch runs an elementwise operation on fewer elements than this on one thread.
SERIAL_ELEMENTS = 32768


def is_exact(x: Tensor) -> bool:
    """Whether a row's result must not depend, to the bit, on which rows share its batch.

    Promised for float32 on the CPU: there a sequence gets the same tokens alone, in a batch, on
    another worker and after a failover. Lower precisions and devices trade the promise for speed.
    """
    return x.device.type == "cpu" and x.dtype == torch.float32


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x `[rows, in]`, weight `[out, in]`, bias `[out]` → `[rows, out]`.

    The BLAS library picks its kernel, and so the order of additions, by the number of rows: results
    are identical from 16 rows and 2 outputs on. So fewer float32 rows on the CPU are padded to 16
    with zero rows, and a single output gets another, which keeps the promise of `is_exact`.
    """
    rows = x.shape[0]
    if len(weight) == 1 and is_exact(x):
        bias = None if bias is None else F.pad(bias, (0, 1))
        return product(x, F.pad(weight, (0, 0, 0, 1)), bias)[:, :1]
    if rows >= MIN_EXACT_ROWS or not is_exact(x):
        return F.linear(x, weight, bias)
    padded = F.pad(x, (0, 0, 0, MIN_EXACT_ROWS - rows))
    return F.linear(padded, weight, bias)[:rows]


def act_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """`activation(gate) * up` of gate_up `[rows, 2 * size]` (gate first) → `[rows, size]`.

    "swigluoai" is gpt-oss's, `gate * sigmoid(1.702 * gate) * (up + 1)` of what is limited to 7.

    torch splits large elementwise work between threads at any element, and takes a scalar path with
    other last bits beside the split. To keep the promise of `is_exact`, float32 rows on the CPU are
    taken in groups too small to be split.
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


def _swish(x: Tensor) -> Tensor:
    apart = x.new_empty(len(x), 2 * x.shape[1])[:, : x.shape[1]]  # as below
    return F.silu(torch.mul(x, SWIGLU_ALPHA, out=apart)) / SWIGLU_ALPHA


def _gelu_by_silu(x: Tensor) -> Tensor:
    """gelu by tanh: torch's own takes another path for what is last of all rows, silu of each row.

    That is, unless rows lie one behind the other. (1 + tanh(y)) / 2 is the sigmoid of 2y, here of
    x * slope.
    """
    slope = x * x * (0.044715 * _TWICE) + _TWICE
    apart = x.new_empty(len(x), 2 * x.shape[1])[:, : x.shape[1]]
    return F.silu(torch.mul(x, slope, out=apart)) / slope


_TWICE = 2 * math.sqrt(2 / math.pi)


# So deep a product of int8 has only whole numbers below 2 ** 24 as sums, which float32 adds up
# exactly in any order.
_EXACT_DEPTH = 1024

# Elsewhere oneDNN multiplies int8 with sums of 16 bits, which saturate.
_HAS_VNNI = torch.cpu._is_vnni_supported()


def exact_products(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` of int8 `[rows, in]` and `[out, in]`: int32 `[rows, out]`, exact."""
    # At a depth of 1 torch 2.13 gives wrong sums, and on a GPU it takes more than 16 rows only.
    fast = x.device.type == "cpu" and _HAS_VNNI and x.shape[1] > 1
    return torch._int_mm(x, weight.T) if fast else products_by_float(x, weight)


def products_by_float(x: Tensor, weight: Tensor) -> Tensor:
    """The same on any device: the products of short pieces of the depth, in float32."""
    sums = torch.zeros(len(x), len(weight), dtype=torch.int32, device=x.device)
    pieces = zip(x.split(_EXACT_DEPTH, dim=1), weight.split(_EXACT_DEPTH, dim=1), strict=True)
    for left, right in pieces:
        sums += (left.float() @ right.float().T).to(torch.int32)
    return sums
