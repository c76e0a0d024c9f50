"""What a worker reports of its hardware, parsed from text of real machines; never in the way."""

import threading
import time

import pytest
import torch

from baton.v1 import common_pb2
from baton.worker import hardware, nvidia_smi
from baton.worker.nvidia_smi import Card, parse_cards, parse_links
from tests.waiting import WAIT_S

U = {number: f"GPU-{number}" for number in range(8)}

# Four of eight H100s with NVSwitch; a terminal's underlining, as nvidia-smi writes it.
H100 = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPXB\tNODE\t0-63,128-191\t0\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\tSYS\t64-127,192-255\t1\t\tN/A\n"
    "NIC0\tPXB\tNODE\tNODE\tSYS\t X \tNODE\t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
# Four cards, two bridges; an older driver that writes mlx5_0 for its cards and spaces for tabs.
PCIE = """\
        GPU0    GPU1    GPU2    GPU3    mlx5_0  CPU Affinity
GPU0     X      NV12    SYS     PHB     PIX     0-23,48-71
GPU1    NV12     X      SYS     NODE    PXB     0-23,48-71
GPU2    SYS     SYS      X      PIX     NODE    24-47
GPU3    PHB     NODE    PIX      X      SYS     24-47
mlx5_0  PIX     PXB     NODE    SYS      X
"""
ALONE = "\tGPU0\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNODE\tNODE\t0-19\t0\t\tN/A\n"
# In a container that was given GPUs 4 and 6.
GIVEN = "\tGPU4\tGPU6\tCPU Affinity\nGPU4\t X \tNV4\t0-7\nGPU6\tNV4\t X \t0-7\n"
FAILED = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
CARDS = (
    "0, GPU-7f0e, NVIDIA H100 80GB HBM3, 81559, 9.0\n"
    "1, GPU-81aa, NVIDIA GB10, [N/A], 12.1\n"
    "2, GPU-93bb, Tesla V100-SXM2-16GB, 16160, [Not Supported]\n"
)
VERSIONS = (
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 2024\n", "550.90.07"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n", "570.86.15"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.142  Release\n", "580.142"),
    ("something else", ""),
)


@pytest.mark.parametrize(
    ("text", "uuids", "own", "links"),
    [
        (H100, U, 3, ["NV18 GPU-0", "NV18 GPU-1", "NV18 GPU-2"]),
        (PCIE, U, 2, ["SYS GPU-0", "SYS GPU-1", "PIX GPU-3"]),
        (ALONE, U, 0, []),
        (FAILED, U, 0, []),
        ("", U, 0, []),
        ("GPU0\nGPU0\tNEW9\n", U, 0, []),
        (H100, U, 7, []),
        (GIVEN, U, 6, ["NV4 GPU-4"]),
        (GIVEN, {6: "GPU-6"}, 6, []),
    ],
)
def test_links_of_one_gpu(text, uuids, own, links):
    assert parse_links(text, uuids, f"GPU-{own}") == links


def test_cards_and_driver_versions(tmp_path, monkeypatch):
    assert parse_cards(CARDS) == [
        Card(0, "GPU-7f0e", "NVIDIA H100 80GB HBM3", 81559 << 20, "9.0"),
        Card(1, "GPU-81aa", "NVIDIA GB10", 0, "12.1"),
        Card(2, "GPU-93bb", "Tesla V100-SXM2-16GB", 16160 << 20, ""),
    ]
    assert parse_cards(FAILED) == parse_cards("") == []
    monkeypatch.setattr(nvidia_smi, "KERNEL_MODULE", tmp_path / "version")
    assert nvidia_smi.driver_version() == ""
    for text, version in VERSIONS:
        (tmp_path / "version").write_text(text)
        assert nvidia_smi.driver_version() == version


def program(folder, script, monkeypatch):
    """Puts an `nvidia-smi` of ours in PATH's place."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(nvidia_smi, "PROGRAM", str(file))


def test_nvidia_smi_is_run_for_cards_and_then_for_links(tmp_path, monkeypatch):
    (tmp_path / "topo").write_text(PCIE)
    cards = "".join(f"{n}, GPU-{n}, A100, 40960, 8.0\\n" for n in range(4))
    asked = f'case "$1" in topo) cat {tmp_path}/topo;; --query-gpu*) printf "{cards}";; esac'
    program(tmp_path, asked, monkeypatch)
    assert nvidia_smi.links("GPU-1", WAIT_S) == ["NV12 GPU-0", "SYS GPU-2", "NODE GPU-3"]
    assert nvidia_smi.links("GPU-9", WAIT_S) == []


@pytest.mark.parametrize("script", ["exit 9", "exec sleep 1000", f"printf '{FAILED[:30]}'", None])
def test_an_nvidia_smi_that_fails_hangs_or_is_missing_reports_nothing(
    script, tmp_path, monkeypatch
):
    monkeypatch.setattr(nvidia_smi, "PROGRAM", str(tmp_path / "missing"))
    if script is not None:
        program(tmp_path, script, monkeypatch)
    began = time.monotonic()
    assert not nvidia_smi.links("GPU-0", 0.3) and not nvidia_smi.cards(0.3)
    assert time.monotonic() - began < WAIT_S


def test_a_machine_without_a_gpu_reports_what_costs_nothing(tmp_path, monkeypatch):
    """No child process, no thread, no CUDA; and the real queries of a GPU raise nothing."""
    if not torch.cuda.is_available():
        found = hardware.describe(torch.device("cuda", 0), timeout_s=WAIT_S)
        assert found.torch_version and not found.HasField("gpu")
    program(tmp_path, f"touch {tmp_path}/asked", monkeypatch)
    found = hardware.describe(torch.device("cpu"))
    assert found.torch_version == torch.__version__
    assert not found.HasField("gpu") and not found.nccl_version and not found.visible_gpus
    assert not (tmp_path / "asked").exists()
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / "rdma" / name).mkdir(parents=True)
    assert hardware.rdma_devices(tmp_path / "rdma") == ["mlx5_0", "mlx5_1"]
    assert hardware.rdma_devices(tmp_path / "none") == []


def test_a_query_that_fails_or_hangs_leaves_the_others(monkeypatch):
    answer, Hardware = threading.Event(), common_pb2.Hardware

    def fails(*_):
        raise RuntimeError("no driver")

    def hangs(*_):
        answer.wait(WAIT_S)
        return Hardware(cuda_version="late")

    card = Hardware(gpu=common_pb2.Gpu(uuid="GPU-0"))
    monkeypatch.setattr(hardware, "_card", lambda *_: card)
    monkeypatch.setattr(hardware, "_versions", fails)
    monkeypatch.setattr(hardware, "_peers", lambda *_: Hardware(peer_gpus=["GPU-1"]))
    monkeypatch.setattr(hardware, "_links", hangs)
    began = time.monotonic()
    found = hardware.describe(torch.device("cuda", 0), timeout_s=0.2)
    assert time.monotonic() - began < WAIT_S
    answer.set()
    assert (found.gpu.uuid, found.peer_gpus) == ("GPU-0", ["GPU-1"])
    assert found.torch_version == torch.__version__ and not found.cuda_version
