"""Where each row of a batch belongs: its position, its slot in the pool, whom it attends with.

For the model in plain torch, whose attention takes these rather than the batch itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.ops.torch.attention import AttentionBatch, PrefillSegment


@dataclass(frozen=True)
class PlacedRows:
    """token_ids, positions: int64 `[rows]` · attention: where they read and write KV."""

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch


def place(batch: StepBatch, block_size: int) -> PlacedRows:
    """A batch's rows over blocks of `block_size` tokens."""
    contexts, counts, tables = batch.contexts.long(), batch.counts.long(), batch.tables.long()
    rows = torch.arange(len(batch.token_ids), device=counts.device)
    sequences = torch.arange(len(counts), device=counts.device)
    owner = sequences.repeat_interleave(counts, output_size=len(rows))
    #  row:       0 1 2 | 3 4 5 6    counts 3, 4: sequences begin at rows 0, 3
    #  position:  5 6 7 | 0 1 2 3    contexts 5, 0
    begins = counts.cumsum(0) - counts
    positions = rows - (begins - contexts)[owner]
    blocks = tables[owner, positions // block_size]
    singles = batch.singles
    attention = AttentionBatch(
        slots=blocks * block_size + positions % block_size,
        num_decode=singles,
        decode_tables=tables[:singles, : _decode_width(batch, block_size)],
        decode_lengths=contexts[:singles] + 1,
        segments=_segments(batch, tables, block_size),
    )
    return PlacedRows(batch.token_ids.long(), positions, attention)


def _decode_width(batch: StepBatch, block_size: int) -> int:
    """Blocks of the longest single-row sequence: a chunk's table may be far wider."""
    if batch.singles in (0, len(batch.counts)):
        return batch.tables.shape[1]
    return int(batch.contexts[: batch.singles].max()) // block_size + 1


def _segments(batch: StepBatch, tables: Tensor, block_size: int) -> tuple[PrefillSegment, ...]:
    """One for each sequence with several rows."""
    singles = batch.singles
    if singles == len(batch.counts):
        return ()
    first_row = singles
    segments = []
    contexts, counts = batch.contexts[singles:].tolist(), batch.counts[singles:].tolist()
    for table, context, count in zip(tables[singles:], contexts, counts, strict=True):
        needed = -(-(context + count) // block_size)
        segments.append(PrefillSegment(first_row, count, context, table[:needed]))
        first_row += count
    return tuple(segments)
