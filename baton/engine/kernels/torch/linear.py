"""Matrix products in plain torch: the reference of faster kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# From this many rows on, a float32 product on the CPU gives each row the same bits in any batch.
MIN_EXACT_ROWS = 16


def is_exact(x: Tensor) -> bool:
    """Whether a row's result must not depend, to the bit, on which rows share its batch.

    True of float32 on the CPU: a sequence gets the same tokens alone, in a batch, on another worker
    and after a failover. Lower precisions and GPUs trade this for speed.
    """
    return x.device.type == "cpu" and x.dtype == torch.float32


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x `[rows, in]`, weight `[out, in]`, bias `[out]` → `[rows, out]`.

    The BLAS library picks its kernel, and so the order of additions, by the number of rows; from 16
    rows and 2 outputs on, results are identical. To keep the promise of `is_exact`, fewer float32
    rows on the CPU are padded to 16, and a single output to 2.
    """
    rows = x.shape[0]
    if len(weight) == 1 and is_exact(x):
        bias = None if bias is None else F.pad(bias, (0, 1))
        return product(x, F.pad(weight, (0, 0, 0, 1)), bias)[:, :1]
    if rows >= MIN_EXACT_ROWS or not is_exact(x):
        return F.linear(x, weight, bias)
    padded = F.pad(x, (0, 0, 0, MIN_EXACT_ROWS - rows))
    return F.linear(padded, weight, bias)[:rows]


# int8 products of at most this depth have sums below 2 ** 24, which float32 adds exactly in any
# order.
_EXACT_DEPTH = 1024

# Without VNNI oneDNN adds int8 products in 16 bits, which saturate.
_HAS_VNNI = torch.cpu._is_vnni_supported()


def exact_products(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` of int8 `[rows, in]` and `[out, in]`: int32 `[rows, out]`, exact."""
    # At a depth of 1 torch 2.13 gives wrong sums, and on a GPU it takes more than 16 rows only.
    fast = x.device.type == "cpu" and _HAS_VNNI and x.shape[1] > 1
    return torch._int_mm(x, weight.T) if fast else products_by_float(x, weight)


def products_by_float(x: Tensor, weight: Tensor) -> Tensor:
    """`exact_products` on any device: float32 products of short pieces of the depth."""
    sums = torch.zeros(len(x), len(weight), dtype=torch.int32, device=x.device)
    pieces = zip(x.split(_EXACT_DEPTH, dim=1), weight.split(_EXACT_DEPTH, dim=1), strict=True)
    for left, right in pieces:
        sums += (left.float() @ right.float().T).to(torch.int32)
    return sums
