"""Paged attention of prompt chunks: causal, after whatever of the prompt is in the pool already.

The form is FlashAttention-2's (Dao 2023): a program takes a tile of query rows and goes over their
keys with an online softmax. The query heads that share a KV head lie in one tile, token by token,
so that what is read of KV serves all of them. Tiles of all sequences are planned on the device,
once a step; the grid follows from shapes, and programs beyond the last tile end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.attention_common import (
    LOG2_E,
    LOWEST,
    NO_WINDOW,
    attend_range,
    kernel_key,
    pool_sizes,
)  # fmt: skip
from baton.engine.ops.triton.spec import Config
from baton.engine.ops.triton.tuning import choose

# Query rows of a program: the least that tensor cores take, and the most that registers hold.
LEAST_ROWS, MOST_ROWS = 16, 128


@dataclass(frozen=True)
class Tiles:
    """Which rows each program takes.

    places: int32 `[tiles, 3]`, a tile's sequence, its first token in the sequence's chunk and that
    token's row in the batch; the sequence is -1 where there is no tile · tokens: of a tile, at most
    · rows: query rows of a tile, tokens times heads of a group, padded to a power of two.
    """

    places: Tensor
    tokens: int
    rows: int


def plan_tiles(query_lens: Tensor, num_rows: int, group: int) -> Tiles:
    """Cuts the chunks of a step into tiles, without waiting for the device.

    query_lens: int32 `[sequences]`, rows of each, num_rows together · group: query heads that share
    a KV head, at most MOST_ROWS. A sequence's last tile, which sees the most keys, comes first, so
    that the longest work starts early.
    """
    assert group <= MOST_ROWS, "the backend takes no other models"
    sequences = len(query_lens)
    average = -(-num_rows // max(sequences, 1)) * group
    rows = min(max(LEAST_ROWS, int(triton.next_power_of_2(average))), MOST_ROWS)
    tokens = rows // group
    # Each sequence has one tile at most that is not full.
    most = min(num_rows, num_rows // tokens + sequences)

    in_sequence = (query_lens + (tokens - 1)) // tokens
    ends = in_sequence.cumsum(0)
    tile = torch.arange(most, dtype=ends.dtype, device=query_lens.device)
    sequence = torch.searchsorted(ends, tile, right=True)
    known = sequence.clamp_max(max(sequences - 1, 0))
    first = (ends[known] - 1 - tile) * tokens
    row = (query_lens.cumsum(0) - query_lens)[known] + first
    places = torch.stack([torch.where(sequence < sequences, sequence, -1), first, row], dim=1)
    return Tiles(places.to(torch.int32), tokens, rows)


def prefill_attention(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, context_lens: Tensor,
    query_lens: Tensor, tiles: Tiles, scale: float, window: int | None,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """Attention of every row over its sequence up to itself, whose KV is in the pool already.

    q: `[rows, heads, head_size]`, contiguous, one sequence's rows after the other's · block_tables:
    int32 `[sequences, width]`, the blocks of each sequence; what lies behind those of its tokens is
    not read · context_lens: int32 `[sequences]`, tokens before a sequence's first row · query_lens:
    int32 `[sequences]`, its rows · tiles: `plan_tiles` of these query_lens · scale: of scores ·
    window: tokens that a row sees, itself included; None is all · config: None is the one in
    effect. Result like q.
    """
    assert q.is_contiguous() and pool.is_contiguous() and block_tables.stride(1) == 1
    sizes = pool_sizes(q, pool)
    config = config or choose(
        "prefill_attention", {**kernel_key(q, pool), "rows": tiles.rows}, q.device
    )
    out = torch.empty_like(q)
    prefill_kernel[sizes["KV_HEADS"], len(tiles.places)](
        q, pool, block_tables, context_lens, query_lens, tiles.places, out, layer,
        block_tables.stride(0), pool.stride(0), scale * LOG2_E, window or NO_WINDOW, **sizes,
        TOKENS=tiles.tokens, ROWS=tiles.rows, WINDOWED=window is not None, **config,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["layer", "table_stride", "window"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_lens", "places"],
)
def prefill_kernel(
    q_rows, pool, block_tables, context_lens, query_lens, places, out, layer, table_stride,
    block_stride, scale, window, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROW_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr, QUANTIZED: tl.constexpr, K_TYPE: tl.constexpr, V_TYPE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, WINDOWED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one KV head, over all keys that any of them sees.

    Grid `[kv_heads, tiles]`. ROWS: of the tile, TOKENS times HEADS // KV_HEADS and padding.
    """
    kv_head = tl.program_id(0)
    place = places + tl.program_id(1) * 3
    sequence = tl.load(place)
    if sequence < 0:
        return
    first_token = tl.load(place + 1)
    first_row = tl.load(place + 2)
    tokens = tl.minimum(tl.load(query_lens + sequence) - first_token, TOKENS)
    first_position = tl.load(context_lens + sequence) + first_token

    GROUP: tl.constexpr = HEADS // KV_HEADS
    PART: tl.constexpr = KV_HEADS * BLOCK_SIZE * ROW_SIZE
    row = tl.arange(0, ROWS)
    token = row // GROUP
    dims = tl.arange(0, HEAD_PAD)
    heads = (first_row + token) * HEADS + kv_head * GROUP + row % GROUP
    at = heads.to(tl.int64)[:, None] * HEAD_SIZE + dims[None, :]
    wanted = (token < tokens)[:, None] & (dims < HEAD_SIZE)[None, :]
    q = tl.load(q_rows + at, mask=wanted, other=0.0).to(K_TYPE)
    positions = first_position + token
    k_base = pool + layer.to(tl.int64) * (2 * PART) + kv_head * (BLOCK_SIZE * ROW_SIZE)
    block_table = block_tables + sequence.to(tl.int64) * table_stride

    weighted = tl.zeros([ROWS, HEAD_PAD], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    largest = tl.full([ROWS], LOWEST, dtype=tl.float32)

    #  begin .............. | whole ................. | diagonal ............. | end
    #  the window cuts tiles | every row sees all keys | causality cuts tiles
    # Tiles lie at multiples of TILE: a row sums up the same ones however its prompt is cut.
    end = first_position + tokens
    diagonal = (first_position + 1) // TILE * TILE
    begin = None
    whole = 0
    if WINDOWED:
        begin = tl.maximum(first_position + 1 - window, 0)
        whole = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), TILE) * TILE, diagonal)
        weighted, total, largest = attend_range(
            q, weighted, total, largest, k_base, k_base + PART, block_table, begin // TILE * TILE,
            whole, begin, end, positions, window, scale, block_stride, BLOCK_SIZE, ROW_SIZE,
            HEAD_SIZE, HEAD_PAD, QUANTIZED, V_TYPE, TILE, PARTLY=True, CAUSAL=False, WINDOWED=True,
        )  # fmt: skip
    weighted, total, largest = attend_range(
        q, weighted, total, largest, k_base, k_base + PART, block_table, whole, diagonal, begin,
        end, positions, window, scale, block_stride, BLOCK_SIZE, ROW_SIZE, HEAD_SIZE, HEAD_PAD,
        QUANTIZED, V_TYPE, TILE, PARTLY=False, CAUSAL=False, WINDOWED=False,
    )  # fmt: skip
    weighted, total, largest = attend_range(
        q, weighted, total, largest, k_base, k_base + PART, block_table, diagonal, end, begin, end,
        positions, window, scale, block_stride, BLOCK_SIZE, ROW_SIZE, HEAD_SIZE, HEAD_PAD,
        QUANTIZED, V_TYPE, TILE, PARTLY=True, CAUSAL=True, WINDOWED=WINDOWED,
    )  # fmt: skip

    result = weighted / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=wanted)
