"""What one step computes, as tensors, and how plans become such batches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.planner import Plan, Work


@dataclass(frozen=True)
class StepBatch:
    """Rows of a step, sequence after sequence; those that have one row come first.

    All are int32, on the model's device.

    token_ids: `[rows]` · context_lens: `[sequences]`, tokens before a sequence's first row, whose
    KV is in the pool · query_lens: `[sequences]`, rows of each, which attend causally to the
    context and to each other · block_tables: `[sequences, width]`, the blocks of each sequence in
    its order, at least those of context and rows; what lies behind them is 0 · logit_rows: `[n]`,
    rows whose next-token scores are wanted, ascending · num_decodes: how many sequences have one
    row (known to the host).
    """

    token_ids: Tensor
    context_lens: Tensor
    query_lens: Tensor
    block_tables: Tensor
    logit_rows: Tensor
    num_decodes: int


class StepModel(Protocol):
    """What a runner needs of a model, whatever its kernels."""

    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a batch and writes its K and V into the pool.

        Logits, float32 `[logit_rows, vocab_size]`, one row for each of the batch's `logit_rows`.
        """


def build_batch(plan: Plan, block_size: int, device: torch.device) -> StepBatch:
    """The batch of a plan.

    Its logit rows are, for each work that samples, those of the last known token and of each
    proposed token behind it.
    """

    def tensor(values: list[int] | npt.NDArray[np.int32]) -> Tensor:
        on_host = torch.from_numpy(np.asarray(values, np.int32))
        if device.type == "cpu":
            return on_host
        # A copy of other memory would wait for all that runs on the device.
        return on_host.pin_memory().to(device, non_blocking=True)

    work = plan.work
    query_lens = [item.count for item in work]
    num_decodes = query_lens.count(1)
    assert query_lens[:num_decodes] == [1] * num_decodes, "single-token rows come first"
    needed = [-(-(item.start + item.count) // block_size) for item in work]
    block_tables = np.zeros((len(work), max(needed)), np.int32)
    for row, item, used in zip(block_tables, work, needed, strict=True):
        row[:used] = item.sequence.block_ids[:used]
    return StepBatch(
        token_ids=tensor(_token_ids(work)),
        context_lens=tensor([item.start for item in work]),
        query_lens=tensor(query_lens),
        block_tables=tensor(block_tables),
        logit_rows=tensor(_logit_rows(work)),
        num_decodes=num_decodes,
    )


def _token_ids(work: list[Work]) -> list[int]:
    """The tokens of each work, one after the other."""
    token_ids: list[int] = []
    for item in work:
        token_ids += item.sequence.tokens[item.start : item.start + item.count]
        token_ids += item.proposed
    return token_ids


def _logit_rows(work: list[Work]) -> list[int]:
    """Rows whose scores are wanted, ascending."""
    logit_rows: list[int] = []
    ends = itertools.accumulate(item.count for item in work)
    for item, end in zip(work, ends, strict=True):
        if item.samples:
            logit_rows += range(end - 1 - len(item.proposed), end)
    return logit_rows
