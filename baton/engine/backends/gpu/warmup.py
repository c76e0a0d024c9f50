"""Steps before any request is served: a profile run that measures memory, and a warm-up.

A kernel is compiled on its first launch with new tiles, warps or parts of a row, which takes
seconds. All of these follow from a step's shapes, by powers of two: from the rows of its chunks,
from how many sequences decode, and from the width of its block tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.launches import GpuSettings
from baton.engine.batch import StepBatch, StepModel
from baton.engine.kv_cache import KvLayout
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.sampling import SamplingParams

# Of all settings these take the most memory. Top-p ranks in one way behind a top-k and in another
# without.
_RANKED = SamplingParams(
    temperature=1.0, top_k=64, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20
)
_NUCLEUS = replace(_RANKED, top_k=0)


class ProfileRun:
    """Runs an engine's largest steps, to measure what they take, over one block of `layout`.

    Every block table names that one block: what is computed means nothing, its size counts.
    """

    def __init__(
        self,
        model: StepModel,
        sampler: Sampler,
        layout: KvLayout,
        max_context: int,
        device: torch.device,
    ) -> None:
        assert layout.num_blocks == 1
        self._model = model
        self._sampler = sampler
        self._max_context = max_context
        self._pool = torch.zeros(layout.shape, dtype=layout.dtype, device=device)

    def chunk(self, rows: int, sampled: int) -> None:
        """A step of so many rows at the end of full contexts, `sampled` of which sample."""
        longest = self._max_context - 1
        query_lens = [longest] * (rows // longest)
        if rest := rows % longest:
            query_lens.insert(0, rest)  # those with one row come first
        logits = self._step(query_lens, sampled)
        settings = (_NUCLEUS if row % 2 else _RANKED for row in range(sampled))
        self._sampler.sample(logits, [SampleRow(params, [0], 1) for params in settings])

    def decode(self, sequences: int) -> Tensor:
        """A step that gives so many full contexts a token: logits `[sequences, vocab_size]`."""
        return self._step([1] * sequences, sequences)

    def _step(self, query_lens: list[int], sampled: int) -> Tensor:
        rows, block_size = sum(query_lens), self._pool.shape[4]
        width = -(-self._max_context // block_size)
        batch = StepBatch(
            token_ids=self._ints([0] * rows),
            context_lens=self._ints([self._max_context - count for count in query_lens]),
            query_lens=self._ints(query_lens),
            block_tables=self._ints([0]).expand(len(query_lens), width).contiguous(),
            logit_rows=self._ints(list(range(rows - sampled, rows))),
            num_decodes=query_lens.count(1),
        )
        return self._model.step(batch, self._pool)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._pool.device)


class StepShape(NamedTuple):
    """A step of so many decode rows and a chunk of so many, over tables of `width` blocks."""

    num_decodes: int
    chunk: int
    width: int


def step_shapes(settings: GpuSettings) -> Iterator[StepShape]:
    """Steps that between them launch whatever an engine's steps can."""
    most = min(settings.chunk_tokens + settings.max_batch, settings.max_context)
    # Where a measured configuration reaches no further, others may hold for rows without a power of
    # two among them.
    for rows in sorted({*_doublings(2, most), *_doublings(3, most)}):
        yield StepShape(0, rows, -(-rows // settings.block_size))
    for rows in _doublings(1, settings.max_batch):
        yield StepShape(rows, 0, 1)
    for width in _doublings(1, settings.table_width):
        yield StepShape(1, min(2, most), width)


def warm_up(model: StepModel, pool: Tensor, stream: Stream, settings: GpuSettings) -> None:
    """Runs a step of each shape. Writes into the pool's first block, which must be free."""
    for shape in step_shapes(settings):
        stream.call(lambda shape=shape: model.step(_batch(shape, stream), pool))  # type: ignore[misc]
    stream.record_event().wait()


def _batch(shape: StepShape, stream: Stream) -> StepBatch:
    """Sequences that begin, all of them in block 0; the last row of each samples."""
    query_lens = [1] * shape.num_decodes + [shape.chunk] * bool(shape.chunk)
    sizes = torch.tensor(query_lens, dtype=torch.int32)
    tables = torch.zeros((len(query_lens), shape.width), dtype=torch.int32)
    return StepBatch(
        token_ids=stream.upload(torch.zeros(sum(query_lens), dtype=torch.int32)),
        context_lens=stream.upload(torch.zeros_like(sizes)),
        query_lens=stream.upload(sizes),
        block_tables=stream.upload(tables),
        logit_rows=stream.upload(sizes.cumsum(0, dtype=torch.int32) - 1),
        num_decodes=query_lens.count(1),
    )


def _doublings(first: int, last: int) -> Iterator[int]:
    """first, twice that, and so on up to last, and last itself; nothing if it is less."""
    while first < last:
        yield first
        first *= 2
    if first >= last >= 1:
        yield last
