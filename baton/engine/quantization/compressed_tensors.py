"""Reads compressed-tensors checkpoints: W4A16 packed, and W8A8 in int8 and fp8.

The format is https://github.com/vllm-project/compressed-tensors'.
"""

from __future__ import annotations

import torch

from baton.engine.quantization.config import CompressedTensorsConfig, Shapes
from baton.engine.quantization.fp8 import Fp8Weight
from baton.engine.quantization.int4 import Int4Part, Int4Weight, group_order, unpack_words
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.quantization.linear_weight import Get, LinearWeight, joined, require


def read_compressed_tensors(
    config: CompressedTensorsConfig, modules: Shapes, get: Get
) -> LinearWeight:
    """The weight of modules, each `[out, in]`, joined along the outputs.

    Raises CheckpointError naming a module whose inputs are in another order than the first's.
    """
    if config.weights == "int4":
        return Int4Weight.from_parts(
            [_int4_part(config, module, shape[1], get) for module, shape in modules.items()]
        )
    values = joined(require(get, f"{module}.weight") for module in modules)
    scales = joined(
        require(get, f"{module}.weight_scale").float().flatten().expand(shape[0])
        for module, shape in modules.items()
    )
    return (Int8Weight if config.weights == "int8" else Fp8Weight)(values, scales)


def _int4_part(config: CompressedTensorsConfig, module: str, inputs: int, get: Get) -> Int4Part:
    # Numbers are signed: values and zero points are stored with 8 added.
    scales = require(get, f"{module}.weight_scale").float()
    if config.zero_points:
        zeros = unpack_words(require(get, f"{module}.weight_zero_point").T).T
    else:
        zeros = torch.full_like(scales, Int4Weight.MIDDLE, dtype=torch.uint8)
    return Int4Part(
        module,
        unpack_words(require(get, f"{module}.weight_packed")),
        scales,
        zeros,
        group_order(get, f"{module}.weight_g_idx", inputs, config.group_size),
    )
