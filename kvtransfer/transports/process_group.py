"""The two-sided transports, gloo and nccl: a process group of two ranks for each pair and epoch.

There is no global world: the receiver opens a store on a free port, both ends build the group on
it, and a hello in both directions proves that both have it before either may drop it (dropping a
group while the other end still builds it breaks that end). The sender is rank 0.
All differences between gloo and nccl are in `kvtransfer.transports.backends`.
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
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from baton.errors import Stale, TransferFailed
from kvtransfer.copier import Copier, copier
from kvtransfer.digest import Digest
from kvtransfer.interface import Link, Listener, PutStats, Transport
from kvtransfer.pool import KvPool, Slots
from kvtransfer.transports.backends import Backend, connected_store, listening_store

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
        self.backend, self.host, self.message_bytes = backend, host, staging_bytes // 2
        self.staging = Staging(max_transfers)

    def listen(self, pool: KvPool) -> Listener:
        return _Listener(self, pool)

    def connect(self, pool: KvPool, endpoint: bytes, pid: int, timeout_s: float) -> Link:
        try:
            place = json.loads(endpoint)
            host, port, name = str(place["host"]), int(place["port"]), str(place["name"])
            message_bytes = int(place["message_bytes"])
            store = PrefixStore(name, connected_store(host, port, timeout_s))
            group = _Group(self, store, _SENDER, pool, message_bytes)
            group.connect(timeout_s)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise TransferFailed(f"{self.name}: cannot reach the receiver: {error}") from error
        return _Link(group)


class Staging:
    """Lends pairs of message buffers, at most `max_lent` at a time, and keeps them for reuse.

    So many links cost no more memory than the transfers that run at once. Any thread.
    """

    def __init__(self, max_lent: int = 8) -> None:
        self._max_lent = max_lent
        self._lent = 0
        self._free: list[torch.Tensor] = []  # uint8 [2, bytes]
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, num_bytes: int, device: torch.device, deadline: float) -> Iterator[torch.Tensor]:
        """Two buffers, uint8 `[2, num_bytes or more]`; waits until `deadline` of time.monotonic().

        After a failure they are not reused: a message that comes too late might still be written
        into them. Raises RuntimeError when none was returned in time.
        """
        with self._changed:
            left = deadline - time.monotonic()
            if not self._changed.wait_for(lambda: self._lent < self._max_lent, max(left, 0.0)):
                raise RuntimeError("no staging memory became free in time")
            self._lent += 1
            buffers = self._take(num_bytes, device)
        try:
            if buffers is None:
                buffers = torch.empty((2, num_bytes), dtype=torch.uint8, device=device)
            yield buffers
            with self._changed:
                self._free.append(buffers)
        finally:
            with self._changed:
                self._lent -= 1
                self._changed.notify()

    def _take(self, num_bytes: int, device: torch.device) -> torch.Tensor | None:
        for n, buffers in enumerate(self._free):
            if buffers.shape[1] >= num_bytes and buffers.device == device:
                return self._free.pop(n)
        return None


class _Group:
    """One end of a pair: the process group and its store, for one thread except for `abort`."""

    def __init__(
        self,
        transport: ProcessGroupTransport,
        store: PrefixStore,
        rank: int,
        pool: KvPool,
        message_bytes: int,
    ) -> None:
        self.backend = transport.backend
        self._staging, self._host = transport.staging, transport.host
        self.pool, self.message_bytes = pool, message_bytes
        self._store, self._rank = store, rank
        self._group: Any = None
        self._copier: Copier | None = None
        self._guard = threading.Lock()
        self._aborted = False

    def connect(self, timeout_s: float) -> None:
        """Builds the group and exchanges a hello in both directions. Raises RuntimeError."""
        deadline = time.monotonic() + timeout_s
        self._copier = copier(self.pool)
        with (
            self.backend.watch(deadline, self.abort),
            self._copier.transfer(self.pool.new_digest()),
        ):
            group = self.backend.build(self._store, self._rank, self._host, timeout_s)
            with self._guard:
                if self._aborted:
                    raise RuntimeError("aborted while connecting")
                self._group = group
            hello = torch.zeros(1, dtype=torch.uint8, device=self.pool.device)
            for sender in (_SENDER, _RECEIVER):
                work = self.send(hello) if self._rank == sender else self.receive(hello)
                self.wait(work, deadline)
            self._finish(self._copier)

    @contextmanager
    def transfer(self, digest: Digest, deadline: float) -> Iterator[tuple[Copier, torch.Tensor]]:
        """Around one put or receive: the copier, and staging memory of two messages.

        When it is left all is done and in `digest`, or nothing goes on. Raises RuntimeError.
        """
        assert self._copier is not None, "not connected"
        size = max(self.message_bytes, self.pool.block_bytes)
        with (
            self._staging.lend(size, self.pool.device, deadline) as staging,
            self.backend.watch(deadline, self.abort),
            self._copier.transfer(digest),
        ):
            try:
                yield self._copier, staging
                self._finish(self._copier)
            except RuntimeError:
                self.abort()  # ends what is queued on a GPU, and with it the copier's transfer
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
                except RuntimeError as error:  # NCCL's can fail; closing the link must go on
                    log.warning("%s: the abort failed: %s", self.backend.name, error)

    def close(self) -> None:
        self.abort()
        self._group = None

    def _finish(self, copier: Copier) -> None:
        copier.finish()
        self._check()  # after an abort a GPU goes on as if all had arrived

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
            with group.transfer(digest, deadline) as (copier, staging):
                travelling = None
                for i, part in enumerate(pool.parts(local, group.message_bytes)):
                    data = copier.gather(part, staging[i % 2])
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
    def __init__(self, transport: ProcessGroupTransport, pool: KvPool) -> None:
        self._transport, self._pool = transport, pool
        self._groups: dict[tuple[str, int], _Group] = {}

    def offer(self, peer: str, epoch: int) -> bytes:
        transport, name = self._transport, f"{peer}/{epoch}"
        store, port = listening_store(transport.host)
        message_bytes = transport.message_bytes
        group = _Group(transport, PrefixStore(name, store), _RECEIVER, self._pool, message_bytes)
        self._groups[peer, epoch] = group
        place = {"host": transport.host, "port": port, "name": name}
        return json.dumps({**place, "message_bytes": message_bytes}).encode()

    def accept(self, peer: str, epoch: int, timeout_s: float) -> None:
        group = self._find(peer, epoch)
        try:
            group.connect(timeout_s)
        except RuntimeError as error:
            raise TransferFailed(
                f"{self._transport.name}: {peer} did not connect: {error}"
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
        parts = self._pool.parts(slots, group.message_bytes)
        try:
            with group.transfer(digest, deadline) as (copier, staging):

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
                    copier.scatter(arrived, part)
        except RuntimeError as error:
            raise TransferFailed(
                f"{self._transport.name}: receive from {peer} failed: {error}"
            ) from error

    def abort(self, peer: str, epoch: int) -> None:
        if (group := self._groups.get((peer, epoch))) is not None:
            group.abort()

    def drop(self, peer: str, epoch: int) -> None:
        if (group := self._groups.pop((peer, epoch), None)) is not None:
            group.close()

    def close(self) -> None:
        for peer, epoch in list(self._groups):
            self.drop(peer, epoch)

    def _find(self, peer: str, epoch: int) -> _Group:
        group = self._groups.get((peer, epoch))
        if group is None:
            raise Stale(f"link epoch {epoch} of {peer} is gone")
        return group
