"""CUDA graphs: steps padded to a ladder of shapes, each captured once and replayed by one launch.

A step is hundreds of kernels, most of them shorter than their launch from Python. A CUDA graph
launches them all at once, but has fixed shapes and reads its inputs at fixed addresses. So decode
batches are padded up one ladder of sizes, chunks of prompts up another, and block tables up a
ladder of widths, so that few unused entries are copied.

    decode rows | padding || chunk | chunk | (no rows) ... | padding
    one sequence each     || `MAX_CHUNKS` sequences        | one more

Padding rows have the context length -1: they write no KV and attend to nothing. A step with chunks
has room for a full batch of decode rows beside them; on a prefill worker, where nothing decodes, it
has none.
"""

from __future__ import annotations

import itertools
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.cuda import CudaDriver
from baton.engine.backends.gpu.device import Stream
from baton.engine.batch import StepBatch
from baton.engine.rank_executor import ReplayStep
from baton.engine.sampling.sampler import NUM_SETTINGS

if TYPE_CHECKING:  # it imports triton, which may not be installed
    from baton.engine.backends.gpu.model import GpuModel

log = logging.getLogger(__name__)
MAX_CHUNKS = 16  # chunks in a captured step
# Rows of all chunks in a captured step. Less than a quarter is padding where padding costs time: a
# GPU takes as long for a few rows as for 256, because it reads all weights. Steps with more rows
# than the last size take longer to compute than to launch.
CHUNK_SIZES = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
_NARROWEST = 128  # blocks of the narrowest table; each wider table is four times as wide
# Sections of the inputs begin at multiples of this number of elements: kernels load faster from
# aligned addresses, and would be compiled again for unaligned ones.
_ALIGNMENT = 32
PADDING = -1  # context length of padding rows
KNOWN = -1  # source of a row whose token the host has written
NO_ADAPTER = -1  # slot of a row
Part = TypeVar("Part")


class StepShape(NamedTuple):
    """The shape of a padded step.

    decodes: number of decode rows · chunk_rows: total rows of chunks; 0 for a step without chunks ·
    width: blocks of each block table · lora: whether rows may have adapters · state_blocks: of each
    sequence's state.
    """

    decodes: int
    chunk_rows: int
    width: int
    lora: bool = False
    state_blocks: int = 0

    @property
    def rows(self) -> int:
        """Total rows of the step."""
        return self.decodes + self.chunk_rows

    @property
    def sequences(self) -> int:
        """Number of sequences: decode rows, then chunks, then one for padding rows of chunks."""
        return self.decodes + (MAX_CHUNKS + 1 if self.chunk_rows else 0)

    @property
    def logits(self) -> int:
        """Rows of logits: one for each decode row and chunk."""
        return self.decodes + (MAX_CHUNKS if self.chunk_rows else 0)


class StepInputs(NamedTuple, Generic[Part]):
    """Inputs of one captured step, all in one buffer; int32 unless another type is named.

    token_ids: `[rows]` · context_lens: `[sequences]` · query_lens `[sequences]` and logit_rows
    `[logits]`: as in `StepBatch`; empty in steps without chunks · sources: `[decodes]`, the row of
    logits of the previous step whose sampled token is the row's token, or KNOWN · lora_slots:
    `[rows]` as in `StepBatch`; empty in steps without adapters · positions: `[logits]`, position of
    the token to sample; 0 for padding · seeds: int64 `[logits]` and settings: float64 `[logits,
    4]`, arguments of `sampling.sample` · block_tables: `[sequences, width]` · state_tables:
    `[sequences, state_blocks]` · all: the buffer.
    """

    token_ids: Part
    context_lens: Part
    query_lens: Part
    logit_rows: Part
    sources: Part
    lora_slots: Part
    positions: Part
    seeds: Part
    settings: Part
    block_tables: Part
    state_tables: Part
    all: Part


def _section_words(shape: StepShape) -> tuple[int, ...]:
    """Size of each section of the inputs, in 32-bit words."""
    sequences, logits = shape.sequences, shape.logits
    of_chunks = (sequences, logits) if shape.chunk_rows else (0, 0)
    sampling = (logits, 2 * logits, 2 * NUM_SETTINGS * logits)
    tables = sequences * shape.width
    lora_slots = shape.rows if shape.lora else 0
    states = sequences * shape.state_blocks
    return shape.rows, sequences, *of_chunks, shape.decodes, lora_slots, *sampling, tables, states


def split_inputs(buffer: Tensor, shape: StepShape) -> StepInputs[Tensor]:
    """Views of the sections in an int32 buffer of at least `num_elements`."""
    parts, end = list[Tensor](), 0
    for words in _section_words(shape):
        parts.append(buffer[end : end + words])
        end += -(-words // _ALIGNMENT) * _ALIGNMENT
    tokens, contexts, queries, logit_rows, sources, slots, positions, *of_sampling, states = parts
    seeds, settings, tables = of_sampling
    return StepInputs(
        tokens, contexts, queries, logit_rows, sources, slots, positions, seeds.view(torch.int64),
        settings.view(torch.float64).view(-1, NUM_SETTINGS),
        tables.view(shape.sequences, shape.width),
        states.view(shape.sequences, shape.state_blocks), buffer[:end],
    )  # fmt: skip


def num_elements(shape: StepShape) -> int:
    """Elements of the buffer that a step's inputs need."""
    return sum(-(-words // _ALIGNMENT) * _ALIGNMENT for words in _section_words(shape))


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Sizes that decode batches are padded to, ascending; the last is `max_batch`."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_batch]
    size = 16
    while size < max_batch:
        sizes.append(size)
        # Steps of 8, then a quarter of the last power of two: less than a fifth is padding.
        size += max(8, (1 << size.bit_length() - 1) // 4)
    return (*sizes, max_batch)


def table_widths(widest: int, num_groups: int = 1) -> tuple[int, ...]:
    """Widths that block tables are padded to, ascending; the last has `widest` blocks of each of
    the groups of layers."""
    widths, width = [], _NARROWEST
    while 2 * width < widest:
        widths.append(width)
        width *= 4
    return tuple(width * num_groups for width in (*widths, widest))


def chunk_sizes(most: int) -> tuple[int, ...]:
    """Total rows that chunks are padded to, ascending, up to `most` or the last of CHUNK_SIZES.

    Each size is larger than the number of logits that chunks can ask for.
    """
    most = min(max(most, CHUNK_SIZES[0]), CHUNK_SIZES[-1])
    return (*(size for size in CHUNK_SIZES if size < most), most)


def shapes_of(
    settings: EngineConfig, max_context: int, num_groups: int = 1, state_blocks: int = 0
) -> list[StepShape]:
    """Shapes of the captured steps, largest first; none without `--graphs`."""
    if not settings.graphs:
        return []
    widths = table_widths(-(-max_context // settings.block_size), num_groups)
    # Steps with chunks take longer, so every other width is enough for them.
    sizes = itertools.product(chunk_sizes(settings.chunk_tokens), widths[::-2][::-1])
    chunks = [StepShape(settings.max_batch, rows, width) for rows, width in sizes]
    sizes = itertools.product(batch_sizes(settings.max_batch), widths)
    shapes = [*(StepShape(size, 0, width) for size, width in sizes), *chunks]
    if settings.lora_slots:
        shapes = [shape._replace(lora=lora) for shape in shapes for lora in (False, True)]
    return [shape._replace(state_blocks=state_blocks) for shape in reversed(shapes)]


class StepGraphs:
    """Computes padded steps on any rank: by CUDA graphs once captured, kernel by kernel before.

    largest: the shape whose sizes no captured step exceeds.
    """

    def __init__(
        self, model: GpuModel, pool: Tensor, stream: Stream, settings: EngineConfig,
        max_context: int,
    ) -> None:  # fmt: skip
        """max_context: largest context of a sequence, in tokens."""
        self._model = model
        self._pool = pool
        self._stream = stream
        groups = model.num_groups
        self._state_blocks = model.state_blocks(pool)
        self._shapes = shapes_of(settings, max_context, groups, self._state_blocks)
        self._batch_sizes = batch_sizes(settings.max_batch)
        self._widths = table_widths(-(-max_context // settings.block_size), groups)
        chunks = [shape for shape in self._shapes if shape.chunk_rows]
        self._chunk_sizes = sorted({shape.chunk_rows for shape in chunks})
        self._chunk_widths = sorted({shape.width for shape in chunks})
        self._max_decodes = settings.max_batch
        most_rows = max(self._chunk_sizes, default=0)
        self.has_lora = settings.lora_slots > 0
        self.largest = StepShape(
            self._max_decodes, most_rows, self._widths[-1], self.has_lora, self._state_blocks
        )
        self._buffer = torch.zeros(
            num_elements(self.largest), dtype=torch.int32, device=stream.device
        )
        self._inputs: dict[StepShape, StepInputs[Tensor]] = {}
        self._captured: dict[StepShape, Callable[[], Tensor]] = {}

    def capture(self) -> None:
        """Captures every shape, largest first, so that the others fit into its memory.

        Before requests are served: all steps read inputs from one buffer, and padding alone is
        computed, which writes nothing into the pool.
        """
        logged = time.monotonic()
        for number, shape in enumerate(self._shapes, 1):
            compute = partial(self._compute, shape)
            self._stream.call(partial(self._write_padding, shape))
            self._stream.call(compute)  # compiles kernels, and allocates what graphs must not
            self._stream.record_event().synchronize()
            if self._stream.cuda is None:  # a CPU has no graphs
                self._captured[shape] = compute
            else:
                graph = torch.cuda.CUDAGraph()
                # All graphs share memory, as one runs at a time. Other threads may use the GPU.
                with torch.cuda.graph(
                    graph, pool=self._stream.graph_pool, stream=self._stream.cuda,
                    capture_error_mode="thread_local",
                ):  # fmt: skip
                    logits = compute()
                self._captured[shape] = partial(_replay, graph, _unowned(logits))
            if number == len(self._shapes) or time.monotonic() >= logged + 1.0:
                logged = time.monotonic()
                log.info("captured %d of %d steps as CUDA graphs", number, len(self._shapes))

    def run(self, shape: StepShape) -> Tensor:
        """Computes the step in `inputs`: logits `[shape.logits, vocab_size]`, valid until the next
        call.

        Called on the stream. Other ranks receive the inputs from the first.
        """
        with self._model.on_all_ranks(ReplayStep(shape)):
            replay = self._captured.get(shape)
            return replay() if replay else self._compute(shape)

    def close(self) -> None:
        """Destroys the graphs: NCCL cannot be shut down while a graph holds its operations."""
        self._captured.clear()

    def decode_shape(self, rows: int, blocks: int) -> StepShape | None:
        """The captured shape for a number of decode rows and table entries, or None."""
        if rows > self._max_decodes:
            return None
        sizes = _least(self._batch_sizes, rows), 0, _least(self._widths, blocks)
        return StepShape(*sizes, state_blocks=self._state_blocks)

    def chunk_shape(self, counts: list[int], blocks: int) -> StepShape | None:
        """The captured shape for a step with chunks, or None.

        counts: rows of each sequence, decode rows first · blocks: entries of the longest table.
        """
        decodes = counts.count(1) if self._max_decodes else 0
        chunks, rows = len(counts) - decodes, sum(counts) - decodes
        if decodes > self._max_decodes or chunks > MAX_CHUNKS:
            return None
        if not self._chunk_sizes or rows > self._chunk_sizes[-1]:
            return None
        width = _least(self._chunk_widths, blocks)
        chunk_rows = _least(self._chunk_sizes, rows)
        return StepShape(self._max_decodes, chunk_rows, width, state_blocks=self._state_blocks)

    def inputs(self, shape: StepShape) -> StepInputs[Tensor]:
        """The inputs on the device that a step of this shape reads."""
        if shape not in self._inputs:
            self._inputs[shape] = split_inputs(self._buffer, shape)
        return self._inputs[shape]

    def _write_padding(self, shape: StepShape) -> None:
        """Makes every row of a step padding."""
        self._buffer.zero_()
        inputs = self.inputs(shape)
        inputs.context_lens.fill_(PADDING)
        inputs.query_lens[: shape.decodes].fill_(1)
        inputs.query_lens[-1:].fill_(shape.chunk_rows)
        inputs.sources.fill_(KNOWN)
        inputs.lora_slots.fill_(NO_ADAPTER)

    def _compute(self, shape: StepShape) -> Tensor:
        """The work of a step, which is what a graph captures: logits."""
        model, inputs = self._model, self.inputs(shape)
        self._load_tokens(inputs)
        model.collectives.broadcast(inputs.all)
        tokens, context_lens, tables = inputs.token_ids, inputs.context_lens, inputs.block_tables
        slots = inputs.lora_slots if shape.lora else None
        states = inputs.state_tables if shape.state_blocks else None
        if shape.chunk_rows:
            rows = (tokens, context_lens, inputs.query_lens, tables, inputs.logit_rows)
            batch = StepBatch(*rows, shape.decodes, lora_slots=slots, state_tables=states)
            logits = model.local_shard.step(batch, self._pool)
        else:
            logits = model.local_shard.decode(
                tokens, context_lens, tables, self._pool, slots, states
            )
        self._sample(inputs, logits)
        return logits

    def _load_tokens(self, inputs: StepInputs[Tensor]) -> None:
        """Loads tokens that the previous step sampled; done by the first rank alone."""

    def _sample(self, inputs: StepInputs[Tensor], logits: Tensor) -> None:
        """Samples a token for each row of logits; done by the first rank alone."""


def _replay(graph: torch.cuda.CUDAGraph, logits: Tensor) -> Tensor:
    graph.replay()
    return logits


def _unowned(tensor: Tensor) -> Tensor:
    """A view that does not own its memory, so that other graphs may use the memory again."""
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = CudaDriver().view(tensor.data_ptr(), extent * tensor.element_size())
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _least(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of ascending sizes that is at least `wanted`."""
    return sizes[bisect_left(sizes, wanted)]
