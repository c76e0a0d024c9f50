"""How a checkpoint holds quantised matrices: `quantization_config` of config.json, checked.

Read are AWQ (gemm packing, https://github.com/casper-hansen/AutoAWQ), GPTQ of 4 bits, also with
act-order (https://github.com/AutoGPTQ/AutoGPTQ, and the second version of its zero points,
https://github.com/ModelCloud/GPTQModel), blocks of fp8 (https://arxiv.org/abs/2412.19437), and of
compressed-tensors (https://github.com/vllm-project/compressed-tensors) W4A16 packed and W8A8 in
int8 and fp8. What would be computed otherwise is refused by name. Torch-free;
`weights/quantized_checkpoint.py` reads the tensors.
"""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton.config import EngineConfig
from baton.engine.models.fields import BOOLEAN, Check, Fields, one_of
from baton.engine.weights.checkpoint import FLOATS
from baton.errors import CheckpointError, ConfigError

GROUP_SIZES = (32, 64, 128)
BLOCK = 128  # outputs and inputs of a block of fp8 that share a scale
_PACKED = 8  # values of 4 bits in an int32
_MULTIPLE = 16  # of the sizes of 8-bit matrices, as products on GPUs need them
_REMEDY = "; or serve the model that it was made of, with --quantization int4, int8 or fp8"

Shapes = dict[str, tuple[int, ...]]
"""Tensors of a checkpoint: their names and shapes."""


class Stored(NamedTuple):
    """What a tensor of a checkpoint has to be; dtypes are safetensors' names."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False


@dataclass(frozen=True)
class QuantizationConfig:
    """Of a checkpoint.

    weights: the format that its matrices are held in · group_size: inputs that share a scale in
    int4 · zero_points: groups have one beside the scale · zero_offset: what is added to a stored
    one · act_order: inputs belong to groups by a list · per_output: 8-bit matrices have a scale for
    each output, else one · ignored: patterns (fnmatch) of modules that are not quantised.
    """

    method: Literal["awq", "gptq", "fp8", "compressed-tensors"]
    weights: Literal["int4", "int8", "fp8", "fp8_block"]
    group_size: int = 0
    zero_points: bool = False
    zero_offset: int = 0
    act_order: bool = False
    per_output: bool = True
    ignored: tuple[str, ...] = ()

    @classmethod
    def parse(cls, fields: Fields) -> QuantizationConfig | None:
        """Of config.json; None where nothing is quantised. Raises CheckpointError."""
        if fields.values.get("quantization_config") is None:
            return None
        inside = fields.inside("quantization_config", _REMEDY)
        methods = {"awq": _awq, "gptq": _gptq, "fp8": _fp8,
                   "compressed-tensors": _compressed_tensors}  # fmt: skip
        method: str = inside.read("quant_method", one_of(*methods))
        return methods[method](inside)

    def holds(self, module: str) -> bool:
        """Whether a module such as `model.layers.0.mlp.up_proj` is quantised."""
        return not any(fnmatch.fnmatchcase(module, pattern) for pattern in self.ignored)

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, Stored]:
        """What a checkpoint has in place of a module's weight `[out, in]`.

        Raises CheckpointError for a shape that the format cannot hold.
        """
        outputs, inputs = shape
        if self.weights == "fp8_block":
            if inputs % GROUP_SIZES[0]:
                raise CheckpointError(
                    f"{module} has {inputs} inputs: of fp8 in blocks they have to be a multiple of "
                    f"{GROUP_SIZES[0]}{_REMEDY}"
                )
            blocks = math.ceil(outputs / BLOCK), math.ceil(inputs / BLOCK)
            return {f"{module}.weight": Stored(shape, ("F8_E4M3",)),
                    f"{module}.weight_scale_inv": Stored(blocks)}  # fmt: skip
        multiple = self.group_size or _MULTIPLE, _PACKED if self.group_size else _MULTIPLE
        if inputs % multiple[0] or outputs % multiple[1]:
            raise CheckpointError(
                f"{module} has {outputs} outputs and {inputs} inputs: in {self.weights} they have "
                f"to be multiples of {multiple[1]} and {multiple[0]}{_REMEDY}"
            )
        if not self.group_size:
            kind = "I8" if self.weights == "int8" else "F8_E4M3"
            scale = (outputs, 1) if self.per_output else (1,)
            return {f"{module}.weight": Stored(shape, (kind,)),
                    f"{module}.weight_scale": Stored(scale)}  # fmt: skip
        groups, ints = inputs // self.group_size, ("I32",)
        if self.method == "compressed-tensors":
            tensors = {
                "weight_packed": Stored((outputs, inputs // _PACKED), ints),
                "weight_scale": Stored((outputs, groups)),
                "weight_shape": Stored((2,), ("I64", "I32")),
            }
            if self.zero_points:
                tensors["weight_zero_point"] = Stored((outputs // _PACKED, groups), ints)
            if self.act_order:
                tensors["weight_g_idx"] = Stored((inputs,), ints)
        else:
            qweight = (inputs, outputs // _PACKED)
            if self.method == "gptq":
                qweight = (inputs // _PACKED, outputs)
            tensors = {
                "qweight": Stored(qweight, ints),
                "qzeros": Stored((groups, outputs // _PACKED), ints),
                "scales": Stored((groups, outputs)),
            }
            if self.method == "gptq":
                tensors["g_idx"] = Stored((inputs,), ints, optional=not self.act_order)
                # Old exports have zeros for what the model has none of.
                tensors["bias"] = Stored((outputs,), optional=True)
        return {f"{module}.{name}": stored for name, stored in tensors.items()}


def weight_format(settings: EngineConfig, stored: QuantizationConfig | None) -> str:
    """How an engine holds its matrices, as `--quantization` names it.

    Raises ConfigError where a checkpoint has them quantised and the settings ask for other ones.
    """
    if stored is None or settings.simulate:
        return settings.quantization
    if settings.quantization != "none":
        raise ConfigError(
            f"--quantization {settings.quantization}: the checkpoint's weights are already "
            f"{stored.weights} ({stored.method}); leave it out"
        )
    if settings.random_weights:
        raise ConfigError(
            f"--random-weights: the model is quantised ({stored.method}), and random weights are "
            f"not; take the config.json of the model that it was made of, and --quantization "
            f"{stored.weights.removesuffix('_block')}"
        )
    return stored.weights


_EMPTY = Check(lambda value: not value, "none")
_PLAIN_ORDERS, _GROUP_ORDERS = (None, False, "weight", "static"), ("group", "dynamic", True)


def _awq(fields: Fields) -> QuantizationConfig:
    fields.read("bits", one_of(4), fields.values.get("w_bit"))
    fields.read("version", one_of("gemm", "GEMM"), "gemm")
    fields.read("zero_point", one_of(True), True)
    group_size = _group_size(fields, fields.values.get("q_group_size"))
    left_out = _names(fields, "modules_to_not_convert")
    return QuantizationConfig(
        "awq", "int4", group_size, zero_points=True,
        ignored=("lm_head", *(f"*{_literal(name)}*" for name in left_out)),
    )  # fmt: skip


def _gptq(fields: Fields) -> QuantizationConfig:
    fields.read("bits", one_of(4))
    fields.read("is_marlin_format", one_of(False), False)
    version = fields.read("checkpoint_format", one_of("gptq", "gptq_v2"), "gptq")
    for key in ("lm_head", "dynamic", "modules_in_block_to_quantize"):
        fields.read(key, _EMPTY)
    return QuantizationConfig(
        "gptq",
        "int4",
        _group_size(fields),
        zero_points=True,  # also symmetric ones are stored
        zero_offset=1 if version == "gptq" else 0,
        act_order=fields.read("desc_act", BOOLEAN, False),
        ignored=("lm_head",),
    )


def _fp8(fields: Fields) -> QuantizationConfig:
    fields.read("weight_block_size", one_of([BLOCK, BLOCK]))
    fields.read("activation_scheme", one_of("dynamic"))
    fields.read("fmt", one_of("e4m3"), "e4m3")
    fields.read("scale_fmt", one_of("float"), "float")
    fields.read("modules_to_convert", _EMPTY)
    names = ["lm_head", "mlp.gate", *_names(fields, "modules_to_not_convert")]
    # A list names modules from the first or the last part on, or what they are parts of.
    patterns = [
        f"{before}{_literal(name)}{after}"
        for name in names for before in ("", "*.") for after in ("", ".*")
    ]  # fmt: skip
    return QuantizationConfig("fp8", "fp8_block", ignored=tuple(patterns))


def _compressed_tensors(fields: Fields) -> QuantizationConfig:
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
    weights = group.inside("weights")
    weights.read("dynamic", one_of(False), False)
    weights.read("type", one_of("float" if kind == "fp8" else "int"))
    ignored = tuple(_pattern(fields, name) for name in _names(fields, "ignore"))
    if kind == "int4":
        weights.read("num_bits", one_of(4))
        weights.read("strategy", one_of("group"))
        group.read("input_activations", _EMPTY)
        order = weights.read("actorder", one_of(*_PLAIN_ORDERS, *_GROUP_ORDERS))
        return QuantizationConfig(
            "compressed-tensors", "int4", _group_size(weights),
            zero_points=not weights.read("symmetric", BOOLEAN, True),
            act_order=order in _GROUP_ORDERS, ignored=ignored,
        )  # fmt: skip
    strategy = weights.read("strategy", one_of("channel", "tensor"))
    for values in (weights, activations := group.inside("input_activations")):
        values.read("num_bits", one_of(8))
        values.read("symmetric", one_of(True), True)
    activations.read("type", one_of("float" if kind == "fp8" else "int"))
    activations.read("dynamic", one_of(True))
    activations.read("strategy", one_of("token"))
    weights_kind: Literal["int8", "fp8"] = "int8" if kind == "int8" else "fp8"
    return QuantizationConfig(
        "compressed-tensors", weights_kind, per_output=strategy == "channel", ignored=ignored
    )


def _group_size(fields: Fields, default: object = None) -> int:
    return int(fields.read("group_size", one_of(*GROUP_SIZES), default))


def _names(fields: Fields, key: str) -> list[str]:
    """The strings that a key has."""

    def holds(value: object) -> bool:
        return isinstance(value, list) and all(isinstance(name, str) for name in value)

    names: list[str] = fields.read(key, Check(holds, "a list of modules"), [])
    return names


def _literal(name: str) -> str:
    """A pattern for this text alone."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _pattern(fields: Fields, name: str) -> str:
    """Of an `ignore`: a module, or `re:` and a regular expression with no more than `.*` in it."""
    if not name.startswith("re:"):
        return _literal(name)
    expression = name.removeprefix("re:").removeprefix("^")
    whole = expression.endswith("$")
    parts = [part.replace(r"\.", ".") for part in expression.removesuffix("$").split(".*")]
    if any(re.search(r"[^\w.-]", part) for part in parts):
        raise fields.error("ignore", name, "modules, and re: with letters, digits, dots and .*")
    return "*".join(parts) + ("" if whole else "*")
