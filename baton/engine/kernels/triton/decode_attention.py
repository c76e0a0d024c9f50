"""Decode attention: one query row a sequence over its KV in a paged pool.

A program takes rows of one KV head, whose query heads are the rows of one product. The keys of all
rows are split equally among as many programs as a GPU runs at once, however lengths differ; the
split is planned on the device, once a step, as FlashMLA's tile scheduler does. Where a row is split
over several programs, a second kernel joins the parts by their log-sum-exp (Flash-Decoding, Dao et
al. 2023). Grids depend on shapes alone, so that a CUDA graph can hold the launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.torch.attention import Scoring
from baton.engine.kernels.triton.attention_common import (
    LOWEST,
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
from baton.engine.kernels.triton.launch_configs import choose
from baton.engine.kernels.triton.pdl import launch, launch_dependents, wait_for_inputs
from baton.engine.kernels.triton.rope_kv import (
    NO_ROTATION,
    Rotation,
    load_angles,
    load_values,
    rotate_heads,
    scaled_queries,
    store_kv,
)
from baton.engine.kernels.triton.specs import Config, Key

# Launches overlap the kernel in front up to this number of decode rows. With more rows, programs
# that start early are spread unevenly over the multiprocessors: 8 rows take 4 % longer on an H200.
EARLY_ROWS = 1
MOST_ROWS = 256  # that configurations distinguish


@dataclass(frozen=True)
class DecodePlan:
    """Split of all keys over programs, valid for all KV heads and all layers with one window. The
    tiles of keys of all rows, at least one a row, are numbered consecutively and split into equal
    shares, one a program.

    seq_lens: int32 `[rows]` · ends: int32 `[rows]`, end of each row's tiles · firsts: int32
    `[programs]`, the row of each program's first tile · config: of `decode_attention`.
    """

    seq_lens: Tensor
    window: int | None
    ends: Tensor
    firsts: Tensor
    config: Config
    chunked: bool = False


def plan_decode(
    q: Tensor, pool: Tensor, seq_lens: Tensor, window: int | None, programs: int = 0,
    config: Config | None = None, *, chunked: bool = False,
) -> DecodePlan:  # fmt: skip
    """Splits the keys of decode rows over programs, without waiting for the device.

    q, pool: arguments of `decode_attention`; only shape and type of q matter · seq_lens: int32
    `[rows]`, tokens of each sequence including the row's; 0 for a padding row · window: of the
    layers that use the plan · programs: number for each KV head; 0 is as many as the GPU runs at
    once · config: None is the one in effect · chunked: as of `Scoring`.
    """
    sizes, _ = pool_sizes(q, pool)
    config = config or choose("decode_attention", config_key(q, pool, len(seq_lens)), q.device)
    resident = config["PER_PROCESSOR"] * processors(q.device)
    programs = programs or max(1, resident // sizes["KV_HEADS"])
    rows = len(seq_lens)
    ends, firsts = (
        torch.empty(count, dtype=torch.int32, device=q.device) for count in (rows, programs)
    )
    plan_kernel[(triton.cdiv(programs, 16),)](
        seq_lens, ends, firsts, rows, window or NO_WINDOW, programs, TILE=config["TILE"],
        ROWS=triton.next_power_of_2(rows), PROGRAMS=16, CHUNKED=chunked and window is not None,
    )  # fmt: skip
    return DecodePlan(seq_lens, window, ends, firsts, config, chunked)


def config_key(q: Tensor, pool: Tensor, rows: int) -> Key:
    """The key of configurations for that many decode rows; more than MOST_ROWS are as those."""
    padded = min(int(triton.next_power_of_2(rows)), MOST_ROWS)
    return {**pool_sizes(q, pool)[1], "rows": padded}


def decode_attention(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, plan: DecodePlan, scoring: Scoring,
    out: Tensor, rotation: Rotation | None = None, *, only_reads: bool = False,
) -> None:  # fmt: skip
    """Writes the attention of each row of q over its sequence, whose KV is in the pool. Does not
    wait for the device.

    q: `[rows, heads, head_size]`, contiguous · block_tables: int32 `[rows, width]`, the blocks of
    each sequence; entries beyond its tokens are not read · plan: of these rows and scoring's window
    · out: like q; zeros for padding rows · rotation: if given, q is `[rows, (heads + 2 * kv_heads)
    * head_size]` as for `rope_and_write`, and K and V of the last token are written first; if
    only_reads, q is without K and V, and they are in the pool.
    """
    window, config, programs = plan.window, plan.config, len(plan.firsts)
    rows, heads, head_size = out.shape
    assert (window, plan.chunked) == (scoring.window, scoring.chunked) and len(plan.ends) == rows
    assert in_order(pool) and block_tables.stride(1) == 1
    assert out.is_contiguous() and out.dtype == q.dtype
    assert q.stride(1) == 1 if rotation else q.is_contiguous() and out.shape == q.shape
    sizes, _ = pool_sizes(out, pool)
    kv_heads = sizes["KV_HEADS"]
    # Weighted sums of partial rows, followed by their log-sum-exps. A program has at most two
    # partial rows: the end of a row that another one began, and the beginning of one that another
    # one ends.
    size, chunked = 2 * programs * heads * (head_size + 1), plan.chunked and window is not None
    parts = torch.empty(size, dtype=torch.float32, device=q.device)
    places = (parts, plan.seq_lens, plan.ends)
    # Tensor cores need tiles of at least 16 rows.
    group_pad = max(16, int(triton.next_power_of_2(heads // kv_heads)))
    options = {name: config[name] for name in ("num_warps", "num_stages", "TILE")}
    started = launch if rows <= EARLY_ROWS else launch_alone
    pool = stored_elements(pool)
    started(
        decode_kernel, (programs, kv_heads), q, pool, block_tables, out, *places, plan.firsts,
        *(rotation or NO_ROTATION).arguments, rows, layer, q.stride(0), block_tables.stride(0),
        pool.stride(0), *score_arguments(scoring), window or NO_WINDOW, WINDOWED=window is not None,
        CHUNKED=chunked, WRITES=not only_reads, GROUP_PAD=group_pad,
        **(rotation or NO_ROTATION).options, **sizes, **options,
    )  # fmt: skip
    started(
        join_kernel, (rows, heads), out, *places, rows, programs, window or NO_WINDOW,
        HEAD_SIZE=head_size, HEAD_PAD=sizes["HEAD_PAD"], TILE=config["TILE"], PARTS=16,
        CHUNKED=chunked,
    )  # fmt: skip


def launch_alone(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Launches a kernel that starts when the kernel in front has ended."""
    kernel[grid](*args, PDL=False, **kwargs)


@cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def tiles_of_row(seq_len, window, TILE: tl.constexpr, CHUNKED: tl.constexpr = False):
    """A row's first visible key, the beginning of that key's tile, and its number of tiles."""
    if CHUNKED:
        window = window_at(seq_len - 1, window, CHUNKED)
    first = tl.maximum(seq_len - window, 0)
    base = first // TILE * TILE
    # A padding row has one tile, whose program writes zeros.
    return first, base, tl.maximum(tl.cdiv(seq_len - base, TILE), 1)


@triton.jit(
    do_not_specialize=["rows", "window", "programs"], do_not_specialize_on_alignment=["seq_lens"]
)
def plan_kernel(
    seq_lens, ends, firsts, rows, window, programs, TILE: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, CHUNKED: tl.constexpr = False,
):  # fmt: skip
    """Computes a `DecodePlan` for PROGRAMS of its programs. Grid `[programs / PROGRAMS]`."""
    row = tl.arange(0, ROWS)
    seq_len = tl.load(seq_lens + row, mask=row < rows, other=0)
    _, _, tiles = tiles_of_row(seq_len, window, TILE, CHUNKED)
    tiles = tl.where(row < rows, tiles, 0)
    end = tl.cumsum(tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(ends + row, end, mask=row < rows)
    share = tl.cdiv(tl.sum(tiles, 0), programs)
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    passed = (end[None, :] <= (program * share)[:, None]) & (row < rows)[None, :]
    tl.store(firsts + program, tl.sum(passed.to(tl.int32), 1), mask=program < programs)


@triton.jit(
    do_not_specialize=["rows", "layer", "table_stride", "window"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens"],
)
def decode_kernel(
    q_rows, pool, block_tables, out, parts, seq_lens, ends, firsts, cos, sin, q_weights, k_weights,
    eps, q_scales, rows, layer, row_stride, table_stride, block_stride, scale, softcap, sinks,
    window, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PART_STEP: tl.constexpr, HEAD_STEP: tl.constexpr, ROW_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, QUANTIZED: tl.constexpr, FP8: tl.constexpr,
    K_TYPE: tl.constexpr, V_TYPE: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    WRITES: tl.constexpr, NORM_LAST: tl.constexpr, NORM_VALUES: tl.constexpr,
    GROUP_PAD: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention over one share of keys for one KV head: results of whole rows, and of partial rows.

    Grid `[programs, kv_heads]`. parts: float32 `[2 * programs, heads, head_size]` followed by `[2 *
    programs, heads]`; ends of rows first, by program, then beginnings.
    """
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    total_tiles = tl.load(ends + rows - 1)
    share = tl.cdiv(total_tiles, tl.num_programs(0))
    at = program * share
    stop = tl.minimum(at + share, total_tiles)
    row = tl.load(firsts + program)

    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS_SIZE: tl.constexpr = BLOCK_SIZE * ROW_SIZE
    PART: tl.constexpr = PART_STEP * ROWS_SIZE
    head = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_PAD)
    wanted = (head < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    k_base = pool + layer.to(tl.int64) * (2 * KV_HEADS * ROWS_SIZE)
    k_base += kv_head * (HEAD_STEP * ROWS_SIZE)

    #  tiles of rows:  | row 0 | row 1 .................. | row 2 | row 3 ........ |
    #  shares:         | program 0    | program 1    | program 2    | program 3    |
    while at < stop:
        seq_len = tl.load(seq_lens + row)
        row_end = tl.load(ends + row)
        first, base, tiles = tiles_of_row(seq_len, window, TILE, CHUNKED)
        row_begin = row_end - tiles
        until = tl.minimum(stop, row_end)
        begin = base + (at - row_begin) * TILE
        end = tl.minimum(base + (until - row_begin) * TILE, seq_len)
        place = -1  # index in `parts`; none for a whole row
        if until - at < tiles:
            place = program
            if at == row_begin:
                place += tl.num_programs(0)
        least = None
        if WINDOWED:
            least = first
        heads = row * HEADS + kv_head * GROUP + head
        block_table = block_tables + row.to(tl.int64) * table_stride
        own = q_rows + row.to(tl.int64) * row_stride + kv_head * GROUP * HEAD_SIZE
        if cos is None:
            q = tl.load(own + head[:, None] * HEAD_SIZE + dims[None, :], mask=wanted, other=0.0)
        else:
            # A padding row is rotated as position 0; its result is not read.
            position = tl.maximum(seq_len - 1, 0)
            cosines, sines = load_angles(cos, sin, position, dims, HEAD_SIZE)
            q = rotate_heads(
                own + head * HEAD_SIZE, head < GROUP, dims, q_weights, cosines, sines, eps,
                HEAD_SIZE, NORM_LAST,
            )  # fmt: skip
            q = scaled_queries(q, q_scales, position)
            writes = False
            if WRITES:
                writes = (until == row_end) & (seq_len > 0)
            if writes:
                one = tl.arange(0, 1)
                of_kv = q_rows + row.to(tl.int64) * row_stride + (HEADS + kv_head + one) * HEAD_SIZE
                k = rotate_heads(
                    of_kv, one == 0, dims, k_weights, cosines, sines, eps, HEAD_SIZE, NORM_LAST
                )
                of_kv += KV_HEADS * HEAD_SIZE
                v = load_values(of_kv, one == 0, dims, eps, HEAD_SIZE, NORM_VALUES)
                block = tl.load(block_table + position // BLOCK_SIZE).to(tl.int64)
                into = k_base + block * block_stride + one
                slot = position % BLOCK_SIZE
                store_kv(into, one == 0, slot, dims, k, BLOCK_SIZE, HEAD_SIZE, QUANTIZED, FP8)
                store_kv(
                    into + PART, one == 0, slot, dims, v, BLOCK_SIZE, HEAD_SIZE, QUANTIZED, FP8
                )
                tl.debug_barrier()  # other threads of the program read it

        q, q_odd = split_even_odd(q.to(K_TYPE), QUANTIZED)
        weighted, odd = split_even_odd(tl.zeros([GROUP_PAD, HEAD_PAD], dtype=tl.float32), QUANTIZED)
        total, largest = initial_state(sinks, kv_head * GROUP + head, head < GROUP)
        if sinks is not None and at > row_begin:  # the sink counts once a row
            total, largest = initial_state(None, head, head < GROUP)
        # Only the first and the last tile can have masked keys, but masking costs no time beside
        # memory access, and a single loop keeps loads in flight from the first tile to the last.
        weighted, odd, total, largest = attend_range(
            q, q_odd, weighted, odd, total, largest, k_base, k_base + PART, block_table, begin, end,
            least, end, None, None, scale, softcap, block_stride, BLOCK_SIZE, HEAD_SIZE, HEAD_PAD,
            QUANTIZED, FP8, V_TYPE, TILE, PARTLY=True, CAUSAL=False, WINDOWED=False,
        )  # fmt: skip

        result = join_even_odd(weighted, odd, QUANTIZED) / tl.where(total == 0, 1.0, total)[:, None]
        if place >= 0:
            part = place * HEADS + kv_head * GROUP + head
            tl.store(parts + part[:, None] * HEAD_SIZE + dims[None, :], result, mask=wanted)
            sums = parts + 2 * tl.num_programs(0) * HEADS * HEAD_SIZE
            tl.store(sums + part, largest + tl.log2(total), mask=head < GROUP)
        else:
            tl.store(
                out + heads[:, None] * HEAD_SIZE + dims[None, :],
                result.to(out.dtype.element_ty),
                mask=wanted,
            )
        at = until
        row += 1


@triton.jit(
    do_not_specialize=["rows", "programs", "window"], do_not_specialize_on_alignment=["seq_lens"]
)
def join_kernel(
    out, parts, seq_lens, ends, rows, programs, window, HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
    CHUNKED: tl.constexpr = False,
):  # fmt: skip
    """Joins the parts of one head of one row, if it has several. Grid `[rows, heads]`."""
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    share = tl.cdiv(tl.load(ends + rows - 1), programs)
    end = tl.load(ends + row)
    _, _, tiles = tiles_of_row(tl.load(seq_lens + row), window, TILE, CHUNKED)
    first = (end - tiles) // share
    last = (end - 1) // share
    if first == last:
        return
    dims = tl.arange(0, HEAD_PAD)
    sums = parts + 2 * programs * heads * HEAD_SIZE
    weighted = tl.zeros([HEAD_PAD], dtype=tl.float32)
    total = tl.full([], 0.0, tl.float32)
    largest = tl.full([], LOWEST, tl.float32)
    for begin in range(first, last + 1, PARTS):
        program = begin + tl.arange(0, PARTS)
        part = tl.where(program == first, program + programs, program) * heads + head
        log_sums = tl.load(sums + part, mask=program <= last, other=float("-inf"))
        results = tl.load(
            parts + part[:, None] * HEAD_SIZE + dims[None, :],
            mask=(program <= last)[:, None] & (dims < HEAD_SIZE)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(log_sums, 0))
        shares = tl.exp2(log_sums - new_largest)
        decay = tl.exp2(largest - new_largest)
        weighted = weighted * decay + tl.sum(results * shares[:, None], 0)
        total = total * decay + tl.sum(shares, 0)
        largest = new_largest
    at = (row * heads + head) * HEAD_SIZE + dims
    tl.store(out + at, (weighted / total).to(out.dtype.element_ty), mask=dims < HEAD_SIZE)
