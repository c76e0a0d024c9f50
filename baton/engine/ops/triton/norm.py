"""Addition to the residual stream and its RMS norm, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.models.decoder import rms_norm
from baton.engine.ops.triton.spec import DTYPES, Config, KernelSpec, Key, Trial
from baton.engine.ops.triton.tuning import choose

NAME = "add_rms_norm"

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
    assert residual is None or residual.dtype == x.dtype
    config = config or choose(NAME, {"rows": rows, "size": size}, x.device)
    normed = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        _add_rms_norm_kernel[(rows,)](
            x, residual, weight, normed, size, x.stride(0), eps, ADD=residual is not None,
            BLOCK=triton.next_power_of_2(size), **config.launch,
        )  # fmt: skip
    return normed, x if residual is None else residual


def add_rms_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in plain torch."""
    stream = x if residual is None else residual.add_(x)
    return rms_norm(stream, weight, eps), stream


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, size = int(shape["rows"]), int(shape["size"])
    dtype = DTYPES[str(shape.get("dtype", "bf16"))]
    x, stream = torch.randn(2, rows, size, device=device).to(dtype).unbind()
    weight = torch.rand(size, device=device).to(dtype)
    residual = stream if shape.get("add", 1) else None
    kept = stream.clone() if shape.get("add", 1) else None
    return Trial(
        {"rows": rows, "size": size},
        lambda config: add_rms_norm(x, residual, weight, 1e-5, config),
        lambda: add_rms_norm_reference(x, kept, weight, 1e-5),
        moved_bytes=4 * x.numel() * x.itemsize,
    )


SPEC = KernelSpec(
    NAME,
    trial=_trial,
    cases=(
        ({"rows": 5, "size": 4096}, Config(4, 1)),
        ({"rows": 5, "size": 8192, "dtype": "fp16"}, Config(8, 1)),
        ({"rows": 5, "size": 2048, "dtype": "fp32", "add": 0}, Config(4, 1)),
        ({"rows": 3, "size": 16384}, Config(32, 1)),
    ),
    configs=lambda key: [Config(warps, 1) for warps in (1, 2, 4, 8, 16, 32)],
    shapes=tuple(
        {"rows": rows, "size": size} for size in (2048, 4096, 8192) for rows in (1, 32, 256, 8192)
    ),
)
