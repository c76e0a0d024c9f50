"""Attention over latent KV (MLA): one row a token in a paged pool, which all query heads share.

A row is `rank` elements, which are key and value of every head, and then `rope_size` rotated ones,
which are the end of every key: see `models.mla`. A program takes some query
heads, and the keys of all rows of a step are split over programs as `decode_attention` splits them.
Rows of prompts are computed like decode rows: all heads share a row of KV, so products take the
time, not memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.torch.attention import write_kv
from baton.engine.kernels.torch.rms_norm import Norm, rms_norm
from baton.engine.kernels.torch.rope import rotate
from baton.engine.kernels.triton.attention_common import LOG2_E, LOWEST, NO_WINDOW
from baton.engine.kernels.triton.decode_attention import (
    DecodePlan,
    join_kernel,
    plan_kernel,
    processors,
    tiles_of_row,
)
from baton.engine.kernels.triton.pdl import launch, launch_dependents, wait_for_inputs
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Outputs, Trial, dtype_of

CONFIG: Config = {"num_warps": 8, "num_stages": 2, "TILE": 32}
HEADS_AT_ONCE = 16  # of a program, the least that tensor cores take


class Angles(NamedTuple):
    """Tables of `baton.engine.models.rope`, `[max_context, rope_size]`."""

    cos: Tensor
    sin: Tensor


def write_latent(
    rows: Tensor, norm: Norm, angles: Angles, positions: Tensor, slots: Tensor, pool: Tensor,
    layer: int,
) -> None:  # fmt: skip
    """Norms the first `rank` elements of each row, rotates the others, and writes it to its slot.

    rows: `[rows, rank + rope_size]` of the pool's type, each contiguous · positions, slots: int32
    `[rows]`, as of `SlotMapping`.
    """
    rank, rope_size, block_size = len(norm.weight), angles.cos.shape[1], pool.shape[4]
    assert pool.shape[2:4] == (1, 1) and pool.shape[5] == rows.shape[1] == rank + rope_size
    assert rows.stride(1) == 1 and pool.is_contiguous() and rows.dtype == pool.dtype
    launch(
        _write_kernel, (len(rows),), rows, norm.weight, *angles, positions, slots, pool, layer,
        rows.stride(0), pool.stride(0), norm.eps, RANK=rank,
        RANK_PAD=triton.next_power_of_2(rank), ROPE=rope_size,
        HALF_PAD=triton.next_power_of_2(rope_size // 2), BLOCK_SIZE=block_size, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["positions", "slots"])
def _write_kernel(
    rows, weight, cos, sin, positions, slots, pool, layer, row_stride, block_stride, eps,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes a row, unless it is padding. Grid `[rows]`."""
    row = tl.program_id(0)
    dims = tl.arange(0, RANK_PAD)
    weights = tl.load(weight + dims, mask=dims < RANK, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    element = pool.dtype.element_ty
    own = rows + row.to(tl.int64) * row_stride
    x = tl.load(own + dims, mask=dims < RANK, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
    unit = (x * inverse).to(weight.dtype.element_ty).to(tl.float32)
    to = pool + (slot // BLOCK_SIZE).to(tl.int64) * block_stride
    to += (layer * BLOCK_SIZE + slot % BLOCK_SIZE) * (RANK + ROPE)
    tl.store(to + dims, (unit * weights).to(element), mask=dims < RANK)
    half = tl.arange(0, HALF_PAD)
    inside = half < ROPE // 2
    angle = tl.load(positions + row).to(tl.int64) * ROPE + half
    cosines = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    sines = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(own + RANK + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(own + RANK + ROPE // 2 + half, mask=inside, other=0.0).to(tl.float32)
    turned = first * cosines - second * sines
    tl.store(to + RANK + half, turned.to(element), mask=inside)
    turned = second * cosines + first * sines
    tl.store(to + RANK + ROPE // 2 + half, turned.to(element), mask=inside)


def plan_latent(seq_lens: Tensor, heads: int, programs: int = 0) -> DecodePlan:
    """Splits the keys of a step's rows over programs, without waiting for the device.

    seq_lens: int32 `[rows]`, visible tokens of each row; 0 for padding · programs: number for each
    group of heads; 0 is as many as the GPU runs at once.
    """
    groups = triton.cdiv(heads, HEADS_AT_ONCE)
    programs = programs or max(1, processors(seq_lens.device) // groups)
    rows, device = len(seq_lens), seq_lens.device
    ends, firsts = (
        torch.empty(count, dtype=torch.int32, device=device) for count in (rows, programs)
    )
    plan_kernel[(triton.cdiv(programs, 16),)](
        seq_lens, ends, firsts, rows, NO_WINDOW, programs, TILE=CONFIG["TILE"],
        ROWS=triton.next_power_of_2(rows), PROGRAMS=16,
    )  # fmt: skip
    return DecodePlan(seq_lens, None, ends, firsts, CONFIG)


def latent_attention(
    q: Tensor, q_end: Tensor, pool: Tensor, layer: int, block_tables: Tensor,
    owners: Tensor | None, plan: DecodePlan, angles: Angles, scale: float,
) -> Tensor:  # fmt: skip
    """The weighted sums of latent rows of each query: `[rows, heads, rank]`; zeros for padding.

    q: `[rows, heads, rank]`, contiguous · q_end: `[rows, heads, rope_size]`, not rotated yet, each
    contiguous · block_tables: int32 `[sequences, width]` · owners: int32 `[rows]`, the sequence of
    each row; None: one each · plan: of these rows.
    """
    (rows, heads, rank), programs = q.shape, len(plan.firsts)
    rope_size, block_size = q_end.shape[2], pool.shape[4]
    assert q.is_contiguous() and pool.is_contiguous() and q.dtype == pool.dtype
    assert q_end.stride(2) == 1 and block_tables.stride(1) == 1 and len(plan.ends) == rows
    out = torch.empty_like(q)
    size = 2 * programs * heads * (rank + 1)
    parts = torch.empty(size, dtype=torch.float32, device=q.device)
    places = (parts, plan.seq_lens, plan.ends)
    rank_pad = max(16, int(triton.next_power_of_2(rank)))
    # The interpreter cannot multiply bfloat16.
    wide = q.device.type == "cpu" and q.dtype == torch.bfloat16
    launch(
        _latent_kernel, (programs, triton.cdiv(heads, HEADS_AT_ONCE)), q, q_end, pool,
        block_tables, owners, out, *places, plan.firsts, *angles, rows, layer, q_end.stride(0),
        q_end.stride(1), block_tables.stride(0), pool.stride(0), scale * LOG2_E, HEADS=heads,
        BLOCK_SIZE=block_size, RANK=rank, RANK_PAD=rank_pad, ROPE=rope_size,
        HALF_PAD=max(16, int(triton.next_power_of_2(rope_size // 2))), GROUP=HEADS_AT_ONCE,
        WIDE=wide, **CONFIG,
    )  # fmt: skip
    launch(
        join_kernel, (rows, heads), out, *places, rows, programs, NO_WINDOW, HEAD_SIZE=rank,
        HEAD_PAD=rank_pad, TILE=CONFIG["TILE"], PARTS=16,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["rows", "layer", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "owners"],
)
def _latent_kernel(
    q_rows, q_ends, pool, block_tables, owners, out, parts, seq_lens, ends, firsts, cos, sin, rows,
    layer, end_row_stride, end_stride, table_stride, block_stride, scale, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr,
    HALF_PAD: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attention of GROUP heads over one share of keys. Grid `[programs, heads / GROUP]`.

    parts: as of `decode_attention.decode_kernel`.
    """
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    program = tl.program_id(0)
    total_tiles = tl.load(ends + rows - 1)
    share = tl.cdiv(total_tiles, tl.num_programs(0))
    at = program * share
    stop = tl.minimum(at + share, total_tiles)
    row = tl.load(firsts + program)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    dims = tl.arange(0, RANK_PAD)
    half = tl.arange(0, HALF_PAD)
    is_half = half < ROPE // 2
    wanted = (head < HEADS)[:, None] & (dims < RANK)[None, :]
    wanted_half = (head < HEADS)[:, None] & is_half[None, :]
    element = q_rows.dtype.element_ty
    of_product = tl.float32 if WIDE else element
    base = pool + layer.to(tl.int64) * (BLOCK_SIZE * (RANK + ROPE))
    while at < stop:
        seq_len = tl.load(seq_lens + row)
        row_end = tl.load(ends + row)
        _, _, tiles = tiles_of_row(seq_len, 2147483647, TILE)
        row_begin = row_end - tiles
        until = tl.minimum(stop, row_end)
        end = tl.minimum((until - row_begin) * TILE, seq_len)
        place = -1  # index in `parts`; none for a whole row
        if until - at < tiles:
            place = program
            if at == row_begin:
                place += tl.num_programs(0)
        owner = row
        if owners is not None:
            owner = tl.load(owners + row)
        block_table = block_tables + owner.to(tl.int64) * table_stride
        heads = row.to(tl.int64) * HEADS + head
        q = tl.load(q_rows + heads[:, None] * RANK + dims[None, :], mask=wanted, other=0.0)
        # A padding row is rotated as position 0; its result is zeros.
        angle = tl.maximum(seq_len - 1, 0).to(tl.int64) * ROPE + half
        cosines = tl.load(cos + angle, mask=is_half, other=0.0).to(tl.float32)[None, :]
        sines = tl.load(sin + angle, mask=is_half, other=0.0).to(tl.float32)[None, :]
        own = q_ends + row.to(tl.int64) * end_row_stride + head[:, None] * end_stride
        first = tl.load(own + half[None, :], mask=wanted_half, other=0.0).to(tl.float32)
        second = tl.load(own + ROPE // 2 + half[None, :], mask=wanted_half, other=0.0)
        second = second.to(tl.float32)
        q = q.to(of_product)
        q_first = (first * cosines - second * sines).to(element).to(of_product)
        q_second = (second * cosines + first * sines).to(element).to(of_product)
        weighted = tl.zeros([GROUP, RANK_PAD], dtype=tl.float32)
        total = tl.zeros([GROUP], dtype=tl.float32)
        largest = tl.full([GROUP], LOWEST, tl.float32)
        for begin in range((at - row_begin) * TILE, end, TILE):
            key = begin + tl.arange(0, TILE)
            visible = key < end
            block = tl.load(block_table + key // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
            rows_at = base + block * block_stride + (key % BLOCK_SIZE) * (RANK + ROPE)
            is_row = visible[:, None] & (dims < RANK)[None, :]
            k = tl.load(rows_at[:, None] + dims[None, :], mask=is_row, other=0.0).to(of_product)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            is_end = visible[:, None] & is_half[None, :]
            ends_at = rows_at[:, None] + RANK + half[None, :]
            k_end = tl.load(ends_at, mask=is_end, other=0.0).to(of_product)
            scores = tl.dot(q_first, tl.trans(k_end), scores, input_precision="ieee")
            k_end = tl.load(ends_at + ROPE // 2, mask=is_end, other=0.0).to(of_product)
            scores = tl.dot(q_second, tl.trans(k_end), scores, input_precision="ieee")
            scores = tl.where(visible[None, :], scores * scale, LOWEST)
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_largest[:, None])
            decay = tl.exp2(largest - new_largest)
            total = total * decay + tl.sum(weights, 1)
            weights = weights.to(element).to(of_product)
            weighted = tl.dot(weights, k, weighted * decay[:, None], input_precision="ieee")
            largest = new_largest
        result = weighted / tl.where(total == 0, 1.0, total)[:, None]
        if place >= 0:
            part = place * HEADS + head
            tl.store(parts + part[:, None] * RANK + dims[None, :], result, mask=wanted)
            sums = parts + 2 * tl.num_programs(0) * HEADS * RANK
            tl.store(sums + part, largest + tl.log2(total), mask=head < HEADS)
        else:
            to = out + heads[:, None] * RANK + dims[None, :]
            tl.store(to, result.to(element), mask=wanted)
        at = until
        row += 1


def _pool_of(
    shape: Key, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Angles]:
    """A pool, its rows by block and slot, tables, `owners` and `seq_lens` of decode rows and of a
    chunk."""
    batch, context, rope_size = (int(shape[name]) for name in ("batch", "context", "rope"))
    size, chunk = int(shape["rank"]) + rope_size, int(shape.get("chunk", 0))
    width = -(-(context + chunk) // 16)
    pool = torch.randn(batch * width + 3, 2, 1, 1, 16, size, device=device).to(dtype)
    tables = torch.randperm(batch * width, device=device).int().view(batch, width)
    lengths = [context - 7 * number % context for number in range(batch)]
    lengths += list(range(lengths.pop() + 1, context + chunk))[:chunk] if chunk else [0]
    owners = [min(number, batch - 1) for number in range(len(lengths))]
    angles = torch.randn(2, context + chunk, rope_size // 2, device=device).repeat(1, 1, 2)
    rows = [torch.tensor(one, dtype=torch.int32, device=device) for one in (owners, lengths)]
    return pool, tables, rows[0], rows[1], Angles(*angles.to(dtype).unbind())


def _trial(shape: Key, device: torch.device) -> Trial:
    """Attention of decode rows, one of them padding, or of decode rows and a chunk."""
    dtype, heads, rank = dtype_of(shape), int(shape["heads"]), int(shape["rank"])
    pool, tables, owners, seq_lens, angles = _pool_of(shape, device, dtype)
    rows, rope_size = len(owners), angles.cos.shape[1]
    q = torch.randn(rows, heads, rank, device=device).to(dtype)
    ends = torch.randn(rows, heads, 24 + rope_size, device=device).to(dtype)[..., 24:]
    scale = (rank + rope_size) ** -0.5

    def run(config: Config | None) -> Outputs:
        plan = plan_latent(seq_lens, heads, int(shape.get("programs", 0)))
        return (latent_attention(q, ends, pool, 1, tables, owners, plan, angles, scale),)

    def expected() -> Outputs:
        positions = (seq_lens - 1).clamp(min=0).long()
        turned = rotate(ends, *(table[positions, None] for table in angles))
        queries, out = torch.cat((q, turned), dim=2).double(), torch.zeros_like(q)
        for row, (owner, count) in enumerate(zip(owners.tolist(), seq_lens.tolist(), strict=True)):
            kv = pool[tables[owner].long(), 1, 0, 0].flatten(0, 1)[:count].double()
            weights = torch.softmax(queries[row] @ kv.T * scale, dim=-1)
            out[row] = (weights @ kv[:, :rank]).to(dtype)
        return (out,)

    row_bytes = (rank + rope_size) * dtype.itemsize
    moved = int(seq_lens.sum()) * row_bytes if device.type != "meta" else 0
    return Trial({}, run, expected, moved_bytes=moved)


def _write_trial(shape: Key, device: torch.device) -> Trial:
    """Rows that end a wider projection, some of them padding."""
    dtype, rank = dtype_of(shape), int(shape["rank"])
    pool, _, _, _, angles = _pool_of(shape, device, dtype)
    rows = 9
    projected = torch.randn(rows, 40 + pool.shape[5], device=device).to(dtype)[:, 40:]
    weight = 1 + 0.2 * torch.randn(rank, device=device)
    norm = Norm(weight.to(dtype), 1e-5)
    slots = torch.randperm(16 * len(pool), device=device)[:rows].int()
    slots[3] = -1
    positions = torch.arange(rows, dtype=torch.int32, device=device)

    def run(config: Config | None) -> Outputs:
        to = pool.clone()
        write_latent(projected, norm, angles, positions, slots, to, 1)
        return (to,)

    def expected() -> Outputs:
        to, is_row = pool.clone(), slots >= 0
        first, end = projected.split([rank, angles.cos.shape[1]], dim=1)
        turned = rotate(end[:, None], *(table[positions.long(), None] for table in angles))
        found = torch.cat((rms_norm(first, *norm)[:, None], turned), dim=2)
        write_kv(to, 1, slots[is_row].long(), found[is_row])
        return (to,)

    return Trial({}, run, expected)


_SIZES: Key = {"rank": 512, "rope": 64, "context": 600}
SPECS = (
    KernelSpec(
        "latent_attention",
        _trial,
        cases=(
            {"batch": 3, "heads": 16, **_SIZES},
            {"batch": 4, "heads": 20, **_SIZES, "programs": 5, "dtype": "fp32"},
            {"batch": 3, "heads": 5, "rank": 24, "rope": 16, "context": 70, "chunk": 19},
        ),
        # DeepSeek-V3 and Kimi K2, whole and on eight ranks; GLM-4.7-Flash.
        shapes=tuple({"batch": 64, "heads": heads, **_SIZES} for heads in (128, 16, 20)),
    ),
    KernelSpec(
        "write_latent",
        _write_trial,
        cases=(
            {"batch": 1, **_SIZES},
            {"batch": 1, "rank": 24, "rope": 16, "context": 70, "dtype": "fp32"},
        ),
    ),
)
