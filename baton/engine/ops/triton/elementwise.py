"""Kernels on rows: addition to the residual stream with its RMS norm, and the feed-forward gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.models.decoder import rms_norm
from baton.engine.ops.torch.linear import silu_gate
from baton.engine.ops.triton.spec import Config, KernelSpec, Key, Trial, dtype_of
from baton.engine.ops.triton.tuning import choose

# A row lies in the registers of one program.
LARGEST_ROW = 32768


@triton.jit
def _add_rms_norm_kernel(
    x, residual, weight, normed, size, row_stride, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    element = x.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * row_stride + columns, mask=inside, other=0.0)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual += row * size + columns
        total = tl.load(residual, mask=inside, other=0.0).to(tl.float32) + values.to(tl.float32)
        # The norm is of what is kept, in the model's type.
        values = total.to(element)
        tl.store(residual, values, mask=inside)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    # Rounded where the model's own arithmetic rounds.
    unit = (wide * inverse).to(element).to(tl.float32)
    tl.store(normed + row * size + columns, (unit * weights).to(element), mask=inside)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """The residual stream with x added in place, and its RMS norm times weight: (normed, stream).

    x, residual: `[rows, size]` of one type · weight: `[size]`. Without a residual x itself is the
    stream, and nothing is added. config: of the launch; None is that of `tuning`. ValueError for
    rows of over LARGEST_ROW elements.
    """
    rows, size = x.shape
    if size > LARGEST_ROW:
        raise ValueError(f"rows of {size} elements are longer than {LARGEST_ROW}")
    assert x.stride(1) == 1 and weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    config = config or choose("add_rms_norm", {"rows": rows, "size": size}, x.device)
    normed = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        _add_rms_norm_kernel[(rows,)](
            x, residual, weight, normed, size, x.stride(0), eps, ADD=residual is not None,
            BLOCK=triton.next_power_of_2(size), **config,
        )  # fmt: skip
    return normed, x if residual is None else residual


@triton.jit
def _silu_mul_kernel(gate_up, out, size, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    element = out.dtype.element_ty
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + columns, mask=inside, other=0.0)
    # Rounded where torch rounds, which multiplies in a second step.
    gated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(out + row * size + columns, (gated * up.to(tl.float32)).to(element), mask=inside)


def silu_mul(gate_up: Tensor, config: Config | None = None) -> Tensor:
    """`silu(gate) * up` of gate_up `[rows, 2 * size]`, gate first → `[rows, size]`.

    config: of the launch; None is that of `tuning`.
    """
    rows, width = gate_up.shape
    size = width // 2
    config = config or choose("silu_mul", {"rows": rows, "size": size}, gate_up.device)
    assert gate_up.stride(1) == 1 and width == 2 * size
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(size, config["BLOCK"]))
        _silu_mul_kernel[grid](gate_up, out, size, gate_up.stride(0), **config)
    return out


def _norm_trial(shape: Key, device: torch.device) -> Trial:
    rows, size, dtype = int(shape["rows"]), int(shape["size"]), dtype_of(shape)
    x, residual = torch.randn(2, rows, size, device=device).to(dtype).unbind()
    weight = torch.rand(size, device=device).to(dtype)
    added = residual if shape.get("add", 1) else None
    stream = x if added is None else x + added
    return Trial(
        {"rows": rows, "size": size},
        lambda config: add_rms_norm(x, added, weight, 1e-5, config),
        lambda: (rms_norm(stream, weight, 1e-5), stream),
        moved_bytes=4 * x.numel() * x.itemsize,
    )


def _silu_trial(shape: Key, device: torch.device) -> Trial:
    rows, size = int(shape["rows"]), int(shape["size"])
    gate_up = torch.randn(rows, 2 * size, device=device).to(dtype_of(shape))
    return Trial(
        {"rows": rows, "size": size},
        lambda config: (silu_mul(gate_up, config),),
        lambda: (silu_gate(gate_up),),
        moved_bytes=3 * rows * size * gate_up.itemsize,
    )


SPECS = (
    KernelSpec(
        "add_rms_norm",
        _norm_trial,
        cases=(
            {"rows": 5, "size": 4096},
            {"rows": 5, "size": 8192, "dtype": "fp16"},
            {"rows": 5, "size": 2048, "dtype": "fp32", "add": 0},
            {"rows": 3, "size": 16384},
        ),
        configs=lambda key: [{"num_warps": w, "num_stages": 1} for w in (1, 2, 4, 8, 16, 32)],
        shapes=[{"rows": r, "size": s} for s in (2048, 4096, 8192) for r in (1, 32, 256, 8192)],
    ),
    KernelSpec(
        "silu_mul",
        _silu_trial,
        cases=(
            {"rows": 5, "size": 4096},
            {"rows": 7, "size": 1000, "dtype": "fp16"},
            {"rows": 3, "size": 2048, "dtype": "fp32"},
        ),
        # 8 elements of two bytes are one load of a thread.
        configs=lambda key: [
            {"num_warps": warps, "num_stages": 1, "BLOCK": block}
            for block in (256, 512, 1024, 2048, 4096)
            for warps in (1, 2, 4, 8)
            if 4 <= block // (32 * warps) <= 32
        ],
        shapes=[{"rows": r, "size": s} for s in (4096, 14336) for r in (1, 32, 256, 8192)],
    ),
)
