"""One Triton kernel that moves listed blocks and sums what it moves; `reference` is its oracle.

A work item is a tile of one block's words. A fixed, small number of programs share all items: a
copy over a slow link must not fill the GPU with programs that wait for it, while the engine
computes on the rest. The sizes are starting values that no measurement has confirmed yet.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtransfer.digest import MIX_1, MIX_2, STEP
from kvtransfer.kernels import reference
from kvtransfer.pool import KvPool, Slots

TILE = 4096  # words of an item: 16 KiB
WARPS = 8
LINK_PROGRAMS = 32  # between pools: what a link to a neighbour is likely to need
LOCAL_PROGRAMS = 64  # within one GPU's memory

_STEP, _MIX_1, _MIX_2 = tl.constexpr(STEP), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit
def _mixed(words, places):
    """What 32-bit words count for at their places, uint64; see `kvtransfer.digest`."""
    x = words.to(tl.uint32, bitcast=True).to(tl.uint64) + places.to(tl.uint64) * _STEP
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _move_tile(source, target, inside, places, total, WRITES: tl.constexpr):
    """Copies a tile between pointers; returns `total` with what it counts for."""
    words = tl.load(source, mask=inside, other=0)
    if WRITES:
        tl.store(target, words, mask=inside)
    return total + tl.where(inside, _mixed(words, places), 0)


@triton.jit
def _place(words, RUN_WORDS: tl.constexpr, SIDE_WORDS: tl.constexpr):
    """Where words of a block in canonical order lie in a pool: see `move_blocks`."""
    places = words
    if SIDE_WORDS != RUN_WORDS:
        places = words + (words // RUN_WORDS) * (SIDE_WORDS - RUN_WORDS)
    return places


@triton.jit(do_not_specialize=["first_word", "num_blocks", "tail_tokens"])
def move_blocks(
    source, target, source_ids, target_ids, sums, first_word, num_blocks, tail_tokens,
    ROWS: tl.constexpr, ROW_WORDS: tl.constexpr, SLOT_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr, RUN_WORDS: tl.constexpr, FROM_SIDE: tl.constexpr,
    TO_SIDE: tl.constexpr, WRITES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Moves `num_blocks` blocks, of the last one only `tail_tokens` slots unless that is 0.

    source, target: int32 words from the first that is meant on, of a pool
    `[blocks, ROWS * ROW_WORDS / RUN_WORDS, FROM_SIDE or TO_SIDE]`, of which the first RUN_WORDS of
    each last axis are meant, or, where that is 0, of staging memory in canonical order ·
    source_ids, target_ids: int32 `[num_blocks]`, read for pools only · sums: int64 `[1]`, added to
    · first_word: place of the first word · WRITES: without it only the sum is taken, and `target`
    is not used.
    """
    BLOCK_WORDS: tl.constexpr = ROWS * ROW_WORDS
    SIDES: tl.constexpr = BLOCK_WORDS // RUN_WORDS
    TILES: tl.constexpr = (BLOCK_WORDS + TILE - 1) // TILE
    total = tl.zeros([TILE], dtype=tl.uint64)
    for item in range(tl.program_id(0), num_blocks * TILES, tl.num_programs(0)):
        index = item // TILES
        word = (item % TILES) * TILE + tl.arange(0, TILE)
        staged = index.to(tl.int64) * BLOCK_WORDS
        read, write = staged, staged
        if FROM_SIDE:
            read = tl.load(source_ids + index).to(tl.int64) * (SIDES * FROM_SIDE)
        if TO_SIDE:
            write = tl.load(target_ids + index).to(tl.int64) * (SIDES * TO_SIDE)
        places = first_word + staged + word
        if (tail_tokens > 0) & (index == num_blocks - 1):
            # The filled slots of a row come first in it; rows without them follow in the pool.
            width = tail_tokens * (SLOT_WORDS - SCALE_WORDS)
            strewn = (word // width) * ROW_WORDS + word % width
            inside = word < ROWS * tail_tokens * SLOT_WORDS
            if SCALE_WORDS:  # behind a row's elements, and here behind those of all rows
                SCALES: tl.constexpr = ROW_WORDS - ROW_WORDS // SLOT_WORDS * SCALE_WORDS
                scale = word - ROWS * width
                width = tail_tokens * SCALE_WORDS
                behind = (scale // width) * ROW_WORDS + SCALES + scale % width
                strewn = tl.where(scale < 0, strewn, behind)
            from_ = source + read + (_place(strewn, RUN_WORDS, FROM_SIDE) if FROM_SIDE else word)
            to = target + write + (_place(strewn, RUN_WORDS, TO_SIDE) if TO_SIDE else word)
            total = _move_tile(from_, to, inside, places, total, WRITES)
        else:
            from_ = source + read + (_place(word, RUN_WORDS, FROM_SIDE) if FROM_SIDE else word)
            to = target + write + (_place(word, RUN_WORDS, TO_SIDE) if TO_SIDE else word)
            total = _move_tile(from_, to, word < BLOCK_WORDS, places, total, WRITES)
    tl.atomic_add(sums, tl.sum(total, axis=0).to(tl.int64, bitcast=True))


def gather(pool: KvPool, slots: Slots, out: Tensor, sums: Tensor, first_word: int) -> Tensor:
    """As `reference.gather`."""
    data = out[: pool.nbytes(slots)]
    _launch(pool, slots, pool, data, sums, first_word, (slots, None), LOCAL_PROGRAMS)
    return data


def scatter(data: Tensor, pool: KvPool, slots: Slots, sums: Tensor, first_word: int) -> None:
    """As `reference.scatter`."""
    _launch(pool, slots, data, pool, sums, first_word, (None, slots), LOCAL_PROGRAMS)


def copy(
    source: KvPool, local: Slots, target: KvPool, remote: Slots, sums: Tensor, first_word: int
) -> None:
    """As `reference.copy`; `target` may lie on another GPU that this one can write to."""
    ids = (local, remote)
    _launch(source, local, source, target, sums, first_word, ids, LINK_PROGRAMS)


def checksum(pool: KvPool, slots: Slots, sums: Tensor, first_word: int) -> None:
    """As `reference.checksum`; `pool` may lie on another GPU that this one can read."""
    _launch(pool, slots, pool, None, sums, first_word, (slots, None), LOCAL_PROGRAMS)


def _launch(
    pool: KvPool, slots: Slots, source: KvPool | Tensor, target: KvPool | Tensor | None,
    sums: Tensor, first_word: int, ids: tuple[Slots | None, Slots | None], programs: int,
) -> None:  # fmt: skip
    """`ids`: which blocks of a pool are read and written; None where staging memory is."""
    num_blocks = len(slots.block_ids)
    read, written = (_on_device(one, sums.device) for one in ids)  # `pool` may be a neighbour's
    sides, heads, row_bytes = pool.rows.shape[1:]
    source_words, from_side = _words(source)
    target_words, to_side = (source_words, 0) if target is None else _words(target)
    tile = min(TILE, triton.next_power_of_2(pool.block_bytes // 4))
    move_blocks[(min(programs, num_blocks * -(-pool.block_bytes // (4 * tile))),)](
        source_words, target_words,
        sums if read is None else read, sums if written is None else written,
        sums, first_word, num_blocks, slots.num_tokens % pool.block_size,
        ROWS=sides * heads, ROW_WORDS=row_bytes // 4, SLOT_WORDS=pool.row_slot_bytes // 4,
        SCALE_WORDS=pool.scale_bytes // 4, RUN_WORDS=heads * row_bytes // 4, FROM_SIDE=from_side,
        TO_SIDE=to_side, WRITES=target is not None, TILE=tile, num_warps=WARPS,
    )  # fmt: skip


def _words(memory: KvPool | Tensor) -> tuple[Tensor, int]:
    """Its words from the first that is meant on, and for a pool those of all heads of a side."""
    if isinstance(memory, Tensor):
        return memory.view(torch.int32), 0
    row_words = memory.block_size * memory.row_slot_bytes // 4
    words = memory.tensor.view(-1).view(torch.uint8).view(torch.int32)
    return words[memory.heads.start * row_words :], memory.tensor.shape[3] * row_words


def _on_device(slots: Slots | None, device: torch.device) -> Tensor | None:
    """Block ids, int32, on their way to the device in the current stream."""
    if slots is None:
        return None
    pinned = device.type == "cuda"
    ids = torch.tensor(slots.block_ids, dtype=torch.int32, pin_memory=pinned)
    return ids.to(device, non_blocking=True)


def _trial(shape: Mapping[str, Any], device: torch.device) -> SimpleNamespace:
    """One use of the kernel on blocks in random order, the last one partly filled."""
    use, count, dtype = shape["use"], shape["blocks"], getattr(torch, shape["dtype"])
    sizes = (count + 6, shape["layers"], 2, shape["kv_heads"], 16, shape["row"])
    dice = random.Random(shape.get("ragged", 0))  # noqa: S311 - blocks of a test
    tokens = 16 * count - dice.randint(0, 15)
    local, remote = (Slots(tuple(dice.sample(range(count + 6), count)), tokens) for _ in "lr")

    def octets(num_bytes: int) -> Tensor:
        return torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)

    def empty() -> tuple[KvPool, Tensor, Tensor]:
        target = KvPool(torch.zeros(sizes, dtype=dtype, device=device))
        return target, torch.zeros_like(data), torch.zeros(1, dtype=torch.int64, device=device)

    source = KvPool(octets(dtype.itemsize * math.prod(sizes)).view(dtype).view(sizes))
    data = octets(source.nbytes(local))
    mine = empty()

    def run(by: Any, target: KvPool, out: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
        arguments: dict[str, tuple[object, ...]] = {
            "gather": (source, local, out),
            "scatter": (data, target, remote),
            "copy": (source, local, target, remote),
            "checksum": (source, local),
        }
        getattr(by, use)(*arguments[use], sums, 1 << 33)
        return target.blocks, out, sums

    return SimpleNamespace(
        key={},
        run=lambda config: run(sys.modules[__name__], *mine),
        reference=lambda: run(reference, *empty()),
        moved_bytes=len(data) * (1 if use == "checksum" else 2),
        flops=0.0,
        tolerance=0.0,
    )


_POOLS: tuple[dict[str, int | str], ...] = (
    {"dtype": "bfloat16", "layers": 32, "kv_heads": 8, "row": 128},
    {"dtype": "int8", "layers": 24, "kv_heads": 2, "row": 68},
)
_CASES = [
    {"use": use, **pool, "blocks": 3}
    for use in ("gather", "scatter", "copy", "checksum")
    for pool in _POOLS
]
# With the fields of `baton.engine.ops.triton.spec`: nothing of `kvtransfer` imports an engine.
SPECS = (SimpleNamespace(name="move_blocks", trial=_trial, cases=_CASES, configs=None, shapes=()),)
