"""The two-sided transports, gloo and nccl: a process group of two ranks for each pair and epoch.

There is no global world: the receiver opens a store on a free port, both ends build the group on
it, and a hello in both directions proves that both have it before either may drop it (dropping a
group while the other end still builds it breaks that end). The sender is rank 0.

Gloo's calls end with the message, and their waits have a time-out. NCCL's calls only queue work on
the GPU: waiting for a message makes the copier's stream wait, and the host waits once, at the end
of a transfer, for all of it. Such a wait has no time-out, so a timer aborts the communicator at the
deadline; then its kernels end and the waiting thread returns.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from baton.errors import Stale, TransferFailed
from baton.v1 import common_pb2
from kvtransfer.copier import Copier, copier
from kvtransfer.digest import Digest
from kvtransfer.interface import Link, Listener, PutStats, Transport
from kvtransfer.pairing import shares_gpu
from kvtransfer.pool import KvPool, Slots
from kvtransfer.transports.cuda import nccl_version

log = logging.getLogger(__name__)

_SENDER, _RECEIVER = 0, 1

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


class ProcessGroupTransport(Transport):
    """`host` is this worker's address, which the peers can reach. Deadlines: `time.monotonic`.

    `staging_bytes` bounds the memory of one transfer: two messages of half that size, one
    travelling while the other is copied. The receiver's value holds for both ends. Neighbouring
    blocks are sent from where they lie; they arrive in staging memory, which a write that comes too
    late cannot leave. All links share it, so it is there for `max_transfers` at a time.
    """

    one_sided = False

    def __init__(self, host: str, staging_bytes: int = 8 << 20, max_transfers: int = 8) -> None:
        self.host, self.message_bytes = host, staging_bytes // 2
        self.staging = Staging(max_transfers)

    @abstractmethod
    def build(self, store: PrefixStore, rank: int, timeout_s: float) -> Any:
        """A process group of two."""

    @abstractmethod
    def wait(self, work: Any, deadline: float) -> None:
        """Returns when a message is done or, on a GPU, when what is queued later comes after it."""

    def watch(self, deadline: float, abort: Callable[[], None]) -> AbstractContextManager[None]:
        """Around waits without a time-out: a thread calls `abort` at the deadline."""
        return nullcontext()

    def listen(self, pool: KvPool) -> Listener:
        return _Listener(self, pool)

    def connect(self, pool: KvPool, endpoint: bytes, pid: int, timeout_s: float) -> Link:
        try:
            place = json.loads(endpoint)
            host, port, name = str(place["host"]), int(place["port"]), str(place["name"])
            message_bytes = int(place["message_bytes"])
            store = PrefixStore(name, _connected_store(host, port, timeout_s))
            group = _Group(self, store, _SENDER, pool, message_bytes)
            group.connect(timeout_s)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise TransferFailed(f"{self.name}: cannot reach the receiver: {error}") from error
        return _Link(group)


class GlooTransport(ProcessGroupTransport):
    """TCP between CPUs."""

    name = "gloo"
    kind = common_pb2.TRANSPORT_GLOO

    def build(self, store: PrefixStore, rank: int, timeout_s: float) -> Any:
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=self.host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        return distributed.ProcessGroupGloo(store, rank, 2, options)

    def wait(self, work: Any, deadline: float) -> None:
        work.wait(_at_least_1ms(deadline - time.monotonic()))


class NcclTransport(ProcessGroupTransport):
    """Between GPUs. Raises RuntimeError where torch was built without NCCL."""

    name = "nccl"
    kind = common_pb2.TRANSPORT_NCCL
    max_links = NCCL_MAX_LINKS

    def __init__(
        self, host: str, staging_bytes: int = NCCL_STAGING_BYTES, max_transfers: int = 8
    ) -> None:
        super().__init__(host, staging_bytes, max_transfers)
        if not distributed.is_nccl_available():
            raise RuntimeError("this torch was built without NCCL")
        # Read when the first group is built, and only from here. NCCL's own: when it is first used.
        os.environ.update(NCCL_ENVIRONMENT)
        if shares_gpu(nccl_version()):
            os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")

    def build(self, store: PrefixStore, rank: int, timeout_s: float) -> Any:
        # The receiver reads the communicator's id from it, and no abort ends that wait.
        store.set_timeout(_at_least_1ms(timeout_s))
        # Ahead of the engine's kernels: a message behind a step would wait for milliseconds.
        options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=max(timeout_s, _WATCHDOG_S))
        options.config.blocking = 0  # a blocking initialisation cannot be timed out
        options.config.min_ctas, options.config.max_ctas = NCCL_MIN_CTAS, NCCL_MAX_CTAS
        return distributed.ProcessGroupNCCL(store, rank, 2, options)

    def wait(self, work: Any, deadline: float) -> None:
        work.wait()

    @contextmanager
    def watch(self, deadline: float, abort: Callable[[], None]) -> Iterator[None]:
        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), abort)
        timer.name, timer.daemon = "kv-deadline", True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


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
        self.transport = transport
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
            self.transport.watch(deadline, self.abort),
            self._copier.transfer(self.pool.new_digest()),
        ):
            group = self.transport.build(self._store, self._rank, timeout_s)
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
            self.transport.staging.lend(size, self.pool.device, deadline) as staging,
            self.transport.watch(deadline, self.abort),
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
        self.transport.wait(work, deadline)

    def abort(self) -> None:
        with self._guard:
            self._aborted = True
            if self._group is not None:
                try:
                    self._group.abort()
                except RuntimeError as error:  # NCCL's can fail; closing the link must go on
                    log.warning("%s: the abort failed: %s", self.transport.name, error)

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
            raise TransferFailed(f"{group.transport.name}: send failed: {error}") from error
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
        store, port = _listening_store(transport.host)
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


def _listening_store(host: str) -> tuple[TCPStore, int]:
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


def _connected_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The sender's end of it. Raises RuntimeError when it cannot be reached in time."""
    return TCPStore(host, port, None, False, _at_least_1ms(timeout_s), wait_for_workers=False)


def _at_least_1ms(seconds: float) -> timedelta:
    """A time-out for torch, which takes zero and less for "no time-out"."""
    return timedelta(seconds=max(seconds, 0.001))
