"""The Triton kernel beside its torch reference, run in Triton's interpreter."""

import math

import pytest
import torch

from kvtransfer.digest import WordDigest, word_sum
from kvtransfer.kernels import blocks, reference
from kvtransfer.pool import KvPool, Slots
from kvtransfer.transports import shm

SHAPES = {
    "float32": ((9, 2, 2, 2, 4, 8), torch.float32),
    "bfloat16": ((9, 1, 2, 3, 16, 4), torch.bfloat16),
    "int8 with scales": ((9, 1, 2, 1, 16, 20), torch.int8),  # rows of no power of two
}
SLOTS = {
    "one block": (1, (3,)),
    "whole blocks": (0, (7, 0, 3)),
    "a partly filled last one": (-1, (1, 8, 2)),
    "one token of the last": (1, (5, 4)),
}
FIRST = (1 << 33) + 5  # a place beyond 32 bits


@pytest.mark.parametrize(("tail", "ids"), SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES.values(), ids=SHAPES)
def test_every_use_equals_its_reference(shape, dtype, tail, ids, monkeypatch):
    """With tiles smaller than a block, and few programs."""
    for name, size in (("TILE", 64), ("LOCAL_PROGRAMS", 3), ("LINK_PROGRAMS", 2)):
        monkeypatch.setattr(blocks, name, size)
    torch.manual_seed(3)
    octets = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    pool = KvPool(octets.view(dtype).view(shape))
    before, size = pool.blocks.clone(), pool.block_size
    slots = Slots(ids, (len(ids) - 1) * size + (tail % size or size))
    remote = Slots(tuple((block + 4) % 9 for block in ids), slots.num_tokens)
    data = pool.gather(slots, torch.empty(len(ids) * pool.block_bytes, dtype=torch.uint8))

    def results(by):
        def put(use, *arguments):
            target = KvPool(torch.zeros(shape, dtype=dtype))
            sums = torch.full((1,), 11)
            use(*(target if one is KvPool else one for one in arguments), sums, FIRST)
            return target.blocks, sums

        out = torch.full((len(ids) * pool.block_bytes + 8,), 77, dtype=torch.uint8)
        sums = torch.full((1,), 11)
        part = by.gather(pool, slots, out, sums, FIRST)
        assert part.data_ptr() == out.data_ptr() and part.numel() == pool.nbytes(slots)
        return (
            out, sums,
            *put(by.scatter, data, KvPool, slots),
            *put(by.copy, pool, slots, KvPool, remote),
            *put(by.checksum, pool, slots),
        )  # fmt: skip

    wanted, found = results(reference), results(blocks)
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))
    assert torch.equal(wanted[0][: len(data)], data) and wanted[2].any() and wanted[4].any()
    assert {int(sums) for sums in wanted[1::2]} == {int(wanted[1])} != {11}
    assert torch.equal(pool.blocks, before)

    digest, sums = WordDigest(), torch.zeros(1, dtype=torch.int64)
    digest.update(data)
    blocks.checksum(pool, slots, sums, 0)
    assert int(sums) % (1 << 64) == digest.value


def test_blocks_beyond_what_32_bits_can_count():
    shape = (1 << 17, 1, 2, 1, 16, 520)  # 65 KiB a block, more than 2**31 words; untouched is free
    num_bytes = 4 * math.prod(shape)
    assert num_bytes // 4 > 1 << 31
    area = shm.SharedMemoryArea(num_bytes)
    pool = KvPool(area.tensor.view(torch.float32).view(shape))
    last = shape[0] - 1
    pool.tensor[last] = torch.randn(shape[1:])
    sums = torch.zeros(1, dtype=torch.int64)
    out = torch.empty(pool.block_bytes, dtype=torch.uint8)
    blocks.gather(pool, Slots((last,), 16), out, sums, 0)
    assert torch.equal(out, pool.blocks[last])
    blocks.copy(pool, Slots((last,), 16), pool, Slots((last - 1,), 16), sums, 0)
    assert torch.equal(pool.tensor[last - 1], pool.tensor[last])
    assert int(sums) == int(2 * word_sum(out, 0))
    area.close()
