"""Paged attention against the textbook formula, for scattered blocks, windows and block sizes."""

import pytest
import torch

from baton.engine.kernels.torch import attention
from baton.engine.kernels.torch.attention import (
    AttentionBatch,
    PrefillSegment,
    Scoring,
    attend,
    padded_keys,
    pool_of_layer,
    write_kv,
)
from baton.engine.kernels.torch.row_quantization import FP8, pack_rows, unpack_rows
from baton.engine.kv_cache import KvLayout

LAYERS, LAYER, HEADS, KV_HEADS, HEAD_SIZE = 3, 1, 6, 2, 16
SCALE = HEAD_SIZE**-0.5
NO_ROWS = torch.empty(0, dtype=torch.int64)


def textbook(q, k, v, position, window):
    """One query `[heads, head_size]` over k, v `[tokens, kv_heads, head_size]`, in float64."""
    first = 0 if window is None else max(0, position - window + 1)
    k, v = (
        x[first : position + 1].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v)
    )
    weights = torch.einsum("hd,thd->ht", q.double(), k).mul(SCALE).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v).flatten()


class Paged:
    """A pool that holds one sequence of random K and V in scattered blocks."""

    def __init__(self, length, block_size, dtype, kv_dtype=None):
        self.generator = torch.Generator().manual_seed(0)
        self.block_size, self.dtype = block_size, dtype
        count = -(-length // block_size)
        heads = (LAYERS, KV_HEADS, block_size, HEAD_SIZE)
        layout = KvLayout(2 * count + 1, *heads, kv_dtype or dtype)
        self.pool = torch.zeros(layout.shape, dtype=layout.dtype)
        # Block 0 is what padded block_tables point at; finite garbage there must not be seen.
        self.pool[0] = 1e4 if kv_dtype is None else 3
        self.blocks = torch.randperm(2 * count, generator=self.generator)[:count] + 1
        self.k, self.v = self.random(length, KV_HEADS), self.random(length, KV_HEADS)
        write_kv(self.pool, LAYER, self.slots(0, length), self.k, self.v)
        if kv_dtype is not None:  # what was written is what is read
            self.k, self.v = (unpack_rows(pack_rows(x, kv_dtype), dtype) for x in (self.k, self.v))

    def random(self, rows, heads):
        drawn = torch.randn(rows, heads, HEAD_SIZE, generator=self.generator)
        return drawn.to(self.dtype)

    def slots(self, start, end):
        at = torch.arange(start, end)
        return self.blocks[at // self.block_size] * self.block_size + at % self.block_size

    def expected(self, q, positions, window):
        rows = zip(q, positions, strict=True)
        return torch.stack([textbook(row, self.k, self.v, at, window) for row, at in rows])

    def segment(self, first_row, start, end):
        blocks = self.blocks[: -(-end // self.block_size)]
        return PrefillSegment(first_row, end - start, start, blocks)


def only(*segments):
    return AttentionBatch(NO_ROWS, 0, NO_ROWS.view(0, 0), NO_ROWS, segments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(
    ("block_size", "kv_dtype"),
    [(1, None), (16, None), (24, None), (256, None), (16, torch.int8), (24, FP8)],
)
def test_equals_the_textbook(block_size, kv_dtype, window, dtype):
    paged = Paged(150, block_size, dtype, kv_dtype)
    decode, chunks = [0, 31, 149, 16], [(0, 37), (90, 150)]
    positions = decode + [at for start, end in chunks for at in range(start, end)]
    q = paged.random(len(positions), HEADS)
    tables = paged.blocks.repeat(len(decode), 1)
    for row, position in zip(tables, decode, strict=True):
        row[position // block_size + 1 :] = 0  # padded with a block that is no sequence's
    segments = (paged.segment(4, *chunks[0]), paged.segment(41, *chunks[1]))
    batch = AttentionBatch(NO_ROWS, len(decode), tables, torch.tensor(decode) + 1, segments)
    got = attend(q, paged.pool, LAYER, batch, Scoring(SCALE, window))
    assert got.shape == (len(positions), HEADS * HEAD_SIZE)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = paged.expected(q, positions, window)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [700, 2100])
def test_a_query_gives_the_same_bits_in_any_chunk_part_or_group(length, monkeypatch):
    paged = Paged(length, 16, torch.float32)
    q = paged.random(length, HEADS)

    def result(batch, rows=slice(None)):
        return attend(q[rows], paged.pool, LAYER, batch, Scoring(SCALE))

    whole = result(only(paged.segment(0, 0, length)))
    for start, end in ((0, 33), (0, 253), (250, 314), (400, 402), (length - 60, length)):
        got = result(only(paged.segment(0, start, end)), slice(start, end))
        assert torch.equal(got, whole[start:end])
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 50 * HEADS * padded_keys(length))
    assert torch.equal(result(only(paged.segment(0, 0, length))), whole)
    lengths = torch.tensor([300, 5, 16, 17, 128, 129, 299])
    batch = AttentionBatch(NO_ROWS, 7, paged.blocks.repeat(7, 1), lengths, ())
    groups = []
    for size in (1, 50_000, 1 << 30):
        monkeypatch.setattr(attention, "GATHER_BYTES", size)
        groups.append(result(batch, slice(7)))
    assert torch.equal(groups[0], groups[1])
    assert torch.equal(groups[0], groups[2])


@pytest.mark.parametrize(
    ("kv_heads", "head_size", "shared_by"), [(2, 32, 1), (2, 16, 2), (4, 4, 4), (1, 16, 4)]
)
def test_a_share_of_heads_is_in_the_same_share_of_a_block_whatever_their_size(
    kv_heads, head_size, shared_by
):
    """So ranks of unlike numbers exchange the KV of layers with other heads, too."""
    pool = torch.arange(3 * 2 * 2 * 4 * 8 * 16).reshape(3, 2, 2, 4, 8, 16)
    written = torch.zeros_like(pool)
    for layer in range(2 * shared_by):
        seen, at = pool_of_layer(pool, layer, kv_heads, head_size)
        assert seen.shape[2:] == (2, kv_heads, 8, head_size)
        to, _ = pool_of_layer(written, layer, kv_heads, head_size)
        for head in range(kv_heads):
            of_pool = range(head * 4 // kv_heads, (head + 1) * 4 // kv_heads)
            places = pool[:, :, :, of_pool.start : of_pool.stop]
            assert torch.isin(seen[:, at, :, head], places).all()
        blocks = torch.arange(3)
        for offset in range(8):
            write_kv(
                to, at, blocks * 8 + offset, seen[:, at, 0, :, offset], seen[:, at, 1, :, offset]
            )
    assert torch.equal(written, pool), "layers fill the pool and do not overlap"
