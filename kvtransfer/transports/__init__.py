"""The transports, all with the interface `kvtransfer.interface`."""

from __future__ import annotations

import logging

from torch import distributed

from baton.config import SHARED_FOLDER
from baton.cuda import CudaArea
from baton.errors import ConfigError
from baton.rendezvous import listening_socket
from baton.shared_memory import SharedMemoryArea
from kvtransfer.interface import Transport
from kvtransfer.pool import KvPool
from kvtransfer.shared_pool import check_folder
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.gloo_nccl import GlooTransport, NcclTransport
from kvtransfer.transports.shm import ShmTransport

log = logging.getLogger(__name__)


def usable(pool: KvPool, host: str, choice: str = "auto", kv_host: str = "") -> list[Transport]:
    """The transports that this worker can use, fastest first; only `choice`, if it is not "auto".

    `host`: the address at which peers reach this worker · `kv_host`: another address for KV, or
    empty. Raises ConfigError if `kv_host` is not an address of this machine, or `choice` cannot be
    used with this pool.
    """
    if kv_host:
        try:
            listening_socket(kv_host.strip("[]")).close()
        except OSError as error:
            raise ConfigError(
                f"--kv-host {kv_host} is no address of this machine: {error}"
            ) from error
        host = kv_host
    host = host.strip("[]")
    transports: list[Transport] = []
    if pool.area is not None:
        try:
            check_folder()
        except OSError as error:
            text = "other processes cannot write KV here: no socket can be made in %s: %s"
            log.warning(text, SHARED_FOLDER, error.strerror or error)
        else:
            if isinstance(pool.area, CudaArea):
                transports.append(CudaIpcTransport(pool.area.driver))
            elif isinstance(pool.area, SharedMemoryArea):
                transports.append(ShmTransport())
    if pool.device.type == "cpu":
        transports.append(GlooTransport(host))
    elif distributed.is_nccl_available():
        transports.append(NcclTransport(host))
    if choice == "auto":
        return transports
    chosen = [transport for transport in transports if transport.name == choice]
    if not chosen:
        names = ", ".join(transport.name for transport in transports) or "none"
        raise ConfigError(f"--transport {choice} cannot be used here; usable: {names}")
    return chosen
