"""Matrix products with few rows, as in decode steps, fused with norm, gate and residual addition.

Their time is that of reading the weight. Therefore the weight is the left operand of tensor cores,
which needs many rows, and x the right one, which may have few; all programs of a launch run at
once, for which the depth is split if there are few outputs; and a program prefetches its first
weights before the kernel in front has ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_args

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.activation import Activation
from baton.engine.kernels.torch import row_quantization
from baton.engine.kernels.torch.activation import act_mul as reference_act_mul
from baton.engine.kernels.torch.rms_norm import rms_norm
from baton.engine.kernels.triton.activation import act_mul, gated
from baton.engine.kernels.triton.launch_configs import choose
from baton.engine.kernels.triton.pdl import launch, launch_dependents, wait_for_inputs
from baton.engine.kernels.triton.rms_norm import add_rms_norm
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Outputs, Trial, dtype_of

NAME = "skinny_matmul"

# Products of more rows need larger tiles.
MOST_ROWS = 64
_LEAST_ROWS = 16  # of a tensor core product
LEAST_OUTPUTS = 16


@triton.jit
def prefetch(addresses):
    """Prefetches the lines at these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses.to(tl.int64)], tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _scaled(sums, inverse, row_scales, output_scales, bias, rows, outputs, num_rows, num_outputs):
    """Sums `[outputs, rows]` times their scales, plus the bias, in float32."""
    has_row, has_output = rows < num_rows, outputs < num_outputs
    numbers = sums.to(tl.float32)
    if inverse is not None:
        numbers *= inverse[None, :]
    if row_scales is not None:
        row_scale = tl.load(row_scales + rows, mask=has_row, other=0.0)
        output_scale = tl.load(output_scales + outputs, mask=has_output, other=0.0)
        numbers *= row_scale[None, :] * output_scale[:, None]
    if bias is not None:
        numbers += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[:, None]
    return numbers


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_matmul(
    x, weight, row_scales, output_scales, bias, norm, residual, out, partials, counters, num_rows,
    num_outputs, depth, eps, GATED: tl.constexpr, GELU: tl.constexpr, SWIGLU_OAI: tl.constexpr,
    FLOAT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, ROWS)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    # Outputs beyond the last repeat it, and are not stored.
    within = tl.minimum(outputs, num_outputs - 1)
    has_row = rows < num_rows
    steps = tl.cdiv(depth, DEPTH)
    first, last = part * steps // SPLIT * DEPTH, (part + 1) * steps // SPLIT * DEPTH
    columns = tl.arange(0, DEPTH)
    lines = weight + within.to(tl.int64) * depth
    if PDL:
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        ahead = tl.minimum(first + tl.arange(0, 2 * DEPTH // LINE) * LINE, depth - 1)
        prefetch(lines[:, None] + ahead[None, :])
        if GATED:
            prefetch(lines[:, None] + num_outputs.to(tl.int64) * depth + ahead[None, :])
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    KIND: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
    TYPE: tl.constexpr = tl.float32 if FLOAT else weight.dtype.element_ty
    sums = tl.zeros([OUTPUTS, ROWS], dtype=KIND)
    ups = tl.zeros([OUTPUTS, ROWS], dtype=KIND)
    squares = tl.zeros([DEPTH // 8, ROWS], dtype=tl.float32)
    for at in range(first, last, DEPTH):
        to = at + columns
        from_x = x + rows[None, :] * depth + to[:, None]
        if WHOLE:
            w = tl.load(lines[:, None] + to[None, :])
            a = tl.load(from_x, mask=has_row[None, :], other=0.0)
        else:
            inside = to < depth
            w = tl.load(lines[:, None] + to[None, :], mask=inside[None, :], other=0.0)
            a = tl.load(from_x, mask=has_row[None, :] & inside[:, None], other=0.0)
        if norm is not None:
            wide = a.to(tl.float32)
            squares += tl.sum(tl.reshape(wide * wide, [DEPTH // 8, 8, ROWS]), 1)
            factors = tl.load(norm + to, mask=to < depth, other=0.0).to(tl.float32)
            a = (wide * factors[:, None]).to(x.dtype.element_ty)
        sums = tl.dot(w.to(TYPE), a.to(TYPE), sums, input_precision="ieee", out_dtype=KIND)
        if GATED:
            further = lines[:, None] + num_outputs.to(tl.int64) * depth + to[None, :]
            if WHOLE:
                u = tl.load(further)
            else:
                u = tl.load(further, mask=(to < depth)[None, :], other=0.0)
            ups = tl.dot(u.to(TYPE), a.to(TYPE), ups, input_precision="ieee", out_dtype=KIND)

    row_squares = tl.sum(squares, 0)
    done = True
    if SPLIT > 1:
        SIZE: tl.constexpr = (2 if GATED else 1) * OUTPUTS * ROWS + ROWS
        mine = partials + (tile * SPLIT + part).to(tl.int64) * SIZE
        at = tl.arange(0, OUTPUTS)[:, None] * ROWS + rows[None, :]
        tl.store(mine + ROWS + at, sums.to(tl.float32, bitcast=True))
        if GATED:
            tl.store(mine + ROWS + OUTPUTS * ROWS + at, ups.to(tl.float32, bitcast=True))
        if norm is not None:
            tl.store(mine + rows, row_squares)
        tl.debug_barrier()
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
        if done:
            # Parts are added in their order, whichever program is last. The counter is reset for
            # the next launch.
            tl.store(counters + tile, 0)
            sums = tl.zeros([OUTPUTS, ROWS], dtype=KIND)
            ups = tl.zeros([OUTPUTS, ROWS], dtype=KIND)
            row_squares = tl.zeros([ROWS], dtype=tl.float32)
            for other in range(SPLIT):
                theirs = partials + (tile * SPLIT + other).to(tl.int64) * SIZE
                sums += tl.load(theirs + ROWS + at, cache_modifier=".cg").to(KIND, bitcast=True)
                if GATED:
                    ups += tl.load(theirs + ROWS + OUTPUTS * ROWS + at, cache_modifier=".cg").to(
                        KIND, bitcast=True
                    )
                if norm is not None:
                    row_squares += tl.load(theirs + rows, cache_modifier=".cg")
    if done:
        inverse = None
        if norm is not None:
            inverse = tl.rsqrt(row_squares / depth + eps)
        element = out.dtype.element_ty
        results = _scaled(
            sums, inverse, row_scales, output_scales, bias, rows, outputs, num_rows, num_outputs
        ).to(element)
        to_out = rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
        inside = (outputs < num_outputs)[:, None] & has_row[None, :]
        if GATED:
            if output_scales is not None:
                output_scales += num_outputs
            if bias is not None:
                bias += num_outputs
            up = _scaled(
                ups, inverse, row_scales, output_scales, bias, rows, outputs, num_rows, num_outputs
            ).to(element)
            results = gated(results, up, GELU, SWIGLU_OAI)
        if residual is not None:
            before = tl.load(residual + to_out, mask=inside, other=0.0)
            results = (before.to(tl.float32) + results.to(tl.float32)).to(element)
        tl.store(out + to_out, results, mask=inside)


def skinny_matmul(
    x: Tensor, weight: Tensor, counters: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype,
    scales: tuple[Tensor, Tensor] | None = None, norm: Tensor | None = None, eps: float = 0.0,
    activation: Activation | None = None, residual: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """`x @ weight.T + bias`, of dtype: `[rows, out]`.

    x: `[rows, in]`, up to MOST_ROWS rows · weight: `[out, in]` of x's type, both contiguous ·
    counters: int32 of `new_counters`, used by one stream · bias: `[out]` of any floating type ·
    scales: float32 `[rows]` and `[out]` for int8 or fp8 · norm, eps: float32 `[in]`, the weight of
    an RMS norm of x, rounded differently than the decoder's `rms_norm`; float32 because loads of 32
    bits are pipelined · activation: the first half of out gates the second: the result is `[rows,
    out / 2]` · residual: `[rows, out]`, which the product is added to in place · config: None is
    the one in effect.
    """
    (num_rows, depth), num_outputs = x.shape, len(weight) // (2 if activation else 1)
    assert num_rows <= MOST_ROWS, "too many rows for this kernel"
    assert x.is_contiguous() and weight.is_contiguous()
    rows = padded_rows(num_rows)
    key = key_of(x, weight, norm is not None, activation is not None)
    config = config or choose(NAME, key, x.device)
    tiles, split = triton.cdiv(num_outputs, config["OUTPUTS"]), config["SPLIT"]
    out = residual
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    partials = None
    if split > 1:
        size = ((2 if activation else 1) * config["OUTPUTS"] + 1) * rows
        partials = torch.empty(tiles * split * size, dtype=torch.float32, device=x.device)
    row_scales, output_scales = scales or (None, None)
    # The interpreter multiplies few types.
    as_float = x.device.type == "cpu" and x.dtype != torch.int8
    launch(
        _skinny_matmul, (tiles, split), x, weight, row_scales, output_scales, bias, norm, residual,
        out, partials, counters, num_rows, num_outputs, depth, eps,
        GATED=activation is not None, GELU=activation == "gelu_tanh",
        SWIGLU_OAI=activation == "swigluoai", FLOAT=as_float,
        WHOLE=depth % config["DEPTH"] == 0, ROWS=rows, **config,
    )  # fmt: skip
    return out


def new_counters(num_outputs: int, device: torch.device) -> Tensor:
    """Counters of finished programs for a weight's launches, which reset them to zero."""
    return torch.zeros(triton.cdiv(num_outputs, LEAST_OUTPUTS), dtype=torch.int32, device=device)


def key_of(x: Tensor, weight: Tensor, has_norm: bool = False, has_gate: bool = False) -> Key:
    """The key of a launch's configuration."""
    outputs, depth = weight.shape
    kind = f"{8 * x.itemsize}-bit{' norm' if has_norm else ''}{' gate' if has_gate else ''}"
    return {"kind": kind, "rows": padded_rows(len(x)), "outputs": outputs, "depth": depth}


def uses_skinny_matmul(
    x: Tensor, weight: Tensor, has_norm: bool = False, has_gate: bool = False
) -> bool:
    """Whether `skinny_matmul` is to compute a product together with its norm and gate.

    If not, norm and gate are separate launches, and torch or `skinny_matmul` multiplies."""
    if len(x) > MOST_ROWS:
        return False
    return not choose(NAME, key_of(x, weight, has_norm, has_gate), x.device).get("LIBRARY")


def padded_rows(num_rows: int) -> int:
    """Rows of a tile that holds all rows of x."""
    return max(_LEAST_ROWS, int(triton.next_power_of_2(num_rows)))


# An H200, for which candidates are chosen.
_SHARED_BYTES, _PROCESSORS = 224 * 1024, 132
_IN_FLIGHT = 40 * 1024  # bytes of weights that a multiprocessor should have in flight


def _candidates(key: Key) -> list[Config]:
    """Configurations that keep memory busy: many bytes in flight, and few parts to join."""
    bits, along = str(key["kind"]).split("-")
    size, gate = int(bits) // 8, int("gate" in along)
    rows, outputs, depth = (int(key[name]) for name in ("rows", "outputs", "depth"))
    found: list[Config] = [{"LIBRARY": 1}] if size == 2 else []
    in_flight = min(_IN_FLIGHT, outputs * depth * size // _PROCESSORS // 2)
    for (tile, warps), step_bytes, split in itertools.product(
        ((16, 4), (32, 4), (64, 4), (128, 8)), (128, 256, 512), (1, 2, 4, 8)
    ):
        width, step = tile * (1 + gate), step_bytes // size
        programs = triton.cdiv(outputs, width) * split
        fewest = triton.cdiv(programs, _PROCESSORS)  # on one multiprocessor, if all run at once
        for places in {min(fewest, 8), min(fewest, 2), 1}:
            stages = min(6, _SHARED_BYTES // places // ((width + rows) * step_bytes))
            at_once = min(places, programs / _PROCESSORS)
            if (
                fewest > places > 2
                or stages < 3
                or at_once * (stages - 1) * width * step_bytes < in_flight
                or depth < 4 * split * step
                or (programs > 4 * _PROCESSORS and split > 1)
                or 2 * tile < rows
                or tile > max(64, 2 * rows)
            ):
                continue
            config = {
                "OUTPUTS": tile, "DEPTH": step, "SPLIT": split, "num_warps": warps,
                "num_stages": stages,
            }  # fmt: skip
            if config not in found:
                found.append(config)
    return found


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, outputs, depth = (int(shape[name]) for name in ("rows", "outputs", "depth"))
    dtype, kind = dtype_of(shape), dtype_of(shape, "weight", str(shape.get("dtype", "bf16")))
    x = torch.randn(rows, depth, device=device)
    weight = torch.randn(outputs, depth, device=device) / depth**0.5
    scales = bias = norm = residual = None
    if kind.itemsize == 1:
        x, of_rows = row_quantization.quantize_rows(x, kind)
        weight, of_outputs = row_quantization.quantize_rows(weight, kind)
        scales = of_rows, of_outputs
    else:
        x, weight = x.to(kind), weight.to(kind)
    if shape.get("bias"):
        bias = torch.randn(outputs, device=device).to(dtype)
    if shape.get("norm"):
        norm = torch.rand(depth, device=device)
    gated: Activation | None = "silu" if shape.get("gate") else None
    activations: tuple[Activation, ...] = get_args(Activation)
    activation = next((name for name in activations if name in shape), gated)
    if shape.get("residual"):
        residual = torch.randn(rows, outputs, device=device).to(dtype)
    counters = new_counters(outputs, device)
    key = key_of(x, weight, norm is not None, activation is not None)

    def reference() -> Outputs:
        found = x.float() if norm is None else rms_norm(x.float(), norm, _EPS)
        found = F.linear(found, weight.float())
        if scales is not None:
            found = found * scales[0][:, None] * scales[1]
        if bias is not None:
            found = found + bias
        if activation:
            found = reference_act_mul(found, activation)
        return ((found if residual is None else residual + found).to(dtype),)

    def separate() -> Outputs:
        """Separate launches around torch's product."""
        normed = x if norm is None else add_rms_norm(x, None, norm, _EPS)[0]
        found = F.linear(normed, weight, bias)
        if activation:
            found = act_mul(found, activation)
        return (found if residual is None else residual + found,)

    def run(config: Config | None) -> Outputs:
        config = config or choose(NAME, key, device)
        if config.get("LIBRARY"):
            if not shape.get("ours"):
                return separate()
            config = next(one for one in _candidates(key) if "LIBRARY" not in one)
        found = skinny_matmul(
            x, weight, counters, bias, dtype=dtype, scales=scales, norm=norm,
            eps=_EPS, activation=activation,
            residual=None if residual is None else residual.clone(), config=config,
        )  # fmt: skip
        return (found,)

    return Trial(
        key,
        run,
        reference,
        moved_bytes=kind.itemsize * depth * (outputs + rows) + dtype.itemsize * rows * outputs,
    )


_EPS = 1e-5
_MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
# Fused operations of a layer's products, and products without any.
_TUNED: tuple[tuple[Key, Sequence[tuple[int, int]]], ...] = (
    ({"norm": 1}, _MATRICES[:1]),
    ({"norm": 1, "gate": 1}, _MATRICES[2:3]),
    ({"gate": 1}, _MATRICES[2:3]),
    ({}, _MATRICES),
    ({"weight": "fp8", "gate": 1}, _MATRICES[2:3]),
    ({"weight": "fp8"}, _MATRICES),
)
_CASES: tuple[tuple[int, int, str, Key], ...] = (
    (16, 96, "bf16", {"norm": 1, "ours": 1}),
    (32, 96, "bf16", {"bias": 1, "ours": 1}),
    (64, 192, "bf16", {"norm": 1, "gate": 1, "ours": 1}),
    (9, 96, "bf16", {"residual": 1, "ours": 1}),
    (64, 96, "fp16", {"bias": 1, "residual": 1, "ours": 1}),
    (16, 96, "bf16", {"weight": "int8"}),
    (9, 192, "bf16", {"weight": "int8", "gate": 1}),
    (64, 96, "fp32", {"weight": "int8", "bias": 1}),
    (16, 96, "bf16", {"weight": "fp8", "residual": 1, "least": 89}),
    (64, 192, "bf16", {"weight": "fp8", "gate": 1, "least": 89}),
    (9, 96, "fp16", {"weight": "fp8", "bias": 1, "least": 89}),
)
SPECS = (
    KernelSpec(
        NAME,
        _trial,
        cases=[
            {"rows": rows, "outputs": outputs, "depth": 528 if rows == 9 else 512, "dtype": dtype}
            | dict(more)
            for rows, outputs, dtype, more in _CASES
        ],
        configs=_candidates,
        shapes=[
            {"rows": rows, "outputs": outputs, "depth": depth, **along}
            for along, matrices in _TUNED
            for outputs, depth in matrices
            for rows in (16, 32, 64)
        ],
    ),
)
