"""The transport between two pools of one process: for tests and single-process clusters."""

from __future__ import annotations

import time
import uuid

from baton.errors import TransferFailed
from baton.v1 import common_pb2
from kvtransfer.digest import Digest
from kvtransfer.interface import Link, Listener, PutStats, Transport
from kvtransfer.pool import KvPool, Slots, copy_slots


class MemoryTransport(Transport):
    """Both ends share one instance; it knows the pools that listen."""

    name = "memory"
    kind = common_pb2.TRANSPORT_MEMORY
    one_sided = True

    def __init__(self) -> None:
        self.pools: dict[bytes, KvPool] = {}

    def listen(self, pool: KvPool, name: str) -> Listener:
        return _MemoryListener(self, pool)

    def connect(self, pool: KvPool, endpoint: bytes, pid: int, timeout_s: float) -> Link:
        return _MemoryLink(self, pool, endpoint)


class _MemoryListener(Listener):
    def __init__(self, transport: MemoryTransport, pool: KvPool) -> None:
        super().__init__(uuid.uuid4().bytes)
        self._pools = transport.pools
        self._pools[self.endpoint] = pool

    def close(self) -> None:
        self._pools.pop(self.endpoint, None)


class _MemoryLink(Link):
    def __init__(self, transport: MemoryTransport, pool: KvPool, endpoint: bytes) -> None:
        self._pools, self._pool, self._endpoint = transport.pools, pool, endpoint

    def put(self, local: Slots, remote: Slots, digest: Digest, timeout_s: float) -> PutStats:
        if (target := self._pools.get(self._endpoint)) is None:
            raise TransferFailed("memory: the receiver is gone")
        start = time.perf_counter()
        copy_slots(self._pool, local, target, remote, digest)
        return PutStats(self._pool.nbytes(local), time.perf_counter() - start)
