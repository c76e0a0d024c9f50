"""Looks at this machine's GPUs and at what they need: torch with CUDA, Triton, NCCL, RDMA.

Imports torch only where the driver shows a GPU.
"""

from __future__ import annotations

import os
import resource
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.local.doctor.finding import Finding, ok, warn
from baton.local.doctor.machine import version_of
from baton.v1 import common_pb2
from baton.worker import nvidia_smi
from kvtransfer import pairing

LOOK_S = 5.0
LEAST_CAPABILITY = (8, 0)
LEAST_SHM_BYTES = 1 << 30
SHM = Path("/dev/shm")  # noqa: S108
INFINIBAND = Path("/sys/class/infiniband")
# NCCL's documentation, "Environment Variables".
_HINDRANCES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
_GPU_EXTRA = "pip install 'baton-serving[gpu]'"


def examine() -> Iterator[Finding]:
    """The driver's view first, then torch's, then what lies between GPUs and machines."""
    cards = nvidia_smi.cards(LOOK_S)
    driver = nvidia_smi.driver_version()
    yield triton(bool(cards))
    yield rdma(INFINIBAND, bool(cards))
    if not cards:
        yield no_card(driver)
        return
    yield from (card(one) for one in cards)
    yield shared_memory()
    yield from environment()
    if version_of("torch") is None:
        return  # which is told already
    told = seen_by_torch()
    yield from torch_sees(cards, told, driver)
    if told:
        yield nccl(told[0].nccl_version)
        yield from (neighbours(number, one) for number, one in enumerate(told))


def no_card(driver: str) -> Finding:
    """Nothing to compute on but CPUs, or a driver that does not answer."""
    if driver:
        return warn(
            "GPU",
            f"driver {driver} is loaded, and nvidia-smi shows no GPU",
            "run nvidia-smi by hand; in containers: the NVIDIA container toolkit, and the "
            "capability `utility`",
        )
    return ok("GPU", "none: workers compute on the CPU")


def card(found: nvidia_smi.Card) -> Finding:
    """One GPU as the driver tells of it."""
    subject = f"GPU {found.index}"
    text = f"{found.name}, {found.memory_bytes / 2**30:.0f} GiB, {found.uuid}"
    if not found.capability:
        return ok(subject, text)
    text += f", compute capability {found.capability}"
    if tuple(map(int, found.capability.split("."))) < LEAST_CAPABILITY:
        return warn(subject, text, "kernels are written for 8.0 (Ampere) and later")
    return ok(subject, text)


def triton(needed: bool) -> Finding:
    """The compiler of the GPU kernels, and what it compiles its own C module with."""
    version = version_of("triton")
    if not needed:
        return ok("triton", version or "not installed; GPUs alone need it")
    if version is None:
        return warn("triton", "not installed, and kernels on GPUs need it", _GPU_EXTRA)
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))):
        return warn(
            "triton",
            f"{version}, without the C compiler that it needs when a worker starts",
            "install gcc, or name a compiler in CC",
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return warn("triton", f"{version}, without {headers}/Python.h", "install python3-dev")
    return ok("triton", version)


def rdma(folder: Path, needed: bool) -> Finding:
    """Cards that move memory between machines by themselves."""
    devices = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if not devices:
        return ok("RDMA", "no devices: between machines NCCL would use TCP sockets")
    text = ", ".join(devices)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if needed and locked != resource.RLIM_INFINITY:
        return warn(
            "RDMA",
            f"{text}; only {locked >> 10} KiB of memory can be locked for it",
            "ulimit -l unlimited; in compose: ulimits: {memlock: -1}",
        )
    return ok("RDMA", text)


def shared_memory() -> Finding:
    """NCCL moves bytes between processes of a machine through /dev/shm where GPUs are no peers."""
    try:
        space = os.statvfs(SHM)
    except OSError as error:
        return warn(str(SHM), str(error), "ipc: host, or shm_size")
    size = space.f_frsize * space.f_blocks
    text = f"{size / 2**30:.1f} GiB"
    if size < LEAST_SHM_BYTES:
        return warn(str(SHM), text, "NCCL may not start: ipc: host, or shm_size: 8gb")
    return ok(str(SHM), text)


def environment() -> Iterator[Finding]:
    """Variables that keep GPUs from reaching each other, or NCCL from doing its best."""
    for name in _HINDRANCES:
        if os.environ.get(name, "0") not in ("", "0"):
            yield warn(name, f"is set to {os.environ[name]}: a way for KV is closed", "unset it")


def seen_by_torch() -> list[common_pb2.Hardware]:
    """What a worker on each of torch's devices would tell; empty where torch has no CUDA."""
    import torch  # noqa: PLC0415

    from baton.worker import hardware  # noqa: PLC0415

    if not torch.cuda.is_available():
        return []
    devices = range(torch.cuda.device_count())
    return [hardware.describe(torch.device("cuda", number), LOOK_S) for number in devices]


def torch_sees(
    cards: Sequence[nvidia_smi.Card], told: Sequence[common_pb2.Hardware], driver: str
) -> Iterator[Finding]:
    """Whether torch can use the GPUs that the driver shows."""
    if not told:
        yield warn(
            "CUDA",
            f"torch {version_of('torch')} cannot use the GPUs of driver {driver or 'unknown'}",
            "install torch's build for CUDA, of a version that the driver knows",
        )
        return
    text = f"{told[0].cuda_version}, driver {told[0].driver_version or driver or 'unknown'}"
    if len(told) < len(cards):
        yield warn(
            "CUDA",
            f"{text}; torch sees {len(told)} of {len(cards)} GPUs",
            "leave CUDA_VISIBLE_DEVICES unset and choose with --device cuda:N: a worker that does "
            "not see its neighbour's GPU cannot write its memory",
        )
        return
    yield ok("CUDA", text)


def nccl(version: str) -> Finding:
    """NCCL's version, and what it means for workers that share a GPU."""
    if not version:
        mend = "install torch's build for CUDA, which brings it"
        return warn("NCCL", "not there: GPUs reach no other machine", mend)
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    shares = "may" if pairing.shares_gpu(numbers) else "may not"
    return ok("NCCL", f"{version}: two workers {shares} share a GPU over it (from 2.30 on)")


def neighbours(number: int, told: common_pb2.Hardware) -> Finding:
    """Which GPUs one GPU can write, and over what."""
    others = [uuid for uuid in told.visible_gpus if uuid != told.gpu.uuid]
    links = {uuid: kind for kind, _, uuid in (link.partition(" ") for link in told.gpu_links)}
    subject = f"cuda:{number}"
    if not others:
        return ok(subject, f"{told.gpu.name}, alone")
    peers = [uuid for uuid in others if uuid in told.peer_gpus]
    ways = ", ".join(f"{uuid[:12]} {links.get(uuid, '?')}" for uuid in peers)
    text = f"{told.gpu.name} writes {len(peers)} of {len(others)} others: {ways or 'none'}"
    if not peers:
        return warn(subject, text, "between them KV goes through the host's memory")
    return ok(subject, text)
