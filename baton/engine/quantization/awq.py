"""AWQ checkpoints with gemm packing (https://github.com/casper-hansen/AutoAWQ)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from baton.engine.checkpoint.fields import Fields, one_of
from baton.engine.quantization.config import (
    PACKED,
    Get,
    QuantizationConfig,
    Shapes,
    TensorSpec,
    check_multiples,
    literal_pattern,
    read_group_size,
    read_names,
    require,
)
from baton.engine.quantization.int4 import Int4Part, Int4Weight, unpack_words

# The eight values of a word, lowest bits first, are of outputs 0 2 4 6 1 3 5 7. The inverse:
_OUTPUT_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, kw_only=True)
class AwqConfig(QuantizationConfig):
    """int4 with zero points. group_size: number of inputs that share a scale."""

    METHOD = "awq"

    group_size: int

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Reads `quantization_config`. Raises CheckpointError for what is not supported."""
        fields.read("bits", one_of(4), fields.values.get("w_bit"))
        fields.read("version", one_of("gemm", "GEMM"), "gemm")
        fields.read("zero_point", one_of(True), True)
        group_size = read_group_size(fields, fields.values.get("q_group_size"))
        ignored = (
            f"*{literal_pattern(name)}*" for name in read_names(fields, "modules_to_not_convert")
        )
        return cls("int4", ("lm_head", *ignored), group_size=group_size)

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        check_multiples(module, shape, self.weights, PACKED, self.group_size)
        outputs, inputs = shape
        groups, ints = inputs // self.group_size, ("I32",)
        return {
            f"{module}.qweight": TensorSpec((inputs, outputs // PACKED), ints),
            f"{module}.qzeros": TensorSpec((groups, outputs // PACKED), ints),
            f"{module}.scales": TensorSpec((groups, outputs)),
        }

    def read(self, modules: Shapes, get: Get) -> Int4Weight:
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
