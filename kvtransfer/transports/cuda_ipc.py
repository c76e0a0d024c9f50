"""The transport between GPUs of one machine: the receiver's pool, mapped for the sender's GPU.

The pool is in a `CudaArea`, which a process of the same machine and user opens through the driver
and writes into over NVLink or PCIe.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import torch

from baton.cuda import CudaArea, CudaDriver, gpu_uuid
from baton.errors import TransferFailed
from baton.v1 import common_pb2
from kvtransfer.checksum import Checksum
from kvtransfer.copier import GpuCopier
from kvtransfer.deadline import Deadline
from kvtransfer.interface import ReceivingEnd, SendingEnd, Transport
from kvtransfer.pool import KvPool, Slots, check_fit
from kvtransfer.shared_pool import ReceiverProcess, SharedPoolListener, received

log = logging.getLogger(__name__)

# A put checks its deadline and the receiver after each piece. Two pieces are in flight at a time,
# so the check costs nothing. A piece takes twenty milliseconds over PCIe.
PIECE_BYTES = 1 << 30


class CudaIpcTransport(Transport):
    """For a receiver whose pool is in a `CudaArea`, on a GPU that this one can write to."""

    name = "cuda_ipc"
    kind = common_pb2.TRANSPORT_CUDA_IPC
    one_sided = True

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def listen(self, pool: KvPool) -> ReceivingEnd:
        area = pool.area
        assert isinstance(area, CudaArea), "the pool is not in a CudaArea"
        layout = {"bytes": area.nbytes, **pool.layout, "gpu": gpu_uuid(pool.device)}
        return SharedPoolListener(self.name, area.fd, layout)

    def connect(self, pool: KvPool, endpoint: bytes, timeout_s: float) -> SendingEnd:
        with received(self.name, endpoint, timeout_s) as (layout, fd, receiver):
            return _CudaIpcSendingEnd(self._driver, pool, layout, fd, receiver)


class _CudaIpcSendingEnd(SendingEnd):
    def __init__(
        self,
        driver: CudaDriver,
        pool: KvPool,
        layout: dict[str, Any],
        fd: int,
        receiver: ReceiverProcess,
    ) -> None:
        self._driver, self._pool, self._receiver = driver, pool, receiver
        self._size, num_bytes = int(layout["bytes"]), pool.bytes_at(layout)
        if num_bytes > self._size:
            raise ValueError(f"{layout['blocks']} blocks do not fit in {self._size} bytes")
        self._address = driver.open(pool.device, fd, self._size)
        try:
            octets = driver.view(self._address, num_bytes)
            self._remote: KvPool | None = pool.counterpart(octets, layout)
            self._copier = GpuCopier(pool)
            self._copier.check_access(self._remote)  # so that the first put does not wait, or fail
        except BaseException:
            driver.close(pool.device, self._address, self._size)
            raise

    def put(self, local: Slots, remote: Slots, checksum: Checksum, timeout_s: float) -> None:
        """As `SendingEnd.put`. A copy that a GPU has begun cannot be stopped: time-outs and aborts
        take effect between pieces, and what was begun is always waited for."""
        deadline = Deadline(timeout_s)
        self._receiver.check()
        assert self._remote is not None
        check_fit(self._pool, local, self._remote, remote)
        pieces = (self._pool.split(slots, PIECE_BYTES) for slots in (local, remote))
        try:
            with self._copier.transfer(checksum):
                events: deque[torch.cuda.Event | None] = deque()
                for here, there in zip(*pieces, strict=True):
                    if len(events) == 2:
                        self._copier.synchronize(events.popleft())
                        self._receiver.check()
                        if deadline.passed:
                            raise TransferFailed("cuda_ipc: the copy did not end in time")
                    self._copier.copy(here, self._remote, there)
                    events.append(self._copier.record())
                self._copier.finish()
        except RuntimeError as error:
            raise TransferFailed(f"cuda_ipc: the copy failed: {error}") from error
        self._receiver.check()

    def abort(self) -> None:
        self._receiver.abort()

    def close(self) -> None:
        if self._remote is not None:
            self._remote = None
            try:
                self._driver.close(self._pool.device, self._address, self._size)
            except OSError as error:
                log.warning("cuda_ipc: the receiver's memory stays open: %s", error)
            self._receiver.close()
