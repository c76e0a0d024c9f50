"""The draws of `baton.engine.sampling.filters` on a CPU: row by row in numpy.

A row of weights stays in the processor's cache through all that is done to it, and numpy sorts and
partitions with vector instructions: a whole vocabulary takes a fraction of a millisecond. What is
kept and drawn is what `filters` keeps and draws, up to the rounding of its sums; a row's token
depends neither on other rows nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from baton.sampling import SamplingParams

Weights = npt.NDArray[np.float32]
_BLOCK = 512  # weights summed first: a search runs over sums, then over one block's weights
# Top-p sorts the weights from here up, which is nearly always enough, before it sorts all.
_CANDIDATE = np.float32(2.0**-12)


def draw(
    logits: Weights, params: Sequence[SamplingParams], uniform: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Tokens `[rows]` where each row's cumulative weight passes its number in [0, 1).

    `logits` is `[rows, vocab]` and is not changed. A row whose logits are not numbers gives a token
    beyond the vocabulary.
    """
    tokens = np.full(len(params), logits.shape[1], np.int64)
    for at, (row, settings, number) in enumerate(zip(logits, params, uniform, strict=True)):
        kept = weights(row, settings)
        sums = _block_sums(kept)
        total = sums[-1]
        if total > 0:  # not if it is no number
            tokens[at] = _where_sum_passes(kept, sums, float(number) * total)
    return tokens


def weights(logits: Weights, params: SamplingParams) -> Weights:
    """`filters.weights` of one row `[vocab]`; no numbers if its logits are none."""
    largest = logits.max()
    if not np.isfinite(largest):
        return np.full_like(logits, np.nan)
    result: Weights = logits - largest
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


def _keep(row: Weights, count: int, edge: np.float32) -> None:
    """Sets all but the `count` largest weights, the last of which is `edge`, to 0."""
    keep = row >= edge
    excess = np.count_nonzero(keep) - count
    if excess > 0:  # equals at the edge, of which the highest ids go
        keep[np.flatnonzero(row == edge)[-excess:]] = False
    row *= keep


def _top_k_edge(row: Weights, top_k: int, top_p: float) -> tuple[int, np.float32]:
    """How many weights top-k, and top-p of what it leaves, keep, and the last one."""
    ranked = _largest_first(np.partition(row, -top_k)[-top_k:])
    if top_p == 1:
        return top_k, ranked[-1]
    return _nucleus(ranked, top_p, None)


def _top_p_edge(row: Weights, top_p: float) -> tuple[int, np.float32]:
    """How many weights top-p keeps, and the last one."""
    total = float(_block_sums(row)[-1])
    candidates = row[row >= _CANDIDATE]
    if candidates.sum(dtype=np.float64) < top_p * total:
        candidates = row
    return _nucleus(_largest_first(candidates), top_p, total)


def _nucleus(ranked: Weights, top_p: float, total: float | None) -> tuple[int, np.float32]:
    """How many of the largest weights make up `top_p` of the total, and the last one.

    A weight stays if those before it do not reach top_p: the one that reaches it stays too.
    `total` None is what `ranked` sums up to.
    """
    sums = _block_sums(ranked)
    target = top_p * float(sums[-1] if total is None else total)
    last = _where_sum_passes(ranked, sums, target, "left")
    return last + 1, ranked[last]


def _largest_first(values: Weights) -> Weights:
    return np.sort(values)[::-1]


def _block_sums(values: Weights) -> npt.NDArray[np.float64]:
    """The sum of all weights up to the end of each block of them."""
    starts = np.arange(0, len(values), _BLOCK)
    return np.add.reduceat(values, starts, dtype=np.float64).cumsum()


def _where_sum_passes(
    values: Weights,
    sums: npt.NDArray[np.float64],
    target: float,
    side: Literal["left", "right"] = "right",
) -> int:
    """The first place where the sum of all values so far passes `target`, or reaches it ("left").

    Rounding may put the target past the sum of all: then it is the last positive value's place.
    """
    block = min(sums.searchsorted(target, side), sums.searchsorted(sums[-1]))
    before = sums[block - 1] if block else 0.0
    inside = values[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    offset = min(inside.searchsorted(target - before, side), inside.searchsorted(inside[-1]))
    return int(block * _BLOCK + offset)
