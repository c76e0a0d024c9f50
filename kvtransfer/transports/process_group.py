"""The two-sided transports, gloo and nccl: a process group of two ranks for each pair and epoch.

The receiver opens a store on a free port, both ends build the group on it, and a hello in both
directions proves that both have it before either may drop it (dropping a group while the other end
still builds it breaks that end).

The ends know each other by a secret, which the receiver makes for one link and which the sender
gets with the answer to its Offer, over the control channel. Who reaches the ports without it can
make a link fail, within its time, but not join it: what is in the store carries a MAC, each hello
proves the secret, and then the store is closed. What travels is not encrypted.

Gloo's waits have a time-out. NCCL's calls only queue work on the GPU, and the host waits once, at
the end of a transfer; a timer aborts the communicator at the deadline, which ends its kernels and
so that wait.
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
from baton.rendezvous import (
    Place,
    Rendezvous,
    at_least_1ms,
    gloo_group,
    nccl_group,
    open_store,
)
from baton.v1 import common_pb2
from kvtransfer.copier import Copier, copier
from kvtransfer.deadline import Deadline
from kvtransfer.digest import Digest
from kvtransfer.interface import ReceivingEnd, SendingEnd, Transport
from kvtransfer.pairing import shares_gpu
from kvtransfer.pool import KvPool, Slots

log = logging.getLogger(__name__)

_SENDER, _RECEIVER = 0, 1

# A communicator's channels: each costs GPU memory and, while bytes travel, a multiprocessor.
NCCL_MIN_CTAS, NCCL_MAX_CTAS = 1, 8
_WATCHDOG_S = 300.0  # later than any wait here: torch's own time-out must not come first


class ProcessGroupTransport(Transport):
    """`host` is this worker's address, which the peers can reach.

    `staging_bytes`, of the receiver, bounds the memory of one transfer: two messages of half that
    size, one travelling while the other is copied. Neighbouring blocks are sent from where they
    lie; they arrive in staging memory, which a write that comes too late cannot leave.
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
        """Returns when a message is done or, on a GPU, when what is queued later comes after it."""

    def watch(self, deadline: Deadline, abort: Callable[[], None]) -> AbstractContextManager[None]:
        """Around waits without a time-out: a thread calls `abort` at the deadline."""
        return nullcontext()

    def listen(self, pool: KvPool) -> ReceivingEnd:
        meeting, place = open_store(self.host)
        at = {"host": self.host, "port": place.port, "secret": place.secret.hex()}
        endpoint = json.dumps({**at, "message_bytes": self.message_bytes}).encode()
        return _GroupEnd(self, pool, _RECEIVER, meeting, self.message_bytes, endpoint)

    def connect(self, pool: KvPool, endpoint: bytes, timeout_s: float) -> SendingEnd:
        try:
            at = json.loads(endpoint)
            place = Place(str(at["host"]), int(at["port"]), bytes.fromhex(at["secret"]))
            meeting = place.connect(timeout_s)
            end = _GroupEnd(self, pool, _SENDER, meeting, int(at["message_bytes"]), endpoint)
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

    # A message is a kernel launch and some waits between streams, tens of microseconds for which
    # nothing travels; one of 4 MiB, as on a CPU, takes no more than 80 at 50 GB/s.
    def __init__(self, host: str, staging_bytes: int = 32 << 20) -> None:
        super().__init__(host, staging_bytes)
        if not distributed.is_nccl_available():
            raise RuntimeError("this torch was built without NCCL")
        # Read when the first group is built, and only from here. NCCL's own: when it is first used.
        os.environ.update(NCCL_ENVIRONMENT)
        if shares_gpu(nccl_version()):
            os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")

    def build(self, store: Rendezvous, rank: int, timeout_s: float, ranks: int = 2) -> Any:
        # The receiver reads the communicator's id from it, and no abort ends that wait.
        store.set_timeout(at_least_1ms(timeout_s))
        config = {
            "blocking": 0,  # a blocking initialisation cannot be timed out
            "min_ctas": NCCL_MIN_CTAS,
            "max_ctas": NCCL_MAX_CTAS,
        }
        # Ahead of the engine's kernels: a message behind a step would wait for milliseconds.
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
    """Lends pairs of message buffers, `max_lent` at a time, and keeps them. Any thread."""

    def __init__(self, max_lent: int = 8) -> None:
        # uint8 [2, bytes], or None: to be allocated. What was returned last is lent next.
        self._free: queue.LifoQueue[torch.Tensor | None] = queue.LifoQueue()
        for _ in range(max_lent):
            self._free.put(None)

    @contextmanager
    def lend(
        self, num_bytes: int, device: torch.device, deadline: Deadline
    ) -> Iterator[torch.Tensor]:
        """Two buffers, uint8 `[2, num_bytes or more]`; waits until the deadline.

        After a failure they are not reused: a message that comes too late might still be written
        into them. Raises RuntimeError when none was returned in time.
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
    """One end of a pair: the process group and its store, for one thread except for `abort`."""

    _transport: ProcessGroupTransport
    _pool: KvPool
    _rank: int
    _meeting: Rendezvous
    _message_bytes: int
    endpoint: bytes
    _group: Any = None
    _copier: Copier | None = None
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _aborted: bool = False

    def accept(self, timeout_s: float) -> None:
        """Builds the group and exchanges a hello in both directions; the same at both ends."""
        deadline = Deadline(timeout_s)
        try:
            copying = copier(self._pool)
            with (
                self._transport.watch(deadline, self.abort),
                copying.transfer(self._pool.new_digest()),
            ):
                group = self._transport.build(self._meeting, self._rank, timeout_s)
                with self._guard:
                    self._group = group
                self._check()
                # On a GPU, what copies these heads is compiled now, and not in the first transfer.
                nothing, empty = Slots((), 0), torch.empty(0, dtype=torch.uint8)
                if self._rank == _SENDER:
                    copying.gather(nothing, empty.to(self._pool.device))
                else:
                    copying.scatter(empty.to(self._pool.device), nothing)
                for sender in (_SENDER, _RECEIVER):
                    hello = self._meeting.hello(sender).to(self._pool.device)
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
            self.close()  # no other caller closes a sender's end
            raise TransferFailed(f"{self._transport.name}: no connection: {error}") from error
        finally:
            self._meeting.close()

    def put(self, local: Slots, remote: Slots, digest: Digest, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        with self._transfer("send", digest, deadline) as (copying, staging):
            travelling = None
            for i, part in enumerate(self._pool.split(local, self._message_bytes)):
                data = copying.gather(part, staging[i % 2])
                self._wait(travelling, deadline)
                travelling = self._send(data)
            self._wait(travelling, deadline)

    def receive(
        self, slots: Slots, digest: Digest, timeout_s: float, posted: Callable[[], None]
    ) -> None:
        deadline = Deadline(timeout_s)
        parts = self._pool.split(slots, self._message_bytes)
        with self._transfer("receive", digest, deadline) as (copying, staging):

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
                except RuntimeError as error:  # NCCL's can fail; closing the link must go on
                    log.warning("%s: the abort failed: %s", self._transport.name, error)

    def close(self) -> None:
        self.abort()
        self._meeting.close()
        self._group = None

    @contextmanager
    def _transfer(
        self, what: str, digest: Digest, deadline: Deadline
    ) -> Iterator[tuple[Copier, torch.Tensor]]:
        """Around one put or receive. When it is left all is done and in `digest`, or nothing goes
        on. Raises TransferFailed."""
        assert self._copier is not None, "not connected"
        size = max(self._message_bytes, self._pool.block_bytes)
        try:
            with (
                self._transport.staging.lend(size, self._pool.device, deadline) as staging,
                self._transport.watch(deadline, self.abort),
                self._copier.transfer(digest),
            ):
                try:
                    self._check()
                    yield self._copier, staging
                    self._finish(self._copier)
                except RuntimeError:
                    self.abort()  # ends what is queued on a GPU, and with it the copier's transfer
                    raise
        except RuntimeError as error:
            raise TransferFailed(f"{self._transport.name}: {what} failed: {error}") from error

    def _send(self, data: torch.Tensor) -> Any:
        return self._group.send([data], 1 - self._rank, 0)

    def _receive(self, data: torch.Tensor) -> Any:
        return self._group.recv([data], 1 - self._rank, 0)

    def _wait(self, work: Any, deadline: Deadline) -> None:
        """Waits for a message, if any. A time-out closes the pair for good. Raises RuntimeError."""
        self._check()
        if work is not None:
            self._transport.wait(work, deadline)

    def _finish(self, copying: Copier) -> None:
        copying.finish()
        self._check()  # after an abort a GPU goes on as if all had arrived

    def _check(self) -> None:
        if self._aborted:
            raise RuntimeError("the link was aborted, or its time was over")
