"""What a worker reports of its hardware: its GPU, what it reaches from there, and versions.

For people and `baton doctor`; nothing else depends on it. A query that fails or takes too long is
left out: it must not keep a worker from serving.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import torch

from baton.cuda import gpu_uuid, nccl_version, reachable_gpus, visible_gpus
from baton.v1.common_pb2 import Gpu, Hardware
from baton.worker import nvidia_smi

log = logging.getLogger(__name__)

QUERY_S = 3.0


def describe(device: torch.device, timeout_s: float = QUERY_S) -> Hardware:
    """What a worker computing on `device` has; blocks for `timeout_s` at most, raises nothing.

    Queries run on a thread that may be left behind: drivers can hang beyond any time-out.
    """
    found = Hardware(torch_version=torch.__version__, rdma_devices=rdma_devices())
    if device.type != "cuda":
        return found
    parts: list[Hardware] = []

    def work() -> None:
        for query in (_card, _versions, _peers, _links):  # quick ones first
            try:
                parts.append(query(device, timeout_s))
            except Exception as error:
                log.debug("%s: %s", query.__name__, error)

    thread = threading.Thread(target=work, name="hardware", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        log.debug("the GPU was not described within %g s", timeout_s)
    for part in tuple(parts):
        found.MergeFrom(part)
    return found


def rdma_devices(folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Names of this machine's RDMA devices."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _card(device: torch.device, timeout_s: float) -> Hardware:
    properties = torch.cuda.get_device_properties(device)
    gpu = Gpu(
        uuid=gpu_uuid(device),
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_bytes=properties.total_memory,
    )
    return Hardware(gpu=gpu, driver_version=nvidia_smi.driver_version())


def _versions(device: torch.device, timeout_s: float) -> Hardware:
    nccl = ".".join(map(str, nccl_version()))
    return Hardware(cuda_version=torch.version.cuda or "", nccl_version=nccl)


def _peers(device: torch.device, timeout_s: float) -> Hardware:
    own, *peers = reachable_gpus(device)
    visible = [own, *(uuid for uuid in visible_gpus() if uuid != own)]
    return Hardware(visible_gpus=visible, peer_gpus=peers)


def _links(device: torch.device, timeout_s: float) -> Hardware:
    return Hardware(gpu_links=nvidia_smi.links(gpu_uuid(device), timeout_s))
