"""The distribution a token is drawn from (temperature, top-k, top-p, min-p), and the draw.

Top-k and top-p both keep the n likeliest tokens of a row, for an n of the row's own, and need only
the n-th weight. A whole vocabulary is never sorted: that would cost more than the rest of a step.
Of equally likely tokens at the edge the lowest ids stay, so that top_k=1 is greedy. On a CPU
`baton.engine.row_draws` does the same faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.sampling import SamplingParams

# Entries summed first, so that a draw scans vocab / 512 sums and then 512 weights.
_BLOCK = 512
# Top-p sorts weights into buckets by their leading bits, which order positive floats by size:
# exponent and 5 bits of mantissa, so that a bucket's weights differ by 3 % at most.
_BUCKET_SHIFT = 18
_BUCKETS = (0x3F800000 >> _BUCKET_SHIFT) + 1  # 0x3F800000 is 1.0, the largest weight


def weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Unnormalised probabilities `[rows, vocab]`: 1 for the likeliest token, 0 for dropped ones.

    `logits` is `[rows, vocab]` float32 and is not changed; every temperature is above 0.
    """
    result = logits - logits.amax(1, keepdim=True)
    temperature = _column([p.temperature for p in params], logits)
    result.div_(temperature).exp_()
    vocab_size = logits.shape[1]
    ranked = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    nucleus = [i for i, p in enumerate(params) if p.top_p < 1 and i not in set(ranked)]
    for which, edges in ((ranked, _top_k_edges), (nucleus, _top_p_edges)):
        if which:
            index = torch.tensor(which, device=logits.device)
            picked = result[index]
            result[index] = _cut(picked, *edges(picked, [params[i] for i in which]))
    if any(p.min_p for p in params):
        # The likeliest weight is 1, so min_p is a plain threshold.
        result.masked_fill_(result < _column([p.min_p for p in params], logits), 0)
    return result


def draw(row_weights: Tensor, uniform: Tensor) -> Tensor:
    """Tokens `[rows]` where each row's cumulative weight passes its number in [0, 1).

    Weights are added up in token-id order, which no rounding can reorder: noise of 1e-7 in the
    logits moves each boundary by as much and changes one draw in millions. The sums are float64.
    A row whose weights are not numbers gives a token beyond the vocabulary.
    """
    vocab_size = row_weights.shape[1]
    cumulative = _block_sums(row_weights).cumsum(1)
    target = uniform[:, None].to(torch.float64) * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=row_weights.device)
    inside = row_weights.gather(1, ids.clamp(max=vocab_size - 1)).masked_fill(ids >= vocab_size, 0)
    inner = inside.cumsum(1, dtype=torch.float64)
    offset = torch.searchsorted(inner, target - before, right=True)
    # Rounding may put the target past the block's last positive weight; stop at that one.
    offset = torch.minimum(offset, torch.searchsorted(inner, inner[:, -1:].contiguous()))
    broken = ~(cumulative[:, -1:] > 0)  # true for nan
    return (block * _BLOCK + offset).masked_fill(broken, vocab_size)[:, 0]


def _block_sums(row_weights: Tensor) -> Tensor:
    """Sums of each `_BLOCK` weights `[rows, blocks]` float64; the last may be of fewer."""
    whole = row_weights.shape[1] // _BLOCK * _BLOCK
    blocks = row_weights[:, :whole].unflatten(1, (whole // _BLOCK, _BLOCK))
    rest = row_weights[:, whole:].sum(1, keepdim=True, dtype=torch.float64)
    return torch.cat([blocks.sum(2, dtype=torch.float64), rest], 1)


def _cut(row_weights: Tensor, kept: Tensor, edge: Tensor) -> Tensor:
    """Sets all but the `kept` likeliest weights, the last of which is `edge`, to 0.

    `kept` and `edge` are `[rows, 1]`.
    """
    keep = row_weights >= edge
    if bool((keep.sum(1, keepdim=True) > kept).any()):  # equals at the edge, of which some go
        above, at_edge = row_weights > edge, row_weights == edge
        room = kept - above.sum(1, keepdim=True)
        keep = above | (at_edge & (at_edge.cumsum(1) <= room))
    return row_weights.masked_fill(~keep, 0)


def _top_k_edges(row_weights: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """How many tokens top-k, and top-p of what it leaves, keep, and the last one's weight."""
    top_k = [p.top_k for p in params]
    limit = torch.tensor(top_k, device=row_weights.device)[:, None]
    ranked = row_weights.topk(max(top_k)).values
    cumulative = ranked.cumsum(1, dtype=torch.float64)
    share = _column([p.top_p for p in params], cumulative)
    target = share * cumulative.gather(1, limit - 1)
    # A token stays if those before it do not reach top_p: the one that reaches it stays too, and
    # it lies within top-k, whose tokens make up the total.
    nucleus = 1 + (cumulative < target).sum(1, keepdim=True)
    kept = torch.where(share < 1, nucleus, limit)
    return kept, ranked.gather(1, kept - 1)


def _top_p_edges(row_weights: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """How many tokens top-p keeps, and the last one's weight; `[rows, 1]` each.

    A histogram of mass finds the bucket in which top-p is reached; only that one is ranked.
    """
    # The clamp is for weights that are not numbers, which `draw` reports.
    bucket = (row_weights.view(torch.int32) >> _BUCKET_SHIFT).clamp_(0, _BUCKETS - 1)
    largest_first = (_BUCKETS - 1 - bucket).long()
    mass = torch.zeros(
        (len(params), _BUCKETS), dtype=torch.float64, device=row_weights.device
    ).scatter_add_(1, largest_first, row_weights.to(torch.float64))
    cumulative = mass.cumsum(1)
    target = _column([p.top_p for p in params], cumulative) * cumulative[:, -1:]
    crossing = torch.searchsorted(cumulative, target).clamp(max=_BUCKETS - 1)
    before = torch.where(crossing > 0, cumulative.gather(1, (crossing - 1).clamp(min=0)), 0.0)
    inside = largest_first == crossing
    size = inside.sum(1, keepdim=True).clamp(min=1)
    ranked = row_weights.masked_fill(~inside, 0).topk(int(size.max())).values
    reached = before + ranked.cumsum(1, dtype=torch.float64)
    # Sums in another order may fall short of the bucket's by rounding: no more than it holds.
    nucleus = torch.minimum(1 + (reached < target).sum(1, keepdim=True), size)
    kept = (largest_first < crossing).sum(1, keepdim=True) + nucleus
    return kept, ranked.gather(1, nucleus - 1)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
