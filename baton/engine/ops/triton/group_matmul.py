"""Products with weights of which groups of inputs share a scale: int4, MXFP4 (W4A16), fp8 (W8A16).

Activations stay as they are, values are unpacked in place. A group's products are summed up with
`value - zero point` or the fp8 number, which every floating type holds exactly, and the sum is
scaled: what the native kernel for CPUs does, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.attention_common import TRITON_TYPES
from baton.engine.ops.triton.skinny_matmul import MOST_ROWS, tile_rows
from baton.engine.ops.triton.spec import Config, KernelSpec, Key, Trial, dtype_of, product_of
from baton.engine.ops.triton.tuning import choose
from baton.engine.weights.quantize import FP8
from baton.engine.weights.weight import (
    Fp8BlockWeight,
    GroupScaledWeight,
    Int4Weight,
    Mxfp4Weight,
    Weight,
)

NAME = "group_matmul"


@triton.jit
def _of_fp8(bits):
    """float8_e4m3fn, uint8, as float32: also for GPUs without it, and of its smallest numbers."""
    exponent = (bits >> 3 & 15).to(tl.int32)
    digits = (bits & 7).to(tl.int32) + tl.where(exponent > 0, 8, 0)
    power = (tl.maximum(exponent, 1) + 117 << 23).to(tl.float32, bitcast=True)  # 2^(exponent - 10)
    size = digits.to(tl.float32) * power
    return tl.where(bits > 127, -size, size)


@triton.jit
def _of_mxfp4(bits):
    """Twice a number of E2M1, as int8."""
    size = (bits & 7).to(tl.int8)
    large = ((size & 1) + 2) << (tl.maximum(size >> 1, 1) - 1)
    number = tl.where(size < 2, size, large)
    return tl.where(bits > 7, -number, number).to(tl.int8)


@triton.jit
def group_sums(
    left, values, scales, zeros, outputs, has_row, has_output, depth, GROUP: tl.constexpr,
    NUMBERS: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Rows, which begin at pointers left, times some outputs of a weight: float32."""
    left = left[:, None] + tl.arange(0, GROUP)[None, :]
    STEP: tl.constexpr = GROUP if NUMBERS == "fp8" else GROUP // 2  # bytes
    right = values + outputs.to(tl.int64)[:, None] * (depth * STEP // GROUP)
    right += tl.arange(0, STEP)[None, :]
    groups = outputs.to(tl.int64) * (depth // GROUP)
    sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for group in range(depth // GROUP):
        a = tl.load(left + group * GROUP, mask=has_row[:, None], other=0.0)
        held = tl.load(right + group * STEP, mask=has_output[:, None], other=0)
        if NUMBERS == "fp8":
            numbers = _of_fp8(held)
        elif NUMBERS == "mxfp4":
            numbers = tl.interleave(_of_mxfp4(held & 15), _of_mxfp4(held >> 4))
        else:
            numbers = tl.interleave((held & 15).to(tl.int8), (held >> 4).to(tl.int8))
            if zeros is None:
                numbers -= 8
            else:
                zero = tl.load(zeros + groups + group, mask=has_output, other=0).to(tl.int8)
                numbers -= zero[:, None]
        scale = tl.load(scales + groups + group, mask=has_output, other=0.0)
        found = tl.dot(a.to(TYPE), tl.trans(numbers.to(TYPE)), input_precision="ieee")
        sums += found * scale[None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _group_matmul(
    x, values, scales, zeros, bias, out, num_rows, num_outputs, depth, GROUP: tl.constexpr,
    NUMBERS: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    has_output = outputs < num_outputs
    has_row = rows < num_rows
    sums = group_sums(
        x + rows.to(tl.int64) * depth, values, scales, zeros, outputs, has_row, has_output, depth,
        GROUP, NUMBERS, TYPE, ROWS, OUTPUTS,
    )  # fmt: skip
    if bias is not None:
        sums += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
    to = out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


def numbers_of(weight: Weight) -> str:
    """What `group_sums` unpacks of a weight with groups."""
    if isinstance(weight, Mxfp4Weight):
        return "mxfp4"
    return "fp8" if isinstance(weight, Fp8BlockWeight) else "int4"


def group_matmul(
    x: Tensor, weight: GroupScaledWeight, bias: Tensor | None, config: Config | None = None
) -> Tensor:
    """`x @ weight.T + bias`: x `[rows, in]` of a floating type, bias `[out]` → `[rows, out]`.

    x's columns are in the order of the weight's · config: of the launch; None is that of `tuning`.
    """
    (num_rows, depth), (num_outputs, _) = x.shape, weight.shape
    x, rows = x.contiguous(), tile_rows(min(num_rows, MOST_ROWS))
    if config is None:
        key = {"rows": rows, "outputs": num_outputs, "depth": depth}
        config = choose(NAME, key, x.device)
    interpreted = x.device.type == "cpu"  # which has no products of bfloat16
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_outputs, config["OUTPUTS"]), triton.cdiv(num_rows, rows))
    zeros = weight.zeros if isinstance(weight, Int4Weight) else None
    _group_matmul[grid](
        x, weight.values.view(torch.uint8), weight.scales, zeros, bias, out, num_rows, num_outputs,
        depth, GROUP=weight.group, NUMBERS=numbers_of(weight),
        TYPE=tl.float32 if interpreted else TRITON_TYPES[x.dtype], ROWS=rows, **config,
    )  # fmt: skip
    return out


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, outputs, depth = (int(shape[name]) for name in ("rows", "outputs", "depth"))
    dtype, groups = dtype_of(shape), depth // int(shape.get("group", 128))

    def numbers(least: int, end: int, columns: int) -> Tensor:
        return torch.randint(least, end, (outputs, columns), dtype=torch.uint8, device=device)

    scales = torch.randn(outputs, groups, device=device) / 100
    zeros = numbers(0, 17, groups) if shape.get("zeros") else None
    weight: GroupScaledWeight = Int4Weight(numbers(0, 256, depth // 2), scales, zeros)
    if shape.get("fp8"):
        full = torch.randn(outputs, depth, device=device) * 2 ** (numbers(0, 15, depth) - 12.0)
        weight = Fp8BlockWeight(full.to(FP8), scales)
    x = torch.randn(rows, depth, device=device).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype) if shape.get("bias") else None

    def reference() -> tuple[Tensor]:
        exact = x.double() @ weight.dequantized(torch.float64).T
        return ((exact if bias is None else exact + bias.double()).to(dtype),)

    return Trial(
        {"rows": tile_rows(min(rows, MOST_ROWS)), "outputs": outputs, "depth": depth},
        lambda config: (group_matmul(x, weight, bias, config),),
        reference,
        moved_bytes=weight.num_bytes + x.itemsize * rows * (depth + outputs),
        flops=2.0 * rows * outputs * depth,
    )


SPECS = (
    KernelSpec(
        NAME,
        _trial,
        cases=[
            {"rows": rows, "outputs": 96, "depth": 256, "group": group, form: 1,
             "dtype": dtype, "bias": bias}
            for rows, group, form, dtype, bias in (
                (16, 64, "symmetric", "bf16", 0),
                (32, 32, "zeros", "bf16", 1),
                (64, 128, "zeros", "bf16", 0),
                (9, 64, "symmetric", "fp16", 1),
                (16, 128, "symmetric", "fp32", 1),
                (100, 64, "zeros", "bf16", 0),
                (16, 128, "fp8", "bf16", 1),
                (9, 32, "fp8", "fp16", 0),
                (100, 64, "fp8", "fp32", 0),
            )
        ],
        configs=lambda key: product_of(
            OUTPUTS=(16, 32, 64, 128), num_warps=(4, 8), num_stages=(2, 3, 4, 6)
        ),
        shapes=[
            {"rows": rows, "outputs": outputs, "depth": depth}
            for outputs, depth in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
            for rows in (16, 64)
        ],
    ),
)  # fmt: skip
