"""What lies between the two products of a feed-forward layer: `silu(gate) * up`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.spec import CompileCase, Config, KernelSpec, Key, Trial
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


def _case(element: str, block: int, num_warps: int) -> CompileCase:
    return CompileCase(
        f"{element} {block}",
        _silu_mul_kernel,
        {"gate_up": f"*{element}", "out": f"*{element}", "size": "i32", "row_stride": "i32"},
        {"BLOCK": block},
        num_warps=num_warps,
        num_stages=1,
        aligned=("size", "row_stride"),
    )


def _candidates(key: Key) -> list[Config]:
    # 8 elements of two bytes are one load of a thread.
    return [
        Config(warps, 1, {"BLOCK": block})
        for block in (256, 512, 1024, 2048, 4096)
        for warps in (1, 2, 4, 8)
        if 4 <= block // (32 * warps) <= 32
    ]


def _inputs(key: Key, device: torch.device) -> Trial:
    rows, size = int(key["rows"]), int(key["size"])
    gate_up = torch.randn(rows, 2 * size, dtype=torch.bfloat16, device=device)
    moved = 3 * rows * size * gate_up.itemsize
    return Trial(key, lambda config: silu_mul(gate_up, config), moved)


SPEC = KernelSpec(
    NAME,
    cases=(_case("bf16", 1024, 4), _case("fp16", 512, 2), _case("fp32", 1024, 4)),
    candidates=_candidates,
    shapes=tuple(
        {"rows": rows, "size": size} for size in (4096, 14336) for rows in (1, 32, 256, 8192)
    ),
    inputs=_inputs,
)
