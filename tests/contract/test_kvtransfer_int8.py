"""An int8 pool moves as any other: rows with their scales, digests over all of it."""

import pytest
import torch

from baton.engine.kv_cache import KvLayout
from baton.engine.weights.quantize import pack_rows, unpack_rows
from kvtransfer.pool import KvPool

from .kvtransfer_parts import BLOCK_SIZE, BLOCKS, POOLS, TRANSPORTS, Pair, make_area, slots

LAYOUT = KvLayout(BLOCKS, 2, 2, BLOCK_SIZE, 16, torch.int8)


def int8_pool(seed, where="host"):
    """(a pool in memory to share, the numbers that are packed in it)."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(*LAYOUT.shape[:-1], LAYOUT.head_size, generator=generator)
    area = make_area(LAYOUT.num_bytes, where)
    pool = KvPool(area.tensor.view(torch.int8).view(LAYOUT.shape), area)
    pool.tensor.copy_(pack_rows(numbers))
    return pool, numbers


@pytest.mark.parametrize("name", TRANSPORTS)
def test_rows_arrive_with_their_scales(name):
    where = POOLS.get(name, "host")
    (source, numbers), (target, _) = int8_pool(1, where), int8_pool(2, where)
    before = target.tensor.clone()
    pair = Pair(TRANSPORTS[name](), source=source, target=target)
    try:
        stats, sent, arrived = pair.move(slots(10, 9, 1, 20), slots(10, 4, 5, 7))
        assert stats.num_bytes == 10 * LAYOUT.bytes_per_token
        assert sent.value == arrived.value
        moved = unpack_rows(target.tensor, torch.float32)
        unit = numbers.abs().amax(-1, keepdim=True) / 127
        for here, there, fill in ((9, 4, 4), (1, 5, 4), (20, 7, 2)):
            left, right = moved[there, ..., :fill, :], numbers[here, ..., :fill, :]
            assert ((left - right).abs() <= 0.501 * unit[here, ..., :fill, :]).all()
        assert torch.equal(target.tensor[7, ..., 2:, :], before[7, ..., 2:, :])
        others = [block for block in range(BLOCKS) if block not in (4, 5, 7)]
        assert torch.equal(target.tensor[others], before[others])
    finally:
        pair.close()


@pytest.mark.parametrize("where", ["host", "gpu"])
@pytest.mark.parametrize("byte", [0, LAYOUT.row_size - 1])
def test_a_changed_element_or_scale_changes_the_digest(byte, where):
    pool, _ = int8_pool(1, where)
    try:
        digest = pool.digest(slots(8, 3, 5)).value
        pool.tensor[5, 1, 1, 1, 3, byte] ^= 1
        assert pool.digest(slots(8, 3, 5)).value != digest
    finally:
        pool.area.close()
