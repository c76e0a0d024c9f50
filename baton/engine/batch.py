"""What one step computes, as tensors, and how plans become such batches.

Most steps go on with the same sequences, one token further. Then the last batch's tensors are
written again: each library call costs tens of microseconds while weights fill the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.scheduler import ScheduledSequence, ScheduledStep


@dataclass(frozen=True)
class StepBatch:
    """Rows of a step, sequence after sequence; those that have one row come first.

    All are int32, on the model's device.

    token_ids: `[rows]` · context_lens: `[sequences]`, tokens before a sequence's first row, whose
    KV is in the pool · query_lens: `[sequences]`, rows of each, which attend causally to the
    context and to each other · block_tables: `[sequences, width]`, the blocks of each sequence in
    its order, at least those of context and rows; what lies behind them is 0 · logit_rows: `[n]`,
    rows whose next-token scores are wanted, ascending · num_decodes: how many sequences have one
    row (known to the host) · wants_hidden: whether `StepModel.hidden` is to be written.
    """

    token_ids: Tensor
    context_lens: Tensor
    query_lens: Tensor
    block_tables: Tensor
    logit_rows: Tensor
    num_decodes: int
    wants_hidden: bool = False


class StepModel(Protocol):
    """What a runner needs of a model, whatever its kernels.

    expert_tokens: int64 `[layers with experts, experts]`, tokens that took each expert so far; None
    without experts. May be read by any thread · hidden: `[logit_rows, hidden_size]` of the last
    step, behind the last norm, if it wanted them; valid until the next step.
    """

    expert_tokens: Tensor | None
    hidden: Tensor | None

    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a batch and writes its K and V into the pool.

        Logits, float32 `[logit_rows, vocab_size]`, one row for each of the batch's `logit_rows`.
        """

    def close(self) -> None:
        """No step runs any more."""


Ints = npt.NDArray[np.int32]
_SPARE_BLOCKS = 4  # columns of a block table that sequences can grow into


class BatchBuilder:
    """Builds the batch of each step of one engine. Used by the engine thread only."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._last: _DecodeBatch | None = None

    def build(self, step: ScheduledStep) -> StepBatch:
        """The batch of a step, valid until the next is built.

        Its logit rows are, for each work, those of `scored` positions and, if it samples, of the
        last known token and of each proposed token behind it.
        """
        work = step.sequences
        on_cpu = self._device.type == "cpu"  # a GPU's decode steps are launched in another way
        if not on_cpu or work[-1].count > 1 or not all(map(_decodes, work)):
            return self.new_batch(work)
        if self._last is None or not self._last.continues(work):
            self._last = _DecodeBatch(work)
        return self._last.batch(work)

    def new_batch(self, work: list[ScheduledSequence]) -> StepBatch:
        """A batch of tensors of its own."""
        token_ids, logit_rows = list[int](), list[int]()
        for item in work:
            if scored := item.scored:
                before = len(token_ids) - item.start
                logit_rows += range(before + scored.start, before + scored.stop)
            token_ids += item.sequence.tokens[item.start : item.start + item.count]
            token_ids += item.proposed
            if item.samples:
                logit_rows += range(len(token_ids) - 1 - len(item.proposed), len(token_ids))
        context_lens = [item.start for item in work]
        query_lens = [item.count for item in work]
        num_decodes = query_lens.count(1)
        assert query_lens[:num_decodes] == [1] * num_decodes, "single-token rows come first"
        spans = zip(context_lens, query_lens, strict=True)
        needed = [-(-(start + count) // self._block_size) for start, count in spans]
        block_tables = np.zeros((len(work), max(needed)), np.int32)
        for row, item, used in zip(block_tables, work, needed, strict=True):
            row[:used] = item.sequence.block_ids[:used]
        return StepBatch(
            token_ids=self._tensor(np.array(token_ids, np.int32)),
            context_lens=self._tensor(np.array(context_lens, np.int32)),
            query_lens=self._tensor(np.array(query_lens, np.int32)),
            block_tables=self._tensor(block_tables),
            logit_rows=self._tensor(np.array(logit_rows, np.int32)),
            num_decodes=num_decodes,
            wants_hidden=any(item.sequence.params.embedding for item in work),
        )

    def _tensor(self, values: Ints) -> torch.Tensor:
        return on_device(values, self._device)


def on_device(values: Ints, device: torch.device) -> torch.Tensor:
    """These numbers where a model computes."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    # A copy of other memory would wait for all that runs on the device.
    return tensor.pin_memory().to(device, non_blocking=True)


def _decodes(item: ScheduledSequence) -> bool:
    return item.samples and not item.sequence.params.embedding


class _DecodeBatch:
    """Sequences on a CPU that are all one token behind, whose batch is written again each step."""

    def __init__(self, work: list[ScheduledSequence]) -> None:
        count = len(work)
        self._sequences = [item.sequence for item in work]
        self._blocks = [sequence.block_ids for sequence in self._sequences]
        self._num_blocks = [len(blocks) for blocks in self._blocks]
        width = max(self._num_blocks) + _SPARE_BLOCKS
        self._rows = np.zeros((2, count), np.int32)  # token ids, context_lens
        self._tables = np.zeros((count, width), np.int32)
        for row, blocks in zip(self._tables, self._blocks, strict=True):
            row[: len(blocks)] = blocks
        token_ids, context_lens = torch.from_numpy(self._rows).unbind()
        query_lens = torch.ones(count, dtype=torch.int32)
        logit_rows = torch.arange(count, dtype=torch.int32)
        tables = torch.from_numpy(self._tables)
        self._batch = StepBatch(token_ids, context_lens, query_lens, tables, logit_rows, count)

    def continues(self, work: list[ScheduledSequence]) -> bool:
        """Whether these are the same sequences, and have room here; takes in blocks they got."""
        if [item.sequence for item in work] != self._sequences:
            return False
        for at, sequence in enumerate(self._sequences):
            blocks = sequence.block_ids
            same = blocks is self._blocks[at] and len(blocks) == self._num_blocks[at]
            if not same and not self._take(at, blocks):
                return False
        return True

    def batch(self, work: list[ScheduledSequence]) -> StepBatch:
        """The batch of these sequences' last known tokens."""
        self._rows[0] = [sequence.tokens[-1] for sequence in self._sequences]
        self._rows[1] = [item.start for item in work]
        return self._batch

    def _take(self, at: int, blocks: list[int]) -> bool:
        """Writes a sequence's blocks; False if there are too many."""
        if len(blocks) > self._tables.shape[1]:
            return False
        self._tables[at, : len(blocks)] = blocks
        self._tables[at, len(blocks) :] = 0
        self._blocks[at], self._num_blocks[at] = blocks, len(blocks)
        return True
