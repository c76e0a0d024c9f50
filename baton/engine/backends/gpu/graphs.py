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
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends.gpu.device import Stream, Work

if TYPE_CHECKING:  # it imports triton, which may not be installed
    from baton.engine.backends.gpu.model import GpuModel

log = logging.getLogger(__name__)
_NARROWEST = 128  # blocks of a table; wider ones are four times as wide each
# Sections begin at multiples of so many elements: kernels load faster from aligned addresses, and
# would be compiled once more for those that are not.
_SECTION = 32
PADDING = -1  # the context length of a padding row


class Sections(NamedTuple):
    """Parts of one launch's inputs, all int32.

    token_ids, context_lens, sources: `[rows]` · block_tables: `[rows, width]` · all: one after the
    other, in one copy. sources: which row of the launch before sampled a row's token; -1 is none.
    """

    token_ids: Tensor
    context_lens: Tensor
    sources: Tensor
    block_tables: Tensor
    all: Tensor


def sections(flat: Tensor, rows: int, width: int) -> Sections:
    """The parts of a launch of `rows` rows and tables of `width` blocks, in flat memory."""
    step = -(-rows // _SECTION) * _SECTION
    end = 3 * step + rows * width
    block_tables = flat[3 * step : end].view(rows, width)
    token_ids, context_lens, sources = (part[:rows] for part in flat[: 3 * step].split(step))
    return Sections(token_ids, context_lens, sources, block_tables, flat[:end])


def num_elements(rows: int, width: int) -> int:
    """How much flat memory `sections` needs for so many rows and any smaller number."""
    return 3 * (-(-rows // _SECTION) * _SECTION) + rows * width


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
    """Computes padded decode batches: by graphs once they are captured, kernel by kernel before."""

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
        self._logits: Tensor | None = None  # `[max_batch, vocab_size]`; set when one is captured
        self._captured: dict[tuple[int, int], Work] = {}
        self._sections: dict[tuple[int, int], Sections] = {}

    def shape(self, rows: int, blocks: int) -> tuple[int, int]:
        """The batch size and table width that hold so many rows and blocks of each."""
        size = next(size for size in self.sizes if size >= rows)
        return size, next(width for width in self.widths if width >= blocks)

    def inputs(self, size: int, width: int) -> Sections:
        """Where a batch of that shape finds its inputs, on the device."""
        key = size, width
        if key not in self._sections:
            self._sections[key] = sections(self._inputs, size, width)
        return self._sections[key]

    def decode(self, size: int, width: int) -> Tensor:
        """Logits `[size, vocab_size]` of the batch in `inputs`, valid until the next is run.

        To be called on the stream. Other ranks get the inputs of the first, and no logits.
        """
        model = self._model
        with model.together("decode", size, width):
            model.collectives.broadcast(self.inputs(size, width).all)
            captured = self._captured.get((size, width))
            if captured is None:
                return self._run(size, width).float()
            captured()
            assert self._logits is not None, "a graph leaves its logits there"
            return self._logits[:size]

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
            self.inputs(size, width).context_lens.fill_(PADDING)
            logits = self._run(size, width)
            if self._logits is None:
                self._logits = torch.empty_like(logits, dtype=torch.float32)

        def step() -> None:
            assert self._logits is not None, "the first run made it"
            self._logits[:size].copy_(self._run(size, width))

        self._stream.call(first)
        self._stream.record_event().synchronize()
        self._captured[size, width] = self._stream.capture(step)

    def _run(self, size: int, width: int) -> Tensor:
        at = self.inputs(size, width)
        return self._model.decode(at.token_ids, at.context_lens, at.block_tables, self._pool)
