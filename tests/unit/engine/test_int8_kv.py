"""Attention over an int8 pool is attention over the numbers that the pool holds, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.kv_cache import KvLayout, allocate_pool, plan_layout
from baton.engine.ops.torch.attention import AttentionBatch, PrefillSegment, attend, write_kv
from baton.engine.weights.quantize import SCALE_BYTES, pack_rows, unpack_rows
from baton.errors import ConfigError
from tests.unit.engine.quantized import qwen_config

LAYERS, LAYER, HEADS, KV_HEADS, HEAD_SIZE = 3, 1, 6, 2, 16
BLOCKS, SCALE = 40, HEAD_SIZE**-0.5


def layout(dtype: torch.dtype, block_size: int = 16) -> KvLayout:
    return KvLayout(BLOCKS, LAYERS, KV_HEADS, block_size, HEAD_SIZE, dtype)


def pool_of(dtype: torch.dtype, block_size: int = 16) -> Tensor:
    return allocate_pool(layout(dtype, block_size), None, torch.device("cpu"))


def random(rows: int, heads: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, HEAD_SIZE, generator=generator).to(dtype)


def test_sizes() -> None:
    whole, small = layout(torch.bfloat16), layout(torch.int8)
    assert whole.bytes_per_token == 2 * LAYERS * KV_HEADS * HEAD_SIZE * 2
    assert small.bytes_per_token == 2 * LAYERS * KV_HEADS * (HEAD_SIZE + SCALE_BYTES)
    assert small.num_bytes == BLOCKS * 16 * small.bytes_per_token
    assert small.shape == (BLOCKS, LAYERS, 2, KV_HEADS, 16, HEAD_SIZE + SCALE_BYTES)
    memory = torch.zeros(small.num_bytes, dtype=torch.uint8)
    pool = allocate_pool(small, lambda size: memory[:size], torch.device("cpu"))
    assert (pool.dtype, pool.shape) == (torch.int8, torch.Size(small.shape))


def test_a_budget_holds_more_blocks() -> None:
    config = qwen_config()
    planned = {
        dtype: plan_layout(config, dtype, 16, 0, 1 << 20) for dtype in (torch.bfloat16, torch.int8)
    }
    for dtype, one in planned.items():
        assert one.dtype == dtype
        assert one.num_bytes <= 1 << 20 < one.num_bytes + one.num_bytes // one.num_blocks
    assert planned[torch.int8].num_blocks > 1.7 * planned[torch.bfloat16].num_blocks
    with pytest.raises(ConfigError, match="raise --kv-cache"):
        plan_layout(config, torch.int8, 16, 0, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_packs_its_own_slots_only(dtype: torch.dtype) -> None:
    pool = pool_of(torch.int8, block_size=4)
    k, v = random(2, KV_HEADS, 1, dtype), random(2, KV_HEADS, 2, dtype)
    write_kv(pool, 2, torch.tensor([3 * 4 + 1, 0 * 4 + 3]), k, v)
    expected = torch.zeros_like(pool)
    for part, rows in enumerate((pack_rows(k), pack_rows(v))):
        expected[3, 2, part, :, 1], expected[0, 2, part, :, 3] = rows
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("block_size", [16, 24])
def test_what_is_read_is_what_was_written(
    block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    length = 150
    k, v = random(length, KV_HEADS, 1, dtype), random(length, KV_HEADS, 2, dtype)
    blocks = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(3)) + 1
    at = torch.arange(length)
    slots = blocks[at // block_size] * block_size + at % block_size
    small, plain = pool_of(torch.int8, block_size), pool_of(dtype, block_size)
    write_kv(small, LAYER, slots, k, v)
    write_kv(plain, LAYER, slots, *(unpack_rows(pack_rows(x), dtype) for x in (k, v)))
    used = blocks[: -(-length // block_size)]
    batch = AttentionBatch(
        slots=slots[:0],
        num_decode=2,
        decode_tables=torch.stack([used, used]),
        decode_lengths=torch.tensor([31, 150]),
        segments=(PrefillSegment(2, 60, 90, used),),
    )
    q = random(62, HEADS, 4, dtype)
    got = attend(q, small, LAYER, batch, SCALE, window)
    assert got.dtype == dtype
    assert torch.equal(got, attend(q, plain, LAYER, batch, SCALE, window))
