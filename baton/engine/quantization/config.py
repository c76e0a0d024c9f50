"""How a checkpoint holds quantised matrices: their tensors, for each format. Torch-free.

`checkpoint_configs.py` reads it from config.json; the tensors are read by `awq.py`, `gptq.py`,
`scaled_floats.py` and `compressed_tensors.py`.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton.config import EngineConfig
from baton.engine.checkpoint.tensor_headers import FLOATS
from baton.errors import CheckpointError, ConfigError
from baton.gguf.reader import TYPES

GROUP_SIZES = (32, 64, 128)
BLOCK = 128  # outputs and inputs of an fp8 block, which share a scale
_W8A8_MULTIPLE = 16  # of the sizes of W8A8 matrices, as products on GPUs need it
MXFP4_GROUP, NVFP4_GROUP, MXFP8_GROUP = 32, 16, 32  # inputs that share a scale
_PACKED = 8  # values of 4 bits in an int32
REMEDY = "; or serve the model that it was made of, with --quantization int4, int8 or fp8"

Shapes = dict[str, tuple[int, ...]]
"""Names and shapes of a model's tensors."""


class TensorSpec(NamedTuple):
    """What a tensor of a checkpoint has to be; dtypes are safetensors' names.

    other: a further shape that it may have.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False
    other: tuple[int, ...] | None = None


class Modules(NamedTuple):
    """Some of a model's modules.

    names: exact ones · within: modules that have, or are in, a module of that name, such as
    `self_attn` or `layers.0.mlp` · pattern: matches a module's name from its start.
    """

    names: frozenset[str] = frozenset()
    within: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None

    def has(self, module: str) -> bool:
        """Whether a module such as `model.layers.0.mlp.up_proj` is one of them.

        In a multimodal checkpoint's configuration it has a prefix.
        """
        spellings = (
            module,
            f"language_model.{module}",
            f"model.language_model.{module.removeprefix('model.')}",
        )
        return any(
            name in self.names
            or (self.pattern is not None and self.pattern.match(name) is not None)
            or (bool(self.within) and any(part in self.within for part in _sequences(name)))
            for name in spellings
        )


def _sequences(name: str) -> Iterator[str]:
    """All sequences of adjacent parts of a dotted name."""
    parts = name.split(".")
    for first in range(len(parts)):
        for end in range(first + 1, len(parts) + 1):
            yield ".".join(parts[first:end])


_NO_MODULES = Modules()


@dataclass(frozen=True)
class QuantizationConfig(ABC):
    """How a checkpoint holds its quantised matrices.

    method: `quant_method` · weights: their format in memory · ignored: modules that are not
    quantised.
    """

    method: str
    weights: str
    ignored: Modules = _NO_MODULES

    def scheme(self, module: str) -> QuantizationConfig | None:
        """How a module such as `model.layers.0.mlp.up_proj` is quantised; None if it is not."""
        return None if self.ignored.has(module) else self

    def canonical(self, name: str) -> str:
        """A tensor's name in `tensors`, of its name in a checkpoint."""
        return name

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

    group_size: int

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

    group_size: int
    zero_offset: int
    act_order: bool

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


_ALIASES = {
    "weight_packed": "weight",
    "weight_scale_inv": "weight_scale",
    "activation_scale": "input_scale",
    "input_global_scale": "input_scale",
}


@dataclass(frozen=True, kw_only=True)
class ScaledFloatsConfig(QuantizationConfig):
    """Numbers of fp8 (e4m3) or 4 bits (E2M1) with scales; activations are not quantised.

    That is how fp8 with static scales of activations is computed, too: more exact, and on every
    device. (fp8 in blocks is https://arxiv.org/abs/2412.19437's, NVFP4 NVIDIA's; MXFP8 and MXFP4
    are of OCP's Microscaling Formats 1.0.)

    shared: what has one scale · group: inputs, where groups have one · kinds: safetensors' names
    of the scales' type; integers are biased exponents · tensor_scale: the tensor with a further
    scale of the matrix, by which `weight_global_scale` divides and `weight_scale_2` multiplies.
    """

    shared: Literal["tensor", "output", "block", "group"]
    group: int = 0
    kinds: tuple[str, ...] = FLOATS
    tensor_scale: Literal["", "weight_scale_2", "weight_global_scale"] = ""

    @property
    def is_fp4(self) -> bool:
        """Whether numbers have 4 bits."""
        return self.weights.endswith("fp4")

    def canonical(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        return f"{module}.{_ALIASES[kind]}" if kind in _ALIASES else name

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        outputs, inputs = shape
        multiple = self.group or GROUP_SIZES[0]
        if inputs % multiple:
            raise CheckpointError(
                f"{module} has {inputs} inputs: in {self.weights} they have to be a multiple of "
                f"{multiple}{REMEDY}"
            )
        scales = {
            "tensor": (1,),
            "output": (outputs, 1),
            "block": (math.ceil(outputs / BLOCK), math.ceil(inputs / BLOCK)),
            "group": (outputs, inputs // multiple),
        }
        values = TensorSpec((outputs, inputs // 2), ("U8",))
        found = {
            f"{module}.weight": values if self.is_fp4 else TensorSpec(shape, ("F8_E4M3",)),
            f"{module}.weight_scale": TensorSpec(
                scales[self.shared],
                self.kinds,
                other=(outputs,) if self.shared == "output" else None,
            ),
            f"{module}.input_scale": TensorSpec((1,), optional=True),
        }
        if self.tensor_scale:
            found[f"{module}.{self.tensor_scale}"] = TensorSpec((1,))
        return found


@dataclass(frozen=True, kw_only=True)
class MixedConfig(QuantizationConfig):
    """Modules in different formats; parts: modules and their format, of which the first counts."""

    parts: tuple[tuple[Modules, QuantizationConfig], ...]

    def scheme(self, module: str) -> QuantizationConfig | None:
        if self.ignored.has(module):
            return None
        return next((scheme for modules, scheme in self.parts if modules.has(module)), None)

    def canonical(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        scheme = self.scheme(module) if kind in _ALIASES else None
        return name if scheme is None else scheme.canonical(name)

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        raise TypeError("each module has a scheme of its own")


@dataclass(frozen=True, kw_only=True)
class CompressedTensorsConfig(QuantizationConfig):
    """compressed-tensors (https://github.com/vllm-project/compressed-tensors).

    int4 as W4A16, packed, and int8 and fp8 as W8A8.

    per_output: W8A8 weights have a scale for each output, else one · group_size: number of inputs
    that share a scale in int4 · zero_points: whether int4 groups have one · act_order: whether
    `weight_g_idx` says which group an input belongs to.
    """

    per_output: bool = True
    group_size: int = 0
    zero_points: bool = False
    act_order: bool = False

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


@dataclass(frozen=True, kw_only=True)
class GgufConfig(QuantizationConfig):
    """A GGUF file, whose matrices have ggml's types, each its own.

    modules: those whose weights are quantised.
    """

    modules: frozenset[str]

    def scheme(self, module: str) -> QuantizationConfig | None:
        return self if module in self.modules else None

    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        return {f"{module}.weight": TensorSpec(shape, tuple(TYPES))}


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
            f"{stored.weights} ({stored.method}); leave it out"
        )
    if settings.random_weights:
        alike = next((name for name in ("int8", "fp8") if name in stored.weights), "int4")
        raise ConfigError(
            f"--random-weights: the model is quantised ({stored.method}), and random weights are "
            "not; take the config.json of the model that it was made of, and "
            f"--quantization {alike}"
        )
    return stored.weights


def _check_multiples(
    module: str, shape: tuple[int, ...], weights: str, outputs: int, inputs: int
) -> None:
    """Raises CheckpointError unless a matrix's outputs and inputs are multiples of these."""
    if shape[0] % outputs or shape[1] % inputs:
        raise CheckpointError(
            f"{module} has {shape[0]} outputs and {shape[1]} inputs: in {weights} they have to be "
            f"multiples of {outputs} and {inputs}{REMEDY}"
        )
