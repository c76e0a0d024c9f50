"""How a transport's thread moves its pool's bytes: on the host, or on a stream of its own.

On a GPU nothing waits for the device until `settle`: copies, messages and the checksum are queued
one behind the other on the mover's stream, and only the checksum's 8 bytes come to the host.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, cast

import torch

from baton.errors import TransferFailed
from kvtransfer.digest import Digest, WordDigest
from kvtransfer.kernels import reference
from kvtransfer.lanes import Lane, lane
from kvtransfer.pool import KvPool, Slots


class BlockOps(Protocol):
    """`kvtransfer.kernels.reference`, or the same in Triton."""

    def gather(
        self, pool: KvPool, slots: Slots, out: torch.Tensor, sums: torch.Tensor, first_word: int
    ) -> torch.Tensor: ...

    def scatter(
        self, data: torch.Tensor, pool: KvPool, slots: Slots, sums: torch.Tensor, first_word: int
    ) -> None: ...

    def copy(
        self,
        source: KvPool,
        local: Slots,
        target: KvPool,
        remote: Slots,
        sums: torch.Tensor,
        first_word: int,
    ) -> None: ...

    def checksum(self, pool: KvPool, slots: Slots, sums: torch.Tensor, first_word: int) -> None: ...


class Mover(ABC):
    """Gathers and spreads the slots of one pool, for one thread."""

    @abstractmethod
    def turn(self, digest: Digest) -> AbstractContextManager[None]:
        """Around the calls of one transfer, whose bytes `digest` takes in.

        When it is left, nothing that was begun in it goes on.
        """

    @abstractmethod
    def collect(self, slots: Slots, staging: torch.Tensor) -> torch.Tensor:
        """The slots' bytes in canonical order, digested: where they lie, or in `staging`."""

    @abstractmethod
    def spread(self, data: torch.Tensor, slots: Slots) -> None:
        """Digests bytes in canonical order and writes them into the slots."""

    @abstractmethod
    def settle(self) -> None:
        """Returns when all of this turn is done and in the digest."""


class HostMover(Mover):
    """At once, on the calling thread."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._digest = pool.new_digest()

    @contextmanager
    def turn(self, digest: Digest) -> Iterator[None]:
        self._digest = digest
        yield

    def collect(self, slots: Slots, staging: torch.Tensor) -> torch.Tensor:
        data = self._pool.in_place(slots)
        if data is None:
            data = self._pool.gather(slots, staging)
        self._digest.update(data)
        return data

    def spread(self, data: torch.Tensor, slots: Slots) -> None:
        self._digest.update(data)
        self._pool.scatter(data, slots)

    def settle(self) -> None:
        return None


class GpuMover(Mover):
    """In order on a high-priority stream of its own, beside the engine's.

    What it reads must have been computed, and what it overwrites must be unused, before it is
    called: it does not wait for other streams. `ops` are Triton's where there are any.
    """

    def __init__(self, pool: KvPool, ops: BlockOps | None = None, on: Lane | None = None) -> None:
        self._pool, self._ops = pool, ops or block_ops(pool.device)
        self._lane = on or lane(pool.device)
        self._digest = WordDigest()
        self._num_bytes = 0
        with self._lane.entered():
            self._sums = torch.zeros(1, dtype=torch.int64, device=pool.device)
            self._arrived = torch.zeros(1, dtype=torch.int64, pin_memory=self._lane.pinned)

    @contextmanager
    def turn(self, digest: Digest) -> Iterator[None]:
        assert isinstance(digest, WordDigest), "bytes on a GPU are not digested on the host"
        self._digest, self._num_bytes = digest, 0
        with self._lane.entered():
            self._sums.zero_()
            try:
                yield
            finally:
                self.wait(self.mark())

    def collect(self, slots: Slots, staging: torch.Tensor) -> torch.Tensor:
        data = self._pool.in_place(slots)
        if data is None:
            data = self._ops.gather(self._pool, slots, staging, self._sums, self._next_word)
        else:
            self._ops.checksum(self._pool, slots, self._sums, self._next_word)
        self._num_bytes += data.numel()
        return data

    def spread(self, data: torch.Tensor, slots: Slots) -> None:
        self._ops.scatter(data, self._pool, slots, self._sums, self._next_word)
        self._num_bytes += data.numel()

    def copy(self, local: Slots, target: KvPool, remote: Slots) -> None:
        """Digests slots and copies them into those of another pool."""
        self._ops.copy(self._pool, local, target, remote, self._sums, self._next_word)
        self._num_bytes += self._pool.nbytes(local)

    def checksum(self, slots: Slots) -> None:
        """Only digests slots."""
        self._ops.checksum(self._pool, slots, self._sums, self._next_word)
        self._num_bytes += self._pool.nbytes(slots)

    def reach(self, target: KvPool) -> None:
        """Reads a block of another pool, as `copy` will write. Raises what the GPU or Triton do."""
        with self.turn(WordDigest()):
            self._ops.checksum(target, Slots((0,), target.block_size), self._sums, 0)

    def mark(self) -> torch.cuda.Event | None:
        """A point behind all that was queued so far."""
        return self._lane.mark()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Sleeps until the GPU has come to `mark`. Raises RuntimeError when the GPU failed."""
        self._lane.wait(mark)

    def settle(self) -> None:
        self._arrived.copy_(self._sums, non_blocking=True)
        self._sums.zero_()
        self.wait(self.mark())
        self._digest.include(int(self._arrived), self._num_bytes)
        self._num_bytes = 0

    @property
    def _next_word(self) -> int:
        return self._digest.num_words + self._num_bytes // 4


def mover(pool: KvPool) -> Mover:
    """A mover for the calling thread."""
    return GpuMover(pool) if pool.on_gpu else HostMover(pool)


def digest(pool: KvPool, slots: Slots) -> Digest:
    """The digest of what the slots hold now, taken where they lie. Raises TransferFailed."""
    if not pool.on_gpu:
        return pool.digest(slots)
    try:
        found, reader = pool.new_digest(), GpuMover(pool)
        with reader.turn(found):
            reader.checksum(slots)
            reader.settle()
    except RuntimeError as error:
        raise TransferFailed(f"the blocks cannot be read back: {error}") from error
    return found


def prepare(pool: KvPool) -> None:
    """Compiles what a pool on a GPU needs, so that no transfer waits for it; changes no byte.

    To be called before the pool is used. Raises RuntimeError.
    """
    if block_ops(pool.device) is reference:
        return
    gpu, size = GpuMover(pool), pool.block_size
    first = Slots((0,), size)
    with gpu.turn(WordDigest()):
        staging = torch.empty(pool.block_bytes, dtype=torch.uint8, device=pool.device)
        part = Slots((0,), size - 1)  # not in one piece, so that it is gathered
        gpu.spread(gpu.collect(part, staging), part)
        gpu.copy(first, pool, first)
        gpu.checksum(first)
        gpu.settle()


def block_ops(device: torch.device) -> BlockOps:
    """Triton's where the device and the installation can; else torch's."""
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        return cast(BlockOps, importlib.import_module("kvtransfer.kernels.blocks"))
    return cast(BlockOps, reference)
