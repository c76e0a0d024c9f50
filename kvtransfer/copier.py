"""How a transport's thread copies its pool's bytes: on the host, or on a CUDA stream of its own.

On a GPU nothing waits for the device until `finish`: copies, messages and the checksum are queued
on the copier's stream, and only the checksum's 8 bytes are copied to the host.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from baton.errors import TransferFailed
from kvtransfer.digest import Digest, WordDigest
from kvtransfer.kernels import reference
from kvtransfer.pool import KvPool, Slots

BlockOps: TypeAlias = Any  # the module `kvtransfer.kernels.reference`, or a `BlockMover` in Triton


class HostCopier:
    """Gathers and scatters the slots of one pool, at once, on the calling thread."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._digest = pool.new_digest()

    @contextmanager
    def transfer(self, digest: Digest) -> Iterator[None]:
        """Around the calls of one transfer, whose bytes are added to `digest`.

        When it is left, nothing that was begun in it goes on.
        """
        self._digest = digest
        yield

    def gather(self, slots: Slots, staging: torch.Tensor) -> torch.Tensor:
        """The slots' bytes in canonical order, digested: where they lie, or in `staging`."""
        data = self._pool.in_place(slots)
        if data is None:
            data = self._pool.gather(slots, staging)
        self._digest.update(data)
        return data

    def scatter(self, data: torch.Tensor, slots: Slots) -> None:
        self._digest.update(data)
        self._pool.scatter(data, slots)

    def finish(self) -> None:
        """Returns when all of this transfer is done and in the digest."""

    def digest(self, slots: Slots) -> Digest:
        """The digest of what the slots hold now, computed where they lie. Raises TransferFailed."""
        return self._pool.digest(slots)


class GpuCopier:
    """As `HostCopier`, in order on a stream of its own: copies fill gaps between engine kernels.

    What it reads must have been computed, and what it overwrites must be unused, before it is
    called: it does not wait for other streams. Nothing runs on the default stream, where copies and
    engine steps would wait for each other. `ops` are Triton's where there are any.
    """

    def __init__(self, pool: KvPool, ops: BlockOps | None = None) -> None:
        self._pool = pool
        self._stream: torch.cuda.Stream | None = None  # on a CPU all is done at once
        # Ahead of the engine's kernels, whose priority is 0. NCCL's streams, which may wait for a
        # peer, have the highest: of another of torch's pools, so that none of them is this one.
        if cuda := pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(pool.device, priority=-1)
        self._digest = WordDigest()
        self._num_bytes = 0
        self._waits = False  # whether something is queued that nothing has waited for
        with self._queued():
            self._ops = ops or block_ops(pool.device)
            self._sums = torch.zeros(1, dtype=torch.int64, device=pool.device)
            self._host_sums = torch.zeros(1, dtype=torch.int64, pin_memory=cuda)

    @contextmanager
    def transfer(self, digest: Digest) -> Iterator[None]:
        assert isinstance(digest, WordDigest), "bytes on a GPU are not digested on the host"
        self._digest, self._num_bytes = digest, 0
        with self._queued():
            try:
                yield
            except BaseException:
                self._waits = True  # others' messages may be on their way in this stream, too
                raise
            finally:
                if self._waits:  # `finish` was not called, or not reached
                    self._sums.zero_()
                    self.synchronize(self.record())
                    self._waits = False

    def gather(self, slots: Slots, staging: torch.Tensor) -> torch.Tensor:
        data = self._pool.in_place(slots)
        if data is None:
            data = self._ops.gather(self._pool, slots, staging, self._sums, self._next_word)
        else:
            self._ops.checksum(self._pool, slots, self._sums, self._next_word)
        self._moved(data.numel())
        return data

    def scatter(self, data: torch.Tensor, slots: Slots) -> None:
        self._ops.scatter(data, self._pool, slots, self._sums, self._next_word)
        self._moved(data.numel())

    def copy(self, local: Slots, target: KvPool, remote: Slots) -> None:
        self._ops.copy(self._pool, local, target, remote, self._sums, self._next_word)
        self._moved(self._pool.nbytes(local))

    def checksum(self, slots: Slots) -> None:
        self._ops.checksum(self._pool, slots, self._sums, self._next_word)
        self._moved(self._pool.nbytes(slots))

    def check_access(self, target: KvPool) -> None:
        """Reads a block of another pool, as `copy` will write, and has `copy` compiled for the two.

        Changes no byte. Raises what the GPU or Triton do.
        """
        nothing = Slots((), 0)
        with self.transfer(WordDigest()):
            self.copy(nothing, target, nothing)
            self._ops.checksum(target, Slots((0,), target.block_size), self._sums, 0)

    def finish(self) -> None:
        self._host_sums.copy_(self._sums, non_blocking=True)
        copied = self.record()
        self._sums.zero_()  # nobody has to wait for it
        self.synchronize(copied)
        self._waits = False
        self._digest.include(int(self._host_sums), self._num_bytes)
        self._num_bytes = 0

    def digest(self, slots: Slots) -> Digest:
        found = self._pool.new_digest()
        try:
            with self.transfer(found):
                self.checksum(slots)
                self.finish()
        except RuntimeError as error:
            raise TransferFailed(f"the blocks cannot be read back: {error}") from error
        return found

    def record(self) -> torch.cuda.Event | None:
        """An event behind all that was queued so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps and does not spin
        event.record(self._stream)
        return event

    def synchronize(self, event: torch.cuda.Event | None) -> None:
        """Returns when `event` has been reached. Raises RuntimeError when the GPU failed."""
        if event is not None:
            event.synchronize()

    def _moved(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._waits = True

    @contextmanager
    def _queued(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):  # which is also of the right device
                yield

    @property
    def _next_word(self) -> int:
        return self._digest.num_words + self._num_bytes // 4


Copier: TypeAlias = HostCopier | GpuCopier


def copier(pool: KvPool) -> Copier:
    """A copier, for one thread at a time. One on a GPU takes a stream, of which torch has 32 for
    all of a process: keep it as long as its link."""
    return GpuCopier(pool) if pool.on_gpu else HostCopier(pool)


def prepare(pool: KvPool) -> None:
    """Compiles what a pool on a GPU needs, so that no transfer waits for it; changes no byte.

    To be called before the pool is used. Raises RuntimeError.
    """
    if block_ops(pool.device) is reference:
        return
    gpu, size = GpuCopier(pool), pool.block_size
    first, part = Slots((0,), size), Slots((0,), size - 1)  # `part` is not in one piece: gathered
    with gpu.transfer(WordDigest()):
        staging = torch.empty(pool.block_bytes, dtype=torch.uint8, device=pool.device)
        gpu.scatter(gpu.gather(part, staging), part)
        gpu.copy(first, pool, first)
        gpu.checksum(first)
        gpu.finish()


def block_ops(device: torch.device) -> BlockOps:
    """Triton's where the device and the installation can; else torch's."""
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        return importlib.import_module("kvtransfer.kernels.blocks").BlockMover(device)
    return reference
