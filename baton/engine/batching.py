"""Turns plans into batches, step after step.

Most steps go on with what the step before had: the same sequences, one token further. Then the last
batch's tensors are written again, with a few attributes read for each sequence and two arrays
filled. That is little, and it has to be: a step's weights push everything out of the processor's
cache, after which each further library call costs tens of microseconds.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.batch import StepBatch
from baton.engine.planner import Plan, Work

Ints = npt.NDArray[np.int32]
_SPARE_BLOCKS = 4  # columns of a table that sequences can grow into


class Batches:
    """Builds the batch of each plan of one engine. Used by the engine thread only."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._last: _Decoding | None = None

    def build(self, plan: Plan) -> StepBatch:
        """The batch of a plan, valid until the next is built.

        Its logit rows are, for each work that samples, those of the last known token and of each
        draft behind it.
        """
        work = plan.work
        if work[-1].count > 1 or not all(item.samples for item in work):
            return self._from_nothing(work)
        if self._last is None or not self._last.goes_on(work):
            self._last = _Decoding(work, self._device)
        return self._last.batch(work)

    def _from_nothing(self, work: list[Work]) -> StepBatch:
        contexts = [item.start for item in work]
        counts = [item.count for item in work]
        singles = counts.count(1)
        assert counts[:singles] == [1] * singles, "single-token rows come first"
        spans = zip(contexts, counts, strict=True)
        needed = [-(-(start + count) // self._block_size) for start, count in spans]
        tables = np.zeros((len(work), max(needed)), np.int32)
        for row, item, used in zip(tables, work, needed, strict=True):
            row[:used] = item.sequence.block_ids[:used]
        return StepBatch(
            token_ids=self._tensor(np.array(_token_ids(work), np.int32)),
            contexts=self._tensor(np.array(contexts, np.int32)),
            counts=self._tensor(np.array(counts, np.int32)),
            tables=self._tensor(tables),
            logit_rows=self._tensor(np.array(_logit_rows(work), np.int32)),
            singles=singles,
        )

    def _tensor(self, values: Ints) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type == "cpu":
            return tensor
        # A copy of other memory would wait for all that runs on the device.
        return tensor.pin_memory().to(self._device, non_blocking=True)


class _Decoding:
    """A batch of sequences that are all one token behind, and that is written again each step."""

    def __init__(self, work: list[Work], device: torch.device) -> None:
        count = len(work)
        self._sequences = [item.sequence for item in work]
        self._blocks = [list(sequence.block_ids) for sequence in self._sequences]
        width = max(map(len, self._blocks)) + _SPARE_BLOCKS
        self._rows = np.zeros((2, count), np.int32)  # token ids, contexts
        self._tables = np.zeros((count, width), np.int32)
        for row, blocks in zip(self._tables, self._blocks, strict=True):
            row[: len(blocks)] = blocks
        self._host = (torch.from_numpy(self._rows), torch.from_numpy(self._tables))
        # On a CPU these are the same memory.
        self._device = tuple(tensor.to(device) for tensor in self._host)
        token_ids, contexts = self._device[0].unbind()
        counts = torch.ones(count, dtype=torch.int32, device=device)
        logit_rows = torch.arange(count, dtype=torch.int32, device=device)
        self._batch = StepBatch(token_ids, contexts, counts, self._device[1], logit_rows, count)

    def goes_on(self, work: list[Work]) -> bool:
        """Whether these are the same sequences, and have room here; takes in blocks they got."""
        if [item.sequence for item in work] != self._sequences:
            return False
        for at, sequence in enumerate(self._sequences):
            # Blocks are compared, not counted: a list may have been cut, or replaced by another.
            # It costs nanoseconds a block, as long as they are the same objects.
            if sequence.block_ids != self._blocks[at] and not self._take(at, sequence.block_ids):
                return False
        return True

    def batch(self, work: list[Work]) -> StepBatch:
        """The batch of these sequences' last known tokens."""
        self._rows[0] = [sequence.tokens[-1] for sequence in self._sequences]
        self._rows[1] = [item.start for item in work]
        for device, host in zip(self._device, self._host, strict=True):
            if device is not host:
                device.copy_(host)
        return self._batch

    def _take(self, at: int, blocks: list[int]) -> bool:
        """Writes a sequence's blocks; False if there are too many."""
        if len(blocks) > self._tables.shape[1]:
            return False
        self._tables[at, : len(blocks)] = blocks
        self._tables[at, len(blocks) :] = 0
        self._blocks[at] = list(blocks)
        return True


def _token_ids(work: list[Work]) -> list[int]:
    """The tokens of each work, one after the other."""
    token_ids: list[int] = []
    for item in work:
        token_ids += item.sequence.tokens[item.start : item.start + item.count]
        token_ids += item.draft
    return token_ids


def _logit_rows(work: list[Work]) -> list[int]:
    """Rows whose scores are wanted, ascending."""
    logit_rows: list[int] = []
    ends = itertools.accumulate(item.count for item in work)
    for item, end in zip(work, ends, strict=True):
        if item.samples:
            logit_rows += range(end - 1 - len(item.draft), end)
    return logit_rows
