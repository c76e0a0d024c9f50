"""Every kernel becomes machine code for A100, H100 and B200, in a process that has no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ARCHITECTURES = (80, 90, 100)


def check(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """What the command prints; its error and status as an exception.

    Compiled kernels are kept in the user's cache: a second run takes seconds.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "baton.engine.ops.triton", "check", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
        env={**kept, **(environment or {})},
    )
    if done.returncode:
        raise AssertionError(f"{done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PTX of some cases of every kernel, a file each; all would take minutes."""
    folder = tmp_path_factory.mktemp("compiled")
    module = ("--module", "kvtransfer.kernels.blocks")
    told = check("--most", "3", "--ptx", str(folder / "ptx"), *module)
    compiled = re.search(r"^(\d+) of (\d+) compiled$", told, re.MULTILINE)
    assert compiled and compiled[1] == compiled[2]
    files = list((folder / "ptx").iterdir())
    assert len(files) == int(compiled[1]), "two cases have one name"
    return folder / "ptx"


def test_all_kernels_compile_for_all_architectures(ptx: Path) -> None:
    for architecture in ARCHITECTURES:
        files = list(ptx.glob(f"*-sm_{architecture}.ptx"))
        assert files
        for file in files:
            assert f".target sm_{architecture}" in file.read_text(), file.name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quantised_values_are_rounded_twice_as_torch_does(ptx: Path, architecture: int) -> None:
    """A product and a sum fused into one instruction would round once, and miss ties."""
    files = list(ptx.glob(f"quantize_rows-*-sm_{architecture}.ptx"))
    assert files
    for file in files:
        text = file.read_text()
        assert "fma." not in text and "div.rn.f32" in text


def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_kernels.py").write_text(BROKEN)
    with pytest.raises(AssertionError) as failed:
        check(
            "--module", "broken_kernels", "--kernel", "broken", "--arch", "90",
            environment={"PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
    lines = str(failed.value).splitlines()
    assert lines[0] == "1"
    assert "0 of 2 compiled" in lines
    assert any(line.startswith("broken (of itself) for sm_90: ") for line in lines)
    assert any("missing" in line and "(by its call)" in line for line in lines)


BROKEN = """
from types import SimpleNamespace
import torch, triton
import triton.language as tl

@triton.jit
def broken(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), nothing)

SPEC = SimpleNamespace(name="broken", launches={
    "of itself": (80, lambda device: broken[(1,)](torch.empty(16, device=device), SIZE=16)),
    "by its call": (80, lambda device: broken[(1,)](SIZE=16)),
})
"""
