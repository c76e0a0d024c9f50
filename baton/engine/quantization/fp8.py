"""fp8 (float8_e4m3fn): W8A8 with a scale for each row, and W8A16 with one for each group of inputs.

GPUs multiply fp8; on a CPU its products are float32's.
"""

from __future__ import annotations

from torch import Tensor

from baton.engine.kernels.torch.row_quantization import FP8
from baton.engine.quantization.group_scaled import GroupScaledWeight
from baton.engine.quantization.int8 import RowScaledWeight


class Fp8Weight(RowScaledWeight):
    """W8A8 in fp8."""

    DTYPE = FP8

    def _sums(self, x: Tensor) -> Tensor:
        return x.float() @ self.values.float().T


class Fp8BlockWeight(GroupScaledWeight):
    """W8A16: fp8 values `[out, in]`, with scales of groups of each output's inputs."""

    NAME = "block-fp8"

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.values.shape
        return outputs, inputs

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        return self.values[rows].float()
