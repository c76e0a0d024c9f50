"""Temperature, top-k, top-p, min-p, and sampling from the resulting distribution.

Top-k and top-p both keep the n likeliest tokens of a row and need only the n-th weight. The
vocabulary is never sorted, which would cost more than the rest of a step. Of equally likely tokens
at the edge the lowest ids are kept, so that top_k=1 is greedy.

Rows are processed one by one in numpy, so that a row stays in the cache. GPUs
(`baton.engine.kernels.triton.sampling`) give the same tokens, up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from baton.generation.sampling_params import SamplingParams

# Sampling searches the sums of blocks first, and then the weights of a block.
_BLOCK = 512
Floats = npt.NDArray[np.float32]
# Top-p sorts weights from this up, which nearly always suffice, before it sorts all.
_CANDIDATE = np.float32(2.0**-12)


def sample(
    logits: Floats, params: Sequence[SamplingParams], uniform: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """The token of each row `[rows]` at which the cumulative weight passes its number in [0, 1).

    logits: `[rows, vocab]`, not changed · uniform: `[rows]`. Weights are added by token id, in
    float64: so noise of 1e-7 in logits moves boundaries by as much, and changes one token in
    millions. A row whose logits are not finite gives a token beyond the vocabulary.
    """
    tokens = np.full(len(params), logits.shape[1], np.int64)
    for at, (row, settings, number) in enumerate(zip(logits, params, uniform, strict=True)):
        kept = row_weights(row, settings)
        sums = _running_sums(kept)
        total = sums[-1]
        if total > 0:  # false for NaN
            tokens[at] = _index_of_sum(kept, sums, float(number) * total)
    return tokens


def row_weights(logits: Floats, params: SamplingParams) -> Floats:
    """Unnormalised probabilities `[vocab]`: 1 for the likeliest token, 0 for dropped tokens.

    NaN if logits are not finite.
    """
    largest = logits.max()
    if not np.isfinite(largest):
        return np.full_like(logits, np.nan)
    result: Floats = logits - largest
    result /= np.float32(params.temperature)
    np.exp(result, out=result)
    if 0 < params.top_k < len(result):
        _keep(result, *_top_k_edge(result, params.top_k, params.top_p))
    elif params.top_p < 1:
        _keep(result, *_top_p_edge(result, params.top_p))
    if params.min_p:
        # The likeliest weight is 1, so min_p is a plain threshold.
        result *= result >= np.float32(params.min_p)
    return result


def _keep(row: Floats, count: int, edge: np.float32) -> None:
    """Sets all weights to 0 but the `count` largest, the smallest of which is `edge`."""
    keep = row >= edge
    excess = np.count_nonzero(keep) - count
    if excess > 0:  # of equal weights at the edge, the highest ids are dropped
        keep[np.flatnonzero(row == edge)[-excess:]] = False
    row *= keep


def _top_k_edge(row: Floats, top_k: int, top_p: float) -> tuple[int, np.float32]:
    """Number of weights that top-k followed by top-p keeps, and the smallest of them."""
    ranked = np.sort(np.partition(row, -top_k)[-top_k:])[::-1]
    if top_p == 1:
        return top_k, ranked[-1]
    return _nucleus(ranked, top_p, None)


def _top_p_edge(row: Floats, top_p: float) -> tuple[int, np.float32]:
    """Number of weights that top-p keeps, and the smallest of them."""
    total = float(_running_sums(row)[-1])
    candidates = row[row >= _CANDIDATE]
    if candidates.sum(dtype=np.float64) < top_p * total:
        candidates = row
    return _nucleus(np.sort(candidates)[::-1], top_p, total)


def _nucleus(ranked: Floats, top_p: float, total: float | None) -> tuple[int, np.float32]:
    """Number of the largest weights that make up `top_p` of the total, and the smallest of them.

    A weight is kept if those before it do not reach top_p. total: None is the sum of `ranked`.
    """
    sums = _running_sums(ranked)
    target = top_p * float(sums[-1] if total is None else total)
    last = _index_of_sum(ranked, sums, target, "left")
    return last + 1, ranked[last]


def _running_sums(values: Floats) -> npt.NDArray[np.float64]:
    """The sum of all weights up to the end of each block."""
    starts = np.arange(0, len(values), _BLOCK)
    return np.add.reduceat(values, starts, dtype=np.float64).cumsum()


def _index_of_sum(
    values: Floats,
    sums: npt.NDArray[np.float64],
    target: float,
    side: Literal["left", "right"] = "right",
) -> int:
    """The first index at which the cumulative sum passes `target`, or with "left" reaches it.

    If by rounding the target exceeds the total, the index of the last positive value.
    """
    block = min(sums.searchsorted(target, side), sums.searchsorted(sums[-1]))
    before = sums[block - 1] if block else 0.0
    inside = values[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    offset = min(inside.searchsorted(target - before, side), inside.searchsorted(inside[-1]))
    return int(block * _BLOCK + offset)
