"""`baton doctor` on a machine alone: what it has, what it lacks, and how that is told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton import cli
from baton.cli import doctor as command
from baton.cli import status
from baton.client.results import status_of
from baton.errors import ConfigError
from baton.local import doctor, etcd
from baton.local.ports import free
from baton.v1 import common_pb2, fleet_pb2
from baton.worker import nvidia_smi
from baton.worker.nvidia_smi import Card

H100 = Card(0, "GPU-aaaa", "NVIDIA H100 80GB HBM3", 80 << 30, "9.0")
TOLD = common_pb2.Hardware(
    gpu=common_pb2.Gpu(uuid="GPU-aaaa", name="NVIDIA H100 80GB HBM3"),
    visible_gpus=["GPU-aaaa", "GPU-bbbb"],
    peer_gpus=["GPU-bbbb"],
    gpu_links=["NV18 GPU-bbbb"],
    cuda_version="12.8",
    nccl_version="2.27.5",
)


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty control group of our own."""
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    return tmp_path


def test_without_torch_a_machine_is_still_looked_at() -> None:
    """A client's installation: neither torch nor rich can be imported."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['rich'] = None\n"
        "from baton.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert set(report) == {"status", "machine", "router", "workers", "pairs", "cluster"}
    subjects = {finding["subject"] for finding in report["machine"]}
    assert {"python", "torch", "CPU kernels", "cores", "memory", "etcd", "GPU"} <= subjects
    for finding in report["machine"]:
        assert set(finding) == {"level", "subject", "text", "fix"}
        assert finding["level"] in ("ok", "warn")


def test_torch_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    found = next(f for f in doctor.check_machine(False) if f.subject == "torch")
    assert found.level == "warn" and "baton-serving[worker]" in found.fix


def test_no_compiler_is_told_unless_kernels_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "BUILT_KERNELS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.compiler().level == "warn" and "g++" in doctor.compiler().fix
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o700)
    assert "does not run" in doctor.compiler().text
    (tmp_path / "avx2-0.so").touch()
    assert doctor.compiler().level == "ok"


def test_a_container_that_gets_less_time_than_it_sees_cores(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert doctor.cores().text == "8"
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert doctor.cores().level == "ok"
    (cgroup / "cpu.max").write_text("250000 100000\n")
    found = doctor.cores()
    assert found.level == "warn" and "2.5 of them" in found.text and "2 in all" in found.fix


def test_memory_is_what_the_container_may_still_have(
    cgroup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n")
    monkeypatch.setattr(doctor, "MEMINFO", meminfo)
    assert doctor.memory().text == "64.0 GiB, 32.0 GiB of it free"
    (cgroup / "memory.max").write_text(f"{8 << 30}\n")
    (cgroup / "memory.current").write_text(f"{7 << 30}\n")
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {4 << 30}\n")
    found = doctor.memory()
    assert (found.level, found.text) == ("ok", "8.0 GiB, 5.0 GiB of it free")
    (cgroup / "memory.stat").write_text("inactive_file 0\n")
    assert doctor.memory().level == "warn"


def test_a_machine_without_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ConfigError("no etcd to start: put etcd on PATH")

    monkeypatch.setattr(etcd, "etcd_binary", missing)
    found = doctor.etcd_program()
    assert (found.level, found.fix) == ("warn", "put etcd on PATH")


def test_a_port_in_use_is_a_router_s_or_somebody_s() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor.free_port(port, "--port", router_here=True).level == "ok"
        found = doctor.free_port(port, "--port", router_here=False)
        assert found.level == "warn" and "--port" in found.fix
    assert doctor.free_port(free(), "--port", router_here=False).text == "free"


def look_at_cards(
    monkeypatch: pytest.MonkeyPatch, driver: list[Card], torch_sees: list[common_pb2.Hardware]
) -> dict[str, Any]:
    """What is found, by subject, where driver and torch show this."""
    monkeypatch.setattr(nvidia_smi, "cards", lambda timeout_s: driver)
    monkeypatch.setattr(nvidia_smi, "driver_version", lambda: "570.86.15")
    monkeypatch.setattr(doctor, "seen_by_torch", lambda: torch_sees)
    return {finding.subject: finding for finding in doctor.check_gpus()}


def test_two_gpus_with_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    other = common_pb2.Hardware()
    other.CopyFrom(TOLD)
    found = look_at_cards(monkeypatch, [H100, H100], [TOLD, other])
    assert found["GPU 0"].text == (
        "NVIDIA H100 80GB HBM3, 80 GiB, GPU-aaaa, compute capability 9.0"
    )
    assert found["CUDA"].text == "12.8, driver 570.86.15"
    assert found["cuda:0"].text == "NVIDIA H100 80GB HBM3 writes 1 of 1 others: GPU-bbbb NV18"
    assert found["NCCL"].text.startswith("2.27.5: two workers may not share a GPU")
    assert {found[subject].level for subject in ("GPU 0", "CUDA", "cuda:0")} == {"ok"}


def test_gpus_that_torch_cannot_use_or_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look_at_cards(monkeypatch, [H100], [])
    assert "cannot use the GPUs of driver 570.86.15" in found["CUDA"].text
    found = look_at_cards(monkeypatch, [H100, H100], [TOLD])
    assert found["CUDA"].level == "warn" and "CUDA_VISIBLE_DEVICES" in found["CUDA"].fix


def test_variables_that_close_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    found = look_at_cards(monkeypatch, [H100], [TOLD])
    assert found["NCCL_P2P_DISABLE"].level == "warn"
    assert "NCCL_IB_DISABLE" not in found


def test_a_driver_that_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look_at_cards(monkeypatch, [], [])
    assert found["GPU"].level == "warn" and "container toolkit" in found["GPU"].fix
    assert doctor.no_gpu("").level == "ok"


def test_an_old_gpu_and_one_without_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.gpu(Card(0, "GPU-a", "V100", 16 << 30, "7.0")).level == "warn"
    assert doctor.gpu(Card(0, "GPU-a", "V100", 16 << 30, "")).level == "ok"
    alone = common_pb2.Hardware(gpu=TOLD.gpu, visible_gpus=["GPU-aaaa"])
    assert doctor.neighbours(0, alone).text.endswith("alone")
    no_peers = common_pb2.Hardware(gpu=TOLD.gpu, visible_gpus=["GPU-aaaa", "GPU-bbbb"])
    found = doctor.neighbours(0, no_peers)
    assert found.level == "warn" and "host's memory" in found.fix


def test_what_triton_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda package: "3.7.1")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.triton(needed=False).level == "ok"
    assert "C compiler" in doctor.triton(needed=True).text
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o700)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert doctor.triton(needed=True).fix == "install python3-dev"
    (tmp_path / "Python.h").touch()
    assert doctor.triton(needed=True).text == "3.7.1"
    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    assert "baton-serving[gpu]" in doctor.triton(needed=True).fix


def test_nccl_by_its_version() -> None:
    assert "may share a GPU" in doctor.nccl("2.30.1").text
    assert "may not share" in doctor.nccl("2.27.5").text
    assert doctor.nccl("").level == "warn"


def report(**fields: Any) -> dict[str, Any]:
    """The object of `--json`, of a machine with nothing to tell."""
    finding = {"level": "ok", "subject": "python", "text": "3.11", "fix": ""}
    router = {"target": "127.0.0.1:7700", "answers": False}
    empty: dict[str, Any] = {"workers": [], "pairs": [], "cluster": []}
    return {"status": "ok", "machine": [finding], "router": router, **empty, **fields}


@pytest.mark.parametrize(("worst", "exit_status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failure_is_an_exit_status(
    worst: str,
    exit_status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finding = {"level": worst, "subject": "it", "text": "is so", "fix": "do that"}
    monkeypatch.setattr(
        command, "look", lambda target, timeout_s: report(status=worst, machine=[finding])
    )
    assert cli.main(["doctor"]) == exit_status
    said = capsys.readouterr().out
    assert f"  {worst:<4}  it  is so\n            → do that\n" in said
    assert "router: none answers at 127.0.0.1:7700" in said
    counted = {"ok": "nothing is missing", "warn": "0 failed, 1 warning", "fail": "1 failed"}
    assert counted[worst] in said.splitlines()[-1]


def test_long_findings_are_folded_under_themselves() -> None:
    finding = {"level": "warn", "subject": "p → d", "text": "many words " * 9, "fix": "do " * 40}
    said = command.render(report(cluster=[finding]), width=60).splitlines()
    lines = said[said.index("cluster") + 1 : -2]
    assert lines[0].startswith("  warn  p → d  many words") and len(lines) > 4
    assert all(len(line) <= 60 for line in lines)
    assert all(line.startswith(" " * 15) for line in lines[1:])
    assert sum("→ do" in line for line in lines) == 1


def test_pairs_are_explained_in_a_table() -> None:
    pair: dict[str, Any] = {
        "prefill": "p", "decode": "d", "transport": None, "link": None, "in_use": "gloo",
        "problems": ["nothing fits"],
        "not_possible": {"cuda_ipc": "they are apart", "nccl": "nobody offers it"},
    }  # fmt: skip
    worker: dict[str, Any] = {
        "role": "prefill", "incarnation": "p", "address": "h:1", "state": "READY",
        "device": "H100", "gpu": "GPU-a", "visible_gpus": ["GPU-a", "GPU-b"], "peer_gpus": [],
        "rdma_devices": ["mlx5_0"], "transports": ["nccl"],
    }  # fmt: skip
    said = command.render(report(pairs=[pair], workers=[worker]))
    assert "NONE       gloo    cuda_ipc: they are apart; nccl: nobody offers it" in said
    forbidden = command.render(report(pairs=[{**pair, "not_possible": {}}]))
    assert "NONE       gloo    nothing fits" in forbidden
    linked = {**pair, "transport": "cuda_ipc", "link": "NV18", "not_possible": {}}
    assert "cuda_ipc over NV18  gloo    -" in command.render(report(pairs=[linked]))
    assert "READY  H100         0 of 1  mlx5_0  nccl" in said


def test_status_names_devices_where_there_is_a_gpu() -> None:
    """A cluster on CPUs is shown as before."""
    router = {
        "incarnation": "r", "address": "h:1", "pid": 1, "state": "SERVING", "model": "m",
        "cluster": "c", "registry_connected": True, "running": 0, "queued": 0,
    }  # fmt: skip
    records = [
        common_pb2.WorkerRecord(incarnation="p", role="WORKER_ROLE_PREFILL", hardware=TOLD),
        common_pb2.WorkerRecord(incarnation="d", role="WORKER_ROLE_DECODE"),
    ]
    answers = [
        fleet_pb2.GetStatusResponse(workers=[fleet_pb2.WorkerStatus(record=one) for one in some])
        for some in (records, records[1:])
    ]
    mixed, plain = (status.render({**status_of(one), "router": router}) for one in answers)
    assert "computes on" in mixed and "H100 80GB HBM3" in mixed and "cpu" in mixed
    assert "computes on" not in plain and "cpu" not in plain


def test_a_router_that_was_named_must_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--target", f"127.0.0.1:{free()}", "--timeout", "5"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "no router answers at 127.0.0.1:" in said.err
