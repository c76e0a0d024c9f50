"""Puts decode steps on the lane: numbers, forward pass, draw, and the tokens' way back."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.backends.gpu.async_scheduling import KNOWN, Launch, Row
from baton.engine.backends.gpu.device import Lane
from baton.engine.backends.gpu.device_sampling import Drawer
from baton.engine.backends.gpu.graphs import DecodeGraphs, DecodeModel
from baton.engine.backends.gpu.inputs import PADDING, Sections, Tables, num_elements, sections
from baton.engine.sequence import Sequence


@dataclass(frozen=True)
class GpuSettings:
    """What a runner needs to know beforehand. max_context: in tokens, as the engine ends them."""

    max_batch: int
    max_context: int
    block_size: int
    graphs: bool = True  # capture decode steps; without, they are launched kernel by kernel
    overlap: bool = True  # launch the next step before the last one's tokens are there
    chunk_tokens: int = 0  # of prompts in the largest step; 0: no step is rehearsed

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_context // self.block_size)


@dataclass
class Counts:
    """What ran so far. Rows are those of decode launches, padding not included."""

    launches: int = 0
    rows: int = 0
    padding_rows: int = 0
    ahead: int = 0  # launches that nobody had planned yet
    ahead_rows: int = 0
    wasted_rows: int = 0  # of these, rows whose token nobody took
    split: int = 0  # plans of which a part was ahead, and the rest a launch of its own


class Next(NamedTuple):
    """One row to decode: its position, and its token or which row of the launch before drew it."""

    sequence: Sequence
    start: int
    token_id: int
    source: int = KNOWN


class _Slot:
    """The pinned memory of one launch. It may be written again once `mark` was waited for."""

    def __init__(self, lane: Lane, settings: GpuSettings) -> None:
        count = num_elements(settings.max_batch, settings.table_width)
        self.numbers = lane.pinned(count, torch.int32)
        self.drawer = Drawer(lane, settings.max_batch)
        self.mark = lane.mark()


class Launcher:
    """Launches batches of single tokens on one lane. At most two are on it: there are two slots."""

    def __init__(
        self, model: DecodeModel, pool: Tensor, lane: Lane, settings: GpuSettings, vocab_size: int
    ) -> None:
        self.counts = Counts()
        self.graphs = DecodeGraphs(model, pool, lane, settings.max_batch, settings.table_width)
        self._lane = lane
        self._block_size = settings.block_size
        self._vocab_size = vocab_size
        self._tables = Tables(settings.max_batch, settings.table_width)
        self._slots = (_Slot(lane, settings), _Slot(lane, settings))
        self._turn = 0

    def launch(self, rows: Rows[Next], before: Launch | None = None) -> Launch:
        """Computes rows and draws their tokens, which come to the host by themselves.

        before: the launch that draws tokens of rows which the host does not know yet.
        """
        at, shape = self._begin(rows)
        slot = self._slots[at]
        drawer = slot.drawer
        params = [row.sequence.params for row in rows]
        positions = [row.start + 1 for row in rows]
        draw = drawer.prepare(params, positions, self._vocab_size)
        tokens = None if before is None else self._slots[before.slot].drawer.tokens

        def work() -> None:
            drawer.draw(draw, self._decode(shape, slot, tokens)[: draw.rows])

        try:
            self._lane.put(work)
        finally:  # a part of it may be there, and read what is in the slot
            slot.mark = self._lane.mark()
        numbered = {
            row.sequence: Row(at, row.start, self._tables.blocks(row.sequence))
            for at, row in enumerate(rows)
        }
        sources = [row.source for row in rows] if before is not None else []
        known = [row.token_id for row in rows] if before is not None else []
        return Launch(numbered, len(rows), at, slot.mark, sources, known)

    def logits(self, rows: Rows[Next]) -> Tensor:
        """Computes rows: logits `[rows, vocab_size]`, valid until the next launch."""
        at, shape = self._begin(rows)
        slot = self._slots[at]
        try:
            return self._lane.call(lambda: self._decode(shape, slot, None)[: len(rows)])
        finally:
            slot.mark = self._lane.mark()

    def tokens(self, launch: Launch) -> list[int]:
        """What a launch drew, row by row, when it has ended. Raises what it failed with."""
        launch.mark.wait()
        return self._slots[launch.slot].drawer.host_tokens[: launch.count].tolist()

    def _begin(self, rows: Rows[Next]) -> tuple[int, tuple[int, int]]:
        """Writes rows into the slot whose turn it is: (slot, padded shape)."""
        at, self._turn = self._turn, 1 - self._turn
        slot = self._slots[at]
        with suppress(Exception):  # its own run's to tell: it has ended
            slot.mark.wait()
        blocks = max(row.start for row in rows) // self._block_size + 1
        size, width = self.graphs.shape(len(rows), blocks)
        self._write(rows, sections(slot.numbers, size, width))
        self.counts.launches += 1
        self.counts.rows += len(rows)
        self.counts.padding_rows += size - len(rows)
        return at, (size, width)

    def _write(self, rows: Rows[Next], into: Sections) -> None:
        count = len(rows)
        _, starts, token_ids, sources = zip(*rows, strict=True)
        for part, values, padding in (
            (into.token_ids, token_ids, 0),
            (into.contexts, starts, PADDING),
            (into.sources, sources, KNOWN),
        ):
            numbers = part.numpy()
            numbers[:count] = values
            numbers[count:] = padding
        self._tables.gather([row.sequence for row in rows], into.tables[:count])
        into.tables[count:] = 0

    def _decode(self, shape: tuple[int, int], slot: _Slot, drawn: Tensor | None) -> Tensor:
        """Logits `[size, vocab_size]` of what is in the slot; on the lane."""
        here, there = self.graphs.inputs(*shape), sections(slot.numbers, *shape)
        here.all.copy_(there.all, non_blocking=True)
        if drawn is not None:
            # One that is beyond the vocabulary is an error, told when it is taken; no index.
            tokens = drawn.index_select(0, here.sources.clamp(min=0))
            tokens.clamp_(max=self._vocab_size - 1)
            here.token_ids.copy_(torch.where(here.sources == KNOWN, here.token_ids, tokens))
        return self.graphs.decode(*shape)
