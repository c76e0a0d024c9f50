"""A checkpoint's quantised matrices: the base class of the formats of `quantization_config`."""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from baton.engine.checkpoint.fields import Check, Fields, one_of
from baton.engine.checkpoint.tensors import FLOATS
from baton.engine.quantization.linear_weight import LinearWeight
from baton.errors import CheckpointError

GROUP_SIZES = (32, 64, 128)
PACKED = 8  # values of 4 bits in an int32
REMEDY = "; or serve the model that it was made of, with --quantization int4, int8 or fp8"
EMPTY = Check(lambda value: not value, "none")

Shapes = dict[str, tuple[int, ...]]
"""Names and shapes of a model's tensors."""

Get = Callable[[str], Tensor | None]
"""Reads a checkpoint's tensor by its name; None where it has none of that name."""


class TensorSpec(NamedTuple):
    """What a tensor of a checkpoint has to be; dtypes are safetensors' names."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False


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

    @abstractmethod
    def tensors(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The checkpoint's tensors, by name, that replace a module's weight `[out, in]`.

        Raises CheckpointError for a shape that the format cannot hold.
        """

    @abstractmethod
    def read(self, modules: Shapes, get: Get) -> LinearWeight:
        """The weight of modules, each `[out, in]`, joined along the outputs.

        Raises CheckpointError naming a module that cannot be joined with the others.
        """


def check_multiples(
    module: str, shape: tuple[int, ...], weights: str, outputs: int, inputs: int
) -> None:
    """Raises CheckpointError unless a matrix's outputs and inputs are multiples of these."""
    if shape[0] % outputs or shape[1] % inputs:
        raise CheckpointError(
            f"{module} has {shape[0]} outputs and {shape[1]} inputs: in {weights} they have to be "
            f"multiples of {outputs} and {inputs}{REMEDY}"
        )


def read_group_size(fields: Fields, default: object = None) -> int:
    """`group_size`, the number of inputs that share a scale."""
    return int(fields.read("group_size", one_of(*GROUP_SIZES), default))


def read_names(fields: Fields, key: str) -> list[str]:
    """A key's list of modules; empty where the key is absent."""

    def holds(value: object) -> bool:
        return isinstance(value, list) and all(isinstance(name, str) for name in value)

    names: list[str] = fields.read(key, Check(holds, "a list of modules"), [])
    return names


def literal_pattern(name: str) -> str:
    """The fnmatch pattern that matches exactly this text."""
    return re.sub(r"([*?[])", r"[\1]", name)


def require(get: Get, name: str) -> Tensor:
    """A tensor that the checkpoint has."""
    tensor = get(name)
    assert tensor is not None, "the checkpoint's tensors were checked"
    return tensor


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Tensors joined along the first axis."""
    return torch.cat([part.contiguous() for part in parts])
