"""Steps of every kind before any is served, so that none waits for the compiler.

A kernel is compiled on its first launch with new tiles, warps or parts of a row, which takes
seconds. All of these follow from a step's shapes, by powers of two: from the rows of its chunks,
from how many rows are single, and from the width of its tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.backends.gpu.device import Lane
from baton.engine.backends.gpu.launches import GpuSettings
from baton.engine.batch import StepBatch, StepModel


class Kind(NamedTuple):
    """A step of so many single rows and a chunk of so many, over tables of `width` blocks."""

    singles: int
    chunk: int
    width: int


def kinds(settings: GpuSettings) -> Iterator[Kind]:
    """Steps that between them launch whatever an engine's steps can."""
    most = min(settings.chunk_tokens + settings.max_batch, settings.max_context)
    # Where a measured configuration reaches no further, others may hold for rows without a power of
    # two among them.
    for rows in sorted({*_doublings(2, most), *_doublings(3, most)}):
        yield Kind(0, rows, -(-rows // settings.block_size))
    for rows in _doublings(1, settings.max_batch):
        yield Kind(rows, 0, 1)
    for width in _doublings(1, settings.table_width):
        yield Kind(1, min(2, most), width)


def rehearse(model: StepModel, pool: Tensor, lane: Lane, settings: GpuSettings) -> None:
    """Runs a step of each kind. Writes into the pool's first block, which nobody may have yet."""
    for kind in kinds(settings):
        lane.call(lambda kind=kind: model.step(_batch(kind, lane), pool))  # type: ignore[misc]
    lane.mark().wait()


def _batch(kind: Kind, lane: Lane) -> StepBatch:
    """Sequences that begin, all of them in block 0; every one's last row is wanted."""
    counts = [1] * kind.singles + [kind.chunk] * bool(kind.chunk)
    sizes = torch.tensor(counts, dtype=torch.int32)
    return StepBatch(
        token_ids=lane.upload(torch.zeros(sum(counts), dtype=torch.int32)),
        contexts=lane.upload(torch.zeros_like(sizes)),
        counts=lane.upload(sizes),
        tables=lane.upload(torch.zeros((len(counts), kind.width), dtype=torch.int32)),
        logit_rows=lane.upload(sizes.cumsum(0, dtype=torch.int32) - 1),
        singles=counts.count(1),
    )


def _doublings(first: int, last: int) -> Iterator[int]:
    """first, twice that, and so on up to last, and last itself; nothing if it is less."""
    while first < last:
        yield first
        first *= 2
    if first >= last >= 1:
        yield last
