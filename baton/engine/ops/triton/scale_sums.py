"""Sums of an int8 product to numbers: scaled by row and by output, a bias added, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.spec import DTYPES, Config, KernelSpec, Key, Trial

CONFIG = Config(num_warps=4, num_stages=1, sizes={"ROWS": 1, "COLUMNS": 1024})


@triton.jit(do_not_specialize=["num_rows"])
def _scale_sums(
    sums,
    row_scales,
    column_scales,
    bias,
    out,
    num_rows,
    num_columns,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_column = columns < num_columns
    row_scale = tl.load(row_scales + rows, mask=rows < num_rows, other=0.0)
    column_scale = tl.load(column_scales + columns, mask=has_column, other=0.0)
    at = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    inside = (rows < num_rows)[:, None] & has_column[None, :]
    numbers = tl.load(sums + at, mask=inside, other=0).to(tl.float32)
    numbers = numbers * (row_scale[:, None] * column_scale[None, :])
    if HAS_BIAS:
        numbers += tl.load(bias + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, numbers.to(out.dtype.element_ty), mask=inside)


def scale_sums(
    sums: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`sums * row_scales * column_scales + bias`, of dtype: `[rows, columns]`.

    sums: int32 `[rows, columns]`, contiguous · row_scales, column_scales: float32 `[rows]`,
    `[columns]` · bias: `[columns]` of any floating type.
    """
    assert sums.is_contiguous(), "rows of sums lie one after the other"
    num_rows, num_columns = sums.shape
    out = torch.empty_like(sums, dtype=dtype)
    grid = (triton.cdiv(num_rows, CONFIG["ROWS"]), triton.cdiv(num_columns, CONFIG["COLUMNS"]))
    _scale_sums[grid](
        sums,
        row_scales,
        column_scales,
        bias,
        out,
        num_rows,
        num_columns,
        HAS_BIAS=bias is not None,
        **CONFIG.launch,
    )
    return out


def scale_sums_reference(
    sums: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The same in torch."""
    out = sums.float() * (row_scales[:, None] * column_scales)
    return (out if bias is None else out + bias.float()).to(dtype)


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, columns = int(shape["rows"]), int(shape["columns"])
    dtype = DTYPES[str(shape.get("dtype", "bf16"))]
    sums = torch.randint(-(2**20), 2**20, (rows, columns), dtype=torch.int32, device=device)
    scales = (torch.rand(rows, device=device) / 100, torch.rand(columns, device=device) / 100)
    bias = torch.randn(columns, device=device).to(dtype) if shape.get("bias") else None
    return Trial(
        {},
        lambda config: (scale_sums(sums, *scales, bias, dtype),),
        lambda: (scale_sums_reference(sums, *scales, bias, dtype),),
        moved_bytes=(4 + dtype.itemsize) * rows * columns,
    )


SPEC = KernelSpec(
    "scale_sums",
    trial=_trial,
    cases=tuple(
        ({"rows": 5, "columns": 1040, "dtype": dtype, "bias": bias}, CONFIG)
        for dtype in ("fp32", "bf16", "fp16")
        for bias in (0, 1)
    ),
)
