"""What one step computes, as tensors: the form that every model takes, whatever its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class StepBatch:
    """Rows of a step, sequence after sequence; those that have one row come first.

    All are int32, on the model's device.

    token_ids: `[rows]` · contexts: `[sequences]`, tokens before a sequence's first row, whose KV is
    in the pool · counts: `[sequences]`, rows of each, which attend causally to the context and to
    each other · tables: `[sequences, width]`, the blocks of each sequence in its order, at least
    those of context and rows; what lies behind them is 0 · logit_rows: `[n]`, rows whose next-token
    scores are wanted, ascending · singles: how many sequences have one row (not counted on the
    device).
    """

    token_ids: Tensor
    contexts: Tensor
    counts: Tensor
    tables: Tensor
    logit_rows: Tensor
    singles: int


class StepModel(Protocol):
    """What a runner needs of a model, whatever its kernels."""

    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a batch and writes its K and V into the pool.

        Logits, float32 `[logit_rows, vocab_size]`, one row for each of the batch's `logit_rows`.
        """
