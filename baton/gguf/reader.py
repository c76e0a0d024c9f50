"""Reads the metadata of a GGUF file, and where its tensors are. The file is not trusted."""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from baton.checkpoint_files import open_regular
from baton.errors import CheckpointError, quoted

SUFFIX = ".gguf"
_SIZE = struct.Struct("<Q")  # of texts and arrays
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS, _MAX_TENSORS, _MAX_DIMENSIONS = 1 << 16, 1 << 20, 4
_DEFAULT_ALIGNMENT = 32
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

# `struct` formats of values by their number; 8 is a text and 9 an array.
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _ARRAY = 8, 9


class TensorType(NamedTuple):
    """A type of tensors: `elements` are stored in `num_bytes`."""

    elements: int
    num_bytes: int


# By name; the numbers are ggml's `ggml_type`.
TYPES = {
    "F32": TensorType(1, 4),
    "F16": TensorType(1, 2),
    "BF16": TensorType(1, 2),
    "Q4_0": TensorType(32, 18),
    "Q4_1": TensorType(32, 20),
    "Q5_0": TensorType(32, 22),
    "Q5_1": TensorType(32, 24),
    "Q8_0": TensorType(32, 34),
    "Q4_K": TensorType(256, 144),
    "Q5_K": TensorType(256, 176),
    "Q6_K": TensorType(256, 210),
}
_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


class GgufTensor(NamedTuple):
    """The place of a tensor. shape: the outermost dimension first · offset: in the file, bytes."""

    name: str
    file: Path
    type: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        kind = TYPES[self.type]
        return math.prod(self.shape) // kind.elements * kind.num_bytes


@dataclass(frozen=True)
class TextArray:
    """An array of texts, which `texts` reads: vocabularies take a tenth of a second."""

    file: Path
    offset: int
    count: int

    def texts(self) -> list[str]:
        """All texts. Raises CheckpointError for one that is not UTF-8."""
        with _mapped(self.file) as data:
            cursor = _Cursor(self.file, data, self.offset)
            places = cursor.texts(self.count, "an array")
            try:
                return [data[begin:end].decode() for begin, end in places]
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self.file}: a text is not UTF-8: {error}") from error


@dataclass(frozen=True)
class GgufFile:
    """A model's GGUF file, or the first one of several.

    metadata: values by key; an array of texts is a `TextArray` · tensors: of all files, by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def load(cls, path: Path) -> GgufFile:
        """Reads the file, and the other ones of a model that is split into several.

        Raises CheckpointError naming the file, and the key or the tensor.
        """
        metadata, found = _read(path)
        file = cls(path, metadata, found)
        count = file.number("split.count", 1)
        if count <= 1:  # llama-gguf-split leaves 0 where it merged several
            return file
        name = _PART.fullmatch(path.name)
        if name is None or int(name[2]) != 1 or int(name[3]) != count:
            raise CheckpointError(
                f"{path} is one of {count} files of a model: give the first one, "
                f"NAME-00001-of-{count:05}.gguf"
            )
        for part in range(2, count + 1):
            _, more = _read(path.with_name(f"{name[1]}-{part:05}-of-{count:05}.gguf"))
            found |= more
        total = file.number("split.tensors.count", len(found))
        if total != len(found):
            raise CheckpointError(f"{path}: its files have {len(found)} of {total} tensors")
        return file

    @property
    def files(self) -> list[Path]:
        return sorted({self.path, *(tensor.file for tensor in self.tensors.values())})

    @property
    def architecture(self) -> str:
        """`general.architecture`, the prefix of the model's keys."""
        return self.text("general.architecture")

    @property
    def vocab_size(self) -> int:
        """Number of tokens that have an embedding. Raises CheckpointError without embeddings."""
        return self.tensor("token_embd.weight").shape[0]

    def tensor(self, name: str) -> GgufTensor:
        """A tensor of two dimensions. Raises CheckpointError without it."""
        tensor = self.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2:
            raise CheckpointError(f"{self.path} lacks tensor {name}, a matrix")
        return tensor

    def text(self, key: str, default: str | None = None) -> str:
        """The text of a key. Raises CheckpointError without one."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a text")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """The whole number of a key, from 0. Raises CheckpointError without one."""
        value = self.metadata.get(key, default)
        if type(value) is not int or value < 0:
            raise self.error(key, "a whole number from 0")
        return value

    def texts(self, key: str) -> list[str]:
        """The texts of a key; empty where it is absent. Raises CheckpointError for other values."""
        value = self.metadata.get(key, [])
        if value == []:
            return []
        if not isinstance(value, TextArray):
            raise self.error(key, "an array of texts")
        return value.texts()

    def error(self, key: str, supported: str) -> CheckpointError:
        """The error of a missing or unsupported value."""
        found = quoted(self.metadata[key]) if key in self.metadata else "missing"
        return CheckpointError(f"{self.path}: {key} is {found}; supported: {supported}")


class _Cursor:
    """Reads values one after the other, none beyond the end of the file."""

    def __init__(self, file: Path, data: mmap.mmap, offset: int = 0) -> None:
        self.file, self.data, self.offset = file, data, offset

    def value(self, form: str, what: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.skip(struct.calcsize(form), what))
        return value

    def skip(self, num_bytes: int, what: str) -> int:
        """Moves behind some bytes, and returns where they begin."""
        begin, end = self.offset, self.offset + num_bytes
        if end > len(self.data):
            raise CheckpointError(
                f"{self.file} is truncated: it has {len(self.data)} bytes, and {what} ends at {end}"
            )
        self.offset = end
        return begin

    def text(self, what: str) -> str:
        size = self.value("Q", what)
        begin = self.skip(size, what)
        try:
            return self.data[begin : begin + size].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file}: {what} is not UTF-8: {error}") from error

    def texts(self, count: int, what: str) -> Iterator[tuple[int, int]]:
        """Where each of some texts begins and ends."""
        offset, data, last = self.offset, self.data, len(self.data) - _SIZE.size
        for _ in range(count):
            if offset > last:
                offset = len(data) + 1  # reported as truncated
                break
            begin = offset + _SIZE.size
            offset = begin + _SIZE.unpack_from(data, offset)[0]
            yield begin, offset
        self.skip(offset - self.offset, what)

    def count(self, most: int, what: str) -> int:
        count: int = self.value("Q", what)
        if count > most:
            raise CheckpointError(f"{self.file}: {what} is {count}; supported: up to {most}")
        return count

    def metadata_value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.value(_SCALARS[kind], key)
        if kind == _TEXT:
            return self.text(key)
        if kind != _ARRAY:
            raise CheckpointError(f"{self.file}: {key} has a value of type {kind}, which is none")
        inner = self.value("I", key)
        count = self.count(len(self.data), f"the length of {key}")
        if inner == _TEXT:
            begin = self.offset
            for _ in self.texts(count, key):
                pass
            return TextArray(self.file, begin, count)
        if inner not in _SCALARS:
            raise CheckpointError(f"{self.file}: {key} is an array of arrays")
        form = f"<{count}{_SCALARS[inner]}"
        begin = self.skip(struct.calcsize(form), key)
        return list(struct.unpack_from(form, self.data, begin))

    def tensor(self) -> GgufTensor:
        """A tensor, whose offset is still that in the data."""
        name = self.text("the name of a tensor")
        what = f"tensor {quoted(name)}"
        dimensions = self.value("I", what)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{self.file}: {what} has {dimensions} dimensions")
        shape = tuple(self.count(1 << 40, f"a size of {what}") for _ in range(dimensions))[::-1]
        number, offset = self.value("I", what), self.value("Q", what)
        kind = _NAMES.get(number, str(number))
        if kind not in TYPES:
            raise CheckpointError(
                f"{self.file}: {what} has type {kind}; supported: {', '.join(TYPES)}"
            )
        if shape[-1] % TYPES[kind].elements:
            raise CheckpointError(
                f"{self.file}: {what} has {shape[-1]} inputs; of type {kind} they have to be a "
                f"multiple of {TYPES[kind].elements}"
            )
        return GgufTensor(name, self.file, kind, shape, offset)


@contextmanager
def _mapped(file: Path) -> Iterator[mmap.mmap]:
    """A file's bytes."""
    try:
        with open_regular(file) as stream:
            if not os.fstat(stream.fileno()).st_size:
                raise CheckpointError(f"{file} is empty")
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    with data:
        yield data


def _read(file: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """The metadata and the tensors of one file."""
    with _mapped(file) as data:
        cursor = _Cursor(file, data)
        magic = data[: cursor.skip(len(_MAGIC), "its magic number") + len(_MAGIC)]
        if magic != _MAGIC:
            raise CheckpointError(f"{file} is not a GGUF file: it begins with {magic!r}")
        version = cursor.value("I", "its version")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{file}: its version is {version}; supported: little-endian GGUF of version "
                f"{' or '.join(map(str, _VERSIONS))}"
            )
        num_tensors = cursor.count(_MAX_TENSORS, "the number of tensors")
        num_keys = cursor.count(_MAX_KEYS, "the number of keys")
        metadata = {}
        for _ in range(num_keys):
            key = cursor.text("a key")
            metadata[key] = cursor.metadata_value(cursor.value("I", key), key)
        tensors = [cursor.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{file}: general.alignment is {quoted(alignment)}")
        begin = -(-cursor.offset // alignment) * alignment
        return metadata, dict(_placed(tensors, begin, len(data)))


def _placed(tensors: list[GgufTensor], begin: int, size: int) -> Iterator[tuple[str, GgufTensor]]:
    """Tensors with their offsets in the file, whose data begins at `begin`."""
    for tensor in tensors:
        placed = tensor._replace(offset=begin + tensor.offset)
        if (end := placed.offset + placed.num_bytes) > size:
            raise CheckpointError(
                f"{tensor.file} is truncated: it has {size} bytes, and tensor "
                f"{quoted(tensor.name)} ends at {end}"
            )
        yield tensor.name, placed
