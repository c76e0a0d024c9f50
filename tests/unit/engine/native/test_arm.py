"""Kernels for ARM, in an emulator: whole steps compute what this CPU's do."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from baton.engine.kernels.native import library
from tests.waiting import WAIT_S

CROSS = "aarch64-linux-gnu-g++"
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64") or ""
SYSROOT = "/usr/aarch64-linux-gnu"
TARGETS = {target.name: target for target in library.TARGETS}


def scores(
    folder: Path, compiler: str, target: str, dtype: torch.dtype, *runner: str
) -> torch.Tensor:
    """What `step.cpp` prints, compiled for a target: `[models, scores]`."""
    sources = [source for source in library.SOURCES.glob("*.cpp") if source.stem != "forward"]
    flags = (
        *library.FLAGS,
        *TARGETS[target].flags,
        *library.DEFINES[dtype],
        "-O1",
        "-static-libstdc++",
    )
    program = folder / target
    files = [Path(__file__).with_name("step.cpp"), *sources]
    subprocess.run(
        [compiler, *flags, f"-I{library.SOURCES}", *map(str, files), "-o", str(program)], check=True
    )
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
    target: str, dtype: torch.dtype, limits: tuple[float, ...], tmp_path: Path
) -> None:
    expected = scores(tmp_path, library.COMPILER, "avx2", dtype)
    got = scores(tmp_path, CROSS, target, dtype, EMULATOR, "-L", SYSROOT)
    assert (expected.abs().amax(dim=1) > 1).all(), "a model that says nothing proves nothing"
    apart = (got - expected).abs().amax(dim=1).tolist()
    assert all(found <= limit for found, limit in zip(apart, limits, strict=True)), apart
