"""One decode step for each of a few batch sizes, captured once and launched whole.

A step of a small model is hundreds of kernels, each shorter than its launch from Python. A CUDA
graph launches them at once, but is of one shape and reads fixed places. So batches are padded up a
ladder of sizes, and block tables up a ladder of widths, so that little of them is copied in vain.
Padding rows have the context -1: they write no KV and attend to nothing.
"""

from __future__ import annotations

import itertools
import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends.gpu.device import Stream
from baton.engine.sampling.sampler import NUM_SETTINGS

if TYPE_CHECKING:  # it imports triton, which may not be installed
    from baton.engine.backends.gpu.model import GpuModel

log = logging.getLogger(__name__)
_NARROWEST = 128  # blocks of a table; wider ones are four times as wide each
# Sections begin at multiples of so many elements: kernels load faster from aligned addresses, and
# would be compiled once more for those that are not.
_SECTION = 32
PADDING = -1  # the context length of a padding row
KNOWN = -1  # the source of a row whose token is in the inputs
Part = TypeVar("Part")


class Sections(NamedTuple, Generic[Part]):
    """Parts of one launch's inputs, in one copy; int32 `[rows]` where nothing else is said.

    token_ids, context_lens · sources: which row of the launch before sampled a row's token, or
    KNOWN · positions: of the token to sample, 0 of padding · seeds: int64, settings: float64
    `[rows, 4]`, what `sampling.sample` takes · block_tables: `[rows, width]` · all: of all of them.
    """

    token_ids: Part
    context_lens: Part
    sources: Part
    positions: Part
    seeds: Part
    settings: Part
    block_tables: Part
    all: Part


_WORDS = (1, 1, 1, 1, 2, 2 * NUM_SETTINGS)  # of a row in each section before the tables


def sections(flat: Tensor, rows: int, width: int) -> Sections[Tensor]:
    """The parts of a launch of `rows` rows and tables of `width` blocks, in flat int32 memory."""
    step, at = -(-rows // _SECTION) * _SECTION, 0
    parts = list[Tensor]()
    for words in _WORDS:
        parts.append(flat[at : at + words * rows])
        at += words * step
    token_ids, context_lens, sources, positions, seeds, settings = parts
    end = at + rows * width
    return Sections(
        token_ids, context_lens, sources, positions, seeds.view(torch.int64),
        settings.view(torch.float64).view(rows, NUM_SETTINGS), flat[at:end].view(rows, width),
        flat[:end],
    )  # fmt: skip


def num_elements(rows: int, width: int) -> int:
    """How much flat memory `sections` needs for so many rows and any smaller number."""
    return sum(_WORDS) * (-(-rows // _SECTION) * _SECTION) + rows * width


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """The sizes that batches are padded to, ascending; the last is `max_batch`."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_batch]
    size = 16
    while size < max_batch:
        sizes.append(size)
        # By 8 at first, then by a quarter of the last power of two: less than a fifth is padding.
        size += max(8, (1 << size.bit_length() - 1) // 4)
    return (*sizes, max_batch)


def table_widths(widest: int) -> tuple[int, ...]:
    """The widths that block_tables are padded to, ascending; the last is `widest`."""
    widths, width = [], _NARROWEST
    while 2 * width < widest:
        widths.append(width)
        width *= 4
    return (*widths, widest)


def count_graphs(settings: EngineConfig, max_context: int) -> int:
    """How many decode steps are captured; 0 without `--graphs`."""
    if not settings.graphs:
        return 0
    width = -(-max_context // settings.block_size)
    return len(batch_sizes(settings.max_batch)) * len(table_widths(width))


class DecodeGraphs:
    """Computes padded decode batches: by graphs once they are captured, kernel by kernel before.

    Of any rank; the first one's also feed and sample.
    """

    def __init__(
        self, model: GpuModel, pool: Tensor, stream: Stream, max_batch: int, width: int
    ) -> None:
        self.sizes = batch_sizes(max_batch)
        self.widths = table_widths(width)
        self._model = model
        self._pool = pool
        self._stream = stream
        self._inputs = torch.zeros(
            num_elements(max_batch, width), dtype=torch.int32, device=stream.device
        )
        self._captured: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._sections: dict[tuple[int, int], Sections[Tensor]] = {}

    def shape(self, rows: int, blocks: int) -> tuple[int, int]:
        """The batch size and table width that hold so many rows and blocks of each."""
        size = self.sizes[bisect_left(self.sizes, rows)]
        return size, self.widths[bisect_left(self.widths, blocks)]

    def inputs(self, size: int, width: int) -> Sections[Tensor]:
        """Where a batch of that shape finds its inputs, on the device."""
        key = size, width
        if key not in self._sections:
            self._sections[key] = sections(self._inputs, size, width)
        return self._sections[key]

    def decode(self, size: int, width: int) -> Tensor:
        """Computes the batch in `inputs`: logits `[size, vocab_size]`, of the model's type, valid
        until the next is run.

        To be called on the stream. Other ranks get the inputs of the first, and no logits.
        """
        with self._model.together("decode", size, width):
            captured = self._captured.get((size, width))
            return captured() if captured else self._run(size, width)

    def capture(self) -> None:
        """Captures every shape, largest first, so that the others fit into the memory it took.

        Writes nothing into the pool. Before requests are served.
        """
        shapes = list(itertools.product(reversed(self.sizes), reversed(self.widths)))
        logged = time.monotonic()
        for done, (size, width) in enumerate(shapes, 1):
            self._capture(size, width)
            if done == len(shapes) or time.monotonic() >= logged + 1.0:
                logged = time.monotonic()
                log.info("captured %d of %d decode steps as graphs", done, len(shapes))

    def close(self) -> None:
        """Gives captured steps up: NCCL does not end while a graph holds its operations."""
        self._captured.clear()

    def _capture(self, size: int, width: int) -> None:
        def first() -> None:
            self._inputs.zero_()
            at = self.inputs(size, width)
            at.context_lens.fill_(PADDING)
            at.sources.fill_(KNOWN)
            self._run(size, width)

        self._stream.call(first)
        self._stream.record_event().synchronize()
        self._captured[size, width] = self._stream.capture(lambda: self._run(size, width))

    def _run(self, size: int, width: int) -> Tensor:
        model, at = self._model, self.inputs(size, width)
        self._feed(at)
        model.collectives.broadcast(at.all)
        logits = model.decode(at.token_ids, at.context_lens, at.block_tables, self._pool)
        self._sample(at, logits)
        return logits

    def _feed(self, at: Sections[Tensor]) -> None:
        """Completes the inputs, on the device."""

    def _sample(self, at: Sections[Tensor], logits: Tensor) -> None:
        """Samples each row, on the device."""
