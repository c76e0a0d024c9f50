"""fp8 (float8_e4m3fn): W8A8 with a scale for each row, and checkpoints with a scale for each block.

GPUs multiply fp8; on a CPU its products are float32's.
"""

from __future__ import annotations

import math
from typing import Self

from torch import Tensor

from baton.engine.checkpoint.fields import Fields, one_of
from baton.engine.kernels.torch.row_quantization import FP8
from baton.engine.quantization.config import (
    EMPTY,
    GROUP_SIZES,
    REMEDY,
    Get,
    QuantizationConfig,
    Shapes,
    TensorSpec,
    joined,
    literal_pattern,
    read_names,
    require,
)
from baton.engine.quantization.group_scaled import GroupScaledWeight
from baton.engine.quantization.int8 import RowScaledWeight
from baton.errors import CheckpointError

BLOCK = 128  # outputs and inputs of a block that shares a scale


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


class Fp8Config(QuantizationConfig):
    """Checkpoints in fp8 with a scale for each block (https://arxiv.org/abs/2412.19437)."""

    METHOD = "fp8"

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Reads `quantization_config`. Raises CheckpointError for what is not supported."""
        fields.read("weight_block_size", one_of([BLOCK, BLOCK]))
        fields.read("activation_scheme", one_of("dynamic"))
        fields.read("fmt", one_of("e4m3"), "e4m3")
        fields.read("scale_fmt", one_of("float"), "float")
        fields.read("modules_to_convert", EMPTY)
        names = ["lm_head", "mlp.gate", *read_names(fields, "modules_to_not_convert")]
        # A name is a module's first or last part, or one that the module is within.
        patterns = [
            f"{before}{literal_pattern(name)}{after}"
            for name in names for before in ("", "*.") for after in ("", ".*")
        ]  # fmt: skip
        return cls("fp8_block", tuple(patterns))

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        outputs, inputs = shape
        if inputs % GROUP_SIZES[0]:
            raise CheckpointError(
                f"{module} has {inputs} inputs: of fp8 in blocks they have to be a multiple of "
                f"{GROUP_SIZES[0]}{REMEDY}"
            )
        blocks = math.ceil(outputs / BLOCK), math.ceil(inputs / BLOCK)
        return {
            f"{module}.weight": TensorSpec(shape, ("F8_E4M3",)),
            f"{module}.weight_scale_inv": TensorSpec(blocks),
        }

    def read(self, modules: Shapes, get: Get) -> Fp8BlockWeight:
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
