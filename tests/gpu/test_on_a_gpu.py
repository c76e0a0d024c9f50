"""On a real GPU: kernels, the engine's tokens, KV between processes, a cluster's tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def figures(part: str, tmp_path: Path) -> dict[str, Any]:
    """What `make gpu` of one part finds in six minutes, without a failure."""
    file = tmp_path / "figures.json"
    command = f"-m benchmarks gpu --minutes 6 --shape 1B --only {part} --json".split()
    argv = [sys.executable, *command, str(file)]
    subprocess.run(argv, timeout=390, check=True, cwd=Path(__file__).parents[2])
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_every_kernel_is_as_its_reference(tmp_path: Path) -> None:
    found = figures("kernels", tmp_path)
    assert len(found["tables"]["kernels against their references"]) >= 20
    assert not found["notes"], "some were left out"


def test_the_engine_gives_the_tokens_of_plain_torch(tmp_path: Path) -> None:
    rows = figures("engine", tmp_path)["tables"]["engine against its reference"]
    assert [row["other tokens"] for row in rows] == [0, 0]


def test_every_architecture_gives_the_tokens_of_plain_torch() -> None:
    argv = [sys.executable, "-m", "tests.gpu.models"]
    subprocess.run(argv, timeout=390, check=True, cwd=Path(__file__).parents[2])


def test_a_warm_up_leaves_nothing_to_be_compiled_or_captured(tmp_path: Path) -> None:
    started, served = figures("worker", tmp_path)["tables"]["worker"]
    assert started["graphs"] > 0 and served["requests"] > 0


def test_bytes_arrive_over_cuda_ipc_and_a_cluster_has_the_tokens_of_one_process(
    tmp_path: Path,
) -> None:
    found = figures("cluster", tmp_path)
    assert "cuda_ipc" in [row["name"] for row in found["tables"]["transfer"]]
    if missing := [note["text"] for note in found["notes"] if note["table"] == "handoff"]:
        pytest.skip(missing[0])
    assert found["tables"]["handoff"][0]["other tokens"] == 0
