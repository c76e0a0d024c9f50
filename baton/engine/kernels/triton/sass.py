"""Facts about a kernel's speed from its machine code (SASS): innermost loops and resources.

Instructions a weight show whether a loop is bound by memory or by arithmetic: an H200 can issue
about 6 for each byte that it reads (132 multiprocessors, 4 schedulers of 32 lanes, 1.7 GHz; 4.8
TB/s), and thus 3 for a 4-bit weight.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import triton
from triton.runtime.cache import get_cache_manager

# Products of tensor cores; a warp does a quarter of the multiply-adds of a wgmma.
_PRODUCT = re.compile(r"(?:(H|I|Q|B)?G?MMA)\.(\d+)(?:x(\d+)x(\d+))?")
_LOAD = re.compile(r"(LDG|LDGSTS|UBLKCP|UTMALDG)\b")
_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}  # else 4
_ADDRESS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")


class Resources(NamedTuple):
    """Registers of a thread, and bytes that it spills."""

    registers: int
    spilled: int


class Loop(NamedTuple):
    """An innermost loop of a warp.

    products: number of tensor core instructions by name · multiplied: their multiply-adds · loads:
    number of instructions by bytes of a thread; 0 for bulk copies.
    """

    instructions: int
    products: Counter[str]
    multiplied: int
    loads: Counter[int]


NO_LOOP = Loop(0, Counter(), 0, Counter())


class Processors(NamedTuple):
    """A GPU's multiprocessors, and the limits of one (CUDA C++ Programming Guide, compute
    capabilities; A100, H100 and B200)."""

    number: int
    shared_bytes: int
    registers: int = 65536
    warps: int = 64
    programs: int = 32

    def places(self, registers: int, shared: int, warps: int) -> int:
        """Number of programs that run at once. Registers are allocated in units of 256 a warp."""
        of_warp = max(1, -(-registers * 32 // 256)) * 256
        by_shared = self.shared_bytes // (shared + 1024)
        fit = min(self.registers // (of_warp * warps), by_shared, self.warps // warps)
        return self.number * min(fit, self.programs)


PROCESSORS = {
    80: Processors(108, 164 << 10), 90: Processors(132, 228 << 10), 100: Processors(148, 228 << 10)
}  # fmt: skip


@cache
def resources(cubin: bytes) -> Resources:
    """Resources as cuobjdump reports them."""
    usage = _run(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin)
    registers, stack, local = (
        max(map(int, re.findall(rf"\b{name}:(\d+)", usage)), default=0)
        for name in ("REG", "STACK", "LOCAL")
    )
    return Resources(registers, stack + local)


@cache
def loops(cubin: bytes) -> list[Loop]:
    """Innermost loops: from a label to a branch back to it, with no such branch in between."""
    instructions, labels, backward = list[str](), dict[str, int](), list[tuple[int, int]]()
    for line in _run(triton.knobs.nvidia.nvdisasm.path, "-c", cubin).splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif found := _ADDRESS.search(line):
            instructions.append(found[1])
            target = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", found[1])
            # A kernel ends with a branch to itself.
            if target and labels.get(target[1], len(instructions)) < len(instructions) - 1:
                backward.append((labels[target[1]], len(instructions)))
    return [
        _loop(instructions[first:end])
        for first, end in backward
        if not any(first <= a and b <= end and (a, b) != (first, end) for a, b in backward)
    ]


def _loop(instructions: Sequence[str]) -> Loop:
    products, loads, multiplied = Counter[str](), Counter[int](), 0
    for name in map(_name, instructions):
        if found := _PRODUCT.match(name):
            kind = name.partition(".")[0]
            products[kind] += 1
            multiplied += _multiplied(kind, *found.groups()[1:])
        elif _LOAD.match(name):
            loads[_width(name)] += 1
    return Loop(len(instructions), products, multiplied, loads)


def _name(instruction: str) -> str:
    """Name of an instruction, without its predicate."""
    first, _, rest = instruction.partition(" ")
    return rest.split()[0] if first.startswith("@") else first


def _multiplied(kind: str, m: str, n: str | None, k: str | None) -> int:
    """Multiply-adds of an instruction such as `HGMMA.64x16x16` or `HMMA.16816` for one warp."""
    if n and k:
        return int(m) * int(n) * int(k) // 4
    digits = re.fullmatch(r"(16|8)(8)(\d+)", m)
    return int(digits[1]) * int(digits[2]) * int(digits[3]) if digits else 0


def _width(name: str) -> int:
    parts = name.split(".")
    if parts[0] in ("UBLKCP", "UTMALDG"):
        return 0
    return next((_BYTES[part] for part in parts if part in _BYTES), 4)


def _run(program: str, option: str, cubin: bytes) -> str:
    """What a program of CUDA prints about machine code; kept in Triton's cache."""
    kept = get_cache_manager(hashlib.sha256(f"{program} {option} ".encode() + cubin).hexdigest())
    if known := kept.get_file("printed"):
        return zlib.decompress(Path(known).read_bytes()).decode()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, option, file.name], capture_output=True, text=True, check=True, timeout=60
        )
    kept.put(zlib.compress(done.stdout.encode()), "printed")
    return done.stdout
