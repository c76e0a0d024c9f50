"""Sums of an int8 product to numbers: scaled by row and by output, a bias added, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.spec import CompileCase, Config, KernelSpec, Key, Trial

CONFIG = Config(num_warps=4, num_stages=1, sizes={"ROWS": 1, "COLUMNS": 1024})

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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


def _case(dtype: torch.dtype, has_bias: bool) -> CompileCase:
    kind = _TYPES[dtype]
    types = {
        "sums": "*i32",
        "row_scales": "*fp32",
        "column_scales": "*fp32",
        "out": f"*{kind}",
        "num_rows": "i32",
        "num_columns": "i32",
    }
    constexprs: dict[str, object] = {"HAS_BIAS": has_bias, **CONFIG.sizes}
    if has_bias:
        types["bias"] = f"*{kind}"
    else:
        constexprs["bias"] = None
    return CompileCase(
        f"{kind}{' with bias' if has_bias else ''}",
        _scale_sums,
        types,
        constexprs,
        CONFIG.num_warps,
        CONFIG.num_stages,
        aligned=("num_columns",),
    )


def _inputs(key: Key, device: torch.device) -> Trial:
    rows, columns = int(key["rows"]), int(key["columns"])
    sums = torch.ones((rows, columns), dtype=torch.int32, device=device)
    row_scales, column_scales = (torch.ones(size, device=device) for size in (rows, columns))

    def run(_: Config) -> Tensor:
        return scale_sums(sums, row_scales, column_scales, None, torch.bfloat16)

    return Trial(key, run, 6 * rows * columns)


SPEC = KernelSpec(
    name="scale_sums",
    cases=tuple(_case(dtype, has_bias) for dtype in _TYPES for has_bias in (False, True)),
    candidates=lambda key: [CONFIG],
    shapes=({"rows": 64, "columns": 4096}, {"rows": 2048, "columns": 14336}),
    inputs=_inputs,
)
