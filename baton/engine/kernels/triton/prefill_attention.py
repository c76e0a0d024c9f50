"""Prefill attention: causal attention of prompt chunks over KV in a paged pool.

The algorithm is FlashAttention-2's (Dao 2023): a program takes a tile of query rows and iterates
over their keys with an online softmax. The query heads that share a KV head are in one tile, token
by token, so that each load of KV serves all of them. Tiles of all sequences are planned on the
device, once a step; the grid follows from shapes, and programs beyond the last tile exit at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.torch.attention import Scoring
from baton.engine.kernels.triton.attention_common import (
    NO_WINDOW,
    attend_range,
    in_order,
    initial_state,
    join_even_odd,
    pool_sizes,
    score_arguments,
    split_even_odd,
    stored_elements,
    window_at,
)
from baton.engine.kernels.triton.launch_configs import choose, most_tile_rows, tile_rows
from baton.engine.kernels.triton.specs import Config


@dataclass(frozen=True)
class Tiles:
    """Split of chunks into tiles of query rows.

    places: int32 `[tiles, 3]`: a tile's sequence, its first token's index in the chunk, and that
    token's row in the batch; -1 and undefined where there is no tile · tokens: maximum number in a
    tile · rows: query rows of a tile, tokens times heads of a group, padded to a power of two.
    """

    places: Tensor
    tokens: int
    rows: int


def plan_tiles(query_lens: Tensor, num_rows: int, group: int, head_size: int = 0) -> Tiles:
    """Splits the chunks of a step into tiles, without waiting for the device.

    query_lens: int32 `[sequences]`, rows of each; their sum is num_rows · group: query heads that
    share a KV head, at most `most_tile_rows` of the head size. A sequence's last tile sees the most
    keys and comes first, so that the longest work starts early.
    """
    assert group <= most_tile_rows(head_size), "the backend refuses other models"
    sequences = len(query_lens)
    rows = tile_rows(num_rows, sequences, group, head_size)
    tokens = rows // group
    # Each sequence has at most one partial tile.
    most = min(num_rows, num_rows // tokens + sequences)

    places = torch.empty((most, 3), dtype=torch.int32, device=query_lens.device)
    tiles_kernel[(triton.cdiv(most, 16),)](
        query_lens, places, sequences, most, tokens, TILES=16, SEQUENCES=128
    )
    return Tiles(places, tokens, rows)


@triton.jit(
    do_not_specialize=["sequences", "most", "tokens"],
    do_not_specialize_on_alignment=["query_lens"],
)
def tiles_kernel(
    query_lens, places, sequences, most, tokens, TILES: tl.constexpr, SEQUENCES: tl.constexpr
):
    """Computes TILES entries of `Tiles.places`, over SEQUENCES at a time. Grid `[most / TILES]`.
    Compiled once, for any number and length of chunks."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    of = tl.full([TILES], -1, tl.int32)
    token = tl.zeros([TILES], tl.int32)
    row = tl.zeros([TILES], tl.int32)
    tiles_before = tl.full([], 0, tl.int32)
    rows_before = tl.full([], 0, tl.int32)
    for begin in range(0, sequences, SEQUENCES):
        sequence = begin + tl.arange(0, SEQUENCES)
        rows = tl.load(query_lens + sequence, mask=sequence < sequences, other=0).to(tl.int32)
        count = (rows + (tokens - 1)) // tokens
        end = tiles_before + tl.cumsum(count, 0)
        first_row = rows_before + tl.cumsum(rows, 0) - rows
        # A tile belongs to one sequence or none, so the sum over all sequences is that one's value.
        own = ((end - count)[None, :] <= tile[:, None]) & (tile[:, None] < end[None, :])
        of += tl.sum(tl.where(own, sequence[None, :] + 1, 0), 1)
        first = (end[None, :] - 1 - tile[:, None]) * tokens
        token += tl.sum(tl.where(own, first, 0), 1)
        row += tl.sum(tl.where(own, first_row[None, :] + first, 0), 1)
        tiles_before += tl.sum(count, 0)
        rows_before += tl.sum(rows, 0)
    place = places + tile * 3
    tl.store(place, of, mask=tile < most)
    tl.store(place + 1, token, mask=tile < most)
    tl.store(place + 2, row, mask=tile < most)


def prefill_attention(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, context_lens: Tensor,
    query_lens: Tensor, tiles: Tiles, scoring: Scoring, out: Tensor, config: Config | None = None,
) -> None:  # fmt: skip
    """Writes the causal attention of every row over its sequence, whose KV is in the pool.
    Arguments are as in `decode_attention`, but q has the rows of the first sequence, then those of
    the next · block_tables: of each sequence · context_lens: int32 `[sequences]`, tokens before a
    sequence's first row; -1 for padding, whose out is zeros · query_lens: int32 `[sequences]`, rows
    of each · tiles: `plan_tiles` of these query_lens."""
    assert q.is_contiguous() and in_order(pool) and block_tables.stride(1) == 1
    assert out.is_contiguous() and out.shape == q.shape and out.dtype == q.dtype
    sizes, key = pool_sizes(q, pool)
    config = config or choose("prefill_attention", {**key, "rows": tiles.rows}, q.device)
    pool = stored_elements(pool)
    prefill_kernel[sizes["KV_HEADS"] * len(tiles.places),](
        q, pool, block_tables, context_lens, query_lens, tiles.places, out, layer,
        block_tables.stride(0), pool.stride(0), *score_arguments(scoring),
        scoring.window or NO_WINDOW, **sizes, TOKENS=tiles.tokens, ROWS=tiles.rows,
        WINDOWED=scoring.window is not None,
        CHUNKED=scoring.chunked and scoring.window is not None, **config,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["layer", "table_stride", "window"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_lens", "places"],
)
def prefill_kernel(
    q_rows, pool, block_tables, context_lens, query_lens, places, out, layer, table_stride,
    block_stride, scale, softcap, sinks, window, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PART_STEP: tl.constexpr, HEAD_STEP: tl.constexpr,
    ROW_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr, QUANTIZED: tl.constexpr, FP8: tl.constexpr, K_TYPE: tl.constexpr,
    V_TYPE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of query rows for one KV head, over all keys that any of them sees.

    Grid `[tiles * kv_heads]`: other axes of a grid are limited to 65,535 programs, and there may be
    a tile for each row. ROWS: rows of the tile, TOKENS times HEADS // KV_HEADS and padding.
    """
    kv_head = tl.program_id(0) % KV_HEADS
    place = places + tl.program_id(0) // KV_HEADS * 3
    sequence = tl.load(place)
    if sequence < 0:
        return
    first_token = tl.load(place + 1)
    first_row = tl.load(place + 2)
    tokens = tl.minimum(tl.load(query_lens + sequence) - first_token, TOKENS)
    context = tl.load(context_lens + sequence)
    first_position = context + first_token

    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS_SIZE: tl.constexpr = BLOCK_SIZE * ROW_SIZE
    PART: tl.constexpr = PART_STEP * ROWS_SIZE
    row = tl.arange(0, ROWS)
    token = row // GROUP
    dims = tl.arange(0, HEAD_PAD)
    heads = (first_row + token) * HEADS + kv_head * GROUP + row % GROUP
    at = heads.to(tl.int64)[:, None] * HEAD_SIZE + dims[None, :]
    wanted = (token < tokens)[:, None] & (dims < HEAD_SIZE)[None, :]
    if context < 0:  # padding
        tl.store(out + at, tl.zeros([ROWS, HEAD_PAD], out.dtype.element_ty), mask=wanted)
        return
    q = tl.load(q_rows + at, mask=wanted, other=0.0).to(K_TYPE)
    positions = first_position + token
    k_base = pool + layer.to(tl.int64) * (2 * KV_HEADS * ROWS_SIZE)
    k_base += kv_head * (HEAD_STEP * ROWS_SIZE)
    block_table = block_tables + sequence.to(tl.int64) * table_stride

    q, q_odd = split_even_odd(q, QUANTIZED)
    weighted, odd = split_even_odd(tl.zeros([ROWS, HEAD_PAD], dtype=tl.float32), QUANTIZED)
    total, largest = initial_state(sinks, kv_head * GROUP + row % GROUP, token < tokens)

    #  begin .............. | whole ................. | diagonal ............. | end
    #  the window cuts tiles | every row sees all keys | causality cuts tiles
    # Tiles begin at multiples of TILE, so a row sums the same tiles however its prompt is chunked.
    end = first_position + tokens
    diagonal = (first_position + 1) // TILE * TILE
    begin = None
    edges = (0, 0, diagonal, end)
    if WINDOWED:
        first_window = window_at(first_position, window, CHUNKED)
        last_window = window_at(end - 1, window, CHUNKED)
        window = window_at(positions, window, CHUNKED)
        begin = tl.maximum(first_position + 1 - first_window, 0)
        whole = tl.minimum(tl.cdiv(tl.maximum(end - last_window, 0), TILE) * TILE, diagonal)
        edges = (begin // TILE * TILE, whole, diagonal, end)
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        weighted, odd, total, largest = attend_range(
            q, q_odd, weighted, odd, total, largest, k_base, k_base + PART, block_table,
            edges[part], edges[part + 1], begin, end, positions, window, scale, softcap,
            block_stride, BLOCK_SIZE, HEAD_SIZE, HEAD_PAD, QUANTIZED, FP8, V_TYPE, TILE,
            PARTLY=part != 1, CAUSAL=part == 2, WINDOWED=WINDOWED and part != 1,
        )  # fmt: skip

    result = join_even_odd(weighted, odd, QUANTIZED) / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=wanted)
