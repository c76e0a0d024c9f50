"""What lies between the two products of a feed-forward layer: `silu(gate) * up`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.spec import DTYPES, Config, KernelSpec, Key, Trial
from baton.engine.ops.triton.tuning import choose

NAME = "silu_mul"


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
    config = config or choose(NAME, {"rows": rows, "size": size}, gate_up.device)
    assert gate_up.stride(1) == 1 and width == 2 * size
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(size, config["BLOCK"]))
        _silu_mul_kernel[grid](gate_up, out, size, gate_up.stride(0), **config.launch)
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_mul` in plain torch."""
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, size = int(shape["rows"]), int(shape["size"])
    dtype = DTYPES[str(shape.get("dtype", "bf16"))]
    gate_up = torch.randn(rows, 2 * size, device=device).to(dtype)
    return Trial(
        {"rows": rows, "size": size},
        lambda config: (silu_mul(gate_up, config),),
        lambda: (silu_mul_reference(gate_up),),
        moved_bytes=3 * rows * size * gate_up.itemsize,
    )


SPEC = KernelSpec(
    NAME,
    trial=_trial,
    cases=(
        ({"rows": 5, "size": 4096}, Config(4, 1, {"BLOCK": 1024})),
        ({"rows": 7, "size": 1000, "dtype": "fp16"}, Config(2, 1, {"BLOCK": 512})),
        ({"rows": 3, "size": 2048, "dtype": "fp32"}, Config(4, 1, {"BLOCK": 1024})),
    ),
    # 8 elements of two bytes are one load of a thread.
    configs=lambda key: [
        Config(warps, 1, {"BLOCK": block})
        for block in (256, 512, 1024, 2048, 4096)
        for warps in (1, 2, 4, 8)
        if 4 <= block // (32 * warps) <= 32
    ],
    shapes=tuple(
        {"rows": rows, "size": size} for size in (4096, 14336) for rows in (1, 32, 256, 8192)
    ),
)
