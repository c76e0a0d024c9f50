"""Reads `quantization_config` of a checkpoint's config.json, for each quantisation method.

What would be computed with less precision than the checkpoint's method says is refused by name.
Torch-free.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from baton.engine.checkpoint.fields import BOOLEAN, OBJECT, Check, Fields, one_of
from baton.engine.checkpoint.tensor_headers import read_json
from baton.engine.quantization.config import (
    BLOCK,
    GROUP_SIZES,
    MXFP4_GROUP,
    MXFP8_GROUP,
    NVFP4_GROUP,
    REMEDY,
    AwqConfig,
    CompressedTensorsConfig,
    GgufConfig,
    GptqConfig,
    MixedConfig,
    Modules,
    QuantizationConfig,
    ScaledFloatsConfig,
)

_IN_ORDER, _BY_LIST = (None, False, "weight", "static"), ("group", "dynamic", True)  # `actorder`
_EMPTY = Check(lambda value: not value, "none")
_E4M3, _EXPONENTS = ("F8_E4M3",), ("U8", "F8_E8M0")  # types of groups' scales
_MODELOPT_FILE = "hf_quant_config.json"  # beside config.json, in older checkpoints
# Limits of regular expressions in configs, so that no name takes long: a quantified group can
# take a time that is exponential in a name's length.
_MAX_EXPRESSION, _MAX_QUANTIFIERS = 500, 6
_QUANTIFIED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_QUANTIFIER = re.compile(r"(?<!\\)[*+{]")


def parse_quantization_config(fields: Fields) -> QuantizationConfig | None:
    """Reads `quantization_config` of config.json; None where nothing is quantised.

    Raises CheckpointError naming a key whose value is not supported.
    """
    if fields.values.get("quantization_config") is not None:
        inside = fields.inside("quantization_config", REMEDY)
    elif (file := _modelopt_file(fields)) is not None:
        inside = Fields(file, read_json(file), remedy=REMEDY).inside("quantization")
        inside = inside._replace(values={**inside.values, "quant_method": "modelopt"})
    else:
        return None
    method: str = inside.read("quant_method", one_of(*_METHODS))
    return _METHODS[method](inside)


def _modelopt_file(fields: Fields) -> Path | None:
    file = fields.file.with_name(_MODELOPT_FILE)
    return file if fields.file.name == "config.json" and file.is_file() else None


def _awq(fields: Fields) -> QuantizationConfig:
    fields.read("bits", one_of(4), fields.values.get("w_bit"))
    fields.read("version", one_of("gemm", "GEMM"), "gemm")
    fields.read("zero_point", one_of(True), True)
    group_size = _read_group_size(fields, fields.values.get("q_group_size"))
    names = [f".*{re.escape(name)}" for name in _read_names(fields, "modules_to_not_convert")]
    ignored = Modules(frozenset({"lm_head"}), pattern=_any_of(names))
    return AwqConfig("awq", "int4", ignored, group_size=group_size)


def _gptq(fields: Fields) -> QuantizationConfig:
    fields.read("bits", one_of(4))
    fields.read("is_marlin_format", one_of(False), False)
    version = fields.read("checkpoint_format", one_of("gptq", "gptq_v2"), "gptq")
    for key in ("lm_head", "dynamic", "modules_in_block_to_quantize"):
        fields.read(key, _EMPTY)
    return GptqConfig(
        "gptq",
        "int4",
        Modules(frozenset({"lm_head"})),
        group_size=_read_group_size(fields),
        zero_offset=1 if version == "gptq" else 0,
        act_order=fields.read("desc_act", BOOLEAN, False),
    )


def _fp8(fields: Fields) -> QuantizationConfig:
    """fp8 in blocks or with a scale for each matrix, as transformers and vLLM write it."""
    blocks = fields.read("weight_block_size", one_of([BLOCK, BLOCK], None))
    fields.read("activation_scheme", one_of("dynamic", *(() if blocks else ("static",))), "dynamic")
    fields.read("fmt", one_of("e4m3", "float8_e4m3fn"), "e4m3")
    fields.read("scale_fmt", one_of("float"), "float")
    fields.read("modules_to_convert", _EMPTY)
    lists = ("modules_to_not_convert", "ignored_layers")
    names = [name for key in lists for name in _read_names(fields, key)]
    ignored = Modules(within=frozenset({"lm_head", "mlp.gate", *names}))
    if blocks:
        return ScaledFloatsConfig("fp8", "fp8_block", ignored, shared="block")
    return ScaledFloatsConfig("fp8", "fp8_w8a16", ignored, shared="tensor")


def _modelopt(fields: Fields) -> QuantizationConfig:
    """NVIDIA's Model Optimizer (https://github.com/NVIDIA/Model-Optimizer)."""
    names = [*_read_names(fields, "ignore"), *_read_names(fields, "exclude_modules")]
    ignored = Modules(
        pattern=_any_of(f"{fnmatch.translate(name)[:-2]}(?:\\..*)?$" for name in names)
    )
    layers = fields.read("quantized_layers", OBJECT, {})
    if not layers:
        return _modelopt_format(fields, ignored)
    fields.read("quant_algo", one_of("MIXED_PRECISION"))
    inside, alike = fields.inside("quantized_layers"), dict[QuantizationConfig, list[str]]()
    for name in layers:
        alike.setdefault(_modelopt_format(inside.inside(name), Modules()), []).append(name)
    parts = [(Modules(within=frozenset(names)), scheme) for scheme, names in alike.items()]
    return _mixed("modelopt", ignored, parts)


def _modelopt_format(fields: Fields, ignored: Modules) -> QuantizationConfig:
    algorithm = fields.read(
        "quant_algo", one_of("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP8")
    )
    if algorithm == "NVFP4":
        fields.read("group_size", one_of(NVFP4_GROUP), NVFP4_GROUP)
        return _nvfp4("modelopt", ignored, "weight_scale_2")
    if algorithm == "MXFP8":
        fields.read("group_size", one_of(MXFP8_GROUP), MXFP8_GROUP)
        return _mxfp8("modelopt", ignored)
    shared: Any = "tensor" if algorithm == "FP8" else "output"
    return ScaledFloatsConfig("modelopt", "fp8_w8a16", ignored, shared=shared)


def _nvfp4(method: str, ignored: Modules, tensor_scale: Any) -> QuantizationConfig:
    return ScaledFloatsConfig(
        method, "nvfp4", ignored,
        shared="group", group=NVFP4_GROUP, kinds=_E4M3, tensor_scale=tensor_scale,
    )  # fmt: skip


def _mxfp8(method: str, ignored: Modules) -> QuantizationConfig:
    return ScaledFloatsConfig(
        method, "mxfp8", ignored, shared="group", group=MXFP8_GROUP, kinds=_EXPONENTS
    )


_COMPRESSED = "compressed-tensors"


def _compressed_tensors(fields: Fields) -> QuantizationConfig:
    """Groups of modules, each with a format (https://github.com/vllm-project/compressed-tensors).

    Of several targets that match a module, its name counts before an expression, and that before
    the class `Linear`.
    """
    for key in ("sparsity_config", "transform_config"):
        fields.read(key, _EMPTY)
    ignored = _modules(fields, "ignore", _read_names(fields, "ignore"))
    groups = fields.inside("config_groups")
    if not groups.values:
        raise fields.error("config_groups", sorted(groups.values), "one group or more")
    named, linear = list[tuple[Modules, QuantizationConfig]](), None
    for name in sorted(groups.values):
        group = groups.inside(name)
        scheme = _compressed_format(fields, group, ignored)
        targets = _read_names(group, "targets")
        exact = [target for target in targets if not target.startswith("re:")]
        if "Linear" in exact:
            linear = linear or scheme
        expressions = [target for target in targets if target.startswith("re:")]
        named += [
            (_modules(group, "targets", some), scheme) for some in (exact, expressions) if some
        ]
    named.sort(key=lambda part: part[0].pattern is not None)
    if linear is not None and len(groups.values) == 1:
        return linear
    every = Modules(pattern=re.compile(""))
    return _mixed(_COMPRESSED, ignored, named + ([(every, linear)] if linear else []))


def _mixed(
    method: str, ignored: Modules, parts: list[tuple[Modules, QuantizationConfig]]
) -> QuantizationConfig:
    formats = "+".join(sorted({scheme.weights for _, scheme in parts}))
    return MixedConfig(method, formats, ignored, parts=tuple(parts))


def _compressed_format(fields: Fields, group: Fields, ignored: Modules) -> QuantizationConfig:
    """The format of a group of modules."""
    read: dict[str, Callable[[Fields, Modules], QuantizationConfig]] = {
        "pack-quantized": _w4a16,
        "int-quantized": _w8a8_int8,
        "float-quantized": _compressed_fp8,
        "nvfp4-pack-quantized": _compressed_nvfp4,
        "mxfp4-pack-quantized": _compressed_mxfp4,
        "mxfp8-quantized": _compressed_mxfp8,
    }
    form = fields.read("format", one_of(*read, "mixed-precision"))
    if form == "mixed-precision" or "format" in group.values:
        form = group.read("format", one_of(*read), form)
    group.read("output_activations", _EMPTY)
    group.inside("weights").read("dynamic", one_of(False), False)
    group.inside("weights").read("type", one_of("int" if form in _INTEGERS else "float"))
    return read[form](group, ignored)


_INTEGERS = ("pack-quantized", "int-quantized")


def _w4a16(group: Fields, ignored: Modules) -> QuantizationConfig:
    weights = group.inside("weights")
    weights.read("num_bits", one_of(4))
    weights.read("strategy", one_of("group"))
    group.read("input_activations", _EMPTY)
    order = weights.read("actorder", one_of(*_IN_ORDER, *_BY_LIST))
    return CompressedTensorsConfig(
        _COMPRESSED,
        "int4",
        ignored,
        group_size=_read_group_size(weights),
        zero_points=not weights.read("symmetric", BOOLEAN, True),
        act_order=order in _BY_LIST,
    )


def _w8a8_int8(group: Fields, ignored: Modules) -> QuantizationConfig:
    return _w8a8(group, ignored, "int8")


def _w8a8(group: Fields, ignored: Modules, kind: str) -> QuantizationConfig:
    weights, activations = group.inside("weights"), group.inside("input_activations")
    strategy = weights.read("strategy", one_of("channel", "tensor"))
    for values in (weights, activations):
        values.read("num_bits", one_of(8))
        values.read("symmetric", one_of(True), True)
    activations.read("type", one_of("float" if kind == "fp8" else "int"))
    activations.read("dynamic", one_of(True))
    activations.read("strategy", one_of("token"))
    return CompressedTensorsConfig(_COMPRESSED, kind, ignored, per_output=strategy == "channel")


def _compressed_fp8(group: Fields, ignored: Modules) -> QuantizationConfig:
    """W8A8 where each row of activations has its own scale, else W8A16."""
    weights, activations = group.inside("weights"), group.inside("input_activations")
    shared = {"channel": "output", "tensor": "tensor", "block": "block"}
    strategy = weights.read("strategy", one_of(*shared))
    if strategy != "block" and activations.values.get("strategy") == "token":
        return _w8a8(group, ignored, "fp8")
    for values in (weights, activations) if activations.values else (weights,):
        values.read("num_bits", one_of(8))
        values.read("symmetric", one_of(True), True)
        values.read("type", one_of("float"))
    if strategy == "block":
        weights.read("block_structure", one_of([BLOCK, BLOCK]))
        return ScaledFloatsConfig(_COMPRESSED, "fp8_block", ignored, shared="block")
    kind: Any = shared[strategy]
    return ScaledFloatsConfig(_COMPRESSED, "fp8_w8a16", ignored, shared=kind)


def _compressed_nvfp4(group: Fields, ignored: Modules) -> QuantizationConfig:
    _check_floats(group, 4, NVFP4_GROUP, "tensor_group")
    return _nvfp4(_COMPRESSED, ignored, "weight_global_scale")


def _compressed_mxfp4(group: Fields, ignored: Modules) -> QuantizationConfig:
    _check_floats(group, 4, MXFP4_GROUP, "group")
    return ScaledFloatsConfig(
        _COMPRESSED, "mxfp4", ignored, shared="group", group=MXFP4_GROUP, kinds=_EXPONENTS
    )


def _compressed_mxfp8(group: Fields, ignored: Modules) -> QuantizationConfig:
    _check_floats(group, 8, MXFP8_GROUP, "group")
    return _mxfp8(_COMPRESSED, ignored)


def _check_floats(group: Fields, bits: int, size: int, strategy: str) -> None:
    weights = group.inside("weights")
    weights.read("num_bits", one_of(bits))
    weights.read("group_size", one_of(size))
    weights.read("strategy", one_of(strategy), strategy)
    weights.read("symmetric", one_of(True), True)


def _gguf(fields: Fields) -> QuantizationConfig:
    """As `baton.engine.checkpoint.gguf` writes it."""
    return GgufConfig("gguf", "gguf", modules=frozenset(_read_names(fields, "modules")))


_METHODS: dict[str, Callable[[Fields], QuantizationConfig]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "gguf": _gguf,
}


def _read_group_size(fields: Fields, default: object = None) -> int:
    """`group_size`, the number of inputs that share a scale."""
    return int(fields.read("group_size", one_of(*GROUP_SIZES), default))


def _read_names(fields: Fields, key: str) -> list[str]:
    """A key's list of modules; empty where the key is absent."""

    def holds(value: object) -> bool:
        return isinstance(value, list) and all(isinstance(name, str) for name in value)

    names: list[str] = fields.read(key, Check(holds, "a list of modules"), [])
    return names


def _modules(fields: Fields, key: str, names: Iterable[str]) -> Modules:
    """Modules by name, and by regular expression after `re:`."""
    exact, expressions = set[str](), list[str]()
    for name in names:
        if name.startswith("re:"):
            expressions.append(_checked(fields, key, name))
        else:
            exact.add(name)
    return Modules(frozenset(exact), pattern=_any_of(expressions))


def _checked(fields: Fields, key: str, name: str) -> str:
    """The regular expression of an entry. Raises CheckpointError for one that may take long."""
    expression = name.removeprefix("re:")
    is_short = len(expression) <= _MAX_EXPRESSION and (
        len(_QUANTIFIER.findall(expression)) <= _MAX_QUANTIFIERS
    )
    if not is_short or _QUANTIFIED_GROUP.search(expression):
        supported = (
            f"re: with up to {_MAX_EXPRESSION} characters and {_MAX_QUANTIFIERS} of *, + and {{, "
            "none behind a group"
        )
        raise fields.error(key, name, supported)
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise fields.error(key, name, f"a regular expression ({error})") from error
    return expression


def _any_of(expressions: Iterable[str]) -> re.Pattern[str] | None:
    found = [f"(?:{one})" for one in expressions]
    return re.compile("|".join(found)) if found else None
