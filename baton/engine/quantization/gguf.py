"""Weights of GGUF files in ggml's quantised types, at nearly their size in the file.

A block of 256 inputs (K types) or 32 has one or two numbers in float16, and a K type's groups have
whole numbers by which those are multiplied (https://github.com/ggml-org/ggml, ggml-quants.c). A
value is `scale * number`, plus a minimum in types that have one. All products here are exact in
float32, so that values are those of `gguf.quants.dequantize`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from baton.engine.checkpoint.tensor_headers import StoredTensor
from baton.engine.quantization.group_scaled import GroupScaledWeight, unpack_nibbles
from baton.engine.quantization.int4 import Int4Weight, pack_nibbles
from baton.engine.quantization.linear_weight import (
    ROWS_AT_ONCE,
    DenseWeight,
    JoinedWeight,
    LinearWeight,
)
from baton.errors import CheckpointError
from baton.gguf.reader import TYPES

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTIZED = tuple(name for name, kind in TYPES.items() if kind.elements > 1)


@dataclass(frozen=True)
class GgufWeight(GroupScaledWeight):
    """`scales * numbers + minimums`, for each group of inputs.

    values: uint8 `[out, in / 2]` of two numbers plus `offset`, lower bits first; or int8
    `[out, in]` · scales: float32 `[out, groups]`, or int8 that is multiplied by `units` · units:
    float32 `[out, blocks]`, or None · minimums, minimum_units: as those, or None · bits: of the
    numbers, 4, 6 or 8 · offset: what makes all numbers of that many bits positive or 0; 0 where
    there are minimums.
    """

    units: Tensor | None = None
    minimums: Tensor | None = None
    minimum_units: Tensor | None = None
    bits: int = 8
    offset: int = 0

    NAME = "GGUF"

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.values.shape
        return outputs, width * 2 if self.bits == 4 else width

    def nibbles(self, rows: slice = slice(None)) -> Tensor:
        """Rows of four bits, with one number a byte: uint8 `[rows, in]`."""
        return unpack_nibbles(self.values[rows])

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        return (
            self.nibbles(rows).float() - self.offset
            if self.bits == 4
            else self.values[rows].float()
        )

    def dequantized(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        scales = scaled(self.scales, self.units, rows)
        full: Tensor = self.numbers(rows).unflatten(1, (-1, self.group)) * scales[..., None]
        if self.minimums is not None:
            full += scaled(self.minimums, self.minimum_units, rows)[..., None]
        return full.flatten(1).to(dtype)

    def take_outputs(self, rows: Tensor) -> Self:
        rows = rows.to(self.values.device)
        return self._changed({name: part[rows] for name, part in self.tensors().items()})

    def take_inputs(self, columns: range) -> Self:
        inputs, coarse = self.shape[1], min(part.shape[1] for part in self.tensors().values())
        size = inputs // coarse
        if columns.start % size or columns.stop % size:
            raise CheckpointError(
                f"a {self.NAME} matrix of {inputs} inputs is not cut at {columns.start} and "
                f"{columns.stop}: its parts are whole blocks of {size}; choose another --tp"
            )

        def cut(part: Tensor) -> Tensor:
            first, end = (at * part.shape[1] // inputs for at in (columns.start, columns.stop))
            return part[:, first:end].contiguous()

        return self._changed({name: cut(part) for name, part in self.tensors().items()})

    def _changed(self, tensors: dict[str, Any]) -> Self:
        return replace(self, **tensors)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by field, each `[out, …]`."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in found.items() if isinstance(part, Tensor)}


def scaled(numbers: Tensor, units: Tensor | None, rows: slice = slice(None)) -> Tensor:
    """Rows of numbers `[out, groups]` times their blocks' units: float32 `[rows, groups]`."""
    if units is None:
        return numbers[rows]
    blocks = numbers[rows].float().unflatten(1, (units.shape[1], -1))
    result: Tensor = (blocks * units[rows][..., None]).flatten(1)
    return result


class GgufTensors:
    """The tensors of a mapped GGUF file."""

    def __init__(self, file: Path, stored: Mapping[str, StoredTensor]) -> None:
        """stored: tensors by name, also of other files."""
        size = file.stat().st_size
        self._data = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
        self._stored = stored

    def get_tensor(self, name: str) -> Tensor:
        """A tensor; of a quantised type its bytes, uint8 `[out, bytes]`."""
        stored = self._stored[name]
        raw = self._data[stored.offset : stored.offset + stored.num_bytes]
        if stored.dtype in QUANTIZED:
            return raw.view(*stored.shape[:-1], -1)
        return raw.view(_DENSE[stored.dtype]).view(stored.shape)


def read_gguf(kind: str, raw: Tensor) -> GroupScaledWeight:
    """The weight of a tensor. kind: ggml's type · raw: uint8 `[out, bytes]`."""
    size = TYPES[kind].num_bytes
    parts = [_READERS[kind](rows.unflatten(1, (-1, size))) for rows in raw.split(ROWS_AT_ONCE)]
    joined = join_weights(parts)
    assert isinstance(joined, GroupScaledWeight), "its parts have one format"
    return joined


def join_weights(parts: Sequence[LinearWeight]) -> LinearWeight:
    """Weights joined along the outputs: one weight if they have one format."""
    first, *rest = parts
    if not rest:
        return first
    if all(_form(part) == _form(first) for part in rest) and isinstance(first, GroupScaledWeight):
        names = [name for name, value in vars(first).items() if isinstance(value, Tensor)]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return replace(first, **joined)
    return JoinedWeight(tuple(parts))


def common_weight(weight: GgufWeight | JoinedWeight, dtype: torch.dtype) -> LinearWeight:
    """Q4_0 as int4, and other types in dtype: for devices without products of GGUF's types."""
    if isinstance(weight, GgufWeight) and weight.bits == 4 and weight.minimums is None:
        return Int4Weight(weight.values, weight.scales)
    parts = weight.parts if isinstance(weight, JoinedWeight) else (weight,)
    first = next(iter(vars(parts[0]).values()))
    result = torch.empty(weight.shape, dtype=dtype, device=first.device)
    targets = result.split([part.shape[0] for part in parts])
    for part, target in zip(parts, targets, strict=True):
        if isinstance(part, GroupScaledWeight):
            part.dequantize_into(target)
        elif isinstance(part, DenseWeight):
            target.copy_(part.tensor)
    return DenseWeight(result)


def _form(weight: LinearWeight) -> tuple[object, ...]:
    """What weights that can be one have in common."""
    values = vars(weight).items()
    return (
        type(weight),
        *((name, value.shape[1:], value.dtype) if isinstance(value, Tensor) else (name, value)
          for name, value in values),
    )  # fmt: skip


# How blocks of each type are read, uint8 `[rows, blocks, bytes]`.


def _q4_0(raw: Tensor) -> GroupScaledWeight:
    values = pack_nibbles(_halves(raw[..., 2:]).flatten(1))
    return GgufWeight(values, _float(raw, 0), bits=4, offset=8)


def _q4_1(raw: Tensor) -> GroupScaledWeight:
    values = pack_nibbles(_halves(raw[..., 4:]).flatten(1))
    return GgufWeight(values, _float(raw, 0), minimums=_float(raw, 2), bits=4)


def _q5_0(raw: Tensor) -> GroupScaledWeight:
    values = _fifth_bits(raw[..., 2:6], _halves(raw[..., 6:])) - 16
    return GgufWeight(values.flatten(1), _float(raw, 0), bits=6, offset=32)


def _q5_1(raw: Tensor) -> GroupScaledWeight:
    values = _fifth_bits(raw[..., 4:8], _halves(raw[..., 8:]))
    return GgufWeight(values.flatten(1), _float(raw, 0), minimums=_float(raw, 2), bits=6)


def _q8_0(raw: Tensor) -> GroupScaledWeight:
    return GgufWeight(raw[..., 2:].flatten(1).view(torch.int8), _float(raw, 0), offset=128)


def _q4_k(raw: Tensor) -> GroupScaledWeight:
    values = _halves(raw[..., 16:].unflatten(-1, (4, 32)))
    return _k(raw, pack_nibbles(values.flatten(1)), bits=4)


def _q5_k(raw: Tensor) -> GroupScaledWeight:
    low = _halves(raw[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    high = raw[..., None, 16:48] >> _shifts(raw, 8)[:, None] & 1
    return _k(raw, (low | high << 4).flatten(1).view(torch.int8), bits=6)


def _q6_k(raw: Tensor) -> GroupScaledWeight:
    low = _halves(raw[..., :128].unflatten(-1, (2, 64)))  # [2 halves][4 * 32]
    shifts = _shifts(raw, 4, 2)[:, None]
    high = (raw[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-2)
    values = (low | high << 4).view(torch.int8) - 32
    scales = raw[..., 192:208].flatten(1).view(torch.int8)
    return GgufWeight(values.flatten(1), scales, units=_float(raw, 208), bits=6, offset=32)


def _k(raw: Tensor, values: Tensor, bits: int) -> GgufWeight:
    """A type with twelve bytes of scales and minimums of six bits each, of eight groups."""
    low, middle, high = raw[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=-1)
    return GgufWeight(
        values, scales.flatten(1).view(torch.int8), _float(raw, 0),
        minimums.flatten(1).view(torch.int8), -_float(raw, 2), bits,
    )  # fmt: skip


def _halves(pairs: Tensor) -> Tensor:
    """`[..., n]` bytes → `[..., 2 * n]`: the lower four bits of all, then the higher ones."""
    return torch.cat((pairs & 15, pairs >> 4), dim=-1)


def _fifth_bits(words: Tensor, low: Tensor) -> Tensor:
    """Numbers of five bits, int8 `[..., 32]`. words: the highest ones, four bytes."""
    high = words[..., None] >> _shifts(words, 8) & 1
    return (low | high.flatten(-2) << 4).view(torch.int8)


def _shifts(raw: Tensor, count: int, bits: int = 1) -> Tensor:
    """Shifts to each of `count` fields of a byte: uint8 `[count]`."""
    return torch.arange(0, count * bits, bits, dtype=torch.uint8, device=raw.device)


def _float(raw: Tensor, at: int) -> Tensor:
    """The float16 at a place of each block: float32 `[rows, blocks]`."""
    return raw[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


_READERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
