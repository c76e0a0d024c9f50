"""Quantisation of rows to int8 and fp8, for W8A8 products and the KV pool; scaling of int8 sums.

The formulas are those of `baton.engine.kernels.torch.row_quantization`, to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.torch import row_quantization
from baton.engine.kernels.triton.launch_configs import choose
from baton.engine.kernels.triton.pdl import launch, launch_dependents, wait_for_inputs
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Trial, dtype_of, product_of

# Elements of a row that `quantize_rows` keeps in registers between its two passes; a longer row is
# read twice.
LARGEST_WHOLE = 16384


class QuantizedRows(NamedTuple):
    """Quantised rows and their scales; dtype: of the rows before."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype


Rows: TypeAlias = Any  # a Tensor, or QuantizedRows where a caller asked for them
TUNED_ROWS = (1, 32, 256, 8192)  # numbers of rows that kernels are tuned for


@triton.jit
def scale_of(largest, FP8: tl.constexpr):
    """The float32 scale of rows with these largest magnitudes."""
    return tl.div_rn(largest, 448.0 if FP8 else 127.0)


@triton.jit
def bits_of(x, largest, FP8: tl.constexpr):
    """Quantises float32 x in rows with these largest magnitudes: bits of int8 or e4m3, as int8.

    e4m3 is computed by integer operations, because an A100 has no instruction for it."""
    # Smaller magnitudes would overflow peak / largest.
    peak: tl.constexpr = 448.0 if FP8 else 127.0
    least: tl.constexpr = 2e-36 if FP8 else 1e-36
    # `minimum` between product and sum prevents their fusion, which would round once where torch
    # rounds twice.
    units = x * tl.div_rn(peak, tl.maximum(largest, least))
    units = tl.minimum(tl.maximum(units, -peak), peak)
    if FP8:
        magnitudes = tl.abs(units)
        signs = (units.to(tl.int32, bitcast=True) >> 24) & 0x80
        wide = magnitudes.to(tl.int32, bitcast=True)
        # Rounds to three bits of mantissa, ties to even, with an exponent bias of 7.
        normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - 960
        # Near 24576 the spacing of float32 is 2 ** -9, as that of e4m3's subnormals.
        subnormal = (magnitudes + 24576.0).to(tl.int32, bitcast=True) & 0xF
        bits = tl.where(magnitudes < 0.015625, subnormal, normal) | signs
    else:
        # Near 3 * 2 ** 22 the spacing of float32 is 1, ties to even: the low byte is the integer.
        bits = (units + 12582912.0).to(tl.int32, bitcast=True)
    return bits.to(tl.int8)


@triton.jit
def store_row(out, scales, row, size, columns, x, FP8: tl.constexpr):
    """Stores a whole row; quantised with its scale unless `scales` is None."""
    inside = columns < size
    out += row * size + columns
    if scales is None:
        tl.store(out, x, mask=inside)
    else:
        wide = tl.where(inside, x.to(tl.float32), 0.0)
        largest = tl.max(tl.abs(wide), 0)
        tl.store(out, bits_of(wide, largest, FP8), mask=inside)
        tl.store(scales + row, scale_of(largest, FP8))


def empty_rows(x: Tensor, size: int, to: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Empty tensors for as many rows as x has, and for their scales if `to` is a quantised type."""
    out = torch.empty((len(x), size), dtype=torch.int8 if to else x.dtype, device=x.device)
    return out, torch.empty(len(x), dtype=torch.float32, device=x.device) if to else None


def as_rows(out: Tensor, scales: Tensor | None, to: torch.dtype | None, x: Tensor) -> Rows:
    """What a kernel stored in `empty_rows`, for rows of x's type."""
    if scales is None or to is None:
        return out
    return QuantizedRows(out.view(to), scales, x.dtype)


@triton.jit
def _quantize_rows_kernel(
    x, values, scales, size, row_stride, WHOLE: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    launch_dependents(PDL)
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

    The scale is a row's largest magnitude over 127 or 448; values are rounded to nearest, ties to
    even. A row of zeros has the scale 0. config: None is the one in effect.
    """
    rows, size = x.shape
    config = config or choose("quantize_rows", {"rows": rows, "size": size}, x.device)
    assert x.stride(1) == 1
    values = torch.empty((rows, size), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    whole = size <= LARGEST_WHOLE
    block = triton.next_power_of_2(size) if whole else config["BLOCK"]
    launch(
        _quantize_rows_kernel, (rows,), x, values, scales, size, x.stride(0), WHOLE=whole,
        FP8=dtype == row_quantization.FP8, **{**config, "BLOCK": block},
    )  # fmt: skip
    return values.view(dtype), scales


_SCALE = {"num_warps": 4, "num_stages": 1, "ROWS": 1, "COLUMNS": 1024}


@triton.jit(do_not_specialize=["num_rows"])
def _scale_sums(
    sums, row_scales, column_scales, bias, out, num_rows, num_columns, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    has_row, has_column = rows < num_rows, columns < num_columns
    inside = has_row[:, None] & has_column[None, :]
    numbers = tl.load(sums + at, mask=inside, other=0).to(tl.float32)
    row_scale = tl.load(row_scales + rows, mask=has_row, other=0.0)
    column_scale = tl.load(column_scales + columns, mask=has_column, other=0.0)
    numbers *= row_scale[:, None] * column_scale[None, :]
    if bias is not None:
        numbers += tl.load(bias + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, numbers.to(out.dtype.element_ty), mask=inside)


def scale_sums(
    sums: Tensor, row_scales: Tensor, column_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`sums * row_scales * column_scales + bias` of an int8 product, of dtype: `[rows, columns]`.

    sums: int32 `[rows, columns]`, contiguous · row_scales, column_scales: float32 `[rows]`,
    `[columns]` · bias: `[columns]` of any floating type.
    """
    assert sums.is_contiguous()
    num_rows, num_columns = sums.shape
    out = torch.empty_like(sums, dtype=dtype)
    grid = (triton.cdiv(num_rows, _SCALE["ROWS"]), triton.cdiv(num_columns, _SCALE["COLUMNS"]))
    launch(
        _scale_sums, grid, sums, row_scales, column_scales, bias, out, num_rows, num_columns,
        **_SCALE,
    )  # fmt: skip
    return out


def parts_of(rows: Rows) -> tuple[Tensor, ...]:
    """The tensors of rows, as trials compare them."""
    return (rows.values, rows.scales) if isinstance(rows, QuantizedRows) else (rows,)


def _quantize_trial(shape: Key, device: torch.device) -> Trial:
    rows, size, to = int(shape["rows"]), int(shape["size"]), dtype_of(shape, "to", "int8")
    x = torch.randn(rows, size, device=device).to(dtype_of(shape))
    x[0] = 0  # a scale of 0
    return Trial(
        {"rows": rows, "size": size},
        lambda config: quantize_rows(x, to, config),
        lambda: row_quantization.quantize_rows(x, to),
        moved_bytes=3 * rows * size + 4 * rows,
        tolerance=0.0,
    )


def _scale_trial(shape: Key, device: torch.device) -> Trial:
    rows, columns, dtype = int(shape["rows"]), int(shape["columns"]), dtype_of(shape)
    sums = torch.randint(-(2**20), 2**20, (rows, columns), dtype=torch.int32, device=device)
    row_scales, column_scales = (torch.rand(n, device=device) / 100 for n in (rows, columns))
    bias = torch.randn(columns, device=device).to(dtype) if shape.get("bias") else None

    def reference() -> tuple[Tensor]:
        out = sums.float() * (row_scales[:, None] * column_scales)
        return ((out if bias is None else out + bias.float()).to(dtype),)

    return Trial(
        {},
        lambda config: (scale_sums(sums, row_scales, column_scales, bias, dtype),),
        reference,
        moved_bytes=(4 + dtype.itemsize) * rows * columns,
    )


SPECS = (
    KernelSpec(
        "scale_sums",
        _scale_trial,
        cases=product_of(rows=(5,), columns=(1040,), dtype=("fp32", "bf16", "fp16"), bias=(0, 1)),
    ),
    KernelSpec(
        "quantize_rows",
        _quantize_trial,
        cases=(
            {"rows": 5, "size": 4096},
            {"rows": 5, "size": 4096, "to": "fp8"},
            {"rows": 3, "size": 8192, "dtype": "fp16"},
            {"rows": 5, "size": 2048, "dtype": "fp32"},
            {"rows": 2, "size": 20000},
        ),
        configs=lambda key: product_of(
            BLOCK=(0,) if int(key["size"]) <= LARGEST_WHOLE else (2048, 4096, 8192),
            num_warps=(1, 2, 4, 8, 16, 32),
            num_stages=(1,),
        ),
        shapes=product_of(size=(4096, 14336, 28672), rows=TUNED_ROWS),
    ),
)
