"""Reads AWQ checkpoints with gemm packing (https://github.com/casper-hansen/AutoAWQ).

They are dequantised as all weights in groups: `group_scaled.py`, Triton's `group_scaled_linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.quantization.config import Shapes
from baton.engine.quantization.int4 import Int4Part, Int4Weight, unpack_words
from baton.engine.quantization.linear_weight import Get, require

# The eight values of a word, lowest bits first, are of outputs 0 2 4 6 1 3 5 7. The inverse:
_OUTPUT_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def read_awq(modules: Shapes, get: Get) -> Int4Weight:
    """The weight of modules, each `[out, in]`, joined along the outputs."""
    return Int4Weight.from_parts(
        [
            Int4Part(
                module,
                _unpacked(require(get, f"{module}.qweight")),
                require(get, f"{module}.scales").T.float(),
                _unpacked(require(get, f"{module}.qzeros")),
                torch.arange(shape[1]),
            )
            for module, shape in modules.items()
        ]
    )


def _unpacked(words: Tensor) -> Tensor:
    """int32 `[n, out / 8]` → uint8 `[out, n]`."""
    eights: Tensor = unpack_words(words).unflatten(-1, (-1, 8))
    return eights[..., _OUTPUT_ORDER].flatten(-2).T
