"""Group-quantised linear layers: int4 (AWQ, GPTQ), MXFP4, NVFP4 and fp8, 16-bit activations.

Weights are packed by `group_scaled_packing.py`. Up to MOST_ROWS rows are multiplied while elements
are unpacked in registers: the weight is the left operand, which tensor cores read from registers.
For more rows the weight is dequantised into temporary memory and multiplied by torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from baton.engine.kernels.triton.group_scaled_packing import (
    STEP,
    TILE,
    PackedWeight,
    pack,
    planes,
    random_weight,
    scaled_plane,
    step_numbers,
)
from baton.engine.kernels.triton.launch_configs import choose
from baton.engine.kernels.triton.pdl import launch, wait_for_inputs
from baton.engine.kernels.triton.skinny_matmul import padded_rows, prefetch
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Trial, dtype_of, product_of

NAME = "group_scaled_linear"

MOST_ROWS = 128  # more rows are multiplied by torch
_STEP, _TILE = tl.constexpr(STEP), tl.constexpr(TILE)


@triton.jit(do_not_specialize=["num_rows"])
def _group_scaled_linear(
    x, words, fields, bias, out, partials, counters, num_rows, num_outputs, depth, padded,
    PARTS: tl.constexpr, FORMAT: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_LOWS: tl.constexpr, FACTOR: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr,
    WHOLE: tl.constexpr, IS_SPLIT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes some outputs over a part of the depth. Grid `[outputs, parts]`.

    The last program of these outputs to finish adds up the partial sums."""
    WIDTH: tl.constexpr = _STEP // (2 if FORMAT == "fp8" else 4)
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    has_row = rows < num_rows
    steps = tl.cdiv(depth, _STEP)
    first, last = part * steps // parts, (part + 1) * steps // parts
    if PDL and AHEAD > 0:  # prefetches the first steps, in lines of 64 words
        LINES: tl.constexpr = _TILE * WIDTH // 64
        line = tl.arange(0, OUTPUTS // _TILE * AHEAD * LINES)
        of_tile = tl.minimum(
            tile * (OUTPUTS // _TILE) + line // (AHEAD * LINES), padded // _TILE - 1
        )
        line = tl.minimum(first * LINES + line % (AHEAD * LINES), steps * LINES - 1)
        prefetch(words + (of_tile.to(tl.int64) * (steps * LINES) + line) * 64)
    wait_for_inputs(PDL)
    column, inputs = tl.arange(0, WIDTH), tl.arange(0, _STEP)
    left = words + (outputs // _TILE).to(tl.int64)[:, None] * (steps * _TILE * WIDTH)
    left += (outputs % _TILE)[:, None] * WIDTH + column[None, :]
    own_fields = fields + tl.minimum(outputs, padded - 1)
    right = x + rows[None, :] * depth + inputs[:, None]
    sums = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    # Otherwise the loop might not run, and ptxas waits for each product to keep zeros correct.
    tl.assume(first < last)
    for step in range(first, last):
        if WHOLE:
            held = tl.load(left + step * (_TILE * WIDTH))
            a = tl.load(right + step * _STEP, mask=has_row[None, :], other=0.0)
        else:
            is_held = (outputs < padded)[:, None]
            held = tl.load(left + step * (_TILE * WIDTH), mask=is_held, other=0)
            wanted = has_row[None, :] & (inputs + step * _STEP < depth)[:, None]
            a = tl.load(right + step * _STEP, mask=wanted, other=0.0)
        numbers = step_numbers(
            planes(held, FORMAT, TYPE, PLAIN), own_fields + step * PARTS * padded, padded, FORMAT,
            GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN,
        )  # fmt: skip
        if PLAIN:
            a = a.to(tl.float32)
        sums = tl.dot(numbers, a, sums, input_precision="ieee")
    sums *= FACTOR
    has_output = outputs < num_outputs
    wanted = has_output[:, None] & has_row[None, :]
    to = rows[None, :] * num_outputs + outputs[:, None]
    if IS_SPLIT:
        size = num_rows * num_outputs
        tl.store(partials + part * size + to, sums, mask=wanted)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == parts - 1
        if is_last:
            tl.store(counters + tile, 0)  # for the next launch
            sums = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
            AT_ONCE: tl.constexpr = 4 if ROWS <= 16 else 2  # as registers hold them
            for begin in range(0, parts, AT_ONCE):
                for next in tl.static_range(AT_ONCE):
                    other = begin + next
                    sums += tl.load(
                        partials + other * size + to, mask=wanted & (other < parts), other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
            _store(sums, bias, out, to, outputs, has_output, wanted)
    else:
        _store(sums, bias, out, to, outputs, has_output, wanted)


@triton.jit
def _store(sums, bias, out, to, outputs, has_output, wanted):
    if bias is not None:
        sums += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[:, None]
    tl.store(out + to, sums.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _dequantize(
    words, fields, out, num_outputs, depth, padded, PARTS: tl.constexpr, FORMAT: tl.constexpr,
    GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_LOWS: tl.constexpr, FACTOR: tl.constexpr,
    TYPE: tl.constexpr, PLAIN: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Dequantises one step of some outputs. Grid `[padded / OUTPUTS, steps]`."""
    PLANES: tl.constexpr = 2 if FORMAT == "fp8" else 4
    WIDTH: tl.constexpr = _STEP // PLANES
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, WIDTH)
    step, steps = tl.program_id(1), tl.num_programs(1)
    place = (outputs // _TILE).to(tl.int64) * steps + step
    right = words + (place * _TILE + outputs % _TILE)[:, None] * WIDTH + column[None, :]
    raw = planes(tl.load(right), FORMAT, TYPE, PLAIN)
    to = out + outputs.to(tl.int64)[:, None] * depth + column[None, :]
    has_output = (outputs < num_outputs)[:, None]
    own_fields = fields + step * PARTS * padded + outputs
    for plane in tl.static_range(PLANES):
        first = step * _STEP + plane * WIDTH
        number = scaled_plane(
            raw, plane, own_fields, padded, FORMAT, GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN
        )
        number = number.to(tl.float32) * FACTOR
        inside = has_output & (first + column < depth)[None, :]
        tl.store(to + first, number.to(out.dtype.element_ty), mask=inside)


def dequantized(weight: PackedWeight) -> Tensor:
    """The dequantised matrix `[out, in]`, of the weight's dtype."""
    outputs, depth = weight.shape
    out = torch.empty((outputs, depth), dtype=weight.dtype, device=weight.words.device)
    _dequantize[(weight.padded // TILE, weight.words.shape[1])](
        weight.words, weight.fields, out, outputs, depth, weight.padded, OUTPUTS=TILE, num_warps=4,
        num_stages=1, **weight.options,
    )  # fmt: skip
    return out


def group_scaled_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, config: Config | None = None
) -> Tensor:
    """`x @ weight.T + bias`: x `[rows, in]` of the weight's dtype, bias `[out]` → `[rows, out]`.

    x's columns are in the order of the weight's · config: None is the one in effect,
    `{"LIBRARY": 1}` is a product by torch.
    """
    (num_rows, depth), (num_outputs, _) = x.shape, weight.shape
    assert x.dtype == weight.dtype
    if config is None and num_rows <= MOST_ROWS and weight.has_kernel:
        config = choose(NAME, _key(weight, num_rows), x.device)
    if config is None or "LIBRARY" in config:
        return linear(x, dequantized(weight), bias)
    x = x.contiguous()
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    sizes, tiles = dict(config), triton.cdiv(num_outputs, config["OUTPUTS"])
    parts = min(sizes.pop("SPLIT"), weight.words.shape[1])
    partials = None
    if parts > 1:
        partials = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device)
    launch(
        _group_scaled_linear, (tiles, parts), x, weight.words, weight.fields, bias, out, partials,
        weight.counters, num_rows, num_outputs, depth, weight.padded,
        WHOLE=depth % STEP == 0 and weight.padded % config["OUTPUTS"] == 0, IS_SPLIT=parts > 1,
        ROWS=padded_rows(num_rows), **weight.options, **sizes,
    )  # fmt: skip
    return out


def _key(weight: PackedWeight, rows: int) -> Key:
    outputs, depth = weight.shape
    return {
        "rows": padded_rows(rows), "outputs": outputs, "depth": depth, "format": weight.format,
    }  # fmt: skip


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, outputs, depth = (int(shape[name]) for name in ("rows", "outputs", "depth"))
    dtype, meta = dtype_of(shape), device.type == "meta"
    # Packing needs real numbers; a few outputs suffice for the kernel's constants.
    made = (min(outputs, TILE), torch.device("cpu")) if meta else (outputs, device)
    weight = random_weight(str(shape.get("weight", "int4")), made[0], depth, made[1])
    packed = pack(weight, dtype)
    assert packed is not None
    if meta:
        packed = packed.empty(outputs, device)
    x = torch.randn(rows, depth, device=device).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype) if shape.get("bias") else None

    def reference() -> tuple[Tensor]:
        exact = x.double() @ weight.dequantized(torch.float64).T
        return ((exact if bias is None else exact + bias.double()).to(dtype),)

    return Trial(
        _key(packed, rows),
        lambda config: (group_scaled_linear(x, packed, bias, config),),
        reference,
        moved_bytes=packed.num_bytes + x.itemsize * rows * (depth + outputs),
        flops=2.0 * rows * outputs * depth,
    )


SPECS = (
    KernelSpec(
        NAME,
        _trial,
        cases=[
            {"rows": rows, "outputs": outputs, "depth": depth, "weight": weight, "dtype": dtype,
             "bias": bias}
            for rows, outputs, depth, weight, dtype, bias in (
                (16, 256, 512, "int4", "bf16", 0),
                (64, 256, 512, "int4", "bf16", 1),
                (9, 100, 320, "int4", "fp16", 1),
                (16, 256, 512, "awq", "bf16", 0),
                (64, 256, 512, "awq", "fp16", 0),
                (16, 256, 512, "fp8", "bf16", 1),
                (64, 256, 512, "fp8", "bf16", 0),
                (16, 256, 512, "mxfp4", "bf16", 0),
                (64, 72, 288, "mxfp4", "bf16", 1),
                (100, 100, 320, "int4", "bf16", 1),
                (16, 100, 256, "awq", "fp32", 1),
                (16, 100, 256, "fp8", "fp16", 0),
                (16, 100, 320, "mxfp4", "fp32", 0),
                (16, 256, 512, "nvfp4", "bf16", 0),
                (64, 72, 288, "nvfp4", "bf16", 1),
                (64, 96, 160, "fp8", "bf16", 0),
            )
        ],
        configs=lambda key: [
            {"LIBRARY": 1},
            *(
                config
                for config in product_of(
                    OUTPUTS=(64, 128, 256), SPLIT=(1, 2, 3, 4, 6, 8, 12, 16), AHEAD=(4,),
                    num_warps=(4, 8), num_stages=(2, 3, 4, 6),
                )
                if _fits(config, key)
            ),
        ],
        shapes=[
            {"rows": rows, "outputs": outputs, "depth": depth, "weight": weight}
            for outputs, depth in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
            for rows in (16, 64)
            for weight in ("int4", "awq", "fp8", "mxfp4")
        ],
    ),
)  # fmt: skip


def _fits(config: Config, key: Key) -> bool:
    """Whether stages fit shared memory, and the number of programs fills a GPU once."""
    outputs, bits = config["OUTPUTS"], 8 if key["format"] == "fp8" else 4
    rows = int(key["rows"])
    bytes_of_stage = STEP * (outputs * bits // 8 + 2 * rows)
    programs = triton.cdiv(int(key["outputs"]), outputs) * config["SPLIT"]
    return (
        outputs * rows <= 128 * 32 * config["num_warps"]
        and config["num_stages"] * bytes_of_stage <= 200 * 1024
        and 96 <= programs <= 900
        and int(key["depth"]) // STEP >= 4 * config["SPLIT"]
    )
