"""`baton doctor` on a machine alone: what it has, what it lacks, and how that is shown."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from baton import cli
from baton.cli import doctor as command
from baton.errors import ConfigError
from baton.local import doctor, etcd
from baton.local.ports import free
from baton.v1 import common_pb2
from baton.worker import nvidia_smi
from baton.worker.nvidia_smi import Card

H100 = Card(0, "GPU-aaaa", "NVIDIA H100 80GB HBM3", 80 << 30, "9.0")
REPORTED = common_pb2.Hardware(
    gpu=common_pb2.Gpu(uuid="GPU-aaaa", name="NVIDIA H100 80GB HBM3"),
    visible_gpus=["GPU-aaaa", "GPU-bbbb"],
    peer_gpus=["GPU-bbbb"],
    gpu_links=["NV18 GPU-bbbb"],
    cuda_version="12.8",
    nccl_version="2.27.5",
)


def test_a_machine_is_looked_at_without_torch() -> None:
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


def test_programs_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)

    monkeypatch.setattr(doctor, "BUILT_KERNELS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    no_etcd = mock.Mock(side_effect=ConfigError("no etcd to start: put etcd on PATH"))
    monkeypatch.setattr(etcd, "etcd_binary", no_etcd)
    found = {one.subject: one for one in doctor.check_machine(False)}
    fixes = {"torch": "baton-serving[worker]", "etcd": "put etcd on PATH", "CPU kernels": "g++"}
    for subject, fix in fixes.items():
        assert found[subject].level == "warn" and fix in found[subject].fix
    program("g++", "exit 1")
    assert "does not run" in doctor.compiler().text
    (tmp_path / "avx2-0.so").touch()
    assert doctor.compiler().level == "ok"

    assert "baton-serving[gpu]" in doctor.triton(needed=True).fix
    monkeypatch.setattr(doctor, "version_of", lambda package: "3.7.1")
    assert doctor.triton(needed=False).level == "ok"
    assert "C compiler" in doctor.triton(needed=True).text
    program("gcc", "")
    assert doctor.triton(needed=True).fix == "install python3-dev"
    (tmp_path / "Python.h").touch()
    assert doctor.triton(needed=True).text == "3.7.1"


def test_cores_and_memory_are_what_the_container_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"{text}\n")

    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    monkeypatch.setattr(doctor, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert doctor.cores().text == "8"
    limit("cpu.max", "max 100000")
    assert doctor.cores().level == "ok"
    limit("cpu.max", "250000 100000")
    found = doctor.cores()
    assert found.level == "warn" and "2.5 of them" in found.text and "2 in all" in found.fix

    limit("meminfo", "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB")
    assert doctor.memory().text == "64.0 GiB, 32.0 GiB of it free"
    limit("memory.max", str(8 << 30))
    limit("memory.current", str(7 << 30))
    limit("memory.stat", f"anon 1\ninactive_file {4 << 30}")
    found = doctor.memory()
    assert (found.level, found.text) == ("ok", "8.0 GiB, 5.0 GiB of it free")
    limit("memory.stat", "inactive_file 0")
    assert doctor.memory().level == "warn"


def test_a_port_may_be_in_use_by_a_router() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor.free_port(port, "--port", router_here=True).level == "ok"
        found = doctor.free_port(port, "--port", router_here=False)
        assert found.level == "warn" and "--port" in found.fix
    assert doctor.free_port(free(), "--port", router_here=False).text == "free"


OLD = Card(0, "GPU-a", "V100", 16 << 30, "7.0")
ALONE = common_pb2.Hardware(gpu=REPORTED.gpu, visible_gpus=["GPU-aaaa"], cuda_version="12.8")
NO_PEERS = common_pb2.Hardware(gpu=REPORTED.gpu, visible_gpus=["GPU-aaaa", "GPU-bbbb"])


@pytest.mark.parametrize(
    ("cards", "in_torch", "found"),
    [
        ([H100, H100], [REPORTED, REPORTED], {
            "GPU 0": "ok: NVIDIA H100 80GB HBM3, 80 GiB, GPU-aaaa, compute capability 9.0",
            "CUDA": "ok: 12.8, driver 570.86.15",
            "cuda:0": "ok: NVIDIA H100 80GB HBM3 writes 1 of 1 others: GPU-bbbb NV18",
            "NCCL": "ok: 2.27.5: two workers may not share a GPU",
        }),
        ([H100], [], {"CUDA": "warn: .* cannot use the GPUs of driver 570.86.15 install torch's"}),
        ([H100, H100], [ALONE], {
            "CUDA": "warn: 12.8, .* sees 1 of 2 GPUs leave CUDA_VISIBLE_DEVICES unset",
            "cuda:0": "ok: .*, alone", "NCCL": "warn: not there",
        }),
        ([OLD], [NO_PEERS], {
            "GPU 0": "warn: V100, .*Ampere", "cuda:0": "warn: .* writes 0 of 1 .* host's memory",
        }),
        ([replace(OLD, capability="")], [ALONE], {"GPU 0": "ok: V100"}),
        ([], [], {"GPU": "warn: driver 570.86.15 is loaded, .* container toolkit"}),
        ([H100], [REPORTED], {"NCCL_P2P_DISABLE": "warn: is set to 1: .* unset it"}),
    ],
)  # fmt: skip
def test_gpus_by_driver_and_torch(
    cards: list[Card], in_torch: list[common_pb2.Hardware], found: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(nvidia_smi, "cards", lambda timeout_s: cards)
    monkeypatch.setattr(nvidia_smi, "driver_version", lambda: "570.86.15")
    monkeypatch.setattr(doctor, "seen_by_torch", lambda: in_torch)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    shown = {one.subject: f"{one.level}: {one.text} {one.fix}" for one in doctor.check_gpus()}
    for subject, text in found.items():
        assert re.match(text, shown[subject]), shown[subject]
    assert "NCCL_IB_DISABLE" not in shown


def finding(level: str, subject: str, text: str, fix: str = "") -> dict[str, str]:
    return {"level": level, "subject": subject, "text": text, "fix": fix}


PAIR = {"prefill": "p", "decode": "d", "transport": None, "link": None, "in_use": "gloo",
        "problems": ["nothing fits"], "not_possible": {}}  # fmt: skip
WORKER = {"role": "prefill", "incarnation": "p", "address": "h:1", "state": "READY",
          "device": "H100", "gpu": "GPU-a", "visible_gpus": ["GPU-a", "GPU-b"], "peer_gpus": [],
          "rdma_devices": ["mlx5_0"], "transports": ["nccl"]}  # fmt: skip


@pytest.mark.parametrize(("worst", "exit_status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_a_report_is_shown_and_only_failures_are_an_exit_status(
    worst: str,
    exit_status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    obstacles = {"cuda_ipc": "they are apart", "nccl": "none offers it"}
    report = {
        "status": worst,
        "machine": [finding(worst, "it", "is so", "do that")],
        "router": {"target": "127.0.0.1:7700", "answers": False},
        "workers": [WORKER],
        "pairs": [
            PAIR,
            {**PAIR, "not_possible": obstacles},
            {**PAIR, "transport": "cuda_ipc", "link": "NV18"},
        ],
        "cluster": [finding("ok", "p → d", "many words")],
    }
    monkeypatch.setattr(command, "look", lambda target, timeout_s: report)
    assert cli.main(["doctor"]) == exit_status
    shown = capsys.readouterr().out
    assert f"  {worst:<4}  it  is so\n            → do that\n" in shown
    assert "router: none answers at 127.0.0.1:7700" in shown
    counted = {"ok": "nothing is missing", "warn": "0 failed, 1 warning", "fail": "1 failed"}
    assert counted[worst] in shown.splitlines()[-1]
    assert "READY  H100         0 of 1  mlx5_0  nccl" in shown
    assert "NONE                gloo    nothing fits" in shown
    assert "NONE                gloo    cuda_ipc: they are apart; nccl: none offers it" in shown
    assert "cuda_ipc over NV18  gloo    -" in shown
    assert "\n  ok    p → d  many words\n" in shown


def test_a_router_that_was_named_must_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--target", f"127.0.0.1:{free()}", "--timeout", "5"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "no router answers at 127.0.0.1:" in shown.err
