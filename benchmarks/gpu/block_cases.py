"""Kernels that move KV blocks against their references: bytes and sums equal to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu import errors, paged
from benchmarks.gpu.device import device_of
from benchmarks.gpu.errors import Case, Error
from benchmarks.gpu.job import Job
from benchmarks.gpu.paged import Geometry
from kvtransfer.kernels import blocks, reference
from kvtransfer.pool import KvPool, Slots

_DTYPES = (torch.bfloat16, torch.float32, torch.int8)


def cases(job: Job) -> Iterator[tuple[str, Case]]:
    """One for each kernel; each call of it draws another shape."""
    device = device_of(job)
    for name, check in (
        ("gather blocks", _gather),
        ("scatter blocks", _scatter),
        ("copy blocks", _copy),
        ("sum blocks", _checksum),
    ):
        yield name, _bound(check, job, device)


class _Pools:
    """Two pools of one layout, twice: for the kernel and for the reference."""

    def __init__(self, job: Job, device: torch.device, dice: random.Random) -> None:
        dtype = dice.choice(_DTYPES)
        heads, size = dice.choice(job.sized((1, 2, 8), (2, 8), (2,))), dice.choice((16, 64, 128))
        block_size = dice.choice(job.sized((8, 16, 64), (16, 64), (16,)))
        g = Geometry(heads, heads, size, block_size, dtype, dtype)
        self.num_blocks, layers = job.sized((200, 5), (60, 3), (6, 2))
        tensors = [paged.random_pool(g, self.num_blocks, layers, device) for _ in range(2)]
        self.source = KvPool(tensors[0])
        self.target, self.wanted = KvPool(tensors[1]), KvPool(tensors[1].clone())
        self.first_word = dice.randrange(1 << 40)
        count = dice.randint(1, self.num_blocks)
        self.num_tokens = (count - 1) * block_size + dice.randint(1, block_size)
        self.local, self.remote = (self._slots(dice, count) for _ in range(2))
        self.sums = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
        self.staging = torch.full(
            (self.source.nbytes(self.local),), 0xFF, dtype=torch.uint8, device=device
        )
        self.where = f"{g}, {layers} layers, {self.num_tokens} tokens in {count} blocks"

    def _slots(self, dice: random.Random, count: int) -> Slots:
        ids = dice.sample(range(self.num_blocks), count)
        if dice.random() < 0.3:
            ids.sort()
        return Slots(tuple(ids), self.num_tokens)

    def compared(self, found: Tensor, wanted: Tensor) -> Error:
        """Bytes, and what they sum up to."""
        pairs = ((found, wanted), tuple(self.sums))
        return errors.at(errors.worst([errors.equal(*pair) for pair in pairs]), self.where)


def _bound(check: Callable[[_Pools], Error], job: Job, device: torch.device) -> Case:
    return lambda dice: check(_Pools(job, device, dice))


def _gather(pools: _Pools) -> Error:
    copy = pools.staging.clone()
    found = blocks.gather(pools.source, pools.local, pools.staging, pools.sums[0], pools.first_word)
    wanted = reference.gather(pools.source, pools.local, copy, pools.sums[1], pools.first_word)
    return pools.compared(found, wanted)


def _scatter(pools: _Pools) -> Error:
    data, first = pools.source.gather(pools.local, pools.staging), pools.first_word
    blocks.scatter(data, pools.target, pools.remote, pools.sums[0], first)
    reference.scatter(data, pools.wanted, pools.remote, pools.sums[1], first)
    return pools.compared(pools.target.tensor, pools.wanted.tensor)


def _copy(pools: _Pools) -> Error:
    ends, first = (pools.source, pools.local), pools.first_word
    blocks.copy(*ends, pools.target, pools.remote, pools.sums[0], first)
    reference.copy(*ends, pools.wanted, pools.remote, pools.sums[1], first)
    return pools.compared(pools.target.tensor, pools.wanted.tensor)


def _checksum(pools: _Pools) -> Error:
    for kernel, sums in zip((blocks, reference), pools.sums, strict=True):
        kernel.checksum(pools.source, pools.local, sums, pools.first_word)
    return pools.compared(pools.source.tensor, pools.source.tensor)
