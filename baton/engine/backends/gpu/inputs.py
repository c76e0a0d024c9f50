"""The numbers that a decode launch reads: written by the host, carried over by one copy.

Kernels find them at fixed places, so that a captured graph reads whatever was carried there last.
The host writes into pinned memory, of which there are two, used in turn: while one is being read,
the next launch's numbers are written into the other. Draws need numbers too: see `draws`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from baton.engine.sequence import Sequence

Ints = npt.NDArray[np.int32]
# Sections begin at multiples of so many elements: kernels load faster from aligned addresses, and
# would be compiled once more for those that are not.
_SECTION = 32
PADDING = -1  # the context of a row that nobody has


class Sections(NamedTuple):
    """Parts of one launch's numbers, all int32.

    token_ids, contexts, sources: `[rows]` · tables: `[rows, width]` · all: one after the other,
    what one copy carries. sources: which row of the launch before drew a row's token; -1 is none.
    """

    token_ids: Tensor
    contexts: Tensor
    sources: Tensor
    tables: Tensor
    all: Tensor


def sections(flat: Tensor, rows: int, width: int) -> Sections:
    """The parts of a launch of `rows` rows and tables of `width` blocks, in flat memory."""
    step = -(-rows // _SECTION) * _SECTION
    end = 3 * step + rows * width
    tables = flat[3 * step : end].view(rows, width)
    token_ids, contexts, sources = (part[:rows] for part in flat[: 3 * step].split(step))
    return Sections(token_ids, contexts, sources, tables, flat[:end])


def num_elements(rows: int, width: int) -> int:
    """How much flat memory `sections` needs for so many rows and any smaller number."""
    return 3 * (-(-rows // _SECTION) * _SECTION) + rows * width


@dataclass
class _Seat:
    row: int
    blocks: list[int] = field(default_factory=list)


class Tables:
    """Block tables of those that decode, on the host, kept from launch to launch.

    A sequence keeps its row while it decodes: turning a list of blocks into numbers takes far
    longer than copying them.
    """

    def __init__(self, max_batch: int, width: int) -> None:
        # Twice as many as can decode at once, so that rows need not be given up one by one.
        self._rows = np.zeros((2 * max_batch, width), np.int32)
        self._free = list(range(2 * max_batch))
        self._seats: dict[Sequence, _Seat] = {}

    def gather(self, sequences: list[Sequence], into: Tensor) -> None:
        """Writes each sequence's first blocks into `[sequences, width]`; behind them lies 0."""
        rows = [self._row(sequence, sequences) for sequence in sequences]
        into.numpy()[:] = self._rows[rows, : into.shape[1]]

    def blocks(self, sequence: Sequence) -> list[int]:
        """What was written last for a sequence; the list itself is never changed."""
        return self._seats[sequence].blocks

    def _row(self, sequence: Sequence, staying: list[Sequence]) -> int:
        seat = self._seats.get(sequence)
        if seat is None:
            if not self._free:
                self._give_up_all_but(staying)
            seat = self._seats[sequence] = _Seat(self._free.pop())
        # It costs nanoseconds a block to compare them, as long as they are the same objects.
        if seat.blocks != sequence.block_ids:
            self._write(seat, list(sequence.block_ids))
        return seat.row

    def _write(self, seat: _Seat, blocks: list[int]) -> None:
        row, known = self._rows[seat.row], len(seat.blocks)
        if blocks[:known] != seat.blocks:
            known = 0
        used = min(len(blocks), len(row))
        row[known:used] = blocks[known:used]
        row[used:] = 0
        seat.blocks = blocks

    def _give_up_all_but(self, staying: list[Sequence]) -> None:
        kept = set(staying)
        for sequence in [one for one in self._seats if one not in kept]:
            self._free.append(self._seats.pop(sequence).row)
