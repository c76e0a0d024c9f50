"""GPTQ checkpoints of 4 bits, also with act-order (https://github.com/AutoGPTQ/AutoGPTQ).

The second version of their zero points is https://github.com/ModelCloud/GPTQModel's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from baton.engine.checkpoint.fields import BOOLEAN, Fields, one_of
from baton.engine.quantization.config import (
    EMPTY,
    PACKED,
    Get,
    QuantizationConfig,
    Shapes,
    TensorSpec,
    check_multiples,
    read_group_size,
    require,
)
from baton.engine.quantization.int4 import Int4Part, Int4Weight, group_order, unpack_words


@dataclass(frozen=True, kw_only=True)
class GptqConfig(QuantizationConfig):
    """int4 with zero points.

    group_size: number of inputs that share a scale · zero_offset: added to stored zero points ·
    act_order: whether `g_idx` says which group an input belongs to.
    """

    METHOD = "gptq"

    group_size: int
    zero_offset: int
    act_order: bool

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Reads `quantization_config`. Raises CheckpointError for what is not supported."""
        fields.read("bits", one_of(4))
        fields.read("is_marlin_format", one_of(False), False)
        version = fields.read("checkpoint_format", one_of("gptq", "gptq_v2"), "gptq")
        for key in ("lm_head", "dynamic", "modules_in_block_to_quantize"):
            fields.read(key, EMPTY)
        return cls(
            "int4",
            ("lm_head",),
            group_size=read_group_size(fields),
            zero_offset=1 if version == "gptq" else 0,
            act_order=fields.read("desc_act", BOOLEAN, False),
        )

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        check_multiples(module, shape, self.weights, PACKED, self.group_size)
        outputs, inputs = shape
        groups, ints = inputs // self.group_size, ("I32",)
        return {
            f"{module}.qweight": TensorSpec((inputs // PACKED, outputs), ints),
            f"{module}.qzeros": TensorSpec((groups, outputs // PACKED), ints),
            f"{module}.scales": TensorSpec((groups, outputs)),
            f"{module}.g_idx": TensorSpec((inputs,), ints, optional=not self.act_order),
            # Old exports have a bias of zeros where the model has none.
            f"{module}.bias": TensorSpec((outputs,), optional=True),
        }

    def read(self, modules: Shapes, get: Get) -> Int4Weight:
        return Int4Weight.from_parts(
            [
                Int4Part(
                    module,
                    unpack_words(require(get, f"{module}.qweight").T),
                    require(get, f"{module}.scales").T.float(),
                    unpack_words(require(get, f"{module}.qzeros")).T + self.zero_offset,
                    group_order(get, f"{module}.g_idx", shape[1], self.group_size),
                )
                for module, shape in modules.items()
            ]
        )
