"""Launches decode steps on the stream: inputs, forward pass, sampling, and the tokens' way back.

Kernels find their inputs at fixed places, so that a captured graph reads whatever was copied there
last. The host writes them into pinned memory, of which there are two buffers, used in turn: while
one is being read, the next launch's inputs are written into the other.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engine.backends.gpu.async_scheduling import KNOWN, Launch, Row
from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.device_sampling import DeviceSampler
from baton.engine.backends.gpu.graphs import (
    PADDING,
    DecodeGraphs,
    DecodeModel,
    Sections,
    num_elements,
    sections,
)
from baton.engine.sequence import Sequence


@dataclass
class _TableRow:
    row: int
    blocks: list[int] = field(default_factory=list)


class BlockTables:
    """Block tables of decoding sequences, on the host, kept from launch to launch.

    A sequence keeps its row while it decodes: turning a list of blocks into numbers takes far
    longer than copying them.
    """

    def __init__(self, max_batch: int, width: int) -> None:
        # Twice as many as can decode at once, so that rows need not be given up one by one.
        self._rows = np.zeros((2 * max_batch, width), np.int32)
        self._free = list(range(2 * max_batch))
        self._entries: dict[Sequence, _TableRow] = {}

    def gather(self, sequences: list[Sequence], into: Tensor) -> None:
        """Writes each sequence's first blocks into `[sequences, width]`; behind them lies 0."""
        rows = [self._row(sequence, sequences) for sequence in sequences]
        into.numpy()[:] = self._rows[rows, : into.shape[1]]

    def blocks(self, sequence: Sequence) -> list[int]:
        """What was written last for a sequence; the list itself is never changed."""
        return self._entries[sequence].blocks

    def _row(self, sequence: Sequence, staying: list[Sequence]) -> int:
        entry = self._entries.get(sequence)
        if entry is None:
            if not self._free:
                self._give_up_all_but(staying)
            entry = self._entries[sequence] = _TableRow(self._free.pop())
        # It costs nanoseconds a block to compare them, as long as they are the same objects.
        if entry.blocks != sequence.block_ids:
            self._write(entry, list(sequence.block_ids))
        return entry.row

    def _write(self, entry: _TableRow, blocks: list[int]) -> None:
        row, known = self._rows[entry.row], len(entry.blocks)
        if blocks[:known] != entry.blocks:
            known = 0
        used = min(len(blocks), len(row))
        row[known:used] = blocks[known:used]
        row[used:] = 0
        entry.blocks = blocks

    def _give_up_all_but(self, staying: list[Sequence]) -> None:
        kept = set(staying)
        for sequence in [one for one in self._entries if one not in kept]:
            self._free.append(self._entries.pop(sequence).row)


@dataclass(frozen=True)
class GpuSettings:
    """What a runner needs to know beforehand. max_context: in tokens, as the engine ends them."""

    max_batch: int
    max_context: int
    block_size: int
    graphs: bool = True  # capture decode steps; without, they are launched kernel by kernel
    overlap: bool = True  # launch the next step before the last one's tokens are there
    chunk_tokens: int = 0  # of prompts in the largest step; 0: there is no warm-up

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_context // self.block_size)


@dataclass
class RunnerStats:
    """What ran so far. Rows are those of decode launches, padding not included."""

    launches: int = 0
    rows: int = 0
    padding_rows: int = 0
    async_launches: int = 0  # launched before they were planned
    async_rows: int = 0
    wasted_rows: int = 0  # of these, rows whose token was not used
    split: int = 0  # plans of which only a part had been launched


class Next(NamedTuple):
    """A row to decode: its position, and its token or which row of the launch before samples it."""

    sequence: Sequence
    start: int
    token_id: int
    source: int = KNOWN


class _Slot:
    """The pinned memory of one launch. It may be written again once `event` was waited for."""

    def __init__(self, stream: Stream, settings: GpuSettings) -> None:
        count = num_elements(settings.max_batch, settings.table_width)
        self.numbers = stream.pinned(count, torch.int32)
        self.sampler = DeviceSampler(stream, settings.max_batch)
        self.event = stream.record_event()


class Launcher:
    """Launches batches of single tokens on one stream; at most two at a time: it has two slots."""

    def __init__(
        self,
        model: DecodeModel,
        pool: Tensor,
        stream: Stream,
        settings: GpuSettings,
        vocab_size: int,
    ) -> None:
        self.stats = RunnerStats()
        self.graphs = DecodeGraphs(model, pool, stream, settings.max_batch, settings.table_width)
        self._stream = stream
        self._block_size = settings.block_size
        self._vocab_size = vocab_size
        self._block_tables = BlockTables(settings.max_batch, settings.table_width)
        self._slots = (_Slot(stream, settings), _Slot(stream, settings))
        self._next_slot = 0

    def launch(self, rows: Rows[Next], before: Launch | None = None) -> Launch:
        """Computes rows and samples their tokens, which are copied to the host.

        before: the launch that samples those tokens which the host does not know yet.
        """
        at, shape = self._begin(rows)
        slot = self._slots[at]
        sampler = slot.sampler
        params = [row.sequence.params for row in rows]
        positions = [row.start + 1 for row in rows]
        plan = sampler.prepare(params, positions, self._vocab_size)
        tokens = None if before is None else self._slots[before.slot].sampler.tokens

        def work() -> None:
            sampler.sample(plan, self._decode(shape, slot, tokens)[: plan.rows])

        try:
            self._stream.put(work)
        finally:  # a part of it may be there, and read what is in the slot
            slot.event = self._stream.record_event()
        numbered = {
            row.sequence: Row(at, row.start, self._block_tables.blocks(row.sequence))
            for at, row in enumerate(rows)
        }
        sources = [row.source for row in rows] if before is not None else []
        known = [row.token_id for row in rows] if before is not None else []
        return Launch(numbered, len(rows), at, slot.event, sources, known)

    def logits(self, rows: Rows[Next]) -> Tensor:
        """Computes rows: logits `[rows, vocab_size]`, valid until the next launch."""
        at, shape = self._begin(rows)
        slot = self._slots[at]
        try:
            return self._stream.call(lambda: self._decode(shape, slot, None)[: len(rows)])
        finally:
            slot.event = self._stream.record_event()

    def tokens(self, launch: Launch) -> list[int]:
        """What a launch sampled, row by row, when it has ended. Raises what it failed with."""
        launch.event.wait()
        return self._slots[launch.slot].sampler.host_tokens[: launch.count].tolist()

    def _begin(self, rows: Rows[Next]) -> tuple[int, tuple[int, int]]:
        """Writes rows into the slot used less recently: (slot, padded shape)."""
        at, self._next_slot = self._next_slot, 1 - self._next_slot
        slot = self._slots[at]
        with suppress(Exception):  # its own run reports it
            slot.event.wait()
        blocks = max(row.start for row in rows) // self._block_size + 1
        size, width = self.graphs.shape(len(rows), blocks)
        self._write(rows, sections(slot.numbers, size, width))
        self.stats.launches += 1
        self.stats.rows += len(rows)
        self.stats.padding_rows += size - len(rows)
        return at, (size, width)

    def _write(self, rows: Rows[Next], into: Sections) -> None:
        count = len(rows)
        _, starts, token_ids, sources = zip(*rows, strict=True)
        for part, values, padding in (
            (into.token_ids, token_ids, 0),
            (into.context_lens, starts, PADDING),
            (into.sources, sources, KNOWN),
        ):
            numbers = part.numpy()
            numbers[:count] = values
            numbers[count:] = padding
        self._block_tables.gather([row.sequence for row in rows], into.block_tables[:count])
        into.block_tables[count:] = 0

    def _decode(self, shape: tuple[int, int], slot: _Slot, sampled: Tensor | None) -> Tensor:
        """Logits `[size, vocab_size]` of what is in the slot; on the stream."""
        here, there = self.graphs.inputs(*shape), sections(slot.numbers, *shape)
        here.all.copy_(there.all, non_blocking=True)
        if sampled is not None:
            # One beyond the vocabulary is an error, raised when it is used, but must be no index.
            tokens = sampled.index_select(0, here.sources.clamp(min=0))
            tokens.clamp_(max=self._vocab_size - 1)
            here.token_ids.copy_(torch.where(here.sources == KNOWN, here.token_ids, tokens))
        return self.graphs.decode(*shape)
