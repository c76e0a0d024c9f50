"""The input tensors of a step, and how they are built.

Most steps continue the same sequences by one token. Then the tensors of the previous batch are
reused: each library call costs tens of microseconds while weights fill the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.adapters import LoraAdapter
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence


@dataclass(frozen=True)
class StepBatch:
    """Rows of a step by sequence; sequences with one row come first.

    All tensors are int32, on the model's device.

    token_ids: `[rows]` · context_lens: `[sequences]`, tokens before a sequence's first row, whose
    KV is in the pool · query_lens: `[sequences]`, rows of each, which attend causally to the
    context and to each other · block_tables: `[sequences, width]`, the blocks of each sequence, one
    of each group of layers in turn (`Sequence.block_ids`), at least those of context and rows;
    padded with 0, also where a group has none · logit_rows: `[n]`, rows whose logits are wanted,
    ascending · num_decodes: number of sequences with one row (known to the host) · wants_hidden:
    whether `StepModel.hidden` is to be written · lora_slots: `[rows]`, the slot of each row's
    adapter or -1; None if no row has one · state_tables: `[sequences, blocks]`, the blocks of each
    sequence's state; None in models without · kept_lens: `[sequences]`, the rows of each that its
    state keeps, which are those before proposed tokens; None: all.
    """

    token_ids: Tensor
    context_lens: Tensor
    query_lens: Tensor
    block_tables: Tensor
    logit_rows: Tensor
    num_decodes: int
    wants_hidden: bool = False
    lora_slots: Tensor | None = None
    state_tables: Tensor | None = None
    kept_lens: Tensor | None = None


class StepModel(Protocol):
    """What a runner needs of a model, whatever its kernels.

    expert_tokens: int64 `[layers with experts, experts]`, tokens that took each expert so far; None
    without experts. May be read by any thread · hidden: `[logit_rows, hidden_size]` of the last
    step, behind the last norm, if it wanted them; valid until the next step · num_groups: groups of
    layers, each with blocks of its own.
    """

    expert_tokens: Tensor | None
    hidden: Tensor | None
    num_groups: int

    def state_blocks(self, pool: Tensor) -> int:
        """Blocks of each sequence's state in a pool of blocks like these; 0 without states."""

    def write_lora(self, slot: int, adapter: LoraAdapter) -> None:
        """Writes an adapter to a slot that no sequence uses."""

    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a batch and writes its K and V into the pool.

        Logits, float32 `[logit_rows, vocab_size]`, one row for each of the batch's `logit_rows`.
        """

    def close(self) -> None:
        """Frees what the model uses; no step follows."""


Ints = npt.NDArray[np.int32]
_SPARE_BLOCKS = 4  # of each group: columns of a block table that sequences can grow into


class BatchBuilder:
    """Builds the batch of each step of one engine. Used by the engine thread only."""

    def __init__(self, block_size: int, device: torch.device, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._num_groups = num_groups
        self._device = device
        self.keeps_hidden = False  # whether every step writes `StepModel.hidden`
        self._last: _DecodeBatch | None = None

    def build(self, step: ScheduledStep) -> StepBatch:
        """The batch of a step, valid until the next is built.

        Its logit rows are, of each sequence, those of `scored` positions and, if it samples, of the
        last known token and of each proposed token after it.
        """
        scheduled = step.sequences
        only_decodes = scheduled[-1].count == 1 and all(map(_decodes, scheduled))
        if self._device.type != "cpu" or not only_decodes:  # a GPU's have an input batch
            return self.new_batch(scheduled)
        if self._last is None or not self._last.continues(scheduled):
            self._last = _DecodeBatch(scheduled, self._num_groups, self.keeps_hidden)
        return self._last.batch(scheduled)

    def new_batch(self, scheduled: list[ScheduledSequence]) -> StepBatch:
        token_ids, logit_rows = list[int](), list[int]()
        for item in scheduled:
            if scored := item.scored:
                before = len(token_ids) - item.start
                logit_rows += range(before + scored.start, before + scored.stop)
            token_ids += item.sequence.tokens[item.start : item.start + item.count]
            token_ids += item.proposed
            if item.samples:
                logit_rows += range(len(token_ids) - 1 - len(item.proposed), len(token_ids))
        context_lens = [item.start for item in scheduled]
        query_lens = [item.count for item in scheduled]
        num_decodes = query_lens.count(1)
        assert query_lens[:num_decodes] == [1] * num_decodes, "single-token rows come first"
        spans = zip(context_lens, query_lens, strict=True)
        size, groups = self._block_size, self._num_groups
        needed = [-(-(start + count) // size) * groups for start, count in spans]
        block_tables = np.zeros((len(scheduled), max(needed)), np.int32)
        for row, item, used in zip(block_tables, scheduled, needed, strict=True):
            row[:used] = item.sequence.block_ids[:used]
        np.maximum(block_tables, 0, out=block_tables)
        return StepBatch(
            token_ids=self._tensor(np.array(token_ids, np.int32)),
            context_lens=self._tensor(np.array(context_lens, np.int32)),
            query_lens=self._tensor(np.array(query_lens, np.int32)),
            block_tables=self._tensor(block_tables),
            logit_rows=self._tensor(np.array(logit_rows, np.int32)),
            num_decodes=num_decodes,
            wants_hidden=self.keeps_hidden
            or any(one.sequence.params.is_pooled for one in scheduled),
            lora_slots=None if (slots := lora_slots(scheduled)) is None else self._tensor(slots),
            state_tables=None if (of := state_tables(scheduled)) is None else self._tensor(of),
            kept_lens=None if (kept := kept_lens(scheduled)) is None else self._tensor(kept),
        )

    def _tensor(self, values: Ints) -> torch.Tensor:
        return on_device(values, self._device)


def lora_slots(scheduled: list[ScheduledSequence]) -> Ints | None:
    """The step's `StepBatch.lora_slots`."""
    slots = [item.sequence.lora_slot for item in scheduled]
    if max(slots) < 0:
        return None
    return np.repeat(np.array(slots, np.int32), [item.count for item in scheduled])


def state_tables(scheduled: list[ScheduledSequence]) -> Ints | None:
    """The step's `StepBatch.state_tables`."""
    tables = [item.sequence.state_blocks for item in scheduled]
    return np.array(tables, np.int32) if tables[0] else None


def kept_lens(scheduled: list[ScheduledSequence]) -> Ints | None:
    """The step's `StepBatch.kept_lens`."""
    if not (scheduled[0].sequence.state_blocks and any(item.proposed for item in scheduled)):
        return None
    return np.array([item.count - len(item.proposed) for item in scheduled], np.int32)


def on_device(values: Ints, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers on a device."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    # A copy of unpinned memory would wait for everything on the device.
    return tensor.pin_memory().to(device, non_blocking=True)


def _decodes(item: ScheduledSequence) -> bool:
    return item.samples and not item.sequence.params.is_pooled


class _DecodeBatch:
    """A decode batch on a CPU, whose tensors are written again for each step."""

    def __init__(
        self, scheduled: list[ScheduledSequence], num_groups: int, wants_hidden: bool
    ) -> None:
        count = len(scheduled)
        self._sequences = [item.sequence for item in scheduled]
        self._blocks = [sequence.block_ids for sequence in self._sequences]
        self._num_blocks = [len(blocks) for blocks in self._blocks]
        self._states = [sequence.state_blocks for sequence in self._sequences]
        width = max(self._num_blocks) + _SPARE_BLOCKS * num_groups
        self._rows = np.zeros((2, count), np.int32)  # token ids, context_lens
        self._tables = np.zeros((count, width), np.int32)
        for row, blocks in zip(self._tables, self._blocks, strict=True):
            row[: len(blocks)] = blocks
        np.maximum(self._tables, 0, out=self._tables)
        token_ids, context_lens = torch.from_numpy(self._rows).unbind()
        query_lens = torch.ones(count, dtype=torch.int32)
        logit_rows = torch.arange(count, dtype=torch.int32)
        tables = torch.from_numpy(self._tables)
        slots, states = lora_slots(scheduled), state_tables(scheduled)
        self._batch = StepBatch(
            *(token_ids, context_lens, query_lens, tables, logit_rows, count, wants_hidden),
            lora_slots=None if slots is None else torch.from_numpy(slots),
            state_tables=None if states is None else torch.from_numpy(states),
        )

    def continues(self, scheduled: list[ScheduledSequence]) -> bool:
        """Whether these are the same sequences and fit; adds blocks that they were given."""
        if [item.sequence for item in scheduled] != self._sequences:
            return False
        for at, sequence in enumerate(self._sequences):
            blocks = sequence.block_ids
            same = blocks is self._blocks[at] and len(blocks) == self._num_blocks[at]
            if not same and not self._take(at, sequence):
                return False
        return True

    def batch(self, scheduled: list[ScheduledSequence]) -> StepBatch:
        """The batch of these sequences' last known tokens."""
        self._rows[0] = [sequence.tokens[-1] for sequence in self._sequences]
        self._rows[1] = [item.start for item in scheduled]
        return self._batch

    def _take(self, at: int, sequence: Sequence) -> bool:
        """Writes a sequence's blocks; False if there are too many, or its state moved with them."""
        blocks = sequence.block_ids
        if len(blocks) > self._tables.shape[1] or sequence.state_blocks is not self._states[at]:
            return False
        self._tables[at, : len(blocks)] = blocks
        self._tables[at, len(blocks) :] = 0
        np.maximum(self._tables[at], 0, out=self._tables[at])
        self._blocks[at], self._num_blocks[at] = blocks, len(blocks)
        return True
