"""Every kernel becomes machine code for A100, H100 and B200, in a process that has no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from baton.engine.kernels.triton.check import BUDGETS

PREFILL = re.compile(r"prefill_attention-tokens-70-.*ragged-0-prefill_kernel-")
DECODE = re.compile(r"decode_attention-(programs|window)-.*-decode_kernel-")
DECODE_SIZES = re.compile(r"^decode_attention +decode_kernel +sm_(\d+) +\d+ +(\d+)", re.MULTILINE)
PROCESSOR_BYTES = {"80": 164 << 10, "90": 228 << 10, "100": 228 << 10}  # shared memory
DECODE_FP8 = re.compile(r"decode_attention-.*kv-fp8-.*-decode_kernel-")

BROKEN = """
from types import SimpleNamespace
import torch, triton
import triton.language as tl

@triton.jit
def broken(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), nothing)

def trial(shape, device):
    arguments = [torch.empty(16, device=device)] if shape["called"] == "well" else []
    return SimpleNamespace(run=lambda config: broken[(1,)](*arguments, SIZE=16))

SPECS = [SimpleNamespace(name="broken", trial=trial, cases=[{"called": "well"}, {"called": "ill"}])]
"""


def check(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command. Compiled kernels are kept in the user's cache: a second run is quick."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "baton.engine.kernels.triton", "check", *arguments],
        capture_output=True, text=True, check=False, env={**kept, "PYTHONPATH": path},
    )  # fmt: skip


def test_all_kernels_compile_for_all_architectures(tmp_path: Path) -> None:
    """Some cases of each: all would take minutes."""
    done = check(
        "--most", "3", "--ptx", str(tmp_path), "--module", "kvtransfer.kernels.copy_and_checksum"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^(\d+) of (\d+) compiled$", done.stdout, re.MULTILINE)
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found and found[1] == found[2] == str(len(files)), "two cases have one name"
    for architecture in (80, 90, 100):
        its = {name: text for name, text in files.items() if f"-sm_{architecture}." in name}
        assert its and all(f".target sm_{architecture}" in text for text in its.values())
        # A product and a sum fused into one instruction would round once, and miss ties.
        quantized = [text for name, text in its.items() if name.startswith("quantize_rows-")]
        assert quantized
        assert not any("fma." in text or "div.rn.f32" not in text for text in quantized)
        moved = {name: text for name, text in its.items() if name.startswith("move_blocks-")}
        assert moved
        for name, text in moved.items():  # 16 bytes at a time
            assert text.count("ld.global.v4.b32") >= 4, name
            assert (text.count("st.global.v4.b32") >= 4) != ("use-checksum" in name), name
            # The first word's place: beyond 8 GiB it must be no other kernel.
            assert re.search(r"\.param \.u64 \w+_param_5,", text), name
    assert not re.search(r"^move_blocks( +\S+){4} +[1-9]", done.stdout, re.MULTILINE), "it spills"
    hopper = {name: text for name, text in files.items() if name.endswith("-sm_90.ptx")}
    (prefill,) = (text for name, text in hopper.items() if PREFILL.match(name))
    assert "wgmma.mma_async" in prefill, "Hopper's products of whole tiles"
    decode = [text for name, text in hopper.items() if DECODE.match(name)]
    assert decode
    for text in decode:  # 16 bytes at a time, which pass by the first-level cache
        assert "cp.async.cg.shared.global" in text and "cp.async.ca" not in text
    (decode_fp8,) = (text for name, text in hopper.items() if DECODE_FP8.match(name))
    widths = [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\..*, 0x(\w+), ", decode_fp8)]
    # 16 bytes of elements at a time; 4 are a scale, of which there is one for a whole row.
    assert {*widths} == {16, 4} and 4 * widths.count(4) < 16 * widths.count(16)
    assert "ldmatrix" in decode_fp8 and "fma.rn.bf16x2" in decode_fp8, "pairs of elements"
    for architecture, shared in DECODE_SIZES.findall(done.stdout):  # as all configurations ask for
        assert 2 * (int(shared) + 1024) <= PROCESSOR_BYTES[architecture], "two fit a multiprocessor"
    bfloat16 = re.findall(
        r"^(?:pre|de)\S+_attention(?: +\S+){4} +(\d+) .*  (?:programs|tokens|window)=",
        done.stdout,
        re.M,
    )
    assert bfloat16 and not any(map(int, bfloat16)), "attention over a bfloat16 pool spills"


def test_launches_as_they_are_served_keep_to_their_budgets() -> None:
    kernels = (
        *("skinny_matmul", "group_scaled_linear", "fused_moe", "route"),
        *("delta_rule", "latent_attention"),
    )
    named = [word for name in kernels for word in ("--kernel", name)]
    done = check("--served", "--arch", "90", "--most", "12", *named)
    assert done.returncode == 0, done.stdout + done.stderr
    for function in json.loads(BUDGETS.read_text())["sm_90"]:
        assert f" {function} " in done.stdout, "it has a budget, and is launched by none of them"


def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_kernels.py").write_text(BROKEN)
    arguments = ("--module", "broken_kernels", "--kernel", "broken", "--arch", "90")
    done = check(*arguments, path=str(tmp_path))
    assert done.returncode == 1
    assert "0 of 2 compiled" in done.stdout.splitlines()
    lines = done.stderr.splitlines()
    assert any(line.startswith("broken (called=well) for sm_90: ") for line in lines)
    assert any("missing" in line and "(called=ill)" in line for line in lines)
