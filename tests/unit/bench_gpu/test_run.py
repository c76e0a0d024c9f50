"""A part's process, floors, targets and the report; then the whole as a dry run on the CPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import triton

from baton.engine.kernels.triton import launch_configs, timing
from baton.engine.kernels.triton.specs import text_of
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.tensor_names import num_parameters
from benchmarks import child
from benchmarks.engine.driver import Driver, Soaked
from benchmarks.gpu import cluster, engine, kernels, run, serve, worker
from benchmarks.gpu.part import Part
from benchmarks.gpu.run import TARGETS
from benchmarks.shapes import GPU_SHAPES, Shape
from tests.namespaces import HAS_NAMESPACES
from tests.preloaded import Preloaded
from tests.unit.bench_gpu import parts
from tests.waiting import WAIT_S

EIGHT, ONE = GPU_SHAPES["8B"], GPU_SHAPES["1B"]
MACHINE = {"device_name": "cpu", "shapes": ["1B"], "smoke": True}
ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.fixture
def forked(preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts, receivers, workers and routers are started from what has imported torch."""
    ours = {"baton", "benchmarks.gpu.cluster", "benchmarks.gpu.part"}
    monkeypatch.setattr(preloaded, "modules", preloaded.modules | ours)
    monkeypatch.setattr(child, "tied", list)


def part_of(seconds: float = 20 * WAIT_S, **settings: Any) -> tuple[Part, list[dict[str, Any]]]:
    """One that keeps its messages."""
    found: list[dict[str, Any]] = []
    send = lambda message: None if "doing" in message else found.append(message)  # noqa: E731
    return Part(send, "cpu", seconds, **settings), found


def on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """A program that is found first."""
    (folder / name).write_text(f"#!/bin/sh\n{script}")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_part_ends_in_time_and_its_failures_are_reported_once_with_their_place(
    forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_ENDING_S", 1.0)

    def messages_of(function: str) -> list[dict[str, Any]]:
        settings = {**MACHINE, "smoke": False, "seconds": 20 * WAIT_S}
        return list(run.run_part("speed", f"{parts.__name__}:{function}", settings, grace_s=1.0))

    row, failed = messages_of("crash")
    assert row["cells"] == {"GB/s": 1.5, "text": "x", "none": None}
    assert failed["error"] == "it ended with status -6, at decode, batch 8"
    assert failed["trace"] == ["out of luck"]

    bad, good, whole = messages_of("fail")
    assert bad["name"] == "bad" and bad["error"].startswith("ZeroDivisionError: ")
    assert bad["trace"][0].startswith("Traceback")
    assert good["cells"] == {"x": 1}, "others are measured all the same"
    assert (whole["table"], whole["error"]) == ("speed", "RuntimeError: no")

    began = time.monotonic()
    (failed,) = messages_of("stay")
    assert failed["error"] == f"it ended with status {-signal.SIGKILL}"
    assert time.monotonic() - began < 6 * WAIT_S, "its hanging end holds up the next part"

    monkeypatch.setattr(child.Child, "read", mock.Mock(side_effect=TimeoutError))
    (failed,) = messages_of("fail")
    assert failed["error"] == "not done 1 s after its time was over"


@pytest.mark.parametrize(("late", "parts"), [({}, ["machine"]), ({"late": True}, [*run.PARTS])])
def test_a_machine_that_is_late_costs_the_ceilings_only(
    late: dict[str, bool], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(part: str, *_: object) -> Iterator[dict[str, Any]]:
        yield {"table": part, "name": "the whole part", "error": "no", "trace": [], **late}

    monkeypatch.setattr(run, "run_part", failing)
    assert [message["table"] for message in run.run([*run.PARTS], MACHINE, 480.0)] == parts


@pytest.mark.parametrize(
    ("text", "fatal"),
    [(ILLEGAL, True), (ILLEGAL.replace("CUDA error", "Triton Error [CUDA]"), True),
     ("CUDA error: out of memory", False), ("shape mismatch", False)],
)  # fmt: skip
def test_an_error_that_leaves_the_gpu_unusable_ends_the_part(text: str, fatal: bool) -> None:
    def bad() -> None:
        raise RuntimeError(text)

    part, messages = part_of()
    if fatal:
        with pytest.raises(RuntimeError):
            part.attempt("t", "case", bad)
    else:
        assert not part.attempt("t", "case", bad)
        assert messages[0]["error"] == f"RuntimeError: {text}"


class Timed:
    """An engine whose steps take 10 ms, or transformers: 30 ms, or `error`."""

    def __init__(self, is_rival: bool, error: Exception | None = None) -> None:
        self.calls, self.waited_s, self._is_rival, self._error = 0, 0.004, is_rival, error

    def decode(self, batch: int, context: int, *steps: int) -> Any:
        self.calls += 1
        if self._error is not None:
            raise self._error
        return (0.03 * steps[0], "static") if self._is_rival else 0.01

    def prefill(self, tokens: int) -> Any:
        return self.decode(1, tokens, 1)


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_ours_is_measured_with_transformers_in_turn_or_without_where_it_fails(what: str) -> None:
    def measure(error: Exception | None) -> tuple[dict[str, Any], int, list[dict[str, Any]]]:
        """Cells of 64 sequences or tokens, calls of transformers, and what was sent meanwhile."""
        part, sent = part_of(copy_bytes_per_s=3e12, matmul_flops=7e14)
        measuring, rival = engine.Measuring(part, EIGHT, engine.BF16), Timed(True, error)
        measuring.rival = cast(Any, rival)
        return getattr(measuring, what)(Timed(False), 64), rival.calls, sent

    cells, calls, sent = measure(None)
    assert cells["x transformers"] == pytest.approx(3.0) and cells["its cache"] == "static"
    assert calls == 3 and not sent
    if what == "decode":
        assert (cells["waited us"], cells["of step waited"]) == (4000.0, 0.4)
        # 512 tokens of context, and the warm-up and half the steps behind them
        kv = 64 * (512 + 8 + 64 // 2) * (128 << 10)
        read = sum(one.weight_bytes for one in engine.products(EIGHT, engine.BF16, 64, 64))
        assert cells["floor ms"] == pytest.approx(1e3 * (read + kv) / 3e12)
    cells, calls, (note,) = measure(TypeError("no such argument"))
    assert next(iter(cells.values())) == 10.0 and "x transformers" not in cells
    assert calls == 1 and note["note"].endswith("no transformers: TypeError: no such argument")
    with pytest.raises(RuntimeError, match="illegal"):  # the GPU takes no more work
        measure(RuntimeError(ILLEGAL))


def config_of(shape: Shape, folder: Path) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(shape.config()))
    return file


def test_floors(tmp_path: Path) -> None:
    assert (EIGHT.num_parameters, ONE.num_parameters) == (8_030_261_248, 1_235_814_400)
    embedding, norms = 128256 * 4096, (2 * 32 + 1) * 4096
    # A step reads all weights but the embedding, unless that is also the output layer.
    assert read(EIGHT, 1) == 2 * (EIGHT.num_parameters - embedding - norms)
    assert read(ONE, 1) == 2 * (ONE.num_parameters - (2 * 16 + 1) * 2048)
    int4, layers = engine.Formats("int4"), EIGHT.num_parameters - 2 * embedding - norms
    assert read(EIGHT, 1, int4) == (0.5 + 2 / 64) * layers + embedding
    assert engine.BF16.layout(EIGHT).bytes_per_token == 128 << 10
    assert engine.FP8.layout(EIGHT).bytes_per_token == 2 * 32 * 8 * (128 + 4)
    assert computed(EIGHT, 10) == 2 * 10 * layers + 2 * embedding
    assert engine.attention_flops(EIGHT, 10) == 32 * 4 * 32 * 128 * (10 * 11 / 2)

    experts = GPU_SHAPES["A3B"]
    assert experts.num_parameters == num_parameters(ModelConfig.load(config_of(experts, tmp_path)))
    assert [round(experts.experts_taken(n), 1) for n in (0, 1, 64, 2048)] == [0, 8, 125.9, 128]
    expert, others = 3 * 2048 * 768, 2 * 2048 * 2560 + 128 * 2048
    head = 151936 * 2048
    assert read(experts, 1) == 2 * (8 * (others + 8 * expert) + head)
    assert read(experts, 4096) == 2 * (8 * (others + 128 * expert) + head)
    assert computed(experts, 1) == 2 * (8 * (others + 8 * expert) + head)

    # Many rows take longer to compute than weights take to read; of each product, that counts.
    part, _ = part_of(copy_bytes_per_s=4e12, matmul_flops=7e14, eight_bit_flops=14e14)
    few, many = (engine.Measuring(part, EIGHT, engine.BF16)._floor_s(n, n) for n in (64, 512))
    assert few == pytest.approx(read(EIGHT, 64) / 4e12)
    assert many == pytest.approx(2 * 512 * (layers + embedding) / 7e14)
    assert engine.Measuring(part, EIGHT, engine.FP8)._floor_s(512, 512) < 0.6 * many


def read(shape: Shape, tokens: int, formats: engine.Formats = engine.BF16) -> float:
    return sum(one.weight_bytes for one in engine.products(shape, formats, tokens, tokens))


def computed(shape: Shape, tokens: int) -> float:
    return sum(one.flops for one in engine.products(shape, engine.BF16, tokens, 1))


def test_the_pool_holds_one_long_context_among_short_ones_and_the_same_spread_evenly() -> None:
    part, _ = part_of()
    blocks = engine.Measuring(part, EIGHT, engine.BF16)._blocks(64)
    run = 8 + engine.STEPS + 2  # tokens that each gets
    assert blocks >= -(-(32768 + run) // 16) + 63 * -(-(1024 + run) // 16)
    assert blocks >= 64 * -(-((32768 + 63 * 1024) // 64 + run) // 16)
    for shape, formats in ((ONE, engine.BF16), (EIGHT, engine.FP8)):
        measured = engine.Measuring(part_of(shapes=("8B", "1B"))[0], shape, formats)
        assert not measured.skewed, "once is enough"


def test_a_soaked_sequence_with_other_tokens_than_a_quiet_one_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part, _ = part_of(smoke=True)
    quiet, survivors = [(1, 2, 3), (4, 5, 6)], [(0, (1, 2)), (1, (4, 5, 6)), (1, (4,))]
    monkeypatch.setattr(Driver, "generate", lambda _, prompts, __: [quiet[len(prompts[0]) - 14]])
    monkeypatch.setattr(Driver, "soak", lambda *_: Soaked(survivors, 7, 8))
    assert engine.soak(part) == {
        "prompts": 3, "tokens": 6, "other tokens": 0, "cancelled": 7, "preemptions": 8,
    }  # fmt: skip
    survivors.append((0, (1, 3)))
    wrong = re.escape("other tokens of 1 of 4: prompt of 14: (1, 3) instead of (1, 2)")
    with pytest.raises(AssertionError, match=wrong):
        engine.soak(part)


def test_what_is_compiled_or_captured_for_a_request_is_a_failure() -> None:
    part, _ = part_of(smoke=True)
    captured: dict[int, int] = {}
    loaded: Any = SimpleNamespace(
        runner=SimpleNamespace(_graphs=SimpleNamespace(_captured=captured))
    )
    driver = mock.Mock(spec=Driver)
    with worker.new_kernels() as compiled:
        assert worker.requests(part, loaded, driver, compiled)["requests"] == 7
        driver.decode.side_effect = lambda *_: captured.update({1: 1})
        with pytest.raises(AssertionError, match="1 graphs were captured"):
            worker.requests(part, loaded, driver, compiled)
        listener: Any = triton.knobs.compilation.listener  # as Triton calls it
        given: dict[str, Any] = {"metadata": {}, "metadata_group": {}, "times": None}
        listener(src=SimpleNamespace(name="rope_kv"), cache_hit=False, **given)
        with pytest.raises(AssertionError, match=r"compiled after the warm-up: \['rope_kv'\]"):
            worker.requests(part, loaded, driver, compiled)
    assert triton.knobs.compilation.listener is None


def test_the_report_has_tables_failures_and_targets_that_are_met_or_missed() -> None:
    met, missed, unknown = TARGETS[3], TARGETS[-1], TARGETS[0]
    report: dict[str, Any] = {
        "date": "2000-01-01", "seconds": 12.3, "smoke": False, "tables": {}, "notes": [],
        "failed": [],
    }  # fmt: skip
    for target, value in ((met, 0.91), (missed, 4.2), (unknown, float("nan"))):
        run.add(report, {"table": target.table, "name": target.row, "cells": {target.cell: value}})
    run.add(report, {"table": "ceilings", "name": "measured", "cells": {"copy GB/s": 3000.0}})
    cells = {"tokens/s": 5131.49, "of floor": 0.9123, "by": "static"}
    run.add(report, {"table": "decode", "name": "batch 64", "cells": cells})
    run.add(report, {"table": "decode", "note": "fp8 is left out"})
    error = {"error": "RuntimeError: no", "trace": ["Traceback", "RuntimeError: no"]}
    run.add(report, {"table": "decode", "name": "batch 256", **error})
    report["targets"] = run.verdicts(report["tables"])
    lines = [" ".join(line.split()) for line in "\n".join(run.text_of(report)).splitlines()]
    at = lines.index("failed: 1")
    assert lines[at + 1 : at + 3] == ["decode, batch 256: RuntimeError: no", "Traceback"]
    assert "batch 64 91.2% 5,131 static" in lines[:at] and "fp8 is left out" in lines[:at]
    *targets, counts = lines[-len(TARGETS) - 1 :]
    assert counts == f"targets: 1 met, 2 missed, {len(TARGETS) - 3} not measured"
    assert targets[3].endswith(">= 87.0% 91.0% met")
    assert targets[-1].endswith("<= 1.1 4.2 missed")
    dry = "\n".join(run.text_of({**report, "smoke": True, "targets": []}))
    assert run.DRY in dry and met.text not in dry


def test_every_target_names_a_row_that_a_full_run_has() -> None:
    rows = {("transfer", "cuda_ipc"), ("handoff", "cuda_ipc")}
    rows |= {("prefill attention", kernels.prefill_name(*prompt)) for prompt in kernels.PROMPTS}
    for batch in kernels.BATCHES:
        for context in kernels.CONTEXTS:
            rows.add(("decode attention", kernels.decode_name("bf16", batch, context)))
    part, _ = part_of(shapes=("8B", "1B"))
    for shape, formats in engine.measured(part):
        measuring = engine.Measuring(part, shape, formats)
        sizes = [("decode", f"batch {batch}") for batch in measuring.batches]
        sizes += [("prefill", f"{tokens} tokens") for tokens in measuring.prompts]
        rows |= {(table, engine.title_of(shape, formats, size)) for table, size in sizes}
    compared = f"batch {len(engine._SKEWED)}"
    for name in engine.SAMPLING:
        rows.add(("decode compared", engine.title_of(EIGHT, engine.BF16, f"{compared}, {name}")))
    rows |= {("serve", serve.row_name(EIGHT, streams)) for streams in serve.STREAMS["8B"]}
    assert {(target.table, target.row) for target in TARGETS} <= rows


def test_attention_is_compared_with_each_of_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with what torch takes: since 2.11 that is cuDNN's on an H100, and others' elsewhere."""

    def took(*_: object) -> float:  # of launches
        flash, cudnn = (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        )
        assert flash != cudnn and not torch.backends.cuda.math_sdp_enabled()
        return 0.6 if flash else 0.3

    monkeypatch.setattr(timing, "seconds", took)
    shape = {"batch": 1, "context": 0, "tokens": 8, "head_size": 16, "group": 1}
    part, _ = part_of()
    compared = partial(kernels._torch_attention, part, 1.0)
    assert compared(shape) == {"of flash": 0.6, "of cuDNN": 0.3}
    assert compared({**shape, "context": 8}) == {"of flash": 0.6, "of cuDNN": None}


@pytest.mark.parametrize("known", kernels._REASONS)
def test_clocks_are_nvidia_smis_under_either_name(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path(
        tmp_path,
        monkeypatch,
        "nvidia-smi",
        f"""
        case "$*" in
        *driver_version*) echo 580.1 ;;
        *{known}*) echo "1980, 2619, 54, [N/A], 0x0000000000000024" ;;
        *) echo "Field is not a valid field to query."; exit 2 ;;
        esac
    """,
    )
    part, messages = part_of(smoke=True)
    kernels.machine(part)
    device, before, ceilings, during = messages
    assert device["cells"]["driver"] == "580.1" and ceilings["cells"]["read GB/s"] > 0
    assert before["cells"] == during["cells"] == {
        "SM MHz": 1980.0, "memory MHz": 2619.0, "degrees C": 54.0, "W": "[N/A]",
        "held back by": "power cap and thermal slowdown",
    }  # fmt: skip


SANITIZER = """
while [ "$1" != --log-file ]; do shift; done
echo "========= Invalid __global__ read" > "$2"
shift 2
"$@" || exit $?
exit $STATUS
"""


@pytest.mark.parametrize("status", [0, 99])
def test_small_launches_are_watched(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path(tmp_path, monkeypatch, "compute-sanitizer", SANITIZER)
    monkeypatch.setenv("STATUS", str(status))
    monkeypatch.setattr(kernels, "_compiled", lambda *_: None)
    monkeypatch.setattr(kernels, "_error", mock.Mock(side_effect=RuntimeError(ILLEGAL)))
    part, messages = part_of(smoke=True)
    with pytest.raises(RuntimeError, match="illegal"):  # it is found all the same
        kernels.correctness(part)
    launches, row, *failed = messages
    assert (launches["cells"]["from the cache"], launches["cells"]["compiled"]) == (0, 0)
    assert row["cells"]["launched"] == 2
    assert len(failed) == bool(status)
    if status:
        assert failed[0]["error"].startswith("it ended with status 99, at compute-sanitizer, ")
        assert failed[0]["trace"][-1] == "========= Invalid __global__ read"


def test_launches_are_compiled_by_other_processes_within_a_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "_COMPILING", 1.0)
    part, messages = part_of(smoke=True)
    launch = "act_mul", {"rows": 2, "size": 64}
    cells = kernels._compiled(part, [launch])
    assert (cells["launches"], cells["compiled"]) == (1, 1) and [*tmp_path.rglob("*.cubin")]
    assert messages[0]["progress"] == "1 of 1"
    with pytest.raises(ValueError, match="1 of 1 fail: act_mul"):
        kernels._compiled(part, [("act_mul", {**launch[1], "dtype": "no such"})])
    monkeypatch.setattr(kernels, "_COMPILING", 0.0)
    assert kernels._compiled(part, [launch])["compiled"] == 0


def test_what_is_tuned_is_written_with_what_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    part, messages = part_of(smoke=True, json=str(tmp_path / "figures.json"))
    kernels.tune(part)
    row, note = messages
    file, shipped = tmp_path / "figures.sm_90.json", launch_configs.shipped_for(90)
    assert str(file) in note["note"] and row["cells"]["x faster"] > 0
    found, then = (launch_configs.read(one).kernels for one in (file, shipped))
    (key, config), *others = found.pop("add_rms_norm")
    assert others == then.pop("add_rms_norm") and found == then
    assert row["cells"]["configuration"] == text_of(config) and "rows" in key


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_where_no_gpu_is_it_says_so(
    forked: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # as the run sets it
    parser = argparse.ArgumentParser()
    run.add_options(parser)
    args = parser.parse_args(["--only", "speed", "--device", "cuda"])
    assert args.device == "cuda:0" and run.main(args) == 1
    assert "--smoke is a dry run without one" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parser.parse_args(["--device", "cpu"])
    assert "cpu is not cuda:N; --smoke is a dry run" in capsys.readouterr().err


# All that a machine with a GPU need have beside Python: torch, what that requires, and three more.
# `sitecustomize` is imported by each process before all else.
PRESENT = {
    "torch", "torchgen", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx",
    "setuptools", "pkg_resources", "sympy", "typing_extensions", "numpy", "safetensors", "triton",
    "baton", "benchmarks", "decode_worker", "kvtransfer", "prefill_worker", "router", "tests",
}  # fmt: skip
LACKING = f"""
import sys

class Present:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *place):
        top = name.partition(".")[0]
        if top in {PRESENT!r} or top in sys.stdlib_module_names or top.startswith("_"):
            return self.finder.find_spec(name, *place)

sys.meta_path[:] = map(Present, sys.meta_path)
"""


# A dry run that starts a process for its first part alone: each takes seconds to import torch.
IN_ONE_PROCESS = """
import pkgutil, sys
import tests.interpreted
from benchmarks.__main__ import main
from benchmarks.gpu import run
from benchmarks.gpu.part import Part

run_part = run.run_part

def run_here(part, function, settings):
    if part == "machine":
        yield from run_part(part, function, settings)
    else:
        messages = []
        pkgutil.resolve_name(function)(Part(messages.append, **settings))
        yield from (one for one in messages if "doing" not in one)

run.run_part = run_here
sys.exit(main())
"""


def test_dry_run_needs_nothing_but_torch_and_triton(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, "gpu", "--smoke", "--json", str(file),
         "--minutes", "60", "--only", "speed,engine,steps,worker,serve"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert run.DRY in done.stdout and file.exists(), done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert done.returncode == 0 and not found["failed"], done.stdout
    tables = {name for name in found["tables"] if not name.startswith("kernels of ")}
    assert len(found["tables"]) - len(tables) == len(found["tables"]["steps"])
    assert tables == {
        "machine", "ceilings", "decode attention", "prefill attention", "rows", "blocks",
        "products", "engine against its reference", "decode", "prefill",
        "decode compared", "steps", "worker",
    }  # fmt: skip
    assert found["smoke"] is True and found["targets"] == []
    smi, rival, served = (note["text"] for note in found["notes"])
    assert "no nvidia-smi" in smi and "no transformers" in rival
    assert served.startswith("no cluster is started: ")


def test_bytes_arrive_and_a_cluster_of_two_gives_the_tokens_of_one_process(forked: None) -> None:
    part, messages = part_of(smoke=True)
    cluster.run(part)
    shm, fp8, between, gloo, handoff, ranks = messages
    assert "cells" in ranks, ranks
    assert [one["name"] for one in (shm, gloo)] == ["shm", "gloo"]
    moved = [shm, fp8, gloo, *([between] if HAS_NAMESPACES else [])]
    # Rows of 16 elements of two bytes, and of one with four of a scale.
    assert fp8["cells"]["MB"] / shm["cells"]["MB"] == pytest.approx((16 + 4) / (2 * 16))
    assert all(one["cells"]["GB/s"] > 0 and one["cells"]["open ms"] > 0 for one in moved)
    assert shm["cells"]["ms beside products"] > 0 and "products slower by" in shm["cells"]
    assert "between pid namespaces" in between["name" if HAS_NAMESPACES else "note"]
    assert (handoff["cells"]["requests"], handoff["cells"]["other tokens"]) == (2, 0)
    assert handoff["cells"]["bookkeeping p50 ms"] > 0
    assert (ranks["cells"]["requests"], ranks["cells"]["other tokens"]) == (2, 0)


def test_streams_are_served_over_http_alone_and_beside_long_prompts(forked: None) -> None:
    part, messages = part_of(smoke=True)
    cluster.served(part)
    device, start, alone, beside = (one for one in messages if "cells" in one)
    assert device["table"] == "machine" and alone["name"] == "smoke, 2 streams"
    start, alone, beside = (one["cells"] for one in (start, alone, beside))
    assert start["ready s"] > 0
    assert all(one["tokens/s"] > 0 and one["TTFT p99 ms"] > 0 for one in (alone, beside))
    assert beside["ITL max ms"] >= beside["ITL p50 ms"] > 0
    assert beside["prompts' TTFT p50 ms"] > 0 and "prompts' TTFT p50 ms" not in alone


def test_figures_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, kept = tmp_path / "figures.json", []

    def found(*_: object) -> Iterator[dict[str, Any]]:
        for name in ("one", "two"):
            yield {"table": "rows", "name": name, "cells": {"us": 1.0}}
            kept.append(len(json.loads(file.read_text())["tables"]["rows"]))

    monkeypatch.setattr(run, "run", found)
    parser = argparse.ArgumentParser()
    run.add_options(parser)
    for variable in ("NCCL_MULTI_RANK_GPU_ENABLE", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(variable, "1")  # restored afterwards
    assert run.main(parser.parse_args(["--smoke", "--json", str(file)])) == 0
    assert kept == [1, 2] and [*tmp_path.iterdir()] == [file]
