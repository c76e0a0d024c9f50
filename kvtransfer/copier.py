"""Copies of a pool's bytes by a transport's thread: on the host, or on a separate CUDA stream.

On a GPU nothing waits for the device before `finish`: copies, messages and the checksum are queued
on the copier's stream, and only the 8 bytes of the checksum are copied to the host.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from baton.errors import TransferFailed
from kvtransfer.checksum import Checksum, WordChecksum
from kvtransfer.kernels import reference
from kvtransfer.pool import KvPool, Slots

BlockOps: TypeAlias = Any  # the module `kvtransfer.kernels.reference`, or a `BlockMover` in Triton


class HostCopier:
    """Gathers and scatters the slots of one pool, synchronously on the calling thread."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._checksum = pool.new_checksum()

    @contextmanager
    def transfer(self, checksum: Checksum) -> Iterator[None]:
        """The context of one transfer, whose bytes are added to `checksum`.

        On exit nothing that was begun in it is still running.
        """
        self._checksum = checksum
        yield

    def gather(self, slots: Slots, staging: torch.Tensor) -> torch.Tensor:
        """The slots' bytes in canonical order, added to the checksum: a view, or in `staging`."""
        data = self._pool.in_place(slots)
        if data is None:
            data = self._pool.gather(slots, staging)
        self._checksum.update(data)
        return data

    def scatter(self, data: torch.Tensor, slots: Slots) -> None:
        """Copies `data` in canonical order into the slots, and adds it to the checksum."""
        self._checksum.update(data)
        self._pool.scatter(data, slots)

    def finish(self) -> None:
        """Returns when everything of this transfer is done and in the checksum."""

    def checksum_of(self, slots: Slots) -> Checksum:
        """The checksum of the slots' current content. Raises TransferFailed."""
        return self._pool.checksum_of(slots)


class GpuCopier:
    """As `HostCopier`, in order on a separate stream, so that copies run beside engine kernels.

    It does not wait for other streams: slots that it reads must have been computed, and slots that
    it overwrites must be unused, before the call. Nothing runs on the default stream, where copies
    and engine steps would wait for each other. `ops` are Triton's if available.
    """

    def __init__(self, pool: KvPool, ops: BlockOps | None = None) -> None:
        self._pool = pool
        self._stream: torch.cuda.Stream | None = None  # on a CPU everything is synchronous
        # Before the engine's kernels, whose priority is 0. NCCL's streams, which may wait for a
        # peer, have the highest priority, from another of torch's pools: none of them is this one.
        if cuda := pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(pool.device, priority=-1)
        self._checksum = WordChecksum()
        self._num_bytes = 0
        self._has_pending = False  # whether queued work has not been waited for
        with self._queued():
            self._ops = ops or block_ops(pool.device)
            self._sums = torch.zeros(1, dtype=torch.int64, device=pool.device)
            self._host_sums = torch.zeros(1, dtype=torch.int64, pin_memory=cuda)

    @contextmanager
    def transfer(self, checksum: Checksum) -> Iterator[None]:
        assert isinstance(checksum, WordChecksum), "GPU pools are checksummed on the GPU"
        self._checksum, self._num_bytes = checksum, 0
        with self._queued():
            try:
                yield
            except BaseException:
                self._has_pending = True  # messages may be queued on this stream, too
                raise
            finally:
                if self._has_pending:  # `finish` was not reached
                    self._sums.zero_()
                    self.synchronize(self.record())
                    self._has_pending = False

    def gather(self, slots: Slots, staging: torch.Tensor) -> torch.Tensor:
        data = self._pool.in_place(slots)
        if data is None:
            data = self._ops_here.gather(self._pool, slots, staging, self._sums, self._next_word)
        else:
            self._ops_here.checksum(self._pool, slots, self._sums, self._next_word)
        self._moved(data.numel())
        return data

    def scatter(self, data: torch.Tensor, slots: Slots) -> None:
        self._ops_here.scatter(data, self._pool, slots, self._sums, self._next_word)
        self._moved(data.numel())

    def copy(self, local: Slots, target: KvPool, remote: Slots) -> None:
        self._ops_here.copy(self._pool, local, target, remote, self._sums, self._next_word)
        self._moved(self._pool.nbytes(local))

    def add_checksum(self, slots: Slots) -> None:
        for part in slots.parts(self._pool.block_size):
            self._ops_here.checksum(self._pool, part, self._sums, self._next_word)
            self._moved(self._pool.nbytes(part))

    def check_access(self, target: KvPool) -> None:
        """Reads a block of another pool, and compiles `copy` for the two; changes no byte.

        Raises the errors of the GPU or Triton.
        """
        nothing = Slots((), 0)
        with self.transfer(WordChecksum()):
            self.copy(nothing, target, nothing)
            self._ops.checksum(target, Slots((0,), target.block_size), self._sums, 0)

    def finish(self) -> None:
        self._host_sums.copy_(self._sums, non_blocking=True)
        copied = self.record()
        self._sums.zero_()  # queued; needs no wait
        self.synchronize(copied)
        self._has_pending = False
        self._checksum.include(int(self._host_sums), self._num_bytes)
        self._num_bytes = 0

    def checksum_of(self, slots: Slots) -> Checksum:
        found = self._pool.new_checksum()
        try:
            with self.transfer(found):
                self.add_checksum(slots)
                self.finish()
        except RuntimeError as error:
            raise TransferFailed(f"the blocks cannot be read back: {error}") from error
        return found

    def record(self) -> torch.cuda.Event | None:
        """An event after everything queued so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)  # waiting threads sleep instead of spinning
        event.record(self._stream)
        return event

    def synchronize(self, event: torch.cuda.Event | None) -> None:
        """Waits for `event`. Raises RuntimeError if the GPU failed."""
        if event is not None:
            event.synchronize()

    def _moved(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._has_pending = True

    @contextmanager
    def _queued(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):  # also selects its device
                yield

    @property
    def _ops_here(self) -> BlockOps:
        """Triton's kernel begins at a multiple of four words; a tail before may end elsewhere."""
        return reference if self._next_word % 4 else self._ops

    @property
    def _next_word(self) -> int:
        return self._checksum.num_words + self._num_bytes // 4


Copier: TypeAlias = HostCopier | GpuCopier


def copier(pool: KvPool) -> Copier:
    """A copier for one thread at a time. On a GPU it uses one of the 32 streams that torch has for
    a process: keep it as long as its link."""
    return GpuCopier(pool) if pool.on_gpu else HostCopier(pool)


def prepare(pool: KvPool) -> None:
    """Compiles the kernels for a pool on a GPU, so that no transfer waits for it; changes no byte.

    Must be called before the pool is used. Raises RuntimeError.
    """
    if block_ops(pool.device) is reference:
        return
    gpu, size = GpuCopier(pool), pool.block_size
    first, part = Slots((0,), size), Slots((0,), size - 1)  # `part` is not contiguous: gathered
    with gpu.transfer(WordChecksum()):
        staging = torch.empty(pool.block_bytes, dtype=torch.uint8, device=pool.device)
        gpu.scatter(gpu.gather(part, staging), part)
        gpu.copy(first, pool, first)
        gpu.add_checksum(first)
        gpu.finish()


def block_ops(device: torch.device) -> BlockOps:
    """Triton's operations if device and installation have Triton, otherwise torch's."""
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        return importlib.import_module("kvtransfer.kernels.copy_and_checksum").BlockMover(device)
    return reference
