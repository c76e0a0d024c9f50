"""Addition to the residual stream together with its RMS norm, optionally quantised."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.torch import row_quantization
from baton.engine.kernels.torch.rms_norm import rms_norm
from baton.engine.kernels.triton.launch_configs import choose
from baton.engine.kernels.triton.pdl import launch, launch_dependents, wait_for_inputs
from baton.engine.kernels.triton.row_quantization import (
    TUNED_ROWS,
    Rows,
    as_rows,
    empty_rows,
    parts_of,
    store_row,
)
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Trial, dtype_of, product_of

LARGEST_ROW = 32768  # elements of a row, which one program holds in registers


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
    launch_dependents(PDL)
    values = tl.load(x + row * row_stride + columns, mask=inside, other=0.0)
    if residual is not None:
        residual += row * size + columns
        total = tl.load(residual, mask=inside, other=0.0).to(tl.float32) + values.to(tl.float32)
        # The norm is computed from the stored sum, which is rounded to the model's type.
        values = total.to(element)
        tl.store(residual, values, mask=inside)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    # Rounded as the decoder's `rms_norm` rounds.
    unit = (wide * inverse).to(weight.dtype.element_ty).to(tl.float32)
    store_row(normed, scales, row, size, columns, (unit * weights).to(element), FP8)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, config: Config | None = None,
    to: torch.dtype | None = None,
) -> tuple[Rows, Tensor]:  # fmt: skip
    """Adds x to the residual stream in place, and norms the sum: (normed, stream).

    x, residual: `[rows, size]` of one type; without a residual, x is the stream · weight: `[size]`,
    of that type or float32 · config: None is the one in effect · to: int8 or float8_e4m3fn
    quantises the result as `quantize_rows` does.
    """
    rows, size = x.shape
    assert size <= LARGEST_ROW, "the row is too long for one program"
    assert x.stride(1) == 1 and weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    config = config or choose("add_rms_norm", {"rows": rows, "size": size}, x.device)
    normed, scales = empty_rows(x, size, to)
    launch(
        _add_rms_norm_kernel, (rows,), x, residual, weight, normed, scales, size, x.stride(0), eps,
        FP8=to == row_quantization.FP8, BLOCK=triton.next_power_of_2(size), **config,
    )  # fmt: skip
    return as_rows(normed, scales, to, x), x if residual is None else residual


def _norm_trial(shape: Key, device: torch.device) -> Trial:
    rows, size, dtype = int(shape["rows"]), int(shape["size"]), dtype_of(shape)
    x, residual = torch.randn(2, rows, size, device=device).to(dtype).unbind()
    weight = torch.rand(size, device=device).to(dtype)
    added = residual if shape.get("add", 1) else None
    stream = x if added is None else x + added
    if "to" in shape:  # equal to the bit to a norm followed by `quantize_rows`
        to = dtype_of(shape, "to")
        return Trial(
            {"rows": rows, "size": size},
            lambda config: parts_of(add_rms_norm(x, added, weight, 1e-5, config, to)[0]),
            lambda: row_quantization.quantize_rows(
                parts_of(add_rms_norm(stream, None, weight, 1e-5)[0])[0], to
            ),
            tolerance=0.0,
        )
    return Trial(
        {"rows": rows, "size": size},
        lambda config: (
            *parts_of(add_rms_norm(x, added, weight, 1e-5, config)[0]),
            x if added is None else added,
        ),
        lambda: (rms_norm(stream, weight, 1e-5), stream),
        moved_bytes=4 * x.numel() * x.itemsize,
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
            {"rows": 5, "size": 4096, "to": "fp8"},
            {"rows": 3, "size": 8192, "add": 0, "to": "int8"},
        ),
        configs=lambda key: product_of(num_warps=(1, 2, 4, 8, 16, 32), num_stages=(1,)),
        shapes=product_of(size=(2048, 4096, 8192), rows=TUNED_ROWS),
    ),
)
