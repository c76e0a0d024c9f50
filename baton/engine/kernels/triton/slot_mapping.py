"""Slot mapping: the position of each row of a step, its slot in the KV pool and its context length.

One launch does what `baton.engine.kernels.torch.attention` does in a dozen, without waiting for the
device: the grid depends on shapes alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.kernels.torch.attention import place
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Outputs, Trial

CONFIG = {"num_warps": 4, "num_stages": 1, "ROWS": 128, "SEQUENCES": 32}

# Alignment of the three results in elements: unaligned addresses would compile kernels again during
# serving.
_ALIGNED = 32


class SlotMapping(NamedTuple):
    """Position, slot and length of each row, int32 `[rows]`.

    positions: index in the sequence; 0 for padding · slots: block * block_size + offset of the
    row's K and V; -1 for padding · lengths: visible tokens including the row's; 0 for padding.
    """

    positions: Tensor
    slots: Tensor
    lengths: Tensor


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "width"])
def _slot_mapping_kernel(
    context_lens, ends, block_tables, positions, slots, lengths, num_rows, num_sequences, width,
    block_size, ONE_EACH: tl.constexpr, ROWS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    owner = rows
    begin = rows
    if not ONE_EACH:
        #  ends:   3       7          query_lens 3, 4
        #  row:    0 1 2 | 3 4 5 6    a row's sequence is the number of ends at or before it
        owner = tl.zeros([ROWS], dtype=tl.int32)
        for first in range(0, num_sequences, SEQUENCES):
            sequences = first + tl.arange(0, SEQUENCES)
            end = tl.load(ends + sequences, mask=sequences < num_sequences, other=2147483647)
            owner += tl.sum((end[None, :] <= rows[:, None]).to(tl.int32), axis=1)
        begin = tl.load(ends + owner - 1, mask=inside & (owner > 0), other=0)
    context = tl.load(context_lens + owner, mask=inside, other=-1)
    taken = context >= 0
    position = tl.where(taken, context + rows - begin, 0)
    entry = block_tables + owner.to(tl.int64) * width + position // block_size
    block = tl.load(entry, mask=taken, other=0)
    slot = tl.where(taken, block * block_size + position % block_size, -1)
    tl.store(positions + rows, position, mask=inside)
    tl.store(slots + rows, slot, mask=inside)
    tl.store(lengths + rows, tl.where(taken, position + 1, 0), mask=inside)


def map_slots(
    context_lens: Tensor, query_lens: Tensor | None, block_tables: Tensor, num_rows: int,
    block_size: int,
) -> SlotMapping:  # fmt: skip
    """Maps the rows of consecutive sequences to slots.

    context_lens: int32 `[sequences]`, tokens before a sequence's first row; -1 for padding ·
    query_lens: int32 `[sequences]`, rows of each; None is one each · block_tables: int32
    `[sequences, width]`, the blocks of every row · block_size: tokens of a block.
    """
    assert block_tables.is_contiguous()
    stride = -(-num_rows // _ALIGNED) * _ALIGNED
    held = torch.empty((3, stride), dtype=torch.int32, device=context_lens.device)
    positions, slots, lengths = held[:, :num_rows].unbind()
    ends = context_lens if query_lens is None else query_lens.cumsum(0, dtype=torch.int32)
    _slot_mapping_kernel[(triton.cdiv(num_rows, CONFIG["ROWS"]),)](
        context_lens, ends, block_tables, positions, slots, lengths, num_rows, len(context_lens),
        block_tables.shape[1], block_size, ONE_EACH=query_lens is None, **CONFIG,
    )  # fmt: skip
    return SlotMapping(positions, slots, lengths)


@triton.jit(do_not_specialize=["num_rows"])
def _gather_tokens_kernel(token_ids, sources, sampled, num_rows, vocab_size, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.load(sources + rows, mask=rows < num_rows, other=-1)
    token = tl.load(sampled + source, mask=source >= 0, other=0)
    # A token beyond the vocabulary is an error that is raised later; it must not be an index.
    token = tl.minimum(token, vocab_size - 1).to(tl.int32)
    tl.store(token_ids + rows, token, mask=source >= 0)


def gather_tokens(token_ids: Tensor, sources: Tensor, sampled: Tensor, vocab_size: int) -> None:
    """Writes `sampled[sources]` into token_ids int32 `[rows]`, except where a source is negative.

    sources: int32 `[rows]` · sampled: int64."""
    rows = CONFIG["ROWS"]
    _gather_tokens_kernel[(triton.cdiv(len(token_ids), rows),)](
        token_ids, sources, sampled, len(token_ids), vocab_size, ROWS=rows, num_warps=4
    )


def _gather_tokens_trial(shape: Key, device: torch.device) -> Trial:
    rows, vocab_size = int(shape["rows"]), 50
    tokens = torch.arange(rows, dtype=torch.int32, device=device)
    sources = torch.randint(-1, rows, (rows,), dtype=torch.int32, device=device)
    sampled = torch.randint(vocab_size + 1, (rows,), device=device)

    def run(config: Config | None) -> Outputs:
        fed = tokens.clone()
        gather_tokens(fed, sources, sampled, vocab_size)
        return (fed,)

    def wanted() -> Outputs:
        found = sampled[sources.clamp(min=0).long()].clamp(max=vocab_size - 1).int()
        return (torch.where(sources < 0, tokens, found),)

    return Trial({}, run, wanted, moved_bytes=16 * rows, tolerance=0.0)


def _trial(shape: Key, device: torch.device) -> Trial:
    """Sequences of one row each, one of them padding; or sequences of several rows."""
    sequences, rows_each = int(shape["rows"]), int(shape.get("rows_each", 1))
    context_lens = torch.arange(sequences, dtype=torch.int32, device=device)
    query_lens = torch.full_like(context_lens, rows_each)
    width = triton.cdiv(sequences + rows_each, 16)
    block_tables = torch.arange(sequences * width, dtype=torch.int32, device=device)
    block_tables = block_tables.view(sequences, width)
    padding = torch.arange(sequences * rows_each, device=device) == (0 if rows_each == 1 else -1)

    def run(config: Config | None) -> Outputs:
        if rows_each > 1:
            return map_slots(context_lens, query_lens, block_tables, len(padding), 16)
        contexts = context_lens.masked_fill(padding, -1)
        return map_slots(contexts, None, block_tables, sequences, 16)

    def reference() -> Outputs:
        tokens = torch.empty_like(padding)
        batch = StepBatch(tokens, context_lens, query_lens, block_tables, tokens, sequences)
        positions, (attention,) = place(batch, 16)
        found = (positions, attention.slots, positions + 1)
        return tuple(
            part.masked_fill(padding, value).int()
            for part, value in zip(found, (0, -1, 0), strict=True)
        )

    return Trial({}, run, reference, moved_bytes=20 * sequences, tolerance=0.0)


SPECS = (
    KernelSpec("slot_mapping", _trial, cases=({"rows": 70}, {"rows": 40, "rows_each": 3})),
    KernelSpec("gather_tokens", _gather_tokens_trial, cases=({"rows": 200},)),
)
