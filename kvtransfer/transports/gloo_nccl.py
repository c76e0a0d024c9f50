"""The two-sided transports, gloo and nccl: a process group of two ranks for each pair and epoch.

The receiver opens a store on a free port, both ends build the group on it, and a hello in both
directions proves that both have built it before either may drop it: dropping a group while the
other end still builds it breaks that end.

The ends authenticate by a secret, which the receiver makes for one link and the sender gets with
the answer to its Offer, over the control stream. A stranger that reaches the ports can make a link
fail, within its time-out, but not join it: values in the store carry a MAC, each hello proves the
secret, and then the store is closed. KV bytes are not encrypted.

Gloo's waits have a time-out. NCCL's calls only queue work on the GPU, and the host waits once, at
the end of a transfer. A timer aborts the communicator at the deadline, which ends its kernels and
with them the wait.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from baton.cuda import NCCL_ENVIRONMENT, nccl_version
from baton.errors import TransferFailed
from baton.rendezvous import Place, Rendezvous, at_least_1ms, gloo_group, nccl_group, open_store
from baton.v1 import common_pb2
from kvtransfer.checksum import Checksum
from kvtransfer.copier import Copier, copier
from kvtransfer.deadline import Deadline
from kvtransfer.interface import ReceivingEnd, SendingEnd, Transport
from kvtransfer.pairing import shares_gpu
from kvtransfer.pool import KvPool, Slots

log = logging.getLogger(__name__)

_SENDER, _RECEIVER = 0, 1

# A communicator's channels: each costs GPU memory and, during a transfer, a multiprocessor.
NCCL_MIN_CTAS, NCCL_MAX_CTAS = 1, 8
_WATCHDOG_S = 300.0  # longer than any wait here: torch's time-out must not come first


class ProcessGroupTransport(Transport):
    """`host`: this worker's address, which the peers can reach.

    `staging_bytes`, of the receiver, bounds the memory of one transfer: two messages of half that
    size, one in flight while the other is copied. Contiguous blocks are sent without a copy. They
    arrive in staging memory, so that a late write cannot reach the pool.
    """

    one_sided = False

    def __init__(self, host: str, staging_bytes: int = 8 << 20) -> None:
        self.host, self.message_bytes = host, staging_bytes // 2
        self.staging = Staging()

    @abstractmethod
    def build(self, store: Rendezvous, rank: int, timeout_s: float, ranks: int = 2) -> Any:
        """A process group."""

    @abstractmethod
    def wait(self, work: Any, deadline: Deadline) -> None:
        """Waits for a message; on a GPU, makes work that is queued later wait for it."""

    def watch(self, deadline: Deadline, abort: Callable[[], None]) -> AbstractContextManager[None]:
        """A context for waits without a time-out: a thread calls `abort` at the deadline."""
        return nullcontext()

    def listen(self, pool: KvPool) -> ReceivingEnd:
        store, place = open_store(self.host)
        at = {"host": self.host, "port": place.port, "secret": place.secret.hex()}
        endpoint = json.dumps({**at, "message_bytes": self.message_bytes}).encode()
        return _GroupEnd(self, pool, _RECEIVER, store, self.message_bytes, endpoint)

    def connect(self, pool: KvPool, endpoint: bytes, timeout_s: float) -> SendingEnd:
        try:
            at = json.loads(endpoint)
            place = Place(str(at["host"]), int(at["port"]), bytes.fromhex(at["secret"]))
            store = place.connect(timeout_s)
            end = _GroupEnd(self, pool, _SENDER, store, int(at["message_bytes"]), endpoint)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise TransferFailed(f"{self.name}: cannot reach the receiver: {error}") from error
        end.accept(timeout_s)
        return end


class GlooTransport(ProcessGroupTransport):
    """TCP between CPUs."""

    name = "gloo"
    kind = common_pb2.TRANSPORT_GLOO

    def build(self, store: Rendezvous, rank: int, timeout_s: float, ranks: int = 2) -> Any:
        return gloo_group(store, rank, ranks, self.host, timeout_s)

    def wait(self, work: Any, deadline: Deadline) -> None:
        work.wait(at_least_1ms(deadline.remaining_s))


class NcclTransport(ProcessGroupTransport):
    """Between GPUs. Raises RuntimeError where torch was built without NCCL."""

    name = "nccl"
    kind = common_pb2.TRANSPORT_NCCL
    # A communicator takes some 50 MB of GPU memory, and a decode worker has one for each peer.
    max_links = 16

    # A message is a kernel launch and some waits between streams: tens of microseconds without any
    # transfer. The 4 MiB of a message on a CPU would take only 80 at 50 GB/s.
    def __init__(self, host: str, staging_bytes: int = 32 << 20) -> None:
        super().__init__(host, staging_bytes)
        if not distributed.is_nccl_available():
            raise RuntimeError("this torch was built without NCCL")
        # torch reads these when the first group is built, NCCL when it is first used.
        os.environ.update(NCCL_ENVIRONMENT)
        if shares_gpu(nccl_version()):
            os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")

    def build(self, store: Rendezvous, rank: int, timeout_s: float, ranks: int = 2) -> Any:
        # The receiver waits there for the communicator's id, which no abort ends.
        store.set_timeout(at_least_1ms(timeout_s))
        config = {
            "blocking": 0,  # a blocking initialisation cannot be timed out
            "min_ctas": NCCL_MIN_CTAS,
            "max_ctas": NCCL_MAX_CTAS,
        }
        # Before the engine's kernels: a message after a step would wait for milliseconds.
        watchdog_s = max(timeout_s, _WATCHDOG_S)
        return nccl_group(store, rank, ranks, watchdog_s, high_priority=True, config=config)

    def wait(self, work: Any, deadline: Deadline) -> None:
        work.wait()

    @contextmanager
    def watch(self, deadline: Deadline, abort: Callable[[], None]) -> Iterator[None]:
        timer = threading.Timer(deadline.remaining_s, abort)
        timer.name, timer.daemon = "kv-deadline", True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class Staging:
    """Lends pairs of message buffers, at most `max_lent` at a time, to any thread."""

    def __init__(self, max_lent: int = 8) -> None:
        # uint8 [2, bytes], or None if not allocated; the last one returned is lent next.
        self._free: queue.LifoQueue[torch.Tensor | None] = queue.LifoQueue()
        for _ in range(max_lent):
            self._free.put(None)

    @contextmanager
    def lend(
        self, num_bytes: int, device: torch.device, deadline: Deadline
    ) -> Iterator[torch.Tensor]:
        """Two buffers, uint8 `[2, num_bytes or more]`; waits until the deadline.

        After a failure they are not reused, because a late message might still be written into
        them. Raises RuntimeError if none is returned in time.
        """
        try:
            buffers = self._free.get(timeout=deadline.remaining_s)
        except queue.Empty:
            raise RuntimeError("no staging memory became free in time") from None
        returned = None
        try:
            if buffers is None or buffers.shape[1] < num_bytes or buffers.device != device:
                buffers = torch.empty((2, num_bytes), dtype=torch.uint8, device=device)
            yield buffers
            returned = buffers
        finally:
            self._free.put(returned)


@dataclass(eq=False)
class _GroupEnd(SendingEnd, ReceivingEnd):
    """One end: the process group and its store, for one thread except for `abort`."""

    _transport: ProcessGroupTransport
    _pool: KvPool
    _rank: int
    _store: Rendezvous
    _message_bytes: int
    endpoint: bytes
    _group: Any = None
    _copier: Copier | None = None
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _aborted: bool = False

    def accept(self, timeout_s: float) -> None:
        """Builds the group and exchanges a hello in both directions, at both ends alike."""
        deadline = Deadline(timeout_s)
        try:
            copying = copier(self._pool)
            with (
                self._transport.watch(deadline, self.abort),
                copying.transfer(self._pool.new_checksum()),
            ):
                group = self._transport.build(self._store, self._rank, timeout_s)
                with self._guard:
                    self._group = group
                self._check()
                # On a GPU this compiles the kernels, before the first transfer.
                nothing, empty = Slots((), 0), torch.empty(0, dtype=torch.uint8)
                if self._rank == _SENDER:
                    copying.gather(nothing, empty.to(self._pool.device))
                else:
                    copying.scatter(empty.to(self._pool.device), nothing)
                for sender in (_SENDER, _RECEIVER):
                    hello = self._store.hello(sender).to(self._pool.device)
                    if self._rank == sender:
                        self._wait(self._send(hello), deadline)
                        continue
                    arrived = torch.zeros_like(hello)
                    self._wait(self._receive(arrived), deadline)
                    self._finish(copying)
                    if not torch.equal(arrived, hello):
                        raise RuntimeError("the peer is not the one that this link was offered to")
                self._finish(copying)
            self._copier = copying
        except RuntimeError as error:
            self.close()  # nothing else closes a sender's end
            raise TransferFailed(f"{self._transport.name}: no connection: {error}") from error
        finally:
            self._store.close()

    def put(self, local: Slots, remote: Slots, checksum: Checksum, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        with self._transfer("send", checksum, deadline) as (copying, staging):
            in_flight = None
            for i, part in enumerate(self._pool.split(local, self._message_bytes)):
                data = copying.gather(part, staging[i % 2])
                self._wait(in_flight, deadline)
                in_flight = self._send(data)
            self._wait(in_flight, deadline)

    def receive(
        self, slots: Slots, checksum: Checksum, timeout_s: float, posted: Callable[[], None]
    ) -> None:
        deadline = Deadline(timeout_s)
        parts = self._pool.split(slots, self._message_bytes)
        with self._transfer("receive", checksum, deadline) as (copying, staging):

            def post(i: int) -> tuple[torch.Tensor, Any]:
                data = staging[i % 2][: self._pool.nbytes(parts[i])]
                return data, self._receive(data)

            data, work = post(0)
            posted()
            for i, part in enumerate(parts):
                self._wait(work, deadline)
                arrived = data
                if i + 1 < len(parts):
                    data, work = post(i + 1)
                copying.scatter(arrived, part)

    def abort(self) -> None:
        with self._guard:
            self._aborted = True
            if self._group is not None:
                try:
                    self._group.abort()
                except (
                    RuntimeError
                ) as error:  # NCCL's can fail; the link must be closed all the same
                    log.warning("%s: the abort failed: %s", self._transport.name, error)

    def close(self) -> None:
        self.abort()
        self._store.close()
        self._group = None

    @contextmanager
    def _transfer(
        self, what: str, checksum: Checksum, deadline: Deadline
    ) -> Iterator[tuple[Copier, torch.Tensor]]:
        """The context of one put or receive. On exit all is done and in `checksum`, or it has
        failed and nothing runs any more. Raises TransferFailed."""
        assert self._copier is not None, "not connected"
        size = max(self._message_bytes, self._pool.block_bytes)
        try:
            with (
                self._transport.staging.lend(size, self._pool.device, deadline) as staging,
                self._transport.watch(deadline, self.abort),
                self._copier.transfer(checksum),
            ):
                try:
                    self._check()
                    yield self._copier, staging
                    self._finish(self._copier)
                except RuntimeError:
                    self.abort()  # ends queued work on a GPU, and so the copier's transfer
                    raise
        except RuntimeError as error:
            raise TransferFailed(f"{self._transport.name}: {what} failed: {error}") from error

    def _send(self, data: torch.Tensor) -> Any:
        return self._group.send([data], 1 - self._rank, 0)

    def _receive(self, data: torch.Tensor) -> Any:
        return self._group.recv([data], 1 - self._rank, 0)

    def _wait(self, work: Any, deadline: Deadline) -> None:
        """Waits for a message, if any. A time-out ends the group for good. Raises RuntimeError."""
        self._check()
        if work is not None:
            self._transport.wait(work, deadline)

    def _finish(self, copying: Copier) -> None:
        copying.finish()
        self._check()  # after an abort, a GPU goes on as if everything had arrived

    def _check(self) -> None:
        if self._aborted:
            raise RuntimeError("the link was aborted, or its time was over")
