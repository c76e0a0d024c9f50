"""GPUs of this machine as `nvidia-smi` prints them.

The program comes with every driver and, in containers, with the capability `utility`; it needs
neither torch nor a CUDA context, and is killed if the driver hangs. Its layout has changed over the
years: text that is not recognised is skipped.
"""

from __future__ import annotations

import logging
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

PROGRAM = "nvidia-smi"
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_FIELDS = ("index", "uuid", "name", "memory.total", "compute_cap")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")
_MIB = 1 << 20


@dataclass(frozen=True)
class Card:
    """One GPU that the driver shows to this process, regardless of CUDA_VISIBLE_DEVICES."""

    index: int
    uuid: str
    name: str
    memory_bytes: int  # 0: unknown
    capability: str  # "9.0"; empty: unknown


def cards(timeout_s: float) -> list[Card]:
    """The GPUs of this machine; empty without a driver, or if it does not answer in time."""
    query = f"--query-gpu={','.join(_FIELDS)}"
    return parse_cards(_output(timeout_s, query, "--format=csv,noheader,nounits"))


def links(uuid: str, timeout_s: float) -> list[str]:
    """Connections of a GPU to the others, such as "NV18 GPU-..."; see `parse_links`."""
    deadline = time.monotonic() + timeout_s
    uuids = {card.index: card.uuid for card in cards(timeout_s)}
    if len(uuids) < 2:
        return []
    return parse_links(_output(deadline - time.monotonic(), "topo", "-m"), uuids, uuid)


def query(fields: Sequence[str], timeout_s: float, uuid: str = "") -> list[str]:
    """Values of fields of one GPU, or of the first; empty if they cannot be had in time."""
    which = [f"--id={uuid}"] if uuid else []
    wanted = (f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    lines = _output(timeout_s, *which, *wanted).splitlines()
    return [value.strip() for value in lines[0].split(",")] if lines else []


def driver_version() -> str:
    """The kernel module's version, "550.90.07"; empty where it is not loaded."""
    try:
        text = KERNEL_MODULE.read_text()
    except OSError:
        return ""
    match = re.search(r"Kernel Module\b[^\d\n]*(?:x86_64|aarch64)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def parse_cards(text: str) -> list[Card]:
    """The lines of `--query-gpu=index,uuid,name,memory.total,compute_cap` in csv without units."""
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_FIELDS) or not values[0].isdigit():
            continue
        index, uuid, name, mebibytes, capability = values
        memory = int(mebibytes) * _MIB if mebibytes.isdigit() else 0
        capability = capability if re.fullmatch(r"\d+\.\d+", capability) else ""
        found.append(Card(int(index), uuid, name, memory, capability))
    return found


def parse_links(text: str, uuids: Mapping[int, str], uuid: str) -> list[str]:
    """The row of one GPU in the matrix of `topo -m`: "NV18 GPU-..." for each other GPU.

    uuids: by the GPUs' numbers. Network cards, affinities and unknown kinds of links are skipped.
    """
    rows = [line.split() for line in _COLOURS.sub("", text).splitlines()]
    matrix = [row for row in rows if row and _GPU.fullmatch(row[0])]
    if not matrix:
        return []
    columns = [uuids.get(int(cell[3:])) for cell in matrix[0] if _GPU.fullmatch(cell)]
    for name, *cells in matrix[1:]:
        if uuids.get(int(name[3:])) == uuid:
            pairs = zip(cells, columns, strict=False)
            return [f"{cell} {other}" for cell, other in pairs if other and _LINK.fullmatch(cell)]
    return []


def _output(timeout_s: float, *args: str) -> str:
    """The program's output; empty if it is missing, fails, or does not end in time."""
    try:
        done = subprocess.run(
            [PROGRAM, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=max(timeout_s, 0.0), check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("%s: %s", PROGRAM, error)
        return ""
    return done.stdout
