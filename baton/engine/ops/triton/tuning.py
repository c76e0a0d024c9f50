"""Which block sizes, warps and stages a kernel is launched with, by GPU and shape.

Values come from `configs/`: one file for each compute capability, and one for the interpreter. They
are reasoned, not measured; what `python -m baton.engine.ops.triton tune` measures on a GPU is kept
in the user's cache and goes before them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

from baton.engine.ops.triton.spec import Config, Key

SHIPPED = Path(__file__).parent / "configs"
INTERPRETER = "interpreter"

# What was measured is used up to so many doublings from its shape; then reasoned values are.
REACH = 2.0


@dataclass(frozen=True)
class Entry:
    """A configuration and the shape that it is for; a field that is not named does not matter."""

    when: Key
    config: Config

    def distance(self, key: Key) -> float | None:
        """How far a key is, in doublings over all its numbers; None if it is another's."""
        distance = 0.0
        for name, wanted in self.when.items():
            found = key.get(name)
            if isinstance(found, int) and isinstance(wanted, int):
                distance += abs(math.log2(max(found, 1) / max(wanted, 1)))
            elif found != wanted:
                return None
        return distance


@dataclass(frozen=True)
class Configs:
    """A file of configurations.

    source: where they come from · measured: on a GPU; otherwise reasoned.
    """

    source: str
    measured: bool
    kernels: dict[str, tuple[Entry, ...]]

    def nearest(self, kernel: str, key: Key) -> Config | None:
        """That of the entry whose shape is nearest, the first of equals.

        None without any, or where what was measured is too far to say anything.
        """
        near = [
            (distance, entry.config)
            for entry in self.kernels.get(kernel, ())
            if (distance := entry.distance(key)) is not None
        ]
        distance, config = min(near, key=lambda pair: pair[0], default=(0.0, None))
        return None if self.measured and distance > REACH else config


def choose(kernel: str, key: Key, device: torch.device) -> Config:
    """The configuration of a launch: about a microsecond once a key was seen.

    LookupError if no file names the kernel.
    """
    return _chosen(kernel, tuple(key.items()), device)


@lru_cache(maxsize=4096)
def _chosen(kernel: str, key: tuple[tuple[str, int | str], ...], device: torch.device) -> Config:
    for configs in in_effect(device):
        if found := configs.nearest(kernel, dict(key)):
            return found
    raise LookupError(f"no configuration of {kernel} for {dict(key)}")


@cache
def in_effect(device: torch.device) -> Sequence[Configs]:
    """Files in order of precedence: the user's, the GPU's, those of older GPUs."""
    if device.type != "cuda":
        return (read(SHIPPED / f"{INTERPRETER}.json"),)
    major, minor = torch.cuda.get_device_capability(device)
    own = user_file(torch.cuda.get_device_name(device))
    files = [own] if own.is_file() else []
    return tuple(read(file) for file in [*files, *shipped_for(major * 10 + minor)])


def shipped_for(capability: int) -> list[Path]:
    """Shipped files for a GPU of a capability such as 89: its own or the nearest lower, then on."""
    known = sorted((int(file.stem[3:]), file) for file in SHIPPED.glob("sm_*.json"))
    below = [file for of, file in known if of <= capability]
    return below[::-1] or [known[0][1]]


def user_file(device_name: str) -> Path:
    """Where measured configurations of a device are kept, with this version of Triton."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", device_name).strip("-")
    return cache_folder() / f"{name}-{triton.__version__}.json"


def cache_folder() -> Path:
    """For what is measured or compiled, in the user's cache."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_home / "baton" / "kernels"


def read(file: Path) -> Configs:
    """ValueError, with the file's name, if it is not of the form that `write` gives."""
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
        kernels = {
            name: tuple(_entry(entry) for entry in entries)
            for name, entries in text["kernels"].items()
        }
        return Configs(str(file), bool(text["measured"]), kernels)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} is no file of kernel configurations: {error!r}") from error


def write(file: Path, configs: Configs) -> None:
    """Keeps configurations as `read` takes them; a reader sees the old file or all of the new."""
    kernels = {
        name: [
            {
                "when": dict(entry.when),
                "num_warps": entry.config.num_warps,
                "num_stages": entry.config.num_stages,
                "sizes": dict(entry.config.sizes),
            }
            for entry in entries
        ]
        for name, entries in configs.kernels.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    lines = json.dumps({"measured": configs.measured, "kernels": kernels}, indent=2)
    partial.write_text(lines + "\n", encoding="utf-8")
    partial.replace(file)


def forget() -> None:
    """Files are read again at the next launch: after one was written."""
    _chosen.cache_clear()
    in_effect.cache_clear()


def _entry(entry: dict[str, Any]) -> Entry:
    sizes = {name: int(size) for name, size in entry.get("sizes", {}).items()}
    config = Config(int(entry["num_warps"]), int(entry["num_stages"]), sizes)
    return Entry(dict(entry.get("when", {})), config)
