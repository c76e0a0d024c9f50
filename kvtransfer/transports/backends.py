"""Everything in which gloo and nccl differ: how a group of two is built and waited for.

Gloo's calls end with the message, and their waits have a time-out. NCCL's calls only queue work on
the GPU: waiting for a message makes the copier's stream wait, and the host waits once, at the end
of a transfer, for all of it. Such a wait has no time-out, so a timer aborts the communicator at the
deadline; then its kernels end and the waiting thread returns.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from baton.v1 import common_pb2
from kvtransfer.interface import Kind
from kvtransfer.pairing import shares_gpu
from kvtransfer.transports.cuda import nccl_version

# A communicator's channels: each costs GPU memory and, while bytes travel, a multiprocessor.
NCCL_MIN_CTAS, NCCL_MAX_CTAS = 1, 8

# A communicator takes some 50 MB of GPU memory, and a decode worker has one for each of its peers.
NCCL_MAX_LINKS = 16

# Of a transfer. A message is a kernel launch and some waits between streams, tens of microseconds
# for which nothing travels; one of 4 MiB, as on a CPU, takes no more than 80 at 50 GB/s.
NCCL_STAGING_BYTES = 32 << 20

NCCL_ENVIRONMENT = {
    # A wait only queues work; see above. Blocking waits would poll once a millisecond.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # A lost peer must fail a link, not end the process: torch's watchdog must do nothing on an
    # error, write no dumps, and not be monitored itself.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # On an error the watchdog sleeps four times this in any case, and the group cannot be freed
    # meanwhile: a lost peer would keep its link's thread for a minute.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # Else every message's Python stack is recorded for a dump that is never written.
    "TORCH_FR_BUFFER_SIZE": "0",
    # Seconds until torch gives up a non-blocking call, a connection among them, which an abort
    # cannot end: torch holds the communicator's lock meanwhile. Its default is half an hour.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
}
_WATCHDOG_S = 300.0  # later than any wait here: torch's own time-out must not come first


@dataclass(frozen=True)
class Backend:
    """One implementation of torch's process groups.

    `build(store, rank, host, timeout_s)` makes a group of two · `wait(work, deadline)` returns when
    a message is done or, on a GPU, when all that is queued later comes after it · `watch(deadline,
    abort)` is around waits that cannot end by themselves: it calls `abort` at the deadline, from
    another thread · `max_links` bounds a receiver. Deadlines are times of `time.monotonic`.
    """

    name: str
    kind: Kind
    build: Callable[[PrefixStore, int, str, float], Any]
    wait: Callable[[Any, float], None]
    watch: Callable[[float, Callable[[], None]], AbstractContextManager[None]]
    max_links: int = 1 << 16


def gloo() -> Backend:
    """TCP between CPUs."""
    return Backend(
        "gloo",
        common_pb2.TRANSPORT_GLOO,
        _build_gloo,
        wait=lambda work, deadline: work.wait(at_least_1ms(deadline - time.monotonic())),
        watch=lambda deadline, abort: contextlib.nullcontext(),
    )


def nccl() -> Backend:
    """Between GPUs. Raises RuntimeError where torch was built without it."""
    if not distributed.is_nccl_available():
        raise RuntimeError("this torch was built without NCCL")
    # Read when the first group is built, and only from here. NCCL's own: when it is first used.
    os.environ.update(NCCL_ENVIRONMENT)
    if shares_gpu(nccl_version()):
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    return Backend(
        "nccl",
        common_pb2.TRANSPORT_NCCL,
        _build_nccl,
        wait=lambda work, deadline: work.wait(),
        watch=_aborting_at,
        max_links=NCCL_MAX_LINKS,
    )


def at_least_1ms(seconds: float) -> timedelta:
    """A time-out for torch, which takes zero and less for "no time-out"."""
    return timedelta(seconds=max(seconds, 0.001))


def _build_gloo(store: PrefixStore, rank: int, host: str, timeout_s: float) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return distributed.ProcessGroupGloo(store, rank, 2, options)


def _build_nccl(store: PrefixStore, rank: int, host: str, timeout_s: float) -> Any:
    # The receiver reads the communicator's id from it, and no abort ends that wait.
    store.set_timeout(at_least_1ms(timeout_s))
    # Ahead of the engine's kernels: a message behind a step would wait for milliseconds.
    options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=max(timeout_s, _WATCHDOG_S))
    options.config.blocking = 0  # a blocking initialisation cannot be timed out
    options.config.min_ctas, options.config.max_ctas = NCCL_MIN_CTAS, NCCL_MAX_CTAS
    return distributed.ProcessGroupNCCL(store, rank, 2, options)


def listening_store(host: str) -> tuple[TCPStore, int]:
    """A store on a free port of `host`, on which both ends meet, and the port. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.bind(address)
        listening.listen()
        port = listening.getsockname()[1]
        store = TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listening.fileno(),
        )
    except BaseException:
        listening.close()
        raise
    listening.detach()  # the store owns it now
    return store, port


def connected_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The sender's end of it. Raises RuntimeError when it cannot be reached in time."""
    return TCPStore(host, port, None, False, at_least_1ms(timeout_s), wait_for_workers=False)


@contextlib.contextmanager
def _aborting_at(deadline: float, abort: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(max(deadline - time.monotonic(), 0.0), abort)
    timer.name, timer.daemon = "kv-deadline", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
