"""Everything in which gloo and nccl differ: how a group of two is built and waited for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from baton.v1 import common_pb2
from kvtransfer.seam import Kind


@dataclass(frozen=True)
class Backend:
    """One implementation of torch's process groups.

    `build(store, rank, host, timeout_s)` makes a group of two; `device(d)` is the context in which
    its calls run; `synchronize(d)` returns when a message that was waited for is in memory.
    """

    name: str
    kind: Kind
    build: Callable[[PrefixStore, int, str, float], Any]
    device: Callable[[torch.device], AbstractContextManager[Any]]
    synchronize: Callable[[torch.device], None]


def gloo() -> Backend:
    """TCP between CPUs."""
    return Backend(
        "gloo",
        common_pb2.TRANSPORT_GLOO,
        _build_gloo,
        device=lambda device: contextlib.nullcontext(),
        synchronize=lambda device: None,
    )


def nccl() -> Backend:
    """Between GPUs. Raises RuntimeError where torch was built without it."""
    if not distributed.is_nccl_available():
        raise RuntimeError("this torch was built without NCCL")
    # A wait must end at its own time-out, and a lost peer must fail a link, not end the process
    # through torch's watchdog. Both are read when a group is built, and only from here.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    return Backend(
        "nccl",
        common_pb2.TRANSPORT_NCCL,
        _build_nccl,
        device=torch.cuda.device,
        synchronize=lambda device: torch.cuda.current_stream(device).synchronize(),
    )


def _build_gloo(store: PrefixStore, rank: int, host: str, timeout_s: float) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return distributed.ProcessGroupGloo(store, rank, 2, options)


def _build_nccl(store: PrefixStore, rank: int, host: str, timeout_s: float) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    # A blocking initialisation cannot be timed out.
    options.config.blocking = 0
    return distributed.ProcessGroupNCCL(store, rank, 2, options)
