"""Products of few int8 rows with an int8 weight, as decode steps have them, in one launch.

Reading the weight is what they cost. torch's own product takes no fewer than 17 rows and leaves
whole sums behind; this one takes any number and scales the sums while they are in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.scale_sums import scale_sums_reference
from baton.engine.ops.triton.spec import DTYPES, Config, KernelSpec, Key, Trial
from baton.engine.ops.triton.tuning import choose

NAME = "int8_matmul"

# From more rows on a product is work for large tiles.
MOST_ROWS = 64
_LEAST_ROWS = 16  # of a tensor core's product


@triton.jit(do_not_specialize=["num_rows"])
def _int8_matmul(
    x,
    weight,
    row_scales,
    output_scales,
    bias,
    out,
    num_rows,
    num_outputs,
    depth,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
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
    row_scale = tl.load(row_scales + rows, mask=has_row, other=0.0)
    output_scale = tl.load(output_scales + outputs, mask=has_output, other=0.0)
    numbers = sums.to(tl.float32) * (row_scale[:, None] * output_scale[None, :])
    if HAS_BIAS:
        numbers += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
    to = out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(to, numbers.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


def int8_matmul(
    x: Tensor,
    weight: Tensor,
    row_scales: Tensor,
    output_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
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
        x,
        weight,
        row_scales,
        output_scales,
        bias,
        out,
        num_rows,
        num_outputs,
        depth,
        HAS_BIAS=bias is not None,
        WHOLE=depth % config["DEPTH"] == 0,
        ROWS=tile_rows(num_rows),
        **config.launch,
    )
    return out


def tile_rows(num_rows: int) -> int:
    """Rows of a tile that holds all of x."""
    return max(_LEAST_ROWS, int(triton.next_power_of_2(num_rows)))


def int8_matmul_reference(
    x: Tensor,
    weight: Tensor,
    row_scales: Tensor,
    output_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`int8_matmul` in plain torch; float64 holds every sum."""
    sums = (x.double() @ weight.double().T).to(torch.int32)
    return scale_sums_reference(sums, row_scales, output_scales, bias, dtype)


def _configs(key: Key) -> list[Config]:
    return [
        Config(warps, stages, {"OUTPUTS": outputs, "DEPTH": depth})
        for outputs in (16, 32, 64, 128)
        for depth in (128, 256)
        for warps in (4, 8)
        for stages in (3, 4, 6)
        if stages * depth * (outputs + int(key["rows"])) <= 160 * 1024
    ]


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, outputs, depth = (int(shape[name]) for name in ("rows", "outputs", "depth"))
    dtype = DTYPES[str(shape.get("dtype", "bf16"))]
    x, weight = (
        torch.randint(-127, 128, (n, depth), dtype=torch.int8, device=device)
        for n in (rows, outputs)
    )
    scales = (torch.rand(rows, device=device) / 100, torch.rand(outputs, device=device) / 100)
    bias = torch.randn(outputs, device=device).to(dtype) if shape.get("bias") else None
    return Trial(
        {"rows": tile_rows(rows), "outputs": outputs, "depth": depth},
        lambda config: (int8_matmul(x, weight, *scales, bias, dtype, config),),
        lambda: (int8_matmul_reference(x, weight, *scales, bias, dtype),),
        moved_bytes=outputs * depth + rows * (depth + 2 * outputs),
    )


SPEC = KernelSpec(
    NAME,
    trial=_trial,
    cases=tuple(
        (
            {"rows": rows, "outputs": 96, "depth": depth, "dtype": dtype, "bias": bias},
            Config(4, 4, {"OUTPUTS": 32, "DEPTH": 256 if rows <= 32 else 128}),
        )
        for rows, depth, dtype, bias in (
            (16, 512, "bf16", 0),
            (32, 512, "bf16", 1),
            (64, 512, "bf16", 0),
            (9, 528, "bf16", 0),
            (64, 512, "fp16", 1),
            (16, 512, "fp32", 1),
        )
    ),
    configs=_configs,
    shapes=tuple(
        {"rows": rows, "outputs": outputs, "depth": depth}
        for outputs, depth in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
        for rows in (16, 64)
    ),
)
