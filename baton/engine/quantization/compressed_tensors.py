"""compressed-tensors checkpoints: W4A16 packed, and W8A8 in int8 and fp8.

The format is https://github.com/vllm-project/compressed-tensors'.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import torch

from baton.engine.checkpoint.fields import BOOLEAN, Fields, one_of
from baton.engine.quantization.config import (
    EMPTY,
    PACKED,
    Get,
    QuantizationConfig,
    Shapes,
    TensorSpec,
    check_multiples,
    joined,
    literal_pattern,
    read_group_size,
    read_names,
    require,
)
from baton.engine.quantization.fp8 import Fp8Weight
from baton.engine.quantization.int4 import Int4Part, Int4Weight, group_order, unpack_words
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.quantization.linear_weight import LinearWeight

_MULTIPLE = 16  # of the sizes of W8A8 matrices, as products on GPUs need it
_IN_ORDER, _BY_LIST = (None, False, "weight", "static"), ("group", "dynamic", True)  # `actorder`


@dataclass(frozen=True, kw_only=True)
class CompressedTensorsConfig(QuantizationConfig):
    """int4, int8 or fp8.

    per_output: W8A8 weights have a scale for each output, else one · group_size: number of inputs
    that share a scale in int4 · zero_points: whether int4 groups have one · act_order: whether
    `weight_g_idx` says which group an input belongs to.
    """

    METHOD = "compressed-tensors"

    per_output: bool = True
    group_size: int = 0
    zero_points: bool = False
    act_order: bool = False

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Reads `quantization_config`. Raises CheckpointError for what is not supported."""
        kinds = {"pack-quantized": "int4", "int-quantized": "int8", "float-quantized": "fp8"}
        kind = kinds[fields.read("format", one_of(*kinds))]
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            fields.read(key, EMPTY)
        groups = fields.inside("config_groups")
        if len(groups.values) != 1:
            raise fields.error("config_groups", sorted(groups.values), "one group")
        group = groups.inside(next(iter(groups.values)))
        group.read("targets", one_of(["Linear"]))
        group.read("format", one_of(fields.values["format"]), fields.values["format"])
        group.read("output_activations", EMPTY)
        group.inside("weights").read("dynamic", one_of(False), False)
        group.inside("weights").read("type", one_of("float" if kind == "fp8" else "int"))
        ignored = tuple(_pattern(fields, name) for name in read_names(fields, "ignore"))
        return (
            cls._parse_w4a16(group, ignored)
            if kind == "int4"
            else cls._parse_w8a8(group, kind, ignored)
        )

    @classmethod
    def _parse_w4a16(cls, group: Fields, ignored: tuple[str, ...]) -> Self:
        weights = group.inside("weights")
        weights.read("num_bits", one_of(4))
        weights.read("strategy", one_of("group"))
        group.read("input_activations", EMPTY)
        order = weights.read("actorder", one_of(*_IN_ORDER, *_BY_LIST))
        return cls(
            "int4",
            ignored,
            group_size=read_group_size(weights),
            zero_points=not weights.read("symmetric", BOOLEAN, True),
            act_order=order in _BY_LIST,
        )

    @classmethod
    def _parse_w8a8(cls, group: Fields, kind: str, ignored: tuple[str, ...]) -> Self:
        weights, activations = group.inside("weights"), group.inside("input_activations")
        strategy = weights.read("strategy", one_of("channel", "tensor"))
        for values in (weights, activations):
            values.read("num_bits", one_of(8))
            values.read("symmetric", one_of(True), True)
        activations.read("type", one_of("float" if kind == "fp8" else "int"))
        activations.read("dynamic", one_of(True))
        activations.read("strategy", one_of("token"))
        return cls("int8" if kind == "int8" else "fp8", ignored, per_output=strategy == "channel")

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        outputs, inputs = shape
        if self.weights != "int4":
            check_multiples(module, shape, self.weights, _MULTIPLE, _MULTIPLE)
            kind = "I8" if self.weights == "int8" else "F8_E4M3"
            return {
                f"{module}.weight": TensorSpec(shape, (kind,)),
                f"{module}.weight_scale": TensorSpec((outputs, 1) if self.per_output else (1,)),
            }
        check_multiples(module, shape, self.weights, PACKED, self.group_size)
        groups, ints = inputs // self.group_size, ("I32",)
        tensors = {
            f"{module}.weight_packed": TensorSpec((outputs, inputs // PACKED), ints),
            f"{module}.weight_scale": TensorSpec((outputs, groups)),
            f"{module}.weight_shape": TensorSpec((2,), ("I64", "I32")),
        }
        if self.zero_points:
            tensors[f"{module}.weight_zero_point"] = TensorSpec((outputs // PACKED, groups), ints)
        if self.act_order:
            tensors[f"{module}.weight_g_idx"] = TensorSpec((inputs,), ints)
        return tensors

    def read(self, modules: Shapes, get: Get) -> LinearWeight:
        if self.weights == "int4":
            return Int4Weight.from_parts(
                [self._int4_part(module, shape[1], get) for module, shape in modules.items()]
            )
        values = joined(require(get, f"{module}.weight") for module in modules)
        scales = joined(
            require(get, f"{module}.weight_scale").float().flatten().expand(shape[0])
            for module, shape in modules.items()
        )
        return (Int8Weight if self.weights == "int8" else Fp8Weight)(values, scales)

    def _int4_part(self, module: str, inputs: int, get: Get) -> Int4Part:
        # Numbers are signed: values and zero points are stored with 8 added.
        scales = require(get, f"{module}.weight_scale").float()
        if self.zero_points:
            zeros = unpack_words(require(get, f"{module}.weight_zero_point").T).T
        else:
            zeros = torch.full_like(scales, Int4Weight.MIDDLE, dtype=torch.uint8)
        return Int4Part(
            module,
            unpack_words(require(get, f"{module}.weight_packed")),
            scales,
            zeros,
            group_order(get, f"{module}.weight_g_idx", inputs, self.group_size),
        )


def _pattern(fields: Fields, name: str) -> str:
    """The pattern of an entry of `ignore`: a module, or `re:` and a regular expression.

    The expression may have no operators but `.*`, `^` and `$`.
    """
    if not name.startswith("re:"):
        return literal_pattern(name)
    expression = name.removeprefix("re:").removeprefix("^")
    reaches_end = expression.endswith("$")
    parts = [part.replace(r"\.", ".") for part in expression.removesuffix("$").split(".*")]
    if any(re.search(r"[^\w.-]", part) for part in parts):
        raise fields.error("ignore", name, "modules, and re: with letters, digits, dots and .*")
    return "*".join(parts) + ("" if reaches_end else "*")
