"""Persistent inputs of CUDA graphs: arrays with a row for each running sequence.

As vLLM's `InputBatch`: a sequence keeps its row while it runs, and a launch gathers the rows. Only
new sequences, and those with new blocks, are written.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from operator import is_
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from baton.engine.backends.gpu.cuda_graphs import (
    KNOWN,
    NO_ADAPTER,
    PADDING,
    StepInputs,
    StepShape,
)
from baton.engine.batch import lora_slots
from baton.engine.kernels.triton.sampling import settings_of
from baton.engine.sampling.sampler import NUM_SETTINGS
from baton.engine.scheduler import ScheduledSequence
from baton.engine.sequence import Sequence

Ints = npt.NDArray[np.int64]
HostInputs: TypeAlias = StepInputs[npt.NDArray[np.int32]]


class InputBatch:
    """Rows of the running sequences. Used by the engine thread only."""

    def __init__(self, max_batch: int, width: int, state_blocks: int = 0) -> None:
        """width: maximum number of entries of a sequence's `block_ids` · state_blocks: number of
        its `state_blocks`."""
        # Twice as many as run at once, so that rows are released in groups.
        count = 2 * max_batch
        self._tables = np.zeros((count, width), np.int32)
        self._states = np.zeros((count, state_blocks), np.int32)
        self._num_blocks = np.zeros(count, np.int64)  # of each table
        self._settings = np.zeros((count, NUM_SETTINGS), np.float64)
        self._seeds = np.zeros(count, np.int64)
        self._held: list[list[int]] = [
            [] for _ in range(count)
        ]  # block lists that tables were written from
        self._free = list(range(count))
        self._row_of: dict[Sequence, int] = {}
        # Whether sampling always depends on the row's tokens; if not, up to which position it does.
        self._adjusted = np.zeros(count, np.bool_)
        self._adjusted_until = np.zeros(count, np.int64)
        self._sequences: list[Sequence] = []  # of the last launch, in its order
        self._rows = np.empty(0, np.int64)
        self._blocks: list[list[int]] = []

    def sources(self, sequences: list[Sequence], before: Rows[Sequence | None]) -> Ints:
        """The previous launch's row that samples each sequence's last token, or KNOWN."""
        if sequences == before:
            return np.arange(len(sequences))
        rows_before = {sequence: place for place, sequence in enumerate(before)}
        return np.array([rows_before.get(one, KNOWN) for one in sequences], np.int64)

    def write(
        self, work: list[ScheduledSequence], shape: StepShape, sources: Ints, into: HostInputs,
    ) -> Ints:  # fmt: skip
        """Writes a launch's inputs; returns the indexes, among sequences that sample, of deferred
        ones.

        sources: of the decode rows, which come first. A row that samples nothing has a known token
        of its own: its sequence was preempted since that launch, and computes its tokens again.
        """
        count, sequences = len(work), [item.sequence for item in work]
        self._update(sequences)
        rows, starts = self._rows, np.array([item.start for item in work])
        num_decodes, ends, samples = len(sources), starts + 1, np.ones(count, np.bool_)
        at: slice | Ints = slice(0, count)
        into.context_lens.fill(PADDING)
        into.positions.fill(0)
        into.token_ids.fill(0)
        into.block_tables[num_decodes:] = 0
        if shape.chunk_rows:
            at = np.arange(count)
            at[num_decodes:] += shape.decodes - num_decodes
            ends = starts + [item.count for item in work]
            samples = np.array([item.samples for item in work])
            self._write_chunks(work[num_decodes:], shape, into)
            into.logit_rows[:num_decodes] = at[:num_decodes]
            sources = np.where(samples[:num_decodes], sources, KNOWN)
        into.context_lens[at] = starts
        into.positions[at] = np.where(samples, ends, 0)
        into.sources[:num_decodes] = sources
        into.sources[num_decodes:] = KNOWN
        if shape.lora:
            slots = lora_slots(work)
            assert slots is not None, "the shape is for rows with adapters"
            into.lora_slots.fill(NO_ADAPTER)
            into.lora_slots[:num_decodes] = slots[:num_decodes]
            of_chunks = into.lora_slots[shape.decodes :]
            of_chunks[: len(slots) - num_decodes] = slots[num_decodes:]
        for place in (sources == KNOWN).nonzero()[0]:
            into.token_ids[place] = sequences[place].tokens[work[place].start]
        into.seeds[at] = self._seeds[rows]
        into.settings[at] = self._settings[rows]
        into.state_tables[at] = self._states[rows]
        into.block_tables[at] = self._tables[rows, : into.block_tables.shape[1]]
        deferred = self._adjusted[rows] | (ends <= self._adjusted_until[rows])
        return deferred[samples].nonzero()[0]

    def _write_chunks(
        self, chunks: list[ScheduledSequence], shape: StepShape, into: HostInputs
    ) -> None:
        """Writes tokens and lengths of chunks, then of empty sequences, and of one with all padding
        rows."""
        into.query_lens.fill(0)
        into.query_lens[: shape.decodes] = 1
        into.logit_rows.fill(0)
        end = shape.decodes
        for place, item in enumerate(chunks, shape.decodes):
            begin, end = end, end + item.count
            into.token_ids[begin:end] = item.sequence.tokens[item.start : item.start + item.count]
            into.query_lens[place], into.logit_rows[place] = item.count, end - 1
        into.query_lens[-1] = shape.rows - end

    def _update(self, sequences: list[Sequence]) -> None:
        """Updates the rows of these sequences."""
        if sequences != self._sequences:
            self._assign_rows(sequences)
        blocks = [one.block_ids for one in sequences]
        num_blocks = np.array(list(map(len, blocks)))
        if all(map(is_, blocks, self._blocks)):
            changed = (num_blocks != self._num_blocks[self._rows]).nonzero()[0]
        else:
            changed = np.arange(len(blocks))
        for place in changed:
            self._write_table(self._rows[place], sequences[place])
        self._blocks = blocks

    def _assign_rows(self, sequences: list[Sequence]) -> None:
        """Assigns a row to each sequence; releases those of dropped and, if needed, other
        sequences."""
        kept = set(sequences)
        gone = [one for one in self._row_of if one.dropped]
        if len(self._free) + len(gone) < len(sequences):
            gone = [one for one in self._row_of if one not in kept]
        for one in gone:
            self._free.append(self._row_of.pop(one))
        for one in sequences:
            if one not in self._row_of:
                self._row_of[one] = row = self._free.pop()
                self._describe(row, one)
        self._sequences = sequences
        self._rows = np.array([self._row_of[one] for one in sequences])
        self._blocks = [self._held[row] for row in self._rows]

    def _describe(self, row: int, sequence: Sequence) -> None:
        params = sequence.params
        self._settings[row] = settings_of([params])[0]
        self._seeds[row] = np.array(params.seed, np.uint64).view(np.int64)
        self._adjusted[row] = (
            params.has_penalties or params.logprobs is not None or sequence.grammar is not None
        )
        self._adjusted_until[row] = sequence.prompt_tokens + params.min_tokens - 1
        self._held[row], self._num_blocks[row] = [], 0
        self._tables[row] = 0

    def _write_table(self, row: int, sequence: Sequence) -> None:
        """Writes a block table. Lists of blocks only grow, so entries of the same list are kept.

        A sequence with another state has another list, too.
        """
        blocks, table, first = sequence.block_ids, self._tables[row], int(self._num_blocks[row])
        if self._held[row] is not blocks:
            self._states[row] = sequence.state_blocks
            self._held[row], first = blocks, 0
            table[:] = 0
        table[first : len(blocks)] = blocks[first : len(table)]
        np.maximum(table, 0, out=table)  # groups of layers that have no block there
        self._num_blocks[row] = len(blocks)
