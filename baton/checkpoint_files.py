"""Reads files of a model directory, which is not trusted: regular ones, of bounded size.

For the text side and the engine, which do not import each other.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from baton.errors import CheckpointError

MAX_TOKENIZER_BYTES = 256 << 20
MAX_JSON_BYTES = 16 << 20
MAX_LABELS = 4096
CLASSIFIER = "ForSequenceClassification"  # the end of such an architecture's name


@contextmanager
def open_regular(file: Path) -> Iterator[BinaryIO]:
    """A regular file to read. Raises FileNotFoundError, and CheckpointError naming the file."""
    try:
        # A pipe without a writer is opened at once, and refused below.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise CheckpointError(f"{file}: cannot be read: it is not a regular file")
            yield stream
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(file) from None
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def read_bytes(file: Path, most: int) -> bytes:
    """A regular file's bytes. Raises as `open_regular` does, also where there are over `most`."""
    with open_regular(file) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise CheckpointError(f"{file}: cannot be read: it has over {most} bytes")
    return content


def parse_json_value(file: Path, content: str | bytes) -> Any:
    """What a file's content is; raises CheckpointError naming the file."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error


def parse_json(file: Path, content: str | bytes) -> dict[str, Any]:
    """The object that a file's content is; raises CheckpointError naming the file."""
    value = parse_json_value(file, content)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, not {type(value).__name__}")
    return value


def label_names(file: Path, config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The labels of a sequence classification model by its config.json, two if that names none.

    None for other models. Raises CheckpointError for labels that are not numbered from 0.
    """
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    if not isinstance(architecture, str) or not architecture.endswith(CLASSIFIER):
        return None
    if (names := config.get("id2label")) is None:
        count = config.get("num_labels")
        count = 2 if count is None else count
        if type(count) is not int or not 0 < count <= MAX_LABELS:
            raise CheckpointError(f"{file}: num_labels must be 1 to {MAX_LABELS}, not {count!r}")
        return tuple(f"LABEL_{index}" for index in range(count))
    by_index = dict(names) if isinstance(names, dict) else {}
    found = tuple(str(by_index.get(str(index))) for index in range(len(by_index)))
    if not 0 < len(found) <= MAX_LABELS or by_index.keys() != set(map(str, range(len(found)))):
        raise CheckpointError(f"{file}: id2label must name labels 0, 1, ..., {MAX_LABELS} at most")
    return found
