"""The tensors of a model directory or a GGUF file, by their headers; the model's fingerprint.

Reads headers and JSON only; torch-free. Errors name the file, and the tensor if there is one.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from baton.checkpoint_files import (
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    open_regular,
    parse_json,
    read_bytes,
)
from baton.engine.checkpoint.gguf import named_tensors
from baton.errors import CheckpointError, quoted
from baton.gguf.reader import SUFFIX, TYPES, GgufFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_TEXT = 256  # longest name or reason from a file that an error shows
# safetensors' names.
FLOATS = ("F32", "F16", "BF16", "F64")
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8,
    "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip

# The fingerprint reads SAMPLE_BYTES of a file's data at SAMPLES_PER_FILE places.
SAMPLE_BYTES = 4096
SAMPLES_PER_FILE = 64


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor, and its type and shape by the file's header.

    offset: in a GGUF file, bytes.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        count = math.prod(self.shape)
        if self.dtype in ELEMENT_BYTES:
            return count * ELEMENT_BYTES[self.dtype]
        kind = TYPES[self.dtype]
        return count // kind.elements * kind.num_bytes


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON file with an object. Raises CheckpointError."""
    try:
        return parse_json(file, read_bytes(file, MAX_JSON_BYTES))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error


def stored_tensors(directory: Path, is_tied: bool = False) -> dict[str, StoredTensor]:
    """All tensors of the model in `directory`, or of a GGUF file, by name. Raises CheckpointError.

    The prefix "model." is added where embedding models lack it. A tied model that is stored with
    its output layer only has that as its embedding.
    """
    if directory.suffix == SUFFIX:
        return {
            name: StoredTensor(name, tensor.file, tensor.type, tensor.shape, tensor.offset)
            for name, tensor in named_tensors(GgufFile.load(directory)).items()
        }
    if (directory / SINGLE_FILE).is_file():
        return _named(file_tensors(directory / SINGLE_FILE), is_tied)
    if (directory / INDEX_FILE).is_file():
        return _named(_sharded_tensors(directory), is_tied)
    missing = f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    pickles = sorted(file for end in ("bin", "pt", "pth") for file in directory.glob(f"*.{end}"))
    if pickles:
        raise CheckpointError(
            f"{missing}, only {pickles[0].name}: pickle files can run code and are never read; "
            "convert the model to safetensors (transformers: model.save_pretrained(directory))"
        )
    raise CheckpointError(f"{missing}: give a directory with safetensors weights")


def _named(tensors: dict[str, StoredTensor], is_tied: bool) -> dict[str, StoredTensor]:
    if "embed_tokens.weight" not in tensors:
        if is_tied and "lm_head.weight" in tensors:
            tensors.setdefault("model.embed_tokens.weight", tensors["lm_head.weight"])
        return tensors
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def _sharded_tensors(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    tensors: dict[str, StoredTensor] = {}
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} has a weight_map to something else than files")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {quoted(shard)}, not a safetensors file beside it"
            )
        tensors |= file_tensors(directory / shard)
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"{directory / shard} lacks tensor {name[:MAX_TEXT]}, promised by {index}"
            )
    return tensors


def file_tensors(file: Path) -> dict[str, StoredTensor]:
    """All tensors of a file, by name. Raises CheckpointError."""
    try:
        with open_regular(file):  # refuses pipes, which would block
            pass
        with safe_open(file, framework="numpy") as opened:  # checks sizes, offsets and the header
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            tensors = {
                name: StoredTensor(name, file, part.get_dtype(), tuple(part.get_shape()))
                for name, part in parts.items()
            }
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or not a safetensors file: {str(error)[:MAX_TEXT]}"
        ) from error
    return tensors


def fingerprint(path: Path, random_seed: int | None = None) -> str:
    """A hex digest that is equal on two workers if and only if they serve the same model.

    path: a model directory, a GGUF file or a config file · random_seed: of random weights. Reads
    configs, tokenizer, headers, sizes, and samples of the data, in which alone fine-tuned siblings
    differ: milliseconds for a model of any size.
    """
    digest = hashlib.sha256()
    if path.suffix == SUFFIX:
        found = GgufFile.load(path)
        for part in found.files:
            offsets = [tensor.offset for tensor in found.tensors.values() if tensor.file == part]
            _digest_samples(digest, part, min(offsets, default=part.stat().st_size))
        return digest.hexdigest()
    files = [path]
    if path.is_dir():
        names = ("config.json", "generation_config.json", "tokenizer.json")
        files = [file for name in names if (file := path / name).is_file()]
    for file in files:
        content = read_bytes(file, MAX_TOKENIZER_BYTES)
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
    if random_seed is not None:
        digest.update(f"random {random_seed}".encode())
        return digest.hexdigest()
    for file in sorted({tensor.file for tensor in stored_tensors(path).values()}):
        _digest_weights(digest, file)
    return digest.hexdigest()


def _digest_weights(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb") as stream:
        data_start = 8 + int.from_bytes(stream.read(8), "little")
    digest.update(f"{file.name} ".encode())
    _digest_samples(digest, file, data_start)


def _digest_samples(digest: hashlib._Hash, file: Path, data_start: int) -> None:
    """Adds a file's size and header, and samples of the data behind it."""
    size = file.stat().st_size
    digest.update(f"{size}\n".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(data_start))
        stride = max(SAMPLE_BYTES, (size - data_start) // SAMPLES_PER_FILE)
        for offset in range(data_start, size, stride):
            stream.seek(offset)
            digest.update(stream.read(SAMPLE_BYTES))
