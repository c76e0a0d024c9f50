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


def octets(tensor):
    return torch.randint(0, 256, tensor.view(torch.uint8).shape, dtype=torch.uint8)


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def pools(request, monkeypatch):
    """A pool with content and an empty one; tiles are smaller than a block, programs few."""
    monkeypatch.setattr(blocks, "TILE", 64)
    monkeypatch.setattr(blocks, "LOCAL_PROGRAMS", 3)
    monkeypatch.setattr(blocks, "LINK_PROGRAMS", 2)
    shape, dtype = request.param
    torch.manual_seed(3)
    full = torch.zeros(shape, dtype=dtype)
    full.view(torch.uint8).copy_(octets(full))
    return KvPool(full), KvPool(torch.zeros(shape, dtype=dtype))


@pytest.fixture(params=SLOTS.values(), ids=SLOTS)
def slots(request, pools):
    tail, ids = request.param
    size = pools[0].block_size
    return Slots(ids, (len(ids) - 1) * size + (tail % size or size))


def both(run):
    """The sums that the reference and the kernel come to, the second run's beside the first's."""
    found = []
    for ops in (reference, blocks):
        sums = torch.full((1,), 11)
        result = run(ops, sums)
        found.append((int(sums), result))
    assert found[0][0] == found[1][0] != 11
    return [result for _, result in found]


def bytes_of(pool):
    return pool.tensor.view(torch.uint8).clone()


FIRST = (1 << 33) + 5  # a place beyond 32 bits


def test_gather(pools, slots):
    pool, _ = pools

    def run(ops, sums):
        out = torch.full((len(slots.block_ids) * pool.block_bytes + 8,), 77, dtype=torch.uint8)
        data = ops.gather(pool, slots, out, sums, FIRST)
        assert data.data_ptr() == out.data_ptr()
        assert data.numel() == pool.nbytes(slots)
        return out

    expected, found = both(run)
    assert torch.equal(expected, found)


def test_scatter(pools, slots):
    pool, empty = pools
    data = pool.gather(slots, torch.empty(len(slots.block_ids) * pool.block_bytes).byte())

    def run(ops, sums):
        empty.tensor.zero_()
        ops.scatter(data, empty, slots, sums, FIRST)
        return bytes_of(empty)

    expected, found = both(run)
    assert expected.any()
    assert torch.equal(expected, found)


def test_copy_to_other_blocks(pools, slots):
    pool, empty = pools
    remote = Slots(tuple((block + 4) % 9 for block in slots.block_ids), slots.num_tokens)

    def run(ops, sums):
        empty.tensor.zero_()
        ops.copy(pool, slots, empty, remote, sums, 0)
        return bytes_of(empty)

    expected, found = both(run)
    assert expected.any()
    assert torch.equal(expected, found)


def test_checksum_is_the_digest_and_changes_nothing(pools, slots):
    pool, _ = pools
    before = bytes_of(pool)
    digest, sums = WordDigest(), torch.zeros(1, dtype=torch.int64)
    data = pool.gather(slots, torch.empty(len(slots.block_ids) * pool.block_bytes).byte())
    digest.update(data)
    blocks.checksum(pool, slots, sums, 0)
    assert int(sums) % (1 << 64) == digest.value
    both(lambda ops, sums: ops.checksum(pool, slots, sums, FIRST))
    assert torch.equal(bytes_of(pool), before)


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
