"""Kernels for ARM, in an emulator: whole steps compute what this CPU's do."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from baton.engine.kernels.native import library
from tests.waiting import WAIT_S

CROSS = "aarch64-linux-gnu-g++"
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64") or ""
SYSROOT = "/usr/aarch64-linux-gnu"
TARGETS = {target.name: target for target in library.TARGETS}


def scores(compiler: str, target: str, dtype: torch.dtype, *runner: str) -> torch.Tensor:
    """What `step.cpp` prints, compiled for a target: `[models, scores]`.

    Programs are kept in the user's cache, as libraries are: a second run is quick.
    """
    sources = [source for source in library.SOURCES.glob("*.cpp") if source.stem != "forward"]
    flags = (
        *library.FLAGS,
        *TARGETS[target].flags,
        *library.DEFINES[dtype],
        "-O1",
        "-static-libstdc++",
    )
    step = Path(__file__).with_name("step.cpp")
    own = hashlib.sha256(f"{compiler} {flags}".encode() + step.read_bytes()).hexdigest()[:16]
    of_library = library._file_name(TARGETS[target], dtype).removesuffix(".so")
    program = library._cache_folder() / f"step-{own}-{of_library}"
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=program.parent) as folder:
            made, files = Path(folder) / "step", map(str, (step, *sources))
            command = [compiler, *flags, f"-I{library.SOURCES}", *files, "-o", str(made)]
            subprocess.run(command, check=True)
            made.rename(program)
    printed = subprocess.check_output([*runner, str(program)], text=True, timeout=WAIT_S)
    return torch.tensor([float.fromhex(line) for line in printed.split()]).view(6, -1)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which(CROSS) or not EMULATOR,
    reason=f"{CROSS} and qemu-aarch64 are not installed",
)
@pytest.mark.parametrize(
    ("target", "dtype", "limits"),
    [
        # A last bit may give an activation or a key another int8.
        ("neon", torch.float32, (1e-5, 1e-5, 0.01, 0.01, 1e-5, 1e-5)),
        ("neon", torch.bfloat16, (0, 0, 0, 0, 0, 0)),
        # AVX2 multiplies floats where this has bfloat16.
        ("neon_bf16", torch.bfloat16, (0.05, 0.05, 0.1, 0.1, 0.05, 0.05)),
    ],
)
def test_steps_on_arm_equal_those_of_avx2(
    target: str, dtype: torch.dtype, limits: tuple[float, ...]
) -> None:
    expected = scores(library.COMPILER, "avx2", dtype)
    got = scores(CROSS, target, dtype, EMULATOR, "-L", SYSROOT)
    assert (expected.abs().amax(dim=1) > 1).all(), "a model that says nothing proves nothing"
    apart = (got - expected).abs().amax(dim=1).tolist()
    assert all(found <= limit for found, limit in zip(apart, limits, strict=True)), apart
