"""Kernels on rows: addition to the residual stream with its RMS norm, the feed-forward gate, and
eight-bit rows, for int8 and fp8 products and for the KV pool; and the scales of int8 products.

The formulas of eight-bit rows are those of `baton.engine.kernels.torch.quantized_rows`, to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from baton.engine.kernels.torch import quantized_rows
from baton.engine.kernels.torch.rows import act_mul as reference_act_mul
from baton.engine.kernels.torch.rows import rms_norm
from baton.engine.kernels.triton.launch import launch, launch_next, wait_for_inputs
from baton.engine.kernels.triton.spec import Config, KernelSpec, Key, Trial, dtype_of, product_of
from baton.engine.kernels.triton.tuning import choose

# A row lies in the registers of one program.
LARGEST_ROW = 32768

# Of `quantize_rows` a row up to here stays in registers between two passes; a longer one is read
# twice.
LARGEST_WHOLE = 16384


class EightBitRows(NamedTuple):
    """What `quantize_rows` gives, of rows of `dtype`."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype


Rows: TypeAlias = Any  # a Tensor; EightBitRows where those are asked for
ALPHA, LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


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
def _store_row(out, scales, row, size, columns, x, FP8: tl.constexpr):
    """Stores a row that is here whole: in eight bits with its scale, unless `scales` is None."""
    inside = columns < size
    out += row * size + columns
    if scales is None:
        tl.store(out, x, mask=inside)
    else:
        wide = tl.where(inside, x.to(tl.float32), 0.0)
        largest = tl.max(tl.abs(wide), 0)
        tl.store(out, bits_of(wide, largest, FP8), mask=inside)
        tl.store(scales + row, scale_of(largest, FP8))


@triton.jit
def _add_rms_norm_kernel(
    x, residual, weight, normed, scales, size, row_stride, eps, FP8: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    element = x.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    launch_next(PDL)
    values = tl.load(x + row * row_stride + columns, mask=inside, other=0.0)
    if residual is not None:
        residual += row * size + columns
        total = tl.load(residual, mask=inside, other=0.0).to(tl.float32) + values.to(tl.float32)
        # The norm is of what is kept, in the model's type.
        values = total.to(element)
        tl.store(residual, values, mask=inside)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    # Rounded where `rms_norm` of the decoder rounds.
    unit = (wide * inverse).to(weight.dtype.element_ty).to(tl.float32)
    _store_row(normed, scales, row, size, columns, (unit * weights).to(element), FP8)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    config: Config | None = None,
    to: torch.dtype | None = None,
) -> tuple[Rows, Tensor]:
    """The residual stream with x added in place, and its RMS norm times weight: (normed, stream).

    x, residual: `[rows, size]` of one type · weight: `[size]`, of that type or float32.
    Without a residual x itself is the stream, and nothing is added. config: of the launch; None is
    that of `tuning` · to: int8 or float8_e4m3fn gives the norm as `quantize_rows` would.
    """
    rows, size = x.shape
    assert size <= LARGEST_ROW, "no model's rows are as long"
    assert x.stride(1) == 1 and weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    config = config or choose("add_rms_norm", {"rows": rows, "size": size}, x.device)
    normed, scales = _empty_rows(x, size, to)
    launch(
        _add_rms_norm_kernel, (rows,), x, residual, weight, normed, scales, size, x.stride(0), eps,
        FP8=to == quantized_rows.FP8, BLOCK=triton.next_power_of_2(size), **config,
    )  # fmt: skip
    return _rows(normed, scales, to, x), x if residual is None else residual


def _empty_rows(x: Tensor, size: int, to: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Where a kernel stores as many rows as x has, and their scales if they are of eight bits."""
    out = torch.empty((len(x), size), dtype=torch.int8 if to else x.dtype, device=x.device)
    return out, torch.empty(len(x), dtype=torch.float32, device=x.device) if to else None


def _rows(out: Tensor, scales: Tensor | None, to: torch.dtype | None, x: Tensor) -> Rows:
    if scales is None or to is None:
        return out
    return EightBitRows(out.view(to), scales, x.dtype)


@triton.jit
def gated(gate, up, GELU: tl.constexpr, SWIGLU_OAI: tl.constexpr):
    """`activation(gate) * up`, of their type and rounded where torch rounds."""
    element = gate.dtype
    gate = gate.to(tl.float32)
    factor = up.to(tl.float32)
    if SWIGLU_OAI:
        gate = tl.minimum(gate, LIMIT)
        factor = tl.minimum(tl.maximum(factor, -LIMIT), LIMIT) + 1.0
    slope = gate
    if SWIGLU_OAI:
        slope = ALPHA * gate
    if GELU:  # by tanh: (1 + tanh(y)) / 2 is the sigmoid of 2y
        slope = gate * (1.5957691216 + 0.0713548163 * gate * gate)
    # torch multiplies in a second step.
    act = (gate / (1.0 + tl.exp(-slope))).to(element).to(tl.float32)
    return (act * factor).to(element)


@triton.jit
def _act_mul_kernel(
    gate_up, out, scales, size, row_stride, GELU: tl.constexpr, SWIGLU_OAI: tl.constexpr,
    FP8: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * row_stride + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + size + columns, mask=inside, other=0.0)
    result = gated(gate, up, GELU, SWIGLU_OAI)
    _store_row(out, scales, row, size, columns, result, FP8)


def act_mul(
    gate_up: Tensor,
    activation: Activation = "silu",
    config: Config | None = None,
    to: torch.dtype | None = None,
) -> Rows:
    """`activation(gate) * up` of gate_up `[rows, 2 * size]`, gate first → `[rows, size]`.

    config: of the launch; None is that of `tuning` · to: int8 or float8_e4m3fn gives rows of up to
    `LARGEST_WHOLE` as `quantize_rows` would, with its configuration.
    """
    rows, width = gate_up.shape
    size = width // 2
    key = {"rows": rows, "size": size}
    config = config or choose("quantize_rows" if to else "act_mul", key, gate_up.device)
    if to:
        assert size <= LARGEST_WHOLE, "a row is one program's"
        config = {**config, "BLOCK": triton.next_power_of_2(size)}
    assert gate_up.stride(1) == 1 and width == 2 * size
    out, scales = _empty_rows(gate_up, size, to)
    grid = (rows, triton.cdiv(size, config["BLOCK"]))
    launch(
        _act_mul_kernel, grid, gate_up, out, scales, size, gate_up.stride(0),
        GELU=activation == "gelu_tanh", SWIGLU_OAI=activation == "swigluoai",
        FP8=to == quantized_rows.FP8, **config,
    )  # fmt: skip
    return _rows(out, scales, to, gate_up)


@triton.jit
def _quantize_rows_kernel(
    x, values, scales, size, row_stride, WHOLE: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    launch_next(PDL)
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
    config = config or choose("quantize_rows", {"rows": rows, "size": size}, x.device)
    assert x.stride(1) == 1
    values = torch.empty((rows, size), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    whole = size <= LARGEST_WHOLE
    block = triton.next_power_of_2(size) if whole else config["BLOCK"]
    launch(
        _quantize_rows_kernel, (rows,), x, values, scales, size, x.stride(0), WHOLE=whole,
        FP8=dtype == quantized_rows.FP8, **{**config, "BLOCK": block},
    )  # fmt: skip
    return values.view(dtype), scales


_SCALE = {"num_warps": 4, "num_stages": 1, "ROWS": 1, "COLUMNS": 1024}


@triton.jit(do_not_specialize=["num_rows"])
def _scale_sums(
    sums, row_scales, column_scales, bias, out, num_rows, num_columns, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    launch_next(PDL)
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
    """`sums * row_scales * column_scales + bias`, of dtype: `[rows, columns]`.

    sums: int32 `[rows, columns]`, contiguous · row_scales, column_scales: float32 `[rows]`,
    `[columns]` · bias: `[columns]` of any floating type.
    """
    assert sums.is_contiguous(), "rows of sums lie one after the other"
    num_rows, num_columns = sums.shape
    out = torch.empty_like(sums, dtype=dtype)
    grid = (triton.cdiv(num_rows, _SCALE["ROWS"]), triton.cdiv(num_columns, _SCALE["COLUMNS"]))
    launch(
        _scale_sums, grid, sums, row_scales, column_scales, bias, out, num_rows, num_columns,
        **_SCALE,
    )  # fmt: skip
    return out


def _parts(rows: Rows) -> tuple[Tensor, ...]:
    return (rows.values, rows.scales) if isinstance(rows, EightBitRows) else (rows,)


def _norm_trial(shape: Key, device: torch.device) -> Trial:
    rows, size, dtype = int(shape["rows"]), int(shape["size"]), dtype_of(shape)
    x, residual = torch.randn(2, rows, size, device=device).to(dtype).unbind()
    weight = torch.rand(size, device=device).to(dtype)
    added = residual if shape.get("add", 1) else None
    stream = x if added is None else x + added
    if "to" in shape:  # as the same norm and `quantize_rows` give, to the bit
        to = dtype_of(shape, "to")
        return Trial(
            {"rows": rows, "size": size},
            lambda config: _parts(add_rms_norm(x, added, weight, 1e-5, config, to)[0]),
            lambda: quantized_rows.quantize_rows(
                _parts(add_rms_norm(stream, None, weight, 1e-5)[0])[0], to
            ),
            tolerance=0.0,
        )
    return Trial(
        {"rows": rows, "size": size},
        lambda config: (
            *_parts(add_rms_norm(x, added, weight, 1e-5, config)[0]),
            x if added is None else added,
        ),
        lambda: (rms_norm(stream, weight, 1e-5), stream),
        moved_bytes=4 * x.numel() * x.itemsize,
    )


def _act_mul_trial(shape: Key, device: torch.device) -> Trial:
    rows, size = int(shape["rows"]), int(shape["size"])
    gate_up = torch.randn(rows, 2 * size, device=device).to(dtype_of(shape))
    if "swigluoai" in shape:
        gate_up = gate_up * 6  # beyond its limits
    activations: tuple[Activation, ...] = get_args(Activation)
    activation = next((name for name in activations if name in shape), activations[0])
    if "to" in shape:
        to = dtype_of(shape, "to")
        return Trial(
            {"rows": rows, "size": size},
            lambda config: _parts(act_mul(gate_up, activation, config, to)),
            lambda: quantized_rows.quantize_rows(_parts(act_mul(gate_up, activation))[0], to),
            tolerance=0.0,
        )
    return Trial(
        {"rows": rows, "size": size},
        lambda config: _parts(act_mul(gate_up, activation, config)),
        lambda: (reference_act_mul(gate_up, activation),),
        moved_bytes=3 * rows * size * gate_up.itemsize,
    )


def _quantize_trial(shape: Key, device: torch.device) -> Trial:
    rows, size, to = int(shape["rows"]), int(shape["size"]), dtype_of(shape, "to", "int8")
    x = torch.randn(rows, size, device=device).to(dtype_of(shape))
    x[0] = 0  # a scale of 0
    return Trial(
        {"rows": rows, "size": size},
        lambda config: quantize_rows(x, to, config),
        lambda: quantized_rows.quantize_rows(x, to),
        moved_bytes=3 * rows * size + 4 * rows,
        tolerance=0.0,
    )


def scaled_reference(
    sums: Tensor, row_scales: Tensor, column_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor]:
    """`scale_sums` in torch."""
    out = sums.float() * (row_scales[:, None] * column_scales)
    return ((out if bias is None else out + bias.float()).to(dtype),)


def random_scales(
    shape: Key, rows: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    """Scales of rows and of columns, a bias if the shape has one, and the result's type."""
    dtype = dtype_of(shape)
    row_scales, column_scales = (torch.rand(n, device=device) / 100 for n in (rows, columns))
    bias = torch.randn(columns, device=device).to(dtype) if shape.get("bias") else None
    return row_scales, column_scales, bias, dtype


def _scale_trial(shape: Key, device: torch.device) -> Trial:
    rows, columns = int(shape["rows"]), int(shape["columns"])
    sums = torch.randint(-(2**20), 2**20, (rows, columns), dtype=torch.int32, device=device)
    scales = random_scales(shape, rows, columns, device)
    return Trial(
        {},
        lambda config: (scale_sums(sums, *scales),),
        lambda: scaled_reference(sums, *scales),
        moved_bytes=(4 + scales[-1].itemsize) * rows * columns,
    )


_ROWS = (1, 32, 256, 8192)
SPECS = (
    KernelSpec(
        "scale_sums",
        _scale_trial,
        cases=product_of(rows=(5,), columns=(1040,), dtype=("fp32", "bf16", "fp16"), bias=(0, 1)),
    ),
    KernelSpec(
        "add_rms_norm",
        _norm_trial,
        cases=(
            {"rows": 5, "size": 4096},
            {"rows": 5, "size": 8192, "dtype": "fp16"},
            {"rows": 5, "size": 2048, "dtype": "fp32", "add": 0},
            {"rows": 3, "size": 16384},
            {"rows": 5, "size": 4096, "to": "fp8"},
            {"rows": 3, "size": 8192, "add": 0, "to": "int8"},
        ),
        configs=lambda key: product_of(num_warps=(1, 2, 4, 8, 16, 32), num_stages=(1,)),
        shapes=product_of(size=(2048, 4096, 8192), rows=_ROWS),
    ),
    KernelSpec(
        "act_mul",
        _act_mul_trial,
        cases=(
            {"rows": 5, "size": 4096},
            {"rows": 7, "size": 1000, "dtype": "fp16"},
            {"rows": 3, "size": 2048, "dtype": "fp32"},
            {"rows": 3, "size": 2048, "gelu_tanh": 1},
            {"rows": 3, "size": 2880, "swigluoai": 1},
            {"rows": 5, "size": 14336, "to": "fp8"},
            {"rows": 3, "size": 4096, "dtype": "fp16", "to": "int8"},
        ),
        # 8 elements of two bytes are one load of a thread.
        configs=lambda key: [
            config
            for config in product_of(
                BLOCK=(256, 512, 1024, 2048, 4096), num_warps=(1, 2, 4, 8), num_stages=(1,)
            )
            if 4 <= config["BLOCK"] // (32 * config["num_warps"]) <= 32
        ],
        shapes=product_of(size=(4096, 14336), rows=_ROWS),
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
        shapes=product_of(size=(4096, 14336, 28672), rows=_ROWS),
    ),
)
