"""Steps padded to a few shapes, each captured once as a CUDA graph and launched whole.

A step is hundreds of kernels, most of them shorter than their launch from Python. A CUDA graph
launches them at once, but is of one shape and reads fixed places. So batches of decode rows are
padded up a ladder of sizes, chunks of prompts up another, and block tables up a ladder of widths,
so that little of them is copied in vain.

    decode rows | padding || chunk | chunk | (no rows) ... | padding
    one sequence each     || `MAX_CHUNKS` sequences        | one more

Padding has the context -1: it writes no KV and attends to nothing. A step with chunks has room for
a full batch of decode rows beside them, and none on a prefill worker, where nothing decodes.
"""

from __future__ import annotations

import itertools
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends.gpu.device import Stream
from baton.engine.batch import StepBatch
from baton.engine.rank_executor import ReplayStep
from baton.engine.sampling.sampler import NUM_SETTINGS

if TYPE_CHECKING:  # it imports triton, which may not be installed
    from baton.engine.backends.gpu.model import GpuModel

log = logging.getLogger(__name__)
MAX_CHUNKS = 16  # sequences with several rows in a captured step
# Rows of chunks in a captured step, so that less than a quarter is padding where that counts: a
# GPU takes as long for a few rows as for 256, as it reads all weights. More than the last take
# longer to compute than to be launched.
CHUNK_SIZES = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
_NARROWEST = 128  # blocks of a table; wider ones are four times as wide each
# Sections begin at multiples of so many elements: kernels load faster from aligned addresses, and
# would be compiled once more for those that are not.
_SECTION = 32
PADDING = -1  # the context length of padding
KNOWN = -1  # the source of a row whose token is in the inputs
Part = TypeVar("Part")


class Shape(NamedTuple):
    """Sizes of a padded step.

    decodes: sequences of one row · chunk_rows: rows of all chunks together; 0 for a step without
    chunks · width: blocks of each table.
    """

    decodes: int
    chunk_rows: int
    width: int

    @property
    def rows(self) -> int:
        """All rows of the step."""
        return self.decodes + self.chunk_rows

    @property
    def sequences(self) -> int:
        """Those of decode rows, then those of chunks, the last of which is padding."""
        return self.decodes + (MAX_CHUNKS + 1 if self.chunk_rows else 0)

    @property
    def logits(self) -> int:
        """Rows of logits: one for each sequence that can be there."""
        return self.decodes + (MAX_CHUNKS if self.chunk_rows else 0)


class Sections(NamedTuple, Generic[Part]):
    """Parts of one launch's inputs, in one copy; int32 where nothing else is said.

    token_ids: `[rows]` · context_lens: `[sequences]` · query_lens: `[sequences]`, and logit_rows:
    `[logits]`, as in `StepBatch`, of steps with chunks · sources: `[decodes]`, which row of logits
    of the launch before sampled a row's token, or KNOWN · positions: `[logits]`, of the token to
    sample, 0 of padding · seeds: int64 `[logits]`, settings: float64 `[logits, 4]`, what
    `sampling.sample` takes · block_tables: `[sequences, width]` · all: of all of them.
    """

    token_ids: Part
    context_lens: Part
    query_lens: Part
    logit_rows: Part
    sources: Part
    positions: Part
    seeds: Part
    settings: Part
    block_tables: Part
    all: Part


def _words(shape: Shape) -> tuple[int, ...]:
    """Of each section, in 32 bits."""
    sequences, logits = shape.sequences, shape.logits
    of_chunks = (sequences, logits) if shape.chunk_rows else (0, 0)
    sampling = (logits, 2 * logits, 2 * NUM_SETTINGS * logits)
    tables = sequences * shape.width
    return shape.rows, sequences, *of_chunks, shape.decodes, *sampling, tables


def sections(flat: Tensor, shape: Shape) -> Sections[Tensor]:
    """The parts of a launch's inputs, in flat int32 memory of at least `num_elements`."""
    parts, end = list[Tensor](), 0
    for words in _words(shape):
        parts.append(flat[end : end + words])
        end += -(-words // _SECTION) * _SECTION
    tokens, contexts, queries, logit_rows, sources, positions, seeds, settings, tables = parts
    return Sections(
        tokens, contexts, queries, logit_rows, sources, positions, seeds.view(torch.int64),
        settings.view(torch.float64).view(-1, NUM_SETTINGS),
        tables.view(shape.sequences, shape.width), flat[:end],
    )  # fmt: skip


def num_elements(shape: Shape) -> int:
    """How much flat memory the inputs of a step take."""
    return sum(-(-words // _SECTION) * _SECTION for words in _words(shape))


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


def chunk_sizes(most: int) -> tuple[int, ...]:
    """The rows that chunks are padded to, ascending; the last is `most` if that is captured.

    All are more than the logits that are wanted of them.
    """
    most = min(max(most, CHUNK_SIZES[0]), CHUNK_SIZES[-1])
    return (*(size for size in CHUNK_SIZES if size < most), most)


def shapes_of(settings: EngineConfig, max_context: int) -> list[Shape]:
    """The shapes of steps that are captured, largest first; none without `--graphs`."""
    if not settings.graphs:
        return []
    widths = table_widths(-(-max_context // settings.block_size))
    beside = 0 if settings.prefill_only else settings.max_batch
    # Chunks take longer than decode rows, so that every other width is enough for them.
    sizes = itertools.product(chunk_sizes(settings.chunk_tokens), widths[::-2][::-1])
    shapes = [Shape(beside, rows, width) for rows, width in sizes]
    if not settings.prefill_only:
        sizes = itertools.product(batch_sizes(settings.max_batch), widths)
        shapes = [*(Shape(size, 0, width) for size, width in sizes), *shapes]
    return shapes[::-1]


def count_graphs(settings: EngineConfig, max_context: int) -> int:
    """How many steps are captured; 0 without `--graphs`."""
    return len(shapes_of(settings, max_context))


class StepGraphs:
    """Computes padded steps: by graphs once they are captured, kernel by kernel before.

    Of any rank; the first one's also feed and sample. largest: no step has more of anything.
    """

    def __init__(
        self, model: GpuModel, pool: Tensor, stream: Stream, settings: EngineConfig,
        max_context: int,
    ) -> None:  # fmt: skip
        """max_context: of sequences, in tokens."""
        self._model = model
        self._pool = pool
        self._stream = stream
        self._shapes = shapes_of(settings, max_context)
        self._batch_sizes = batch_sizes(settings.max_batch)
        self._widths = table_widths(-(-max_context // settings.block_size))
        chunks = [shape for shape in self._shapes if shape.chunk_rows]
        self._chunk_sizes = sorted({shape.chunk_rows for shape in chunks})
        self._chunk_widths = sorted({shape.width for shape in chunks})
        self._beside = 0 if settings.prefill_only else settings.max_batch  # decode rows
        most_rows = max(self._chunk_sizes, default=0)
        self.largest = Shape(self._beside, most_rows, self._widths[-1])
        self._inputs = torch.zeros(
            num_elements(self.largest), dtype=torch.int32, device=stream.device
        )
        self._captured: dict[Shape, Callable[[], Tensor]] = {}
        self._sections: dict[Shape, Sections[Tensor]] = {}

    def decode_shape(self, rows: int, blocks: int) -> Shape | None:
        """The captured shape for a step of `rows` decode rows and block tables of `blocks` entries,
        or None.
        """
        if rows > self._beside:
            return None
        return Shape(_least(self._batch_sizes, rows), 0, _least(self._widths, blocks))

    def chunk_shape(self, counts: list[int], blocks: int) -> Shape | None:
        """The captured shape for a step with chunks, or None. counts: rows of each sequence, decode
        rows first · blocks: entries of the longest block table."""
        singles = counts.count(1) if self._beside else 0
        chunks, rows = len(counts) - singles, sum(counts) - singles
        if singles > self._beside or chunks > MAX_CHUNKS:
            return None
        if not self._chunk_sizes or rows > self._chunk_sizes[-1]:
            return None
        width = _least(self._chunk_widths, blocks)
        return Shape(self._beside, _least(self._chunk_sizes, rows), width)

    def inputs(self, shape: Shape) -> Sections[Tensor]:
        """Where a step of that shape finds its inputs, on the device."""
        if shape not in self._sections:
            self._sections[shape] = sections(self._inputs, shape)
        return self._sections[shape]

    def run(self, shape: Shape) -> Tensor:
        """Computes the step in `inputs`: logits `[shape.logits, vocab_size]`, valid until the next
        is run.

        To be called on the stream. Other ranks get the inputs of the first, and no logits.
        """
        with self._model.on_all_ranks(ReplayStep(shape)):
            captured = self._captured.get(shape)
            return captured() if captured else self._run(shape)

    def capture(self) -> None:
        """Captures every shape, largest first, so that the others fit into the memory it took.

        Writes nothing into the pool. Before requests are served.
        """
        logged = time.monotonic()
        for done, shape in enumerate(self._shapes, 1):
            self._capture(shape)
            if done == len(self._shapes) or time.monotonic() >= logged + 1.0:
                logged = time.monotonic()
                log.info("captured %d of %d steps as graphs", done, len(self._shapes))

    def close(self) -> None:
        """Gives captured steps up: NCCL does not end while a graph holds its operations."""
        self._captured.clear()

    def _capture(self, shape: Shape) -> None:
        def first() -> None:
            self._inputs.zero_()
            at = self.inputs(shape)
            at.context_lens.fill_(PADDING)
            at.query_lens[: shape.decodes].fill_(1)
            at.query_lens[-1:].fill_(shape.chunk_rows)
            at.sources.fill_(KNOWN)
            self._run(shape)

        self._stream.call(first)
        self._stream.record_event().synchronize()
        self._captured[shape] = self._stream.capture(lambda: self._run(shape))

    def _run(self, shape: Shape) -> Tensor:
        model, at = self._model, self.inputs(shape)
        self._feed(at)
        model.collectives.broadcast(at.all)
        if shape.chunk_rows:
            tables, logit_rows = at.block_tables, at.logit_rows
            rows = (at.token_ids, at.context_lens, at.query_lens, tables, logit_rows)
            logits = model.local_shard.step(StepBatch(*rows, shape.decodes), self._pool)
        else:
            logits = model.local_shard.decode(
                at.token_ids, at.context_lens, at.block_tables, self._pool
            )
        self._sample(at, logits)
        return logits

    def _feed(self, at: Sections[Tensor]) -> None:
        """Completes the inputs, on the device."""

    def _sample(self, at: Sections[Tensor], logits: Tensor) -> None:
        """Samples each row, on the device."""


def _least(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of ascending sizes that is large enough."""
    return sizes[bisect_left(sizes, wanted)]
