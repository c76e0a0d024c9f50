"""The distribution a token is sampled from (temperature, top-k, top-p, min-p), and the sampling.

Top-k and top-p both keep the n likeliest tokens of a row, for an n of the row's own, and need only
the n-th weight. A whole vocabulary is never sorted: that would cost more than the rest of a step.
Of equally likely tokens at the edge the lowest ids stay, so that top_k=1 is greedy.

Rows are worked on one by one in numpy, where a row stays in the cache. A GPU
(`baton.engine.kernels.triton.sampling`) keeps and samples the same, up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from baton.generation.sampling_params import SamplingParams

# Entries summed first: sampling searches vocab / 512 sums and then 512 weights.
_BLOCK = 512
Floats = npt.NDArray[np.float32]
# Top-p sorts the weights from here up, which is nearly always enough, before it sorts all.
_CANDIDATE = np.float32(2.0**-12)


def sample(
    logits: Floats, params: Sequence[SamplingParams], uniform: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Tokens `[rows]` where each row's cumulative weight passes its number in [0, 1).

    Weights are added up in token-id order, which no rounding can reorder: noise of 1e-7 in the
    logits moves each boundary by as much and changes one token in millions. The sums are float64.
    `logits` is `[rows, vocab]` and is not changed. A row whose logits are not numbers gives a token
    beyond the vocabulary.
    """
    tokens = np.full(len(params), logits.shape[1], np.int64)
    for at, (row, settings, number) in enumerate(zip(logits, params, uniform, strict=True)):
        kept = row_weights(row, settings)
        sums = _running_sums(kept)
        total = sums[-1]
        if total > 0:  # not if it is no number
            tokens[at] = _where_sum_passes(kept, sums, float(number) * total)
    return tokens


def row_weights(logits: Floats, params: SamplingParams) -> Floats:
    """Unnormalised probabilities `[vocab]`: 1 for the likeliest token, 0 for dropped ones.

    No numbers if the logits are none.
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
    """Sets all but the `count` largest weights, the last of which is `edge`, to 0."""
    keep = row >= edge
    excess = np.count_nonzero(keep) - count
    if excess > 0:  # equals at the edge, of which the highest ids go
        keep[np.flatnonzero(row == edge)[-excess:]] = False
    row *= keep


def _top_k_edge(row: Floats, top_k: int, top_p: float) -> tuple[int, np.float32]:
    """How many weights top-k, and top-p of what it leaves, keep, and the last one."""
    ranked = np.sort(np.partition(row, -top_k)[-top_k:])[::-1]
    if top_p == 1:
        return top_k, ranked[-1]
    return _nucleus(ranked, top_p, None)


def _top_p_edge(row: Floats, top_p: float) -> tuple[int, np.float32]:
    """How many weights top-p keeps, and the last one."""
    total = float(_running_sums(row)[-1])
    candidates = row[row >= _CANDIDATE]
    if candidates.sum(dtype=np.float64) < top_p * total:
        candidates = row
    return _nucleus(np.sort(candidates)[::-1], top_p, total)


def _nucleus(ranked: Floats, top_p: float, total: float | None) -> tuple[int, np.float32]:
    """How many of the largest weights make up `top_p` of the total, and the last one.

    A weight stays if those before it do not reach top_p: the one that reaches it stays too.
    `total` None is what `ranked` sums up to.
    """
    sums = _running_sums(ranked)
    target = top_p * float(sums[-1] if total is None else total)
    last = _where_sum_passes(ranked, sums, target, "left")
    return last + 1, ranked[last]


def _running_sums(values: Floats) -> npt.NDArray[np.float64]:
    """The sum of all weights up to the end of each block of them."""
    starts = np.arange(0, len(values), _BLOCK)
    return np.add.reduceat(values, starts, dtype=np.float64).cumsum()


def _where_sum_passes(
    values: Floats,
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
