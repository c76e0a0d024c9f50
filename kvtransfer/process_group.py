"""The two-sided transports, gloo and nccl: a process group of two ranks for each pair and epoch.

There is no global world: the receiver opens a store on a free port, both ends build the group on
it, and a hello in both directions proves that both have it before either may drop it (dropping a
group while the other end still builds it breaks that end). The sender is rank 0.
Everything in which gloo and nccl differ is in `kvtransfer.backends`.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from baton.errors import Stale, TransferFailed
from kvtransfer.backends import Backend
from kvtransfer.pool import Digest, KvPool, Slots
from kvtransfer.seam import Link, Listener, PutStats, Transport

_SENDER, _RECEIVER = 0, 1


class ProcessGroupTransport(Transport):
    """`host` is this worker's address, which the peers can reach.

    `staging_bytes` bounds the memory of one link: two messages of half that size, one travelling
    while the other is copied. The receiver's value holds for both ends. Neighbouring blocks are
    sent from where they lie; they arrive in staging memory, which a write that comes too late
    cannot leave.
    """

    one_sided = False

    def __init__(self, backend: Backend, host: str, staging_bytes: int = 8 << 20) -> None:
        self.name, self.kind = backend.name, backend.kind
        self._backend, self._host, self._message_bytes = backend, host, staging_bytes // 2

    def listen(self, pool: KvPool) -> Listener:
        return _Listener(self._backend, self._host, self._message_bytes, pool)

    def connect(self, pool: KvPool, endpoint: bytes, timeout_s: float) -> Link:
        try:
            place = json.loads(endpoint)
            host, port, name = str(place["host"]), int(place["port"]), str(place["name"])
            message_bytes = int(place["message_bytes"])
            store = TCPStore(host, port, None, False, _timedelta(timeout_s), wait_for_workers=False)
            group = _Group(self._backend, self._host, store, name, _SENDER, pool, message_bytes)
            group.connect(timeout_s)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise TransferFailed(f"{self.name}: cannot reach the receiver: {error}") from error
        return _Link(group)


class _Group:
    """One end of a pair: the group, its store and the staging memory of two messages."""

    def __init__(
        self,
        backend: Backend,
        host: str,
        store: TCPStore,
        name: str,
        rank: int,
        pool: KvPool,
        message_bytes: int,
    ) -> None:
        self.backend, self.pool, self.message_bytes = backend, pool, message_bytes
        self._host, self._store, self._name, self._rank = host, store, name, rank
        self._group: Any = None
        self._staging: list[torch.Tensor] = []
        self._guard = threading.Lock()
        self._aborted = False

    def connect(self, timeout_s: float) -> None:
        """Builds the group and says hello both ways. Raises RuntimeError."""
        deadline = time.monotonic() + timeout_s
        store = PrefixStore(self._name, self._store)
        with self.backend.device(self.pool.device):
            group = self.backend.build(store, self._rank, self._host, timeout_s)
            with self._guard:
                if self._aborted:
                    raise RuntimeError("aborted while connecting")
                self._group = group
            hello = torch.zeros(1, dtype=torch.uint8, device=self.pool.device)
            for sender in (_SENDER, _RECEIVER):
                work = self.send(hello) if self._rank == sender else self.receive(hello)
                self.wait(work, deadline)
        size = max(self.message_bytes, self.pool.block_bytes)
        self._staging = [
            torch.empty(size, dtype=torch.uint8, device=self.pool.device) for _ in range(2)
        ]

    def staging(self, message: int) -> torch.Tensor:
        """Memory for a message; neighbours in the order of messages never share it."""
        return self._staging[message % 2]

    def send(self, data: torch.Tensor) -> Any:
        return self._group.send([data], 1 - self._rank, 0)

    def receive(self, data: torch.Tensor) -> Any:
        return self._group.recv([data], 1 - self._rank, 0)

    def wait(self, work: Any, deadline: float) -> None:
        """Waits for one message. A time-out closes the pair for good. Raises RuntimeError."""
        if self._aborted:
            raise RuntimeError("the link was aborted")
        work.wait(_timedelta(deadline - time.monotonic()))
        self.backend.synchronize(self.pool.device)

    def abort(self) -> None:
        with self._guard:
            self._aborted = True
            if self._group is not None:
                self._group.abort()

    def close(self) -> None:
        self.abort()
        self._group = None
        self._staging = []


class _Link(Link):
    def __init__(self, group: _Group) -> None:
        self._group = group

    def put(self, local: Slots, remote: Slots, digest: Digest, timeout_s: float) -> PutStats:
        start, deadline = time.perf_counter(), time.monotonic() + timeout_s
        group, pool = self._group, self._group.pool
        try:
            with group.backend.device(pool.device):
                travelling = None
                for i, part in enumerate(pool.parts(local, group.message_bytes)):
                    data = pool.in_place(part)
                    if data is None:
                        data = pool.gather(part, group.staging(i))
                    digest.update(data)
                    if travelling is not None:
                        group.wait(travelling, deadline)
                    travelling = group.send(data)
                if travelling is not None:
                    group.wait(travelling, deadline)
        except RuntimeError as error:
            raise TransferFailed(f"{group.backend.name}: send failed: {error}") from error
        return PutStats(pool.nbytes(local), time.perf_counter() - start)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.close()


class _Listener(Listener):
    def __init__(self, backend: Backend, host: str, message_bytes: int, pool: KvPool) -> None:
        self._backend, self._host, self._message_bytes = backend, host, message_bytes
        self._pool = pool
        self._groups: dict[tuple[str, int], _Group] = {}

    def offer(self, peer: str, epoch: int) -> bytes:
        store, port = _listening_store(self._host)
        name = f"{peer}/{epoch}"
        group = _Group(
            self._backend, self._host, store, name, _RECEIVER, self._pool, self._message_bytes
        )
        self._groups[peer, epoch] = group
        place = {"host": self._host, "port": port, "name": name}
        return json.dumps({**place, "message_bytes": self._message_bytes}).encode()

    def accept(self, peer: str, epoch: int, timeout_s: float) -> None:
        group = self._find(peer, epoch)
        try:
            group.connect(timeout_s)
        except RuntimeError as error:
            raise TransferFailed(
                f"{self._backend.name}: {peer} did not connect: {error}"
            ) from error

    def receive(
        self,
        peer: str,
        epoch: int,
        slots: Slots,
        digest: Digest,
        timeout_s: float,
        posted: Callable[[], None],
    ) -> None:
        group, deadline = self._find(peer, epoch), time.monotonic() + timeout_s
        try:
            with self._backend.device(self._pool.device):
                self._receive(group, slots, digest, deadline, posted)
        except RuntimeError as error:
            raise TransferFailed(
                f"{self._backend.name}: receive from {peer} failed: {error}"
            ) from error

    def _receive(
        self,
        group: _Group,
        slots: Slots,
        digest: Digest,
        deadline: float,
        posted: Callable[[], None],
    ) -> None:
        parts = self._pool.parts(slots, group.message_bytes)

        def post(i: int) -> tuple[torch.Tensor, Any]:
            data = group.staging(i)[: self._pool.nbytes(parts[i])]
            return data, group.receive(data)

        data, work = post(0)
        posted()
        for i, part in enumerate(parts):
            group.wait(work, deadline)
            arrived = data
            if i + 1 < len(parts):
                data, work = post(i + 1)
            digest.update(arrived)
            self._pool.scatter(arrived, part)

    def drop(self, peer: str, epoch: int) -> None:
        group = self._groups.pop((peer, epoch), None)
        if group is not None:
            group.close()

    def close(self) -> None:
        for peer, epoch in list(self._groups):
            self.drop(peer, epoch)

    def _find(self, peer: str, epoch: int) -> _Group:
        group = self._groups.get((peer, epoch))
        if group is None:
            raise Stale(f"link epoch {epoch} of {peer} is gone")
        return group


def _listening_store(host: str) -> tuple[TCPStore, int]:
    """A store that listens on a free port of `host` alone."""
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


def _timedelta(seconds: float) -> timedelta:
    """At least a millisecond: torch takes zero and less for "no time-out"."""
    return timedelta(seconds=max(seconds, 0.001))
