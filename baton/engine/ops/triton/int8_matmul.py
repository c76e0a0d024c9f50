"""Products of few int8 rows with an int8 weight, as decode steps have them, in one launch.

Reading the weight is what they cost. torch's own product takes no fewer than 17 rows and leaves
whole sums behind; this one takes any number and scales the sums while they are in registers.
`scale_sums` does so for the sums of torch's product, in one pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.spec import Config, KernelSpec, Key, Trial, dtype_of, product_of
from baton.engine.ops.triton.tuning import choose

NAME = "int8_matmul"

# From more rows on a product is work for large tiles.
MOST_ROWS = 64
_LEAST_ROWS = 16  # of a tensor core's product
_SCALE = {"num_warps": 4, "num_stages": 1, "ROWS": 1, "COLUMNS": 1024}


@triton.jit
def _store_scaled(
    sums, row_scales, column_scales, bias, out, rows, columns, num_rows, num_columns
):  # fmt: skip
    """Sums `[rows, columns]` times both scales, and the bias unless that is None, to out."""
    has_row = rows < num_rows
    has_column = columns < num_columns
    row_scale = tl.load(row_scales + rows, mask=has_row, other=0.0)
    column_scale = tl.load(column_scales + columns, mask=has_column, other=0.0)
    numbers = sums.to(tl.float32) * (row_scale[:, None] * column_scale[None, :])
    if bias is not None:
        numbers += tl.load(bias + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    to = out + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(to, numbers.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _scale_sums(
    sums, row_scales, column_scales, bias, out, num_rows, num_columns, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    numbers = tl.load(sums + at, mask=inside, other=0)
    _store_scaled(
        numbers, row_scales, column_scales, bias, out, rows, columns, num_rows, num_columns
    )


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
    _scale_sums[grid](sums, row_scales, column_scales, bias, out, num_rows, num_columns, **_SCALE)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _int8_matmul(
    x, weight, row_scales, output_scales, bias, out, num_rows, num_outputs, depth,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    has_row = rows < num_rows
    has_output = outputs < num_outputs
    left = x + rows[:, None] * depth
    right = weight + outputs.to(tl.int64)[None, :] * depth
    sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.int32)
    for first in range(0, depth, DEPTH):
        at = first + tl.arange(0, DEPTH)
        if WHOLE:
            a = tl.load(left + at[None, :], mask=has_row[:, None], other=0)
            b = tl.load(right + at[:, None], mask=has_output[None, :], other=0)
        else:
            inside = at < depth
            a = tl.load(left + at[None, :], mask=has_row[:, None] & inside[None, :], other=0)
            b = tl.load(right + at[:, None], mask=has_output[None, :] & inside[:, None], other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
    _store_scaled(sums, row_scales, output_scales, bias, out, rows, outputs, num_rows, num_outputs)


def int8_matmul(
    x: Tensor, weight: Tensor, row_scales: Tensor, output_scales: Tensor, bias: Tensor | None,
    dtype: torch.dtype, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """`(x * row_scales) @ (weight * output_scales).T + bias`, of dtype: `[rows, out]`.

    x: int8 `[rows, in]`, up to MOST_ROWS of them · weight: int8 `[out, in]`, both contiguous ·
    row_scales, output_scales: float32 `[rows]`, `[out]` · bias: `[out]` of any floating type ·
    config: of the launch; None is that of `tuning`. The sums are whole numbers and exact.
    """
    (num_rows, depth), num_outputs = x.shape, len(weight)
    assert num_rows <= MOST_ROWS, "more rows are another kernel's"
    assert x.is_contiguous() and weight.is_contiguous()
    if config is None:
        key = {"rows": tile_rows(num_rows), "outputs": num_outputs, "depth": depth}
        config = choose(NAME, key, x.device)
    out = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    _int8_matmul[(triton.cdiv(num_outputs, config["OUTPUTS"]),)](
        x, weight, row_scales, output_scales, bias, out, num_rows, num_outputs, depth,
        WHOLE=depth % config["DEPTH"] == 0, ROWS=tile_rows(num_rows), **config,
    )  # fmt: skip
    return out


def tile_rows(num_rows: int) -> int:
    """Rows of a tile that holds all of x."""
    return max(_LEAST_ROWS, int(triton.next_power_of_2(num_rows)))


def _reference(
    sums: Tensor, row_scales: Tensor, column_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor]:
    """`scale_sums` in torch."""
    out = sums.float() * (row_scales[:, None] * column_scales)
    return ((out if bias is None else out + bias.float()).to(dtype),)


def _scales(
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
    scales = _scales(shape, rows, columns, device)
    return Trial(
        {},
        lambda config: (scale_sums(sums, *scales),),
        lambda: _reference(sums, *scales),
        moved_bytes=(4 + scales[-1].itemsize) * rows * columns,
    )


def _matmul_trial(shape: Key, device: torch.device) -> Trial:
    rows, outputs, depth = (int(shape[name]) for name in ("rows", "outputs", "depth"))
    x, weight = (
        torch.randint(-127, 128, (n, depth), dtype=torch.int8, device=device)
        for n in (rows, outputs)
    )
    scales = _scales(shape, rows, outputs, device)
    return Trial(
        {"rows": tile_rows(rows), "outputs": outputs, "depth": depth},
        lambda config: (int8_matmul(x, weight, *scales, config),),
        lambda: _reference(x.double() @ weight.double().T, *scales),
        moved_bytes=outputs * depth + rows * (depth + 2 * outputs),
    )


SPECS = (
    KernelSpec(
        "scale_sums",
        _scale_trial,
        cases=product_of(rows=(5,), columns=(1040,), dtype=("fp32", "bf16", "fp16"), bias=(0, 1)),
    ),
    KernelSpec(
        NAME,
        _matmul_trial,
        cases=[
            {"rows": rows, "outputs": 96, "depth": depth, "dtype": dtype, "bias": bias}
            for rows, depth, dtype, bias in (
                (16, 512, "bf16", 0),
                (32, 512, "bf16", 1),
                (64, 512, "bf16", 0),
                (9, 528, "bf16", 0),
                (64, 512, "fp16", 1),
                (16, 512, "fp32", 1),
            )
        ],
        configs=lambda key: [
            config
            for config in product_of(
                OUTPUTS=(16, 32, 64, 128), DEPTH=(128, 256), num_warps=(4, 8), num_stages=(3, 4, 6)
            )
            if config["num_stages"] * config["DEPTH"] * (config["OUTPUTS"] + int(key["rows"]))
            <= 160 * 1024
        ],
        shapes=[
            {"rows": rows, "outputs": outputs, "depth": depth}
            for outputs, depth in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
            for rows in (16, 64)
        ],
    ),
)
