"""The kernel's operations in plain torch: for any device, with one copy for each run of blocks.

Every function adds the checksum of the bytes it read (`kvtransfer.checksum.word_sum`, the first
word being at `first_word`) to `sums`, int64 `[1]` on the pool's device. Nothing waits for the
device.
"""

from __future__ import annotations

from torch import Tensor

from kvtransfer.checksum import word_sum
from kvtransfer.pool import KvPool, Slots, runs


def gather(pool: KvPool, slots: Slots, out: Tensor, sums: Tensor, first_word: int) -> Tensor:
    """Copies the slots' bytes in canonical order to the front of `out`; returns that part."""
    data = pool.gather(slots, out)
    sums += word_sum(data, first_word)
    return data


def scatter(data: Tensor, pool: KvPool, slots: Slots, sums: Tensor, first_word: int) -> None:
    """Copies `data`, as `gather` returns it, into the slots, and changes nothing else."""
    sums += word_sum(data, first_word)
    pool.scatter(data, slots)


def copy(
    source: KvPool, local: Slots, target: KvPool, remote: Slots, sums: Tensor, first_word: int
) -> None:
    """Copies slots of one pool to the same number of slots of another."""
    checksum(source, local, sums, first_word)
    full = local.num_full(source.block_size)
    for _, here, there, count in runs(local.block_ids[:full], remote.block_ids[:full]):
        target.blocks[there : there + count].copy_(source.blocks[here : here + count])
    for read, written in zip(source.tails(local), target.tails(remote), strict=True):
        written.copy_(read)


def checksum(pool: KvPool, slots: Slots, sums: Tensor, first_word: int) -> None:
    """Adds the checksum of the slots; changes no byte of the pool."""
    for start, _, piece in pool.pieces(slots):
        found = word_sum(piece.contiguous().view(-1), first_word + start // 4)
        sums += found.to(sums.device)
