"""Eight-bit rows: activations before an int8 or fp8 product, and what the KV pool holds of a token.

The formulas are those of `baton.engine.weights.quantize`, to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.spec import Config, KernelSpec, Key, Trial, dtype_of
from baton.engine.ops.triton.tuning import choose
from baton.engine.weights import quantize

NAME = "quantize_rows"

# A row up to here stays in registers between its two passes; a longer one is read twice.
LARGEST_WHOLE = 16384


@triton.jit
def scale_of(largest, FP8: tl.constexpr):
    """The float32 scale of rows whose largest magnitudes these are."""
    return tl.div_rn(largest, 448.0 if FP8 else 127.0)


@triton.jit
def bits_of(x, largest, FP8: tl.constexpr):
    """float32 x, in rows with these largest magnitudes → the bits of its int8 or e4m3, as int8.

    e4m3 is made of integers, and so is the same on every GPU: A100 has no instruction for it.
    """
    # Smaller magnitudes would overflow peak / largest.
    peak: tl.constexpr = 448.0 if FP8 else 127.0
    least: tl.constexpr = 2e-36 if FP8 else 1e-36
    # Between a product and a sum, `minimum` keeps the compiler from fusing them, which would round
    # once where torch rounds twice.
    units = x * tl.div_rn(peak, tl.maximum(largest, least))
    units = tl.minimum(tl.maximum(units, -peak), peak)
    if FP8:
        magnitudes = tl.abs(units)
        signs = (units.to(tl.int32, bitcast=True) >> 24) & 0x80
        wide = magnitudes.to(tl.int32, bitcast=True)
        # Three bits of mantissa stay, ties to even; the exponent's bias becomes 7.
        normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - 960
        # Next to 24576 float32 counts in steps of 2 ** -9, as the subnormals do.
        subnormal = (magnitudes + 24576.0).to(tl.int32, bitcast=True) & 0xF
        bits = tl.where(magnitudes < 0.015625, subnormal, normal) | signs
    else:
        # Next to 3 * 2 ** 22 float32 counts in ones, ties to even: the low byte is the integer.
        bits = (units + 12582912.0).to(tl.int32, bitcast=True)
    return bits.to(tl.int8)


@triton.jit
def _quantize_rows_kernel(
    x, values, scales, size, row_stride, WHOLE: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x += row * row_stride
    values += row * size
    columns = tl.arange(0, BLOCK)
    if WHOLE:
        inside = columns < size
        part = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(part), 0)
        tl.store(values + columns, bits_of(part, largest, FP8), mask=inside)
    else:
        largests = tl.zeros([BLOCK], tl.float32)
        for first in range(0, size, BLOCK):
            inside = first + columns < size
            part = tl.load(x + first + columns, mask=inside, other=0.0).to(tl.float32)
            largests = tl.maximum(largests, tl.abs(part))
        largest = tl.max(largests, 0)
        for first in range(0, size, BLOCK):
            inside = first + columns < size
            part = tl.load(x + first + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(values + first + columns, bits_of(part, largest, FP8), mask=inside)
    tl.store(scales + row, scale_of(largest, FP8))


def quantize_rows(
    x: Tensor, dtype: torch.dtype = torch.int8, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """x `[rows, size]` → (int8 or float8_e4m3fn `[rows, size]`, float32 scales `[rows]`).

    The scale is a row's largest magnitude over 127 or 448; values are rounded to the nearest, ties
    to even. A row of zeros has scale 0. config: of the launch; None is that of `tuning`.
    """
    rows, size = x.shape
    config = config or choose(NAME, {"rows": rows, "size": size}, x.device)
    assert x.stride(1) == 1
    values = torch.empty((rows, size), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    whole = size <= LARGEST_WHOLE
    block = triton.next_power_of_2(size) if whole else config["BLOCK"]
    if rows:
        _quantize_rows_kernel[(rows,)](
            x, values, scales, size, x.stride(0), WHOLE=whole, FP8=dtype == quantize.FP8,
            **{**config, "BLOCK": block},
        )  # fmt: skip
    return values.view(dtype), scales


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, size, to = int(shape["rows"]), int(shape["size"]), dtype_of(shape, "to", "int8")
    x = torch.randn(rows, size, device=device).to(dtype_of(shape))
    x[0] = 0  # a scale of 0
    return Trial(
        {"rows": rows, "size": size},
        lambda config: quantize_rows(x, to, config),
        lambda: quantize.quantize_rows(x, to),
        moved_bytes=3 * rows * size + 4 * rows,
        tolerance=0.0,
    )


SPECS = (
    KernelSpec(
        NAME,
        _trial,
        cases=(
            {"rows": 5, "size": 4096},
            {"rows": 5, "size": 4096, "to": "fp8"},
            {"rows": 3, "size": 8192, "dtype": "fp16"},
            {"rows": 5, "size": 2048, "dtype": "fp32"},
            {"rows": 2, "size": 20000},
        ),
        configs=lambda key: [
            {"num_warps": warps, "num_stages": 1, "BLOCK": block}
            for block in ((0,) if int(key["size"]) <= LARGEST_WHOLE else (2048, 4096, 8192))
            for warps in (1, 2, 4, 8, 16, 32)
        ],
        shapes=[
            {"rows": rows, "size": size}
            for size in (4096, 14336, 28672)
            for rows in (1, 32, 256, 8192)
        ],
    ),
)
