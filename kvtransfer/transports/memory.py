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
        self._pools: dict[bytes, KvPool] = {}

    def listen(self, pool: KvPool) -> Listener:
        endpoint = uuid.uuid4().bytes
        self._pools[endpoint] = pool
        return _MemoryListener(endpoint, self._pools)

    def connect(self, pool: KvPool, endpoint: bytes, pid: int, timeout_s: float) -> Link:
        return _MemoryLink(pool, endpoint, self._pools)


class _MemoryListener(Listener):
    def __init__(self, endpoint: bytes, pools: dict[bytes, KvPool]) -> None:
        super().__init__(endpoint)
        self._pools = pools

    def close(self) -> None:
        self._pools.pop(self._endpoint, None)


class _MemoryLink(Link):
    def __init__(self, pool: KvPool, endpoint: bytes, pools: dict[bytes, KvPool]) -> None:
        self._pool, self._endpoint, self._pools = pool, endpoint, pools

    def put(self, local: Slots, remote: Slots, digest: Digest, timeout_s: float) -> PutStats:
        target = self._pools.get(self._endpoint)
        if target is None:
            raise TransferFailed("memory: the receiver is gone")
        start = time.perf_counter()
        copy_slots(self._pool, local, target, remote, digest)
        return PutStats(self._pool.nbytes(local), time.perf_counter() - start)
