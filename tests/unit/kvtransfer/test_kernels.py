"""The Triton kernel beside its torch reference, run in Triton's interpreter."""

import math
from types import SimpleNamespace

import pytest
import torch

from kvtransfer.checksum import word_sum
from kvtransfer.kernels import copy_and_checksum, reference
from kvtransfer.kernels.copy_and_checksum import BlockMover
from kvtransfer.pool import KvPool, Slots
from kvtransfer.transports import shm
from tests.contract.kvtransfer_driver import CPU

SHAPES = {
    "float32": ((9, 2, 2, 2, 4, 8), torch.float32),
    "bfloat16": ((9, 1, 2, 3, 16, 4), torch.bfloat16),
    "int8 with scales": ((9, 1, 2, 1, 16, 20), torch.int8),  # rows of no power of two
    "latent KV": ((9, 2, 1, 1, 4, 24), torch.float32),
    "some heads": ((9, 2, 2, 5, 4, 8), torch.float32, range(1, 3), range(3, 5)),
}
SLOTS = {
    "one block": (1, (3,)),
    "whole blocks": (0, (7, 0, 3)),
    "a partly filled last one": (-1, (1, 8, 2)),
    "one token of the last": (1, (5, 4)),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def pools(request, monkeypatch):
    """A pool with content and an empty one; tiles are smaller than a block, programs few."""
    monkeypatch.setattr(copy_and_checksum, "TILE", 64)
    monkeypatch.setattr(copy_and_checksum, "TAIL_TILE", 16)
    shape, dtype, *heads = request.param
    torch.manual_seed(3)
    full = torch.zeros(shape, dtype=dtype)
    octets = full.view(torch.uint8)
    octets.copy_(torch.randint(0, 256, octets.shape, dtype=torch.uint8))
    here, there = heads or (None, None)
    empty = torch.zeros((*shape[:3], shape[3] + len(heads), *shape[4:]), dtype=dtype)
    return KvPool(full, heads=here), KvPool(empty, heads=there)


@pytest.fixture(params=SLOTS.values(), ids=SLOTS)
def slots(request, pools):
    tail, ids = request.param
    size = pools[0].block_size
    return Slots(ids, (len(ids) - 1) * size + (tail % size or size))


FIRST = (1 << 33) + 8  # a place beyond 32 bits


def bytes_of(pool):
    return pool.tensor.view(torch.uint8).clone()


def gathered(pool, slots):
    return pool.gather(slots, torch.empty(len(slots.block_ids) * pool.block_bytes).byte())


def written(use, ops, pool, empty, slots, sums):
    """What a use of the kernel or its reference leaves in memory."""
    if use == "gather":
        out = torch.full((len(slots.block_ids) * pool.block_bytes + 8,), 77, dtype=torch.uint8)
        data = ops.gather(pool, slots, out, sums, FIRST)
        assert (data.data_ptr(), data.numel()) == (out.data_ptr(), pool.nbytes(slots))
        return out
    if use == "scatter":
        ops.scatter(gathered(pool, slots), empty, slots, sums, FIRST)
    elif use == "copy":
        remote = Slots(tuple((block + 4) % 9 for block in slots.block_ids), slots.num_tokens)
        ops.copy(pool, slots, empty, remote, sums, FIRST)
    else:
        ops.checksum(pool, slots, sums, FIRST)
    return bytes_of(pool if use == "checksum" else empty)


@pytest.mark.parametrize("use", ["gather", "scatter", "copy", "checksum"])
def test_the_kernel_writes_and_sums_what_its_reference_does(pools, slots, use):
    pool, empty = pools
    before, found = bytes_of(pool), []
    expected = 11 + word_sum(gathered(pool, slots), FIRST)
    for ops in (reference, BlockMover(CPU)):
        empty.tensor.zero_()
        sums = torch.full((1,), 11)
        found.append(written(use, ops, pool, empty, slots, sums))
        assert int(sums) == int(expected)
        assert torch.equal(bytes_of(pool), before)
    assert found[0].any()
    assert torch.equal(*found)


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
    mover = BlockMover(CPU)
    mover.gather(pool, Slots((last,), 16), out, sums, 0)
    assert torch.equal(out, pool.blocks[last].flatten())
    mover.copy(pool, Slots((last,), 16), pool, Slots((last - 1,), 16), sums, 0)
    assert torch.equal(pool.tensor[last - 1], pool.tensor[last])
    assert int(sums) == int(2 * word_sum(out, 0))
    area.close()


def test_a_copy_has_as_many_programs_as_its_link_needs(monkeypatch):
    gpus = [torch.device("cuda", n) for n in range(3)]
    monkeypatch.setattr(copy_and_checksum, "has_nvlink", lambda own, other: other == gpus[1])
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert [copy_and_checksum._programs.__wrapped__(gpus[0], one) for one in gpus] == [132, 32, 4]


def test_ids_come_round_in_the_ring_and_what_exceeds_it_gets_a_larger_one():
    ids = copy_and_checksum._DeviceIds(CPU, 16)
    for first in range(5):
        read, written, none = ids.put((first, 7), (8, first, 9), ())
        assert read.tolist()[:2] == [first, 7]
        assert written.tolist()[:3] == [8, first, 9]
        assert len(none) == 4
    many = tuple(range(100))
    assert ids.put(many, many)[1].tolist() == list(many)
