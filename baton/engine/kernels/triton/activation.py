"""The gated activation of a feed-forward layer (SwiGLU, GeGLU), optionally quantised."""

from __future__ import annotations

from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from baton.engine.kernels.torch import row_quantization
from baton.engine.kernels.torch.activation import act_mul as reference_act_mul
from baton.engine.kernels.triton.launch_configs import choose
from baton.engine.kernels.triton.pdl import launch, launch_dependents, wait_for_inputs
from baton.engine.kernels.triton.row_quantization import (
    LARGEST_WHOLE,
    TUNED_ROWS,
    Rows,
    as_rows,
    empty_rows,
    parts_of,
    store_row,
)
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Trial, dtype_of, product_of

ALPHA, LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def gated(gate, up, GELU: tl.constexpr, SWIGLU_OAI: tl.constexpr):
    """`activation(gate) * up`, in their type and rounded as torch rounds."""
    element = gate.dtype
    gate = gate.to(tl.float32)
    factor = up.to(tl.float32)
    if SWIGLU_OAI:
        gate = tl.minimum(gate, LIMIT)
        factor = tl.minimum(tl.maximum(factor, -LIMIT), LIMIT) + 1.0
    slope = gate
    if SWIGLU_OAI:
        slope = ALPHA * gate
    if GELU:  # by tanh: (1 + tanh(y)) / 2 is the sigmoid of 2y
        slope = gate * (1.5957691216 + 0.0713548163 * gate * gate)
    # torch rounds before the multiplication.
    act = (gate / (1.0 + tl.exp(-slope))).to(element).to(tl.float32)
    return (act * factor).to(element)


@triton.jit
def _act_mul_kernel(
    gate_up, out, scales, size, row_stride, GELU: tl.constexpr, SWIGLU_OAI: tl.constexpr,
    FP8: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * row_stride + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + size + columns, mask=inside, other=0.0)
    result = gated(gate, up, GELU, SWIGLU_OAI)
    store_row(out, scales, row, size, columns, result, FP8)


def act_mul(
    gate_up: Tensor, activation: Activation = "silu", config: Config | None = None,
    to: torch.dtype | None = None,
) -> Rows:  # fmt: skip
    """`activation(gate) * up` of gate_up `[rows, 2 * size]`, gate first → `[rows, size]`.

    config: None is the one in effect · to: int8 or float8_e4m3fn quantises rows of up to
    `LARGEST_WHOLE` elements as `quantize_rows` does, with its configuration.
    """
    rows, width = gate_up.shape
    size = width // 2
    key = {"rows": rows, "size": size}
    config = config or choose("quantize_rows" if to else "act_mul", key, gate_up.device)
    if to:
        assert size <= LARGEST_WHOLE, "the row is too long for one program"
        config = {**config, "BLOCK": triton.next_power_of_2(size)}
    assert gate_up.stride(1) == 1 and width == 2 * size
    out, scales = empty_rows(gate_up, size, to)
    grid = (rows, triton.cdiv(size, config["BLOCK"]))
    launch(
        _act_mul_kernel, grid, gate_up, out, scales, size, gate_up.stride(0),
        GELU=activation == "gelu_tanh", SWIGLU_OAI=activation == "swigluoai",
        FP8=to == row_quantization.FP8, **config,
    )  # fmt: skip
    return as_rows(out, scales, to, gate_up)


def _act_mul_trial(shape: Key, device: torch.device) -> Trial:
    rows, size = int(shape["rows"]), int(shape["size"])
    gate_up = torch.randn(rows, 2 * size, device=device).to(dtype_of(shape))
    if "swigluoai" in shape:
        gate_up = gate_up * 6  # beyond its limits
    activations: tuple[Activation, ...] = get_args(Activation)
    activation = next((name for name in activations if name in shape), activations[0])
    if "to" in shape:
        to = dtype_of(shape, "to")
        return Trial(
            {"rows": rows, "size": size},
            lambda config: parts_of(act_mul(gate_up, activation, config, to)),
            lambda: row_quantization.quantize_rows(parts_of(act_mul(gate_up, activation))[0], to),
            tolerance=0.0,
        )
    return Trial(
        {"rows": rows, "size": size},
        lambda config: parts_of(act_mul(gate_up, activation, config)),
        lambda: (reference_act_mul(gate_up, activation),),
        moved_bytes=3 * rows * size * gate_up.itemsize,
    )


SPECS = (
    KernelSpec(
        "act_mul",
        _act_mul_trial,
        cases=(
            {"rows": 5, "size": 4096},
            {"rows": 7, "size": 1000, "dtype": "fp16"},
            {"rows": 3, "size": 2048, "dtype": "fp32"},
            {"rows": 3, "size": 2048, "gelu_tanh": 1},
            {"rows": 3, "size": 2880, "swigluoai": 1},
            {"rows": 5, "size": 14336, "to": "fp8"},
            {"rows": 3, "size": 4096, "dtype": "fp16", "to": "int8"},
        ),
        # 8 elements of two bytes are one load of a thread.
        configs=lambda key: [
            config
            for config in product_of(
                BLOCK=(256, 512, 1024, 2048, 4096), num_warps=(1, 2, 4, 8), num_stages=(1,)
            )
            if 4 <= config["BLOCK"] // (32 * config["num_warps"]) <= 32
        ],
        shapes=product_of(size=(4096, 14336), rows=TUNED_ROWS),
    ),
)
