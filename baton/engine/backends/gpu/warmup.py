"""Steps before any request is served: the largest, to measure memory, and one of each shape.

A kernel is compiled on its first launch with new tiles, warps or parts of a row, which takes
seconds. All of these follow from a step's shapes, by powers of two: from the rows of its chunks,
from how many sequences decode, and from the width of its block tables. What these steps compute
means nothing: all their blocks are the pool's first, which must be free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.batch import StepBatch, StepModel
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.sampling import SamplingParams

# Of all settings these take the most memory. Top-p ranks in one way behind a top-k and in another
# without.
_RANKED = SamplingParams(
    temperature=1.0, top_k=64, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20
)
_NUCLEUS = replace(_RANKED, top_k=0)


def largest_chunk(
    model: StepModel, sampler: Sampler, pool: Tensor, max_context: int, rows: int, sampled: int
) -> None:
    """A step of so many rows at the end of full contexts, `sampled` of which sample."""
    longest = max_context - 1
    query_lens = [longest] * (rows // longest)
    if rest := rows % longest:
        query_lens.insert(0, rest)  # those with one row come first
    width = -(-max_context // pool.shape[4])
    context_lens = [max_context - count for count in query_lens]
    logit_rows = list(range(rows - sampled, rows))
    logits = model.step(_batch(query_lens, context_lens, logit_rows, width, pool.device), pool)
    settings = (_NUCLEUS if row % 2 else _RANKED for row in range(sampled))
    sampler.sample(logits, [SampleRow(params, [0], 1) for params in settings])


def largest_decode(model: StepModel, pool: Tensor, max_context: int, sequences: int) -> Tensor:
    """A step that gives so many full contexts a token: logits `[sequences, vocab_size]`."""
    width, rows = -(-max_context // pool.shape[4]), list(range(sequences))
    context_lens = [max_context - 1] * sequences
    return model.step(_batch([1] * sequences, context_lens, rows, width, pool.device), pool)


class StepShape(NamedTuple):
    """A step of so many decode rows and a chunk of so many, over tables of `width` blocks."""

    num_decodes: int
    chunk: int
    width: int


def step_shapes(settings: EngineConfig, max_context: int) -> Iterator[StepShape]:
    """Steps that between them launch whatever an engine's steps can."""
    most = min(settings.chunk_tokens + settings.max_batch, max_context)
    # Where a measured configuration reaches no further, others may hold for rows without a power of
    # two among them.
    for rows in sorted({*_doublings(2, most), *_doublings(3, most)}):
        yield StepShape(0, rows, -(-rows // settings.block_size))
    for rows in _doublings(1, settings.max_batch):
        yield StepShape(rows, 0, 1)
    for width in _doublings(1, -(-max_context // settings.block_size)):
        yield StepShape(1, min(2, most), width)


@torch.inference_mode()
def warm_up(model: StepModel, pool: Tensor, settings: EngineConfig, max_context: int) -> None:
    """Runs a step of each shape, of sequences that begin; the last row of each samples."""
    for shape in step_shapes(settings, max_context):
        query_lens = [1] * shape.num_decodes + [shape.chunk] * bool(shape.chunk)
        logit_rows = [*range(shape.num_decodes), sum(query_lens) - 1][: len(query_lens)]
        context_lens = [0] * len(query_lens)
        model.step(_batch(query_lens, context_lens, logit_rows, shape.width, pool.device), pool)


def _batch(
    query_lens: list[int],
    context_lens: list[int],
    logit_rows: list[int],
    width: int,
    device: torch.device,
) -> StepBatch:
    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return StepBatch(
        token_ids=ints([0] * sum(query_lens)),
        context_lens=ints(context_lens),
        query_lens=ints(query_lens),
        block_tables=ints([0]).expand(len(query_lens), width).contiguous(),
        logit_rows=ints(logit_rows),
        num_decodes=query_lens.count(1),
    )


def _doublings(first: int, last: int) -> Iterator[int]:
    """first, twice that, and so on up to last, and last itself; nothing if it is less."""
    while first < last:
        yield first
        first *= 2
    if first >= last >= 1:
        yield last
