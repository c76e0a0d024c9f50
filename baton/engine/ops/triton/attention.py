"""Paged attention of decode rows, one query a sequence, and of prompt chunks, causal.

Decode: a program takes one row's one KV head, whose query heads are the rows of one product. Long
contexts are split over programs, whose parts a second kernel joins by their log-sum-exp
(Flash-Decoding, Dao et al. 2023). The grid depends on shapes alone, so that a CUDA graph can hold
it. Rows come first in it, as rows with a common prefix share blocks in caches.

Chunks: the form is FlashAttention-2's (Dao 2023): a program takes a tile of query rows and goes
over their keys with an online softmax. The query heads that share a KV head lie in one tile, token
by token, so that what is read of KV serves all of them. Tiles of all sequences are planned on the
device, once a step; the grid follows from shapes, and programs beyond the last tile end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.torch.attention import Scoring
from baton.engine.ops.triton.attention_common import (
    NO_WINDOW,
    attend_range,
    first_state,
    pool_sizes,
    scored,
)
from baton.engine.ops.triton.spec import Config
from baton.engine.ops.triton.tuning import choose

# More than this are joined no faster than they are read.
MOST_SPLITS = 64

# Programs for each multiprocessor that are wanted: some waves of the two or three that fit at once,
# so that the last, partly empty one is a small part of all.
PROGRAMS_PER_PROCESSOR = 8

# Query rows of a program: the least that tensor cores take, and the most that registers hold.
LEAST_ROWS, MOST_ROWS = 16, 128


def decode_attention(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, seq_lens: Tensor, scoring: Scoring,
    splits: int = 0, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """Attention of each row of q over its own sequence, whose KV is in the pool already.

    q: `[rows, heads, head_size]`, contiguous · block_tables: int32 `[rows, width]`, the blocks of
    each sequence; what lies behind those of its tokens is not read · seq_lens: int32 `[rows]`,
    tokens of the sequence, the row's own included; 0 is a padding row, which gives zeros · splits:
    programs that share a row at most; 0 chooses by shapes and GPU · config: None is the one in
    effect. Result like q. Waits for nothing on the device.
    """
    window = scoring.window
    rows, heads, head_size = q.shape
    assert q.is_contiguous() and pool.is_contiguous() and block_tables.stride(1) == 1
    sizes, key = pool_sizes(q, pool)
    kv_heads = sizes["KV_HEADS"]
    config = config or choose("decode_attention", key, q.device)
    if not splits:
        keys = block_tables.shape[1] * sizes["BLOCK_SIZE"]
        longest = min(keys, window or keys)
        splits = splits_for(rows * kv_heads, longest // config["LEAST_SPLIT"], processors(q.device))
    out = torch.empty_like(q)
    # The weighted sums of the parts, and behind all of them their log-sum-exps.
    parts = None
    if splits > 1:
        size = rows * heads * splits * (head_size + 1)
        parts = torch.empty(size, dtype=torch.float32, device=q.device)
    # Tensor cores take tiles of 16 rows at least.
    group_pad = max(16, int(triton.next_power_of_2(heads // kv_heads)))
    decode_kernel[rows, kv_heads, splits](
        q, pool, block_tables, seq_lens, out, parts, layer, block_tables.stride(0), pool.stride(0),
        *scored(scoring), window or NO_WINDOW, splits, WINDOWED=window is not None,
        GROUP_PAD=group_pad, **sizes, **config,
    )  # fmt: skip
    if parts is not None:
        join_kernel[rows, heads](
            parts, seq_lens, out, window or NO_WINDOW, splits,
            SPLITS_PAD=triton.next_power_of_2(splits), HEAD_SIZE=head_size,
            HEAD_PAD=sizes["HEAD_PAD"], TILE=config["TILE"], LEAST_SPLIT=config["LEAST_SPLIT"],
        )  # fmt: skip
    return out


def splits_for(programs: int, longest: int, processors: int) -> int:
    """How many programs share one row's keys.

    programs: there without splits · longest: splits that the longest possible row gives work to.
    """
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // programs) if programs else 1
    return max(1, min(wanted, longest, MOST_SPLITS))


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def splits_of_row(first, seq_len, splits, TILE: tl.constexpr, LEAST_SPLIT: tl.constexpr):
    """How the keys first .. seq_len of a row are shared: where its splits begin, the keys of each,
    and how many have any.
    """
    #  base ........ first | ..................................... | seq_len
    #  up to a tile's edge | split 0, 1, .. used - 1: whole tiles  | nothing
    base = first // TILE * TILE
    tiles = tl.cdiv(tl.cdiv(seq_len - base, splits), TILE)
    size = tl.maximum(tiles * TILE, LEAST_SPLIT)
    return base, size, tl.cdiv(seq_len - base, size)


@triton.jit(
    do_not_specialize=["layer", "table_stride", "window", "splits"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens"],
)
def decode_kernel(
    q_rows, pool, block_tables, seq_lens, out, parts, layer, table_stride, block_stride, scale,
    softcap, sinks, window, splits, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROW_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr, QUANTIZED: tl.constexpr, K_TYPE: tl.constexpr, V_TYPE: tl.constexpr,
    WINDOWED: tl.constexpr,
    GROUP_PAD: tl.constexpr, TILE: tl.constexpr, LEAST_SPLIT: tl.constexpr,
):  # fmt: skip
    """One split of one row's one KV head: writes its part, or the result if it is the only one.

    Grid `[rows, kv_heads, splits]`. parts: float32 `[rows, heads, splits, head_size]` and
    `[rows, heads, splits]` behind it; None where splits is 1.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + row)
    first = tl.maximum(seq_len - window, 0)
    base, size, used = splits_of_row(first, seq_len, splits, TILE, LEAST_SPLIT)
    if split >= tl.maximum(used, 1):  # a padding row has one, which writes zeros
        return
    begin = base + split * size
    end = tl.minimum(begin + size, seq_len)

    GROUP: tl.constexpr = HEADS // KV_HEADS
    PART: tl.constexpr = KV_HEADS * BLOCK_SIZE * ROW_SIZE
    least = None
    if WINDOWED:
        least = first
    head = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_PAD)
    wanted = (head < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    first_head = row * HEADS + kv_head * GROUP
    q = tl.load(
        q_rows + (first_head + head)[:, None] * HEAD_SIZE + dims[None, :], mask=wanted, other=0.0
    )
    q = q.to(K_TYPE)
    k_base = pool + layer.to(tl.int64) * (2 * PART) + kv_head * (BLOCK_SIZE * ROW_SIZE)
    block_table = block_tables + row.to(tl.int64) * table_stride

    weighted = tl.zeros([GROUP_PAD, HEAD_PAD], dtype=tl.float32)
    total, largest = first_state(sinks, kv_head * GROUP + head, head < GROUP)
    if sinks is not None and split > 0:  # only one split has it
        total, largest = first_state(None, head, head < GROUP)
    # Only the first and the last tile can have keys to leave out, but looking costs no time next to
    # the memory, and one loop keeps loads under way from the first tile to the last.
    weighted, total, largest = attend_range(
        q, weighted, total, largest, k_base, k_base + PART, block_table, begin, end, least, end,
        None, None, scale, softcap, block_stride, BLOCK_SIZE, ROW_SIZE, HEAD_SIZE, HEAD_PAD,
        QUANTIZED, V_TYPE, TILE, PARTLY=True, CAUSAL=False, WINDOWED=False,
    )  # fmt: skip

    result = weighted / tl.where(total == 0, 1.0, total)[:, None]
    if parts is not None and used > 1:
        part = (first_head + head) * splits + split
        tl.store(parts + part[:, None] * HEAD_SIZE + dims[None, :], result, mask=wanted)
        sums = parts + tl.num_programs(0) * HEADS * splits * HEAD_SIZE
        tl.store(sums + part, largest + tl.log2(total), mask=head < GROUP)
        return
    tl.store(
        out + (first_head + head)[:, None] * HEAD_SIZE + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=wanted,
    )


@triton.jit(do_not_specialize=["window", "splits"], do_not_specialize_on_alignment=["seq_lens"])
def join_kernel(
    parts, seq_lens, out, window, splits, SPLITS_PAD: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr, TILE: tl.constexpr, LEAST_SPLIT: tl.constexpr,
):  # fmt: skip
    """Joins the parts of one row's one head, if it has several. Grid `[rows, heads]`."""
    row = tl.program_id(0)
    head = row * tl.num_programs(1) + tl.program_id(1)
    seq_len = tl.load(seq_lens + row)
    first = tl.maximum(seq_len - window, 0)
    _, _, used = splits_of_row(first, seq_len, splits, TILE, LEAST_SPLIT)
    if used <= 1:
        return
    split = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, HEAD_PAD)
    sums = parts + tl.num_programs(0) * tl.num_programs(1) * splits * HEAD_SIZE
    log_sums = tl.load(sums + head * splits + split, mask=split < used, other=float("-inf"))
    shares = tl.exp2(log_sums - tl.max(log_sums, 0))
    results = tl.load(
        parts + (head * splits + split)[:, None] * HEAD_SIZE + dims[None, :],
        mask=(split < used)[:, None] & (dims < HEAD_SIZE)[None, :],
        other=0.0,
    )
    joined = tl.sum(results * shares[:, None], 0) / tl.sum(shares, 0)
    tl.store(out + head * HEAD_SIZE + dims, joined.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)


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
    query_lens: Tensor, tiles: Tiles, scoring: Scoring, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """Attention of every row over its sequence up to itself, whose KV is in the pool already.

    As `decode_attention`, but q has one sequence's rows after the other's · block_tables: of each
    sequence · context_lens: int32 `[sequences]`, tokens before a sequence's first row · query_lens:
    int32 `[sequences]`, its rows · tiles: `plan_tiles` of these query_lens.
    """
    assert q.is_contiguous() and pool.is_contiguous() and block_tables.stride(1) == 1
    sizes, key = pool_sizes(q, pool)
    config = config or choose("prefill_attention", {**key, "rows": tiles.rows}, q.device)
    out = torch.empty_like(q)
    prefill_kernel[sizes["KV_HEADS"], len(tiles.places)](
        q, pool, block_tables, context_lens, query_lens, tiles.places, out, layer,
        block_tables.stride(0), pool.stride(0), *scored(scoring), scoring.window or NO_WINDOW,
        **sizes, TOKENS=tiles.tokens, ROWS=tiles.rows, WINDOWED=scoring.window is not None,
        **config,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["layer", "table_stride", "window"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_lens", "places"],
)
def prefill_kernel(
    q_rows, pool, block_tables, context_lens, query_lens, places, out, layer, table_stride,
    block_stride, scale, softcap, sinks, window, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
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
    total, largest = first_state(sinks, kv_head * GROUP + row % GROUP, token < tokens)

    #  begin .............. | whole ................. | diagonal ............. | end
    #  the window cuts tiles | every row sees all keys | causality cuts tiles
    # Tiles lie at multiples of TILE: a row sums up the same ones however its prompt is cut.
    end = first_position + tokens
    diagonal = (first_position + 1) // TILE * TILE
    begin = None
    edges = (0, 0, diagonal, end)
    if WINDOWED:
        begin = tl.maximum(first_position + 1 - window, 0)
        whole = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), TILE) * TILE, diagonal)
        edges = (begin // TILE * TILE, whole, diagonal, end)
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        weighted, total, largest = attend_range(
            q, weighted, total, largest, k_base, k_base + PART, block_table, edges[part],
            edges[part + 1], begin, end, positions, window, scale, softcap, block_stride,
            BLOCK_SIZE, ROW_SIZE, HEAD_SIZE, HEAD_PAD, QUANTIZED, V_TYPE, TILE, PARTLY=part != 1,
            CAUSAL=part == 2, WINDOWED=WINDOWED and part != 1,
        )  # fmt: skip

    result = weighted / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=wanted)
