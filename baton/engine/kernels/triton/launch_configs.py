"""Configurations of launches: block sizes, warps and stages by GPU and shape.

Shipped values are in `configs/`, one file a compute capability and one for the interpreter; those
of sm_90 are in part measured, all others derived. Values that
`python -m baton.engine.kernels.triton tune` measures on a GPU are kept in the user's cache and take
precedence. A file has, for each kernel, pairs of a shape and its configuration; a field that a
shape does not name is not compared.
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

from baton.cuda import compute_capability
from baton.engine.kernels.triton.specs import Config, Key

SHIPPED = Path(__file__).parent / "configs"

# A measured configuration is used up to this distance from its shape, in doublings; further away
# a shipped one is.
REACH = 2.0


@dataclass(frozen=True)
class Configs:
    """The contents of a file of configurations."""

    measured: bool
    kernels: dict[str, list[tuple[Key, Config]]]

    def nearest(self, kernel: str, key: Key) -> Config | None:
        """The configuration of the nearest shape; the first of equally near ones.

        None if there is none, or if the nearest measured shape is too far away.
        """
        reach = REACH if self.measured else 1e9
        near = [(_distance(when, key), config) for when, config in self.kernels.get(kernel, ())]
        distance, config = min(near, key=lambda pair: pair[0], default=(math.inf, None))
        return config if distance <= reach else None


def _distance(when: Key, key: Key) -> float:
    """Distance of two keys: doublings, summed over all numbers; infinite if texts differ."""
    distance = 0.0
    for name, wanted in when.items():
        found = key.get(name)
        if isinstance(found, int) and isinstance(wanted, int):
            distance += abs(math.log2(max(found, 1) / max(wanted, 1)))
        elif found != wanted:
            return math.inf
    return distance


def choose(kernel: str, key: Key, device: torch.device) -> Config:
    """The configuration of a launch; takes about a microsecond for a known key.

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
    """Files in order of precedence: the user's, if it exists, and the shipped one.

    On the meta device launches are compiled for the architecture that Triton's driver names.
    """
    if device.type == "meta":
        return [shipped_for(triton.runtime.driver.active.get_current_target().arch)]
    if device.type != "cuda":
        return [SHIPPED / "interpreter.json"]
    measured = user_file(torch.cuda.get_device_name(device))
    return [*([measured] if measured.is_file() else []), shipped_for(compute_capability(device))]


def shipped_for(capability: int) -> Path:
    """The file for a compute capability such as 89: its own, or the nearest lower one."""
    known = sorted(int(file.stem[3:]) for file in SHIPPED.glob("sm_*.json"))
    nearest = max((one for one in known if one <= capability), default=known[0])
    return SHIPPED / f"sm_{nearest}.json"


def user_file(device_name: str) -> Path:
    """File of the measured configurations of a device with this version of Triton."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", device_name).strip("-")
    return cache_folder() / f"{name}-{triton.__version__}.json"


def cache_folder() -> Path:
    """Folder for measured configurations and compiled kernels, in the user's cache."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_home / "baton" / "kernels"


@cache
def read(file: Path) -> Configs:
    """Reads what `write` wrote. Raises ValueError, with the file's name, for anything else."""
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
    """Writes configurations; a reader sees the old file or all of the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(configs), indent=2) + "\n", encoding="utf-8")
    partial.replace(file)
    forget()


def forget() -> None:
    """Clears caches: files are read again at the next launch."""
    _chosen.cache_clear()
    read.cache_clear()


# Query rows of a tile: the fewest that tensor cores take, and the most that registers hold.
LEAST_TILE_ROWS, MOST_TILE_ROWS = 16, 128
WIDE_HEAD = 256


def most_tile_rows(head_size: int) -> int:
    """Most query rows of a tile of attention; their sums are in registers."""
    return MOST_TILE_ROWS if head_size <= WIDE_HEAD else MOST_TILE_ROWS // 4


def tile_rows(num_rows: int, sequences: int, group: int, head_size: int = 0) -> int:
    """Rows of a tile for chunks of `num_rows` rows in all: the average chunk, padded.

    group: rows that each of these becomes, such as the query heads that share a KV head ·
    head_size: of attention.
    """
    average = -(-num_rows // max(sequences, 1)) * group
    rows = max(LEAST_TILE_ROWS, int(triton.next_power_of_2(average)))
    return min(rows, most_tile_rows(head_size))
