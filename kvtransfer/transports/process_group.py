"""The two-sided transports, gloo and nccl: a process group of two ranks for each pair and epoch.

There is no global world: the receiver opens a store on a free port, both ends build the group on
it, and a hello in both directions proves that both have it before either may drop it (dropping a
group while the other end still builds it breaks that end). The sender is rank 0.
Everything in which gloo and nccl differ is in `kvtransfer.transports.backends`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from baton.errors import Stale, TransferFailed
from kvtransfer import movers
from kvtransfer.digest import Digest
from kvtransfer.interface import Link, Listener, PutStats, Transport
from kvtransfer.movers import Mover
from kvtransfer.pool import KvPool, Slots
from kvtransfer.staging import Staging
from kvtransfer.stores import connected_store, listening_store
from kvtransfer.transports.backends import Backend

log = logging.getLogger(__name__)

_SENDER, _RECEIVER = 0, 1


class ProcessGroupTransport(Transport):
    """`host` is this worker's address, which the peers can reach.

    `staging_bytes` bounds the memory of one transfer: two messages of half that size, one
    travelling while the other is copied. The receiver's value holds for both ends. Neighbouring
    blocks are sent from where they lie; they arrive in staging memory, which a write that comes too
    late cannot leave. All links share it, so it is there for `max_transfers` at a time.
    """

    one_sided = False

    def __init__(
        self, backend: Backend, host: str, staging_bytes: int = 8 << 20, max_transfers: int = 8
    ) -> None:
        self.name, self.kind, self.max_links = backend.name, backend.kind, backend.max_links
        self._backend, self._host, self._message_bytes = backend, host, staging_bytes // 2
        self._staging = Staging(max_transfers)

    def listen(self, pool: KvPool) -> Listener:
        return _Listener(self._backend, self._staging, self._host, self._message_bytes, pool)

    def connect(self, pool: KvPool, endpoint: bytes, pid: int, timeout_s: float) -> Link:
        try:
            place = json.loads(endpoint)
            host, port, name = str(place["host"]), int(place["port"]), str(place["name"])
            message_bytes = int(place["message_bytes"])
            store = connected_store(host, port, timeout_s)
            own = self._backend, self._staging, self._host
            group = _Group(*own, store, name, _SENDER, pool, message_bytes)
            group.connect(timeout_s)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise TransferFailed(f"{self.name}: cannot reach the receiver: {error}") from error
        return _Link(group)


class _Group:
    """One end of a pair: the group and its store, for one thread but for `abort`."""

    def __init__(
        self,
        backend: Backend,
        staging: Staging,
        host: str,
        store: TCPStore,
        name: str,
        rank: int,
        pool: KvPool,
        message_bytes: int,
    ) -> None:
        self.backend, self.pool, self.message_bytes = backend, pool, message_bytes
        self._staging, self._host = staging, host
        self._store, self._name, self._rank = store, name, rank
        self._group: Any = None
        self._mover: Mover | None = None
        self._guard = threading.Lock()
        self._aborted = False

    def connect(self, timeout_s: float) -> None:
        """Builds the group and says hello both ways. Raises RuntimeError."""
        deadline = time.monotonic() + timeout_s
        store = PrefixStore(self._name, self._store)
        self._mover = movers.mover(self.pool)
        with self.backend.watch(deadline, self.abort), self._mover.turn(self.pool.new_digest()):
            group = self.backend.build(store, self._rank, self._host, timeout_s)
            with self._guard:
                if self._aborted:
                    raise RuntimeError("aborted while connecting")
                self._group = group
            hello = torch.zeros(1, dtype=torch.uint8, device=self.pool.device)
            for sender in (_SENDER, _RECEIVER):
                work = self.send(hello) if self._rank == sender else self.receive(hello)
                self.wait(work, deadline)
            self._settle(self._mover)

    @contextmanager
    def transfer(self, digest: Digest, deadline: float) -> Iterator[tuple[Mover, torch.Tensor]]:
        """Around one put or receive: what moves bytes, and staging memory of two messages.

        When it is left all is done and in `digest`, or nothing goes on. Raises RuntimeError.
        """
        assert self._mover is not None, "not connected"
        size = max(self.message_bytes, self.pool.block_bytes)
        with (
            self._staging.lend(size, self.pool.device, deadline) as staging,
            self.backend.watch(deadline, self.abort),
            self._mover.turn(digest),
        ):
            try:
                yield self._mover, staging
                self._settle(self._mover)
            except RuntimeError:
                self.abort()  # what is queued on a GPU ends, and the turn with it
                raise

    def send(self, data: torch.Tensor) -> Any:
        return self._group.send([data], 1 - self._rank, 0)

    def receive(self, data: torch.Tensor) -> Any:
        return self._group.recv([data], 1 - self._rank, 0)

    def wait(self, work: Any, deadline: float) -> None:
        """Waits for one message. A time-out closes the pair for good. Raises RuntimeError."""
        self._check()
        self.backend.wait(work, deadline)

    def abort(self) -> None:
        with self._guard:
            self._aborted = True
            if self._group is not None:
                try:
                    self._group.abort()
                except RuntimeError as error:  # NCCL's can; whoever gives a link up has to go on
                    log.warning("%s: the abort failed: %s", self.backend.name, error)

    def close(self) -> None:
        self.abort()
        self._group = None

    def _settle(self, mover: Mover) -> None:
        mover.settle()
        self._check()  # an abort lets a GPU go on as if all had come

    def _check(self) -> None:
        if self._aborted:
            raise RuntimeError("the link was aborted, or its time was over")


class _Link(Link):
    def __init__(self, group: _Group) -> None:
        self._group = group

    def put(self, local: Slots, remote: Slots, digest: Digest, timeout_s: float) -> PutStats:
        start, deadline = time.perf_counter(), time.monotonic() + timeout_s
        group, pool = self._group, self._group.pool
        try:
            with group.transfer(digest, deadline) as (mover, staging):
                travelling = None
                for i, part in enumerate(pool.parts(local, group.message_bytes)):
                    data = mover.collect(part, staging[i % 2])
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
    def __init__(
        self, backend: Backend, staging: Staging, host: str, message_bytes: int, pool: KvPool
    ) -> None:
        self._backend, self._staging, self._host = backend, staging, host
        self._message_bytes, self._pool = message_bytes, pool
        self._groups: dict[tuple[str, int], _Group] = {}

    def offer(self, peer: str, epoch: int) -> bytes:
        store, port = listening_store(self._host)
        name = f"{peer}/{epoch}"
        self._groups[peer, epoch] = _Group(
            self._backend,
            self._staging,
            self._host,
            store,
            name,
            _RECEIVER,
            self._pool,
            self._message_bytes,
        )
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
            with group.transfer(digest, deadline) as (mover, staging):
                self._receive(group, mover, staging, slots, deadline, posted)
        except RuntimeError as error:
            raise TransferFailed(
                f"{self._backend.name}: receive from {peer} failed: {error}"
            ) from error

    def _receive(
        self,
        group: _Group,
        mover: Mover,
        staging: torch.Tensor,
        slots: Slots,
        deadline: float,
        posted: Callable[[], None],
    ) -> None:
        parts = self._pool.parts(slots, group.message_bytes)

        def post(i: int) -> tuple[torch.Tensor, Any]:
            data = staging[i % 2][: self._pool.nbytes(parts[i])]
            return data, group.receive(data)

        data, work = post(0)
        posted()
        for i, part in enumerate(parts):
            group.wait(work, deadline)
            arrived = data
            if i + 1 < len(parts):
                data, work = post(i + 1)
            mover.spread(arrived, part)

    def abort(self, peer: str, epoch: int) -> None:
        group = self._groups.get((peer, epoch))
        if group is not None:
            group.abort()

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
