"""Reads checkpoints of fp8, NVFP4, MXFP4 and MXFP8: numbers with scales that are numbers too."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.quantization.config import BLOCK, ScaledFloatsConfig, Shapes
from baton.engine.quantization.fp8 import Fp8BlockWeight
from baton.engine.quantization.linear_weight import Get, LinearWeight, joined, require
from baton.engine.quantization.mxfp4 import Mxfp4Weight, powers_of_two


def read_scaled_floats(config: ScaledFloatsConfig, modules: Shapes, get: Get) -> LinearWeight:
    """The weight of modules, each `[out, in]`, joined along the outputs."""
    values = joined(require(get, f"{module}.weight") for module in modules)
    scales = joined(_group_scales(config, module, shape, get) for module, shape in modules.items())
    if config.is_fp4:
        return Mxfp4Weight(values, scales / 2)
    return Fp8BlockWeight(values, scales)


def _group_scales(
    config: ScaledFloatsConfig, module: str, shape: tuple[int, ...], get: Get
) -> Tensor:
    """float32 scales of each output's groups of inputs, `[out, groups]`.

    Where a scale is of more inputs than a group, or has none, groups are of equal size: smaller
    than a block where the last block has fewer inputs.
    """
    stored, (outputs, inputs) = require(get, f"{module}.weight_scale"), shape
    group = math.gcd(BLOCK, inputs)
    if config.shared == "group":
        is_exponent = stored.element_size() == 1 and stored.dtype != torch.float8_e4m3fn
        scales = powers_of_two(stored.view(torch.uint8), 127) if is_exponent else stored.float()
        return scales * _tensor_scale(config, module, get)
    if config.shared == "block":
        wide = stored.float().repeat_interleave(BLOCK // group, dim=1)[:, : inputs // group]
        return wide.repeat_interleave(BLOCK, dim=0)[:outputs]
    return stored.float().reshape(-1, 1).expand(outputs, inputs // group)


def _tensor_scale(config: ScaledFloatsConfig, module: str, get: Get) -> Tensor | float:
    if not config.tensor_scale:
        return 1.0
    scale = require(get, f"{module}.{config.tensor_scale}").float().reshape(())
    return 1 / scale if config.tensor_scale == "weight_global_scale" else scale
