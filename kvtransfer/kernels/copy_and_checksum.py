"""A Triton kernel that copies listed blocks and computes their checksum; `reference` is its oracle.

A work item is a tile of one block's words. A small, fixed number of programs share all items: a
copy over a slow link must not fill the GPU with waiting programs while the engine computes. A
thread spends about four instructions on each byte (SASS for sm_90), so memory and links are the
limit, not the checksum.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.cuda import has_nvlink
from kvtransfer.checksum import FACTOR, KEY_STEP, MULTIPLIER_STEP, STEP
from kvtransfer.kernels import reference
from kvtransfer.pool import KvPool, Slots

TILE = 4096  # words of a work item: 16 KiB
TAIL_TILE = 1024  # words of an item of a partly filled block, whose words are not contiguous
WARPS = 8
# Programs, each with 32 KiB in flight for about a microsecond: over NVLink to another GPU (up to
# 900 GB/s), and over PCIe (64 GB/s). Within one GPU there is one on each multiprocessor.
NVLINK_PROGRAMS, PCIE_PROGRAMS = 32, 4

_STEP, _FACTOR = tl.constexpr(STEP), tl.constexpr(FACTOR)
_KEY_STEP, _MULTIPLIER_STEP = tl.constexpr(KEY_STEP), tl.constexpr(MULTIPLIER_STEP)


@triton.jit
def _mixed(words, t, which):
    """The contribution of words to the checksum, uint64; see `kvtransfer.checksum.word_sum`.

    t: number of a word's group of four * STEP, perhaps `[groups, 1]`, and then hashed once for each
    group · which: the word's number in its group.
    """
    t = (t ^ (t >> 32)) * _FACTOR
    upper = (t >> 32).to(tl.uint32)
    key = (t.to(tl.uint32) ^ upper) ^ which * _KEY_STEP
    multiplier = (upper | 1) ^ which * _MULTIPLIER_STEP
    mixed = words.to(tl.uint32, bitcast=True) ^ key
    return mixed.to(tl.uint64) * multiplier.to(tl.uint64)


@triton.jit
def _place(words, RUN_WORDS: tl.constexpr, SIDE_WORDS: tl.constexpr):
    """The positions in a pool of a block's words in canonical order; see `move_blocks`."""
    places = words
    if SIDE_WORDS and SIDE_WORDS != RUN_WORDS:
        places = words + (words // RUN_WORDS) * (SIDE_WORDS - RUN_WORDS)
    return places


@triton.jit
def _block(ids, index, exists, BLOCK_WORDS: tl.constexpr, SIDES: tl.constexpr, SIDE: tl.constexpr):
    """First word of a block in a pool of SIDE words a side; in staging memory if SIDE is 0."""
    if SIDE:
        return tl.load(ids + index, mask=exists, other=0).to(tl.int64) * (SIDES * SIDE)
    return tl.cast(index, tl.int64) * BLOCK_WORDS


@triton.jit
def _lanes(TILE: tl.constexpr):
    """Numbers from 0 in groups of four, which a thread loads at once: `[TILE / 4, 4]`."""
    return 4 * tl.arange(0, TILE // 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def _load_tile(
    source, ids, item, num_items, TILE: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    RUN_WORDS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """An item's words, with zeros past the last item and past the end of a block."""
    TILES: tl.constexpr = (BLOCK_WORDS + TILE - 1) // TILE
    SIDES: tl.constexpr = BLOCK_WORDS // RUN_WORDS
    exists, word = item < num_items, (item % TILES) * TILE + _lanes(TILE)
    begin = source + _block(ids, item // TILES, exists, BLOCK_WORDS, SIDES, SIDE)
    inside = exists & (word < BLOCK_WORDS)
    return tl.load(begin + _place(word, RUN_WORDS, SIDE), mask=inside, other=0)


@triton.jit(do_not_specialize=["first_word", "num_blocks", "tail_tokens"])
def move_blocks(
    source, target, source_ids, target_ids, sums, first_word: tl.int64, num_blocks, tail_tokens,
    ROWS: tl.constexpr, ROW_WORDS: tl.constexpr, SLOT_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr, RUN_WORDS: tl.constexpr, FROM_SIDE: tl.constexpr,
    TO_SIDE: tl.constexpr, WRITES: tl.constexpr, TILE: tl.constexpr, TAIL_TILE: tl.constexpr,
):  # fmt: skip
    """Copies `num_blocks` blocks; of the last one only `tail_tokens` slots, unless that is 0.

    source, target: int32 words of a pool `[blocks, ROWS * ROW_WORDS / RUN_WORDS, FROM_SIDE or
    TO_SIDE]`, from the first selected head on, where the first RUN_WORDS of each last axis are
    copied; or of staging memory in canonical order, if FROM_SIDE or TO_SIDE is 0 · source_ids,
    target_ids: int32 `[num_blocks]`, read for pools only · sums: int64 `[1]`, added to ·
    first_word: position of the first word, a multiple of four, as each block's size is ·
    WRITES: whether bytes are copied; otherwise only the sum is computed, and `target` is not used.
    """
    BLOCK_WORDS: tl.constexpr = ROWS * ROW_WORDS
    SIDES: tl.constexpr = BLOCK_WORDS // RUN_WORDS
    TILES: tl.constexpr = (BLOCK_WORDS + TILE - 1) // TILE
    full = num_blocks - (tail_tokens > 0).to(tl.int32)
    first, step, num_items = tl.program_id(0), tl.num_programs(0), full * TILES
    lanes = _lanes(TILE)
    fours, which = tl.arange(0, TILE // 4)[:, None], tl.arange(0, 4)[None, :].to(tl.uint32)
    steps = fours.to(tl.uint64) * _STEP
    total = tl.zeros([TILE // 4, 4], dtype=tl.uint64)
    words = _load_tile(
        source, source_ids, first, num_items, TILE, BLOCK_WORDS, RUN_WORDS, FROM_SIDE
    )
    for item in range(first, num_items, step):
        # In flight while the previous item is written and summed.
        ahead = _load_tile(
            source, source_ids, item + step, num_items, TILE, BLOCK_WORDS, RUN_WORDS, FROM_SIDE
        )
        index, begin = item // TILES, (item % TILES) * TILE
        inside = begin + lanes < BLOCK_WORDS
        if WRITES:
            write = _block(target_ids, index, True, BLOCK_WORDS, SIDES, TO_SIDE)
            to = target + write + _place(begin + lanes, RUN_WORDS, TO_SIDE)
            tl.store(to, words, mask=inside)
        place = first_word + tl.cast(index, tl.int64) * BLOCK_WORDS + begin
        t = (place >> 2).to(tl.uint64) * _STEP + steps
        total += tl.where(inside, _mixed(words, t, which), 0)
        words = ahead
    # The filled slots come first in each row; the next row follows after the unfilled ones.
    rest = tl.zeros([TAIL_TILE], dtype=tl.uint64)
    width = tail_tokens * (SLOT_WORDS - SCALE_WORDS)
    size, place = (
        ROWS * tail_tokens * SLOT_WORDS,
        first_word + tl.cast(full, tl.int64) * BLOCK_WORDS,
    )
    for start in range(first * TAIL_TILE, size, step * TAIL_TILE):
        word = start + tl.arange(0, TAIL_TILE)
        scattered = (word // width) * ROW_WORDS + word % width
        if SCALE_WORDS:  # in the pool after a row's elements, here after those of all rows
            SCALES: tl.constexpr = ROW_WORDS - ROW_WORDS // SLOT_WORDS * SCALE_WORDS
            scale, scales = word - ROWS * width, tail_tokens * SCALE_WORDS
            behind = (scale // scales) * ROW_WORDS + SCALES + scale % scales
            scattered = tl.where(scale < 0, scattered, behind)
        read = _block(source_ids, full, True, BLOCK_WORDS, SIDES, FROM_SIDE)
        from_ = source + read + (_place(scattered, RUN_WORDS, FROM_SIDE) if FROM_SIDE else word)
        tail = tl.load(from_, mask=word < size, other=0)
        if WRITES:
            write = _block(target_ids, full, True, BLOCK_WORDS, SIDES, TO_SIDE)
            to = target + write + (_place(scattered, RUN_WORDS, TO_SIDE) if TO_SIDE else word)
            tl.store(to, tail, mask=word < size)
        t = ((place + word) >> 2).to(tl.uint64) * _STEP
        rest += tl.where(word < size, _mixed(tail, t, (word & 3).to(tl.uint32)), 0)
    found = tl.sum(tl.sum(total, axis=1), axis=0) + tl.sum(rest, axis=0)
    tl.atomic_add(sums, found.to(tl.int64, bitcast=True))


class BlockMover:
    """Launches the kernel on one GPU's current stream, for one thread; same calls as `reference`.

    It keeps pinned memory for block ids, and the compiled kernel of each combination of pools:
    Triton's own look-up by twenty arguments costs the host more than a launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._ids = _DeviceIds(device)
        self._kernels: dict[tuple[Any, ...], Any] = {}

    def gather(
        self, pool: KvPool, slots: Slots, out: Tensor, sums: Tensor, first_word: int
    ) -> Tensor:
        """As `reference.gather`."""
        data = out[: pool.nbytes(slots)]
        self._launch(pool, slots, pool, data, sums, first_word, (slots, None))
        return data

    def scatter(
        self, data: Tensor, pool: KvPool, slots: Slots, sums: Tensor, first_word: int
    ) -> None:
        """As `reference.scatter`."""
        self._launch(pool, slots, data, pool, sums, first_word, (None, slots))

    def copy(
        self, source: KvPool, local: Slots, target: KvPool, remote: Slots, sums: Tensor,
        first_word: int,
    ) -> None:  # fmt: skip
        """As `reference.copy`; `target` may lie on another GPU that this one can write to."""
        self._launch(source, local, source, target, sums, first_word, (local, remote))

    def checksum(self, pool: KvPool, slots: Slots, sums: Tensor, first_word: int) -> None:
        """As `reference.checksum`; `pool` may lie on another GPU that this one can read."""
        self._launch(pool, slots, pool, None, sums, first_word, (slots, None))

    def _launch(
        self, pool: KvPool, slots: Slots, source: KvPool | Tensor, target: KvPool | Tensor | None,
        sums: Tensor, first_word: int, ids: tuple[Slots | None, Slots | None],
    ) -> None:  # fmt: skip
        """`ids`: the slots read and written; None for staging memory."""
        num_blocks = len(slots.block_ids)
        read, written = self._ids.put(*(() if one is None else one.block_ids for one in ids))
        sides, heads, row_bytes = pool.rows.shape[1:]
        source_words, from_side = _words(source)
        target_words, to_side = (source_words, 0) if target is None else _words(target)
        assert first_word % 4 == 0, "only the last block may be partly filled"
        tile = min(TILE, triton.next_power_of_2(pool.block_bytes // 4))
        programs = min(_programs(sums.device, one.device) for one in (source_words, target_words))
        grid = max(1, min(programs, num_blocks * -(-pool.block_bytes // (4 * tile)))), 1, 1
        arguments = (
            source_words, target_words, read, written, sums,
            first_word, num_blocks, slots.num_tokens % pool.block_size,
        )  # fmt: skip
        # In the order of the kernel's parameters.
        sizes = (
            sides * heads, row_bytes // 4, pool.row_slot_bytes // 4, pool.scale_bytes // 4,
            heads * row_bytes // 4, from_side, to_side, target is not None, tile,
            min(TAIL_TILE, tile),
        )  # fmt: skip
        # Triton also specialises on the alignment of addresses.
        alignment = source_words.data_ptr() % 16, target_words.data_ptr() % 16
        kernel = self._kernels.get((sizes, alignment))
        if kernel is not None:
            kernel[grid](*arguments, *sizes)
        else:  # in the interpreter it is None
            compiled = move_blocks[grid](*arguments, *sizes, num_warps=WARPS)
            self._kernels[sizes, alignment] = compiled


class _DeviceIds:
    """Copies block ids, int32, to a device by way of a ring buffer of pinned memory."""

    def __init__(self, device: torch.device, count: int = 1 << 14) -> None:
        self._device, self._next = device, 0
        self._allocate(count)

    def put(self, *lists: Sequence[int]) -> list[Tensor]:
        """Each list on the device, in the current stream; valid until the ring starts over."""
        # Each list begins at a multiple of 16 bytes, for which the kernel is compiled.
        sizes = [-(-max(1, len(one)) // 4) * 4 for one in lists]
        if self._next + sum(sizes) > len(self._host):
            self._start_over(sum(sizes))
        begin = at = self._next
        found = []
        for one, size in zip(lists, sizes, strict=True):
            self._array[at : at + len(one)] = np.frombuffer(array("i", one), np.int32)
            found.append(self._on_device[at : at + size])
            at += size
        self._on_device[begin:at].copy_(self._host[begin:at], non_blocking=True)
        self._next = at
        return found

    def _start_over(self, count: int) -> None:
        if self._device.type == "cuda":  # queued kernels may still read the ring
            torch.cuda.current_stream(self._device).synchronize()
        if count > len(self._host):
            self._allocate(2 * count)
        self._next = 0

    def _allocate(self, count: int) -> None:
        self._host = torch.zeros(count, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._array: np.ndarray[Any, Any] = self._host.numpy()
        self._on_device = torch.zeros(count, dtype=torch.int32, device=self._device)


@cache
def _programs(gpu: torch.device, memory: torch.device) -> int:
    """Programs for copies between a GPU and this memory. Raises OSError if the driver fails."""
    if gpu.type != "cuda":
        return 2  # interpreted, one after the other
    if memory != gpu:
        return NVLINK_PROGRAMS if has_nvlink(gpu, memory) else PCIE_PROGRAMS
    return torch.cuda.get_device_properties(gpu).multi_processor_count


def _words(memory: KvPool | Tensor) -> tuple[Tensor, int]:
    """The words from the first selected head on, and the words of a side (0 for staging memory)."""
    if isinstance(memory, Tensor):
        return memory.view(torch.int32), 0
    return memory.words, memory.side_words


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
    mine, mover = empty(), BlockMover(device)

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
        run=lambda config: run(mover, *mine),
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
# The fields of `KernelSpec` in baton.engine.kernels.triton.specs: kvtransfer must not import
# the engine.
SPECS = (SimpleNamespace(name="move_blocks", trial=_trial, cases=_CASES, configs=None, shapes=()),)
