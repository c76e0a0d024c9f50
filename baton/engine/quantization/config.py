"""`quantization_config` of a checkpoint's config.json, for each quantisation method. Torch-free.

What would be computed otherwise than the checkpoint's method says is refused by name. The tensors
are read by `awq.py`, `gptq.py`, `fp8.py` and `compressed_tensors.py`.
"""

from __future__ import annotations

import fnmatch
import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

from baton.config import EngineConfig
from baton.engine.checkpoint.fields import BOOLEAN, Check, Fields, one_of
from baton.engine.checkpoint.tensors import FLOATS
from baton.errors import CheckpointError, ConfigError

_GROUP_SIZES = (32, 64, 128)
BLOCK = 128  # outputs and inputs of an fp8 block, which share a scale
_W8A8_MULTIPLE = 16  # of the sizes of W8A8 matrices, as products on GPUs need it
_IN_ORDER, _BY_LIST = (None, False, "weight", "static"), ("group", "dynamic", True)  # `actorder`
MXFP4_GROUP = 32  # inputs that share a scale
_PACKED = 8  # values of 4 bits in an int32
_REMEDY = "; or serve the model that it was made of, with --quantization int4, int8 or fp8"
_EMPTY = Check(lambda value: not value, "none")

Shapes = dict[str, tuple[int, ...]]
"""Names and shapes of a model's tensors."""


class TensorSpec(NamedTuple):
    """What a tensor of a checkpoint has to be; dtypes are safetensors' names.

    is_either: whether its last two axes may be swapped.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False
    is_either: bool = False


@dataclass(frozen=True)
class QuantizationConfig(ABC):
    """How a checkpoint holds its quantised matrices.

    weights: their format in memory · ignored: patterns (fnmatch) of modules that are not quantised.
    """

    weights: Literal["int4", "int8", "fp8", "fp8_block"]
    ignored: tuple[str, ...] = ()

    METHOD: ClassVar[str]  # `quant_method`

    def is_quantized(self, module: str) -> bool:
        """Whether a module such as `model.layers.0.mlp.up_proj` is quantised."""
        return not any(fnmatch.fnmatchcase(module, pattern) for pattern in self.ignored)

    @classmethod
    @abstractmethod
    def parse(cls, fields: Fields) -> Self:
        """Reads `quantization_config`. Raises CheckpointError for unsupported values."""

    @abstractmethod
    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The checkpoint's tensors, by name, that replace a module's weight `[out, in]`.

        Raises CheckpointError for a shape that the format cannot hold.
        """


@dataclass(frozen=True, kw_only=True)
class AwqConfig(QuantizationConfig):
    """AWQ with gemm packing (https://github.com/casper-hansen/AutoAWQ): int4 with zero points.

    group_size: number of inputs that share a scale.
    """

    METHOD = "awq"

    group_size: int

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        fields.read("bits", one_of(4), fields.values.get("w_bit"))
        fields.read("version", one_of("gemm", "GEMM"), "gemm")
        fields.read("zero_point", one_of(True), True)
        group_size = _read_group_size(fields, fields.values.get("q_group_size"))
        ignored = (
            f"*{_literal_pattern(name)}*" for name in _read_names(fields, "modules_to_not_convert")
        )
        return cls("int4", ("lm_head", *ignored), group_size=group_size)

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        _check_multiples(module, shape, self.weights, _PACKED, self.group_size)
        outputs, inputs = shape
        groups, ints = inputs // self.group_size, ("I32",)
        return {
            f"{module}.qweight": TensorSpec((inputs, outputs // _PACKED), ints),
            f"{module}.qzeros": TensorSpec((groups, outputs // _PACKED), ints),
            f"{module}.scales": TensorSpec((groups, outputs)),
        }


@dataclass(frozen=True, kw_only=True)
class GptqConfig(QuantizationConfig):
    """GPTQ of 4 bits (https://github.com/AutoGPTQ/AutoGPTQ): int4 with zero points.

    The second version of its zero points is https://github.com/ModelCloud/GPTQModel's.

    group_size: number of inputs that share a scale · zero_offset: added to stored zero points ·
    act_order: whether `g_idx` says which group an input belongs to.
    """

    METHOD = "gptq"

    group_size: int
    zero_offset: int
    act_order: bool

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        fields.read("bits", one_of(4))
        fields.read("is_marlin_format", one_of(False), False)
        version = fields.read("checkpoint_format", one_of("gptq", "gptq_v2"), "gptq")
        for key in ("lm_head", "dynamic", "modules_in_block_to_quantize"):
            fields.read(key, _EMPTY)
        return cls(
            "int4",
            ("lm_head",),
            group_size=_read_group_size(fields),
            zero_offset=1 if version == "gptq" else 0,
            act_order=fields.read("desc_act", BOOLEAN, False),
        )

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        _check_multiples(module, shape, self.weights, _PACKED, self.group_size)
        outputs, inputs = shape
        groups, ints = inputs // self.group_size, ("I32",)
        return {
            f"{module}.qweight": TensorSpec((inputs // _PACKED, outputs), ints),
            f"{module}.qzeros": TensorSpec((groups, outputs // _PACKED), ints),
            f"{module}.scales": TensorSpec((groups, outputs)),
            f"{module}.g_idx": TensorSpec((inputs,), ints, optional=not self.act_order),
            # Old exports have a bias of zeros where the model has none.
            f"{module}.bias": TensorSpec((outputs,), optional=True),
        }


class Fp8Config(QuantizationConfig):
    """Checkpoints in fp8 with a scale for each block (https://arxiv.org/abs/2412.19437)."""

    METHOD = "fp8"

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        fields.read("weight_block_size", one_of([BLOCK, BLOCK]))
        fields.read("activation_scheme", one_of("dynamic"))
        fields.read("fmt", one_of("e4m3"), "e4m3")
        fields.read("scale_fmt", one_of("float"), "float")
        fields.read("modules_to_convert", _EMPTY)
        names = ["lm_head", "mlp.gate", *_read_names(fields, "modules_to_not_convert")]
        # A name is a module's first or last part, or one that the module is within.
        patterns = [
            f"{before}{_literal_pattern(name)}{after}"
            for name in names for before in ("", "*.") for after in ("", ".*")
        ]  # fmt: skip
        return cls("fp8_block", tuple(patterns))

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        outputs, inputs = shape
        if inputs % _GROUP_SIZES[0]:
            raise CheckpointError(
                f"{module} has {inputs} inputs: of fp8 in blocks they have to be a multiple of "
                f"{_GROUP_SIZES[0]}{_REMEDY}"
            )
        blocks = math.ceil(outputs / BLOCK), math.ceil(inputs / BLOCK)
        return {
            f"{module}.weight": TensorSpec(shape, ("F8_E4M3",)),
            f"{module}.weight_scale_inv": TensorSpec(blocks),
        }


@dataclass(frozen=True, kw_only=True)
class CompressedTensorsConfig(QuantizationConfig):
    """compressed-tensors (https://github.com/vllm-project/compressed-tensors).

    int4 as W4A16, packed, and int8 and fp8 as W8A8.

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
        kinds = {"pack-quantized": "int4", "int-quantized": "int8", "float-quantized": "fp8"}
        kind = kinds[fields.read("format", one_of(*kinds))]
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            fields.read(key, _EMPTY)
        groups = fields.inside("config_groups")
        if len(groups.values) != 1:
            raise fields.error("config_groups", sorted(groups.values), "one group")
        group = groups.inside(next(iter(groups.values)))
        group.read("targets", one_of(["Linear"]))
        group.read("format", one_of(fields.values["format"]), fields.values["format"])
        group.read("output_activations", _EMPTY)
        group.inside("weights").read("dynamic", one_of(False), False)
        group.inside("weights").read("type", one_of("float" if kind == "fp8" else "int"))
        ignored = tuple(_pattern(fields, name) for name in _read_names(fields, "ignore"))
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
        group.read("input_activations", _EMPTY)
        order = weights.read("actorder", one_of(*_IN_ORDER, *_BY_LIST))
        return cls(
            "int4",
            ignored,
            group_size=_read_group_size(weights),
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
            _check_multiples(module, shape, self.weights, _W8A8_MULTIPLE, _W8A8_MULTIPLE)
            kind = "I8" if self.weights == "int8" else "F8_E4M3"
            return {
                f"{module}.weight": TensorSpec(shape, (kind,)),
                f"{module}.weight_scale": TensorSpec((outputs, 1) if self.per_output else (1,)),
            }
        _check_multiples(module, shape, self.weights, _PACKED, self.group_size)
        groups, ints = inputs // self.group_size, ("I32",)
        tensors = {
            f"{module}.weight_packed": TensorSpec((outputs, inputs // _PACKED), ints),
            f"{module}.weight_scale": TensorSpec((outputs, groups)),
            f"{module}.weight_shape": TensorSpec((2,), ("I64", "I32")),
        }
        if self.zero_points:
            tensors[f"{module}.weight_zero_point"] = TensorSpec((outputs // _PACKED, groups), ints)
        if self.act_order:
            tensors[f"{module}.weight_g_idx"] = TensorSpec((inputs,), ints)
        return tensors


METHODS: dict[str, type[QuantizationConfig]] = {
    config.METHOD: config for config in (AwqConfig, GptqConfig, Fp8Config, CompressedTensorsConfig)
}


def parse_quantization_config(fields: Fields) -> QuantizationConfig | None:
    """Reads `quantization_config` of config.json; None where nothing is quantised.

    Raises CheckpointError naming a key whose value is not supported.
    """
    if fields.values.get("quantization_config") is None:
        return None
    inside = fields.inside("quantization_config", _REMEDY)
    method: str = inside.read("quant_method", one_of(*METHODS))
    return METHODS[method].parse(inside)


def weight_format(settings: EngineConfig, stored: QuantizationConfig | None) -> str:
    """The format of a model's weights in memory, as `--quantization` names it.

    stored: the checkpoint's. Raises ConfigError where it is quantised and the settings ask for
    another format.
    """
    if stored is None or settings.simulate:
        return settings.quantization
    if settings.quantization != "none":
        raise ConfigError(
            f"--quantization {settings.quantization}: the checkpoint's weights are already "
            f"{stored.weights} ({stored.METHOD}); leave it out"
        )
    if settings.random_weights:
        raise ConfigError(
            f"--random-weights: the model is quantised ({stored.METHOD}), and random weights are "
            f"not; take the config.json of the model that it was made of, and --quantization "
            f"{stored.weights.removesuffix('_block')}"
        )
    return stored.weights


def _check_multiples(
    module: str, shape: tuple[int, ...], weights: str, outputs: int, inputs: int
) -> None:
    """Raises CheckpointError unless a matrix's outputs and inputs are multiples of these."""
    if shape[0] % outputs or shape[1] % inputs:
        raise CheckpointError(
            f"{module} has {shape[0]} outputs and {shape[1]} inputs: in {weights} they have to be "
            f"multiples of {outputs} and {inputs}{_REMEDY}"
        )


def _read_group_size(fields: Fields, default: object = None) -> int:
    """`group_size`, the number of inputs that share a scale."""
    return int(fields.read("group_size", one_of(*_GROUP_SIZES), default))


def _read_names(fields: Fields, key: str) -> list[str]:
    """A key's list of modules; empty where the key is absent."""

    def holds(value: object) -> bool:
        return isinstance(value, list) and all(isinstance(name, str) for name in value)

    names: list[str] = fields.read(key, Check(holds, "a list of modules"), [])
    return names


def _literal_pattern(name: str) -> str:
    """The fnmatch pattern that matches exactly this text."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _pattern(fields: Fields, name: str) -> str:
    """The pattern of an entry of `ignore`: a module, or `re:` and a regular expression.

    The expression may have no operators but `.*`, `^` and `$`.
    """
    if not name.startswith("re:"):
        return _literal_pattern(name)
    expression = name.removeprefix("re:").removeprefix("^")
    reaches_end = expression.endswith("$")
    parts = [part.replace(r"\.", ".") for part in expression.removesuffix("$").split(".*")]
    if any(re.search(r"[^\w.-]", part) for part in parts):
        raise fields.error("ignore", name, "modules, and re: with letters, digits, dots and .*")
    return "*".join(parts) + ("" if reaches_end else "*")
