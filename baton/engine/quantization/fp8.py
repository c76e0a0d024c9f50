"""fp8 (float8_e4m3fn): W8A8 with a scale for each row, and checkpoints with a scale for each block.

GPUs multiply fp8; on a CPU its products are float32's.
"""

from __future__ import annotations

import math

from torch import Tensor

from baton.engine.kernels.torch.row_quantization import FP8
from baton.engine.quantization.config import BLOCK, Shapes
from baton.engine.quantization.group_scaled import GroupScaledWeight
from baton.engine.quantization.int8 import RowScaledWeight
from baton.engine.quantization.linear_weight import Get, joined, require


class Fp8Weight(RowScaledWeight):
    """W8A8 in fp8."""

    DTYPE = FP8

    def _sums(self, x: Tensor) -> Tensor:
        return x.float() @ self.values.float().T


class Fp8BlockWeight(GroupScaledWeight):
    """W8A16: fp8 values `[out, in]` of a checkpoint with a scale for each block."""

    NAME = "block-fp8"

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.values.shape
        return outputs, inputs

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        return self.values[rows].float()


def read_fp8_blocks(modules: Shapes, get: Get) -> Fp8BlockWeight:
    """The weight of modules, each `[out, in]`, joined along the outputs."""
    return Fp8BlockWeight(
        joined(require(get, f"{module}.weight") for module in modules),
        joined(
            _group_scales(require(get, f"{module}.weight_scale_inv").float(), *shape)
            for module, shape in modules.items()
        ),
    )


def _group_scales(blocks: Tensor, outputs: int, inputs: int) -> Tensor:
    """Scales of blocks → scales of each output's groups of inputs, `[out, groups]`.

    Groups are of equal size: smaller than a block where the last block has fewer inputs.
    """
    group = math.gcd(BLOCK, inputs)
    wide = blocks.repeat_interleave(BLOCK // group, dim=1)[:, : inputs // group]
    return wide.repeat_interleave(BLOCK, dim=0)[:outputs]
