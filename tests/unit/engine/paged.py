"""Drives a model over a scattered KV pool in tests, without planner or runner."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from baton.engine.attention import AttentionBatch, PrefillSegment
from baton.engine.model import Model
from baton.engine.model_config import ModelConfig

NUM_BLOCKS = 160


class PagedSequence:
    """A sequence's known tokens and its scattered blocks."""

    def __init__(self, tokens: list[int], block_ids: list[int]) -> None:
        self.tokens = tokens
        self.block_ids = block_ids
        self.computed = 0


class PagedRun:
    """A pool and the sequences in it; `step` runs any mix of them."""

    def __init__(self, model: Model, block_size: int = 16, seed: int = 0) -> None:
        config: ModelConfig = model.config
        shape = (config.num_layers, 2, config.num_kv_heads, block_size, config.head_size)
        self.model = model
        self.block_size = block_size
        self.pool = torch.zeros(NUM_BLOCKS, *shape, dtype=model.dtype)
        # Block 0 fills padded tables: nobody owns it here, so it may hold any finite garbage.
        self.pool[0] = 3.0
        self._free = random.Random(seed).sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)

    def add(self, tokens: list[int], room: int = 0) -> PagedSequence:
        """A sequence with blocks for its tokens and `room` more."""
        count = -(-(len(tokens) + room) // self.block_size)
        blocks = [self._free.pop() for _ in range(count)]
        return PagedSequence(list(tokens), blocks)

    @torch.inference_mode()
    def step(self, *work: tuple[PagedSequence, int]) -> list[Tensor]:
        """Computes the next `count` tokens of each sequence; logits `[count, vocab]` of each.

        Work of one token comes first, as planners order it.
        """
        ids, positions, slots = [], [], []
        for sequence, count in work:
            span = range(sequence.computed, sequence.computed + count)
            ids += [sequence.tokens[at] for at in span]
            positions += span
            slots += [self._slot(sequence, at) for at in span]
        batch = self._batch(work, torch.tensor(slots))
        hidden = self.model.forward(torch.tensor(ids), torch.tensor(positions), batch, self.pool)
        for sequence, count in work:
            sequence.computed += count
        return list(self.model.logits(hidden).split([count for _, count in work]))

    def _slot(self, sequence: PagedSequence, at: int) -> int:
        size = self.block_size
        return sequence.block_ids[at // size] * size + at % size

    def _batch(self, work: tuple[tuple[PagedSequence, int], ...], slots: Tensor) -> AttentionBatch:
        singles = [sequence for sequence, count in work if count == 1]
        chunks = [(sequence, count) for sequence, count in work[len(singles) :]]
        assert all(count > 1 for _, count in chunks)
        tables = [self._blocks(sequence, 1) for sequence in singles]
        width = max(map(len, tables), default=0)
        segments, row = [], len(singles)
        for sequence, count in chunks:
            blocks = torch.tensor(self._blocks(sequence, count))
            segments.append(PrefillSegment(row, count, sequence.computed, blocks))
            row += count
        return AttentionBatch(
            slots=slots,
            num_decode=len(singles),
            decode_tables=torch.tensor(
                [table + [0] * (width - len(table)) for table in tables], dtype=torch.int64
            ).view(len(singles), width),
            decode_lengths=torch.tensor([s.computed + 1 for s in singles], dtype=torch.int64),
            segments=tuple(segments),
        )

    def _blocks(self, sequence: PagedSequence, count: int) -> list[int]:
        return sequence.block_ids[: -(-(sequence.computed + count) // self.block_size)]
