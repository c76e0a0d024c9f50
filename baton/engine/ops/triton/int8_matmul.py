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
from baton.engine.ops.triton.spec import CompileCase, Config, KernelSpec, Key, Trial
from baton.engine.ops.triton.tuning import choose

NAME = "int8_matmul"

# From more rows on a product is work for large tiles.
MOST_ROWS = 64
_LEAST_ROWS = 16  # of a tensor core's product

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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
    tile_rows = max(_LEAST_ROWS, int(triton.next_power_of_2(num_rows)))
    if config is None:
        key = {"rows": tile_rows, "outputs": num_outputs, "depth": depth}
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
        ROWS=tile_rows,
        **config.launch,
    )
    return out


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


def _candidates(key: Key) -> list[Config]:
    return [
        Config(warps, stages, {"OUTPUTS": outputs, "DEPTH": depth})
        for outputs in (16, 32, 64, 128)
        for depth in (128, 256)
        for warps in (4, 8)
        for stages in (3, 4, 6)
        if stages * depth * (outputs + int(key["rows"])) <= 160 * 1024
    ]


def _case(dtype: torch.dtype, rows: int, has_bias: bool, whole: bool) -> CompileCase:
    kind = _TYPES[dtype]
    config = Config(4, 4, {"OUTPUTS": 32, "DEPTH": 256 if rows <= 32 else 128})
    types = {"x": "*i8", "weight": "*i8", "row_scales": "*fp32", "output_scales": "*fp32"}
    types |= {"out": f"*{kind}", "num_rows": "i32", "num_outputs": "i32", "depth": "i32"}
    constexprs = {"HAS_BIAS": has_bias, "WHOLE": whole, "ROWS": rows, **config.sizes}
    bias: dict[str, object] = {} if has_bias else {"bias": None}
    if has_bias:
        types["bias"] = f"*{kind}"
    name = f"{kind} {rows} rows{' bias' if has_bias else ''}{'' if whole else ' ragged'}"
    return CompileCase(
        name, _int8_matmul, types, constexprs | bias, config.num_warps, config.num_stages,
        aligned=("num_outputs", "depth"),
    )  # fmt: skip


def _inputs(key: Key, device: torch.device) -> Trial:
    rows, outputs, depth = (int(key[name]) for name in ("rows", "outputs", "depth"))
    x, weight = (torch.ones((n, depth), dtype=torch.int8, device=device) for n in (rows, outputs))
    scales = torch.ones(rows, device=device), torch.ones(outputs, device=device)

    def run(config: Config) -> Tensor:
        return int8_matmul(x, weight, *scales, None, torch.bfloat16, config)

    return Trial(key, run, outputs * depth + rows * (depth + 2 * outputs))


SPEC = KernelSpec(
    name=NAME,
    cases=(
        _case(torch.bfloat16, 16, False, True),
        _case(torch.bfloat16, 32, True, True),
        _case(torch.bfloat16, 64, False, True),
        _case(torch.bfloat16, 16, False, False),
        _case(torch.float16, 64, True, True),
        _case(torch.float32, 16, True, True),
    ),
    candidates=_candidates,
    shapes=tuple(
        {"rows": rows, "outputs": outputs, "depth": depth}
        for outputs, depth in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
        for rows in (16, 64)
    ),
    inputs=_inputs,
)
