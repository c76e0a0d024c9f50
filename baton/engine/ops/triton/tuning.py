"""Which block sizes, warps and stages a kernel is launched with, by GPU and shape.

Values come from `configs/`: one file for each compute capability, and one for the interpreter. They
are reasoned, not measured; what `python -m baton.engine.ops.triton tune` measures on a GPU is kept
in the user's cache and goes before them. A file has, for each kernel, pairs of the shape that a
configuration is for, in which a field that is not named does not matter, and the configuration.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
import triton

from baton.engine.ops.triton.spec import Config, Key

SHIPPED = Path(__file__).parent / "configs"

# What was measured is used up to so many doublings from its shape; then reasoned values are.
REACH = 2.0


@dataclass(frozen=True)
class Configs:
    """A file of configurations: measured on a GPU, or reasoned."""

    measured: bool
    kernels: dict[str, list[tuple[Key, Config]]]

    def nearest(self, kernel: str, key: Key) -> Config | None:
        """That of the nearest shape, the first of equals.

        None without any, or where what was measured is too far to say anything.
        """
        near = [
            (distance, config)
            for when, config in self.kernels.get(kernel, ())
            if (distance := _distance(when, key)) is not None
            and (distance <= REACH or not self.measured)
        ]
        return min(near, key=lambda pair: pair[0])[1] if near else None


def _distance(when: Key, key: Key) -> float | None:
    """How far a key is, in doublings over all its numbers; None if it is another's."""
    distance = 0.0
    for name, wanted in when.items():
        found = key.get(name)
        if isinstance(found, int) and isinstance(wanted, int):
            distance += abs(math.log2(max(found, 1) / max(wanted, 1)))
        elif found != wanted:
            return None
    return distance


def choose(kernel: str, key: Key, device: torch.device) -> Config:
    """The configuration of a launch: about a microsecond once a key was seen.

    LookupError if no file names the kernel.
    """
    return _chosen(kernel, tuple(key.items()), device)


@lru_cache(maxsize=4096)
def _chosen(kernel: str, key: tuple[tuple[str, int | str], ...], device: torch.device) -> Config:
    for file in in_effect(device):
        if found := read(file).nearest(kernel, dict(key)):
            return found
    raise LookupError(f"no configuration of {kernel} for {dict(key)}")


def in_effect(device: torch.device) -> Sequence[Path]:
    """Files in order of precedence: the user's, the GPU's, those of older GPUs.

    Launches on the meta device are compiled for the architecture that Triton's driver names.
    """
    if device.type == "meta":
        return shipped_for(triton.runtime.driver.active.get_current_target().arch)
    if device.type != "cuda":
        return [SHIPPED / "interpreter.json"]
    major, minor = torch.cuda.get_device_capability(device)
    own = user_file(torch.cuda.get_device_name(device))
    return [*([own] if own.is_file() else []), *shipped_for(major * 10 + minor)]


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


@cache
def read(file: Path) -> Configs:
    """ValueError, with the file's name, if it is not of the form that `write` gives."""
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
        kernels: dict[str, list[tuple[Key, Config]]] = {
            name: [
                (dict(when), {size: int(value) for size, value in config.items()})
                for when, config in entries
            ]
            for name, entries in text["kernels"].items()
        }
        return Configs(bool(text["measured"]), kernels)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} is no file of kernel configurations: {error!r}") from error


def write(file: Path, configs: Configs) -> None:
    """As `read` takes them; a reader sees the old file or all of the new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(configs), indent=2) + "\n", encoding="utf-8")
    partial.replace(file)
    forget()


def forget() -> None:
    """Files are read again at the next launch."""
    _chosen.cache_clear()
    read.cache_clear()
