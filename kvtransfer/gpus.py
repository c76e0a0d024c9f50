"""Which GPUs this process sees and can write to; nothing on a CPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import distributed


def uuid(device: torch.device) -> str:
    """The driver's name of a GPU, "GPU-…", the same in every process; empty for a CPU."""
    return visible()[device.index or 0] if device.type == "cuda" else ""


@cache
def visible() -> tuple[str, ...]:
    """The names of all GPUs of this process, by torch's numbers."""
    count = torch.cuda.device_count()
    return tuple(f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in range(count))


@cache
def reachable(device: torch.device) -> tuple[str, ...]:
    """The names of the GPUs whose memory kernels on `device` can write to, its own first."""
    if device.type != "cuda":
        return ()
    own = device.index or 0
    others = [n for n in range(len(visible())) if n != own]
    peers = [n for n in others if torch.cuda.can_device_access_peer(own, n)]
    return tuple(visible()[n] for n in (own, *peers))


@cache
def nccl_version() -> tuple[int, ...]:
    """NCCL's, (2, 27, 5); empty where torch has none."""
    return tuple(torch.cuda.nccl.version()) if distributed.is_nccl_available() else ()
