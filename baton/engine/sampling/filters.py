"""The distribution a token is sampled from (temperature, top-k, top-p, min-p), and the sampling.

Top-k and top-p both keep the n likeliest tokens of a row, for an n of the row's own, and need only
the n-th weight. A whole vocabulary is never sorted: that would cost more than the rest of a step.
Of equally likely tokens at the edge the lowest ids stay, so that top_k=1 is greedy.

On a GPU rows are worked on together, without waiting: shapes follow from the settings, which the
host knows. On a CPU (`sample_on_cpu`) they are worked on one by one in numpy, where a row stays in
the cache. Both keep and sample the same, up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.sampling import SamplingParams

# Entries summed first: sampling searches vocab / 512 sums and then 512 weights.
_BLOCK = 512
_ROWS_AT_ONCE = 64  # cut at once: each weight takes some forty bytes meanwhile
# Top-p sorts weights into buckets by their leading bits, which order positive floats by size, then
# those of the bucket in which it is reached by the next bits, until all bits are known.
_LEVELS = ((18, (0x3F800000 >> 18) + 1), (9, 1 << 9), (0, 1 << 9))  # (bits behind, buckets)

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _RANKED, _NUCLEUS = range(6)
NUM_SETTINGS = 6  # rows of `Settings.values`


class Settings(NamedTuple):
    """What `weigh` needs of the settings of some rows.

    values: float64 `[NUM_SETTINGS, rows]`, one setting of all rows after the other; the last two
    name those that top-k cuts, and those that top-p alone does · num_ranked, num_nucleus: how many
    those are · largest_top_k: of the former · min_p: whether any row has one.
    """

    values: npt.NDArray[np.float64]
    num_ranked: int
    num_nucleus: int
    largest_top_k: int
    min_p: bool


def settings_of(params: Sequence[SamplingParams], vocab_size: int) -> Settings:
    """The settings of rows; every temperature is above 0."""
    ranked = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    nucleus = [i for i, p in enumerate(params) if p.top_p < 1 and not 0 < p.top_k < vocab_size]
    values = np.zeros((NUM_SETTINGS, len(params)))
    values[:_RANKED] = np.array([(p.temperature, p.top_k, p.top_p, p.min_p) for p in params]).T
    values[_RANKED, : len(ranked)] = ranked
    values[_NUCLEUS, : len(nucleus)] = nucleus
    largest_top_k = max((params[i].top_k for i in ranked), default=0)
    min_p = any(p.min_p for p in params)
    return Settings(values, len(ranked), len(nucleus), largest_top_k, min_p)


def weigh(logits: Tensor, settings: Settings, values: Tensor | None = None) -> Tensor:
    """Unnormalised probabilities `[rows, vocab]`: 1 for the likeliest token, 0 for dropped ones.

    `logits` is `[rows, vocab]` float32 and is not changed. values: `settings.values`, where they
    are on the device of the logits already.
    """
    if values is None:
        values = torch.from_numpy(settings.values).to(logits.device)
    result = logits - logits.amax(1, keepdim=True)
    columns = values[:_RANKED, :, None]
    result.div_(columns[_TEMPERATURE].to(result.dtype)).exp_()
    for index in _groups(values[_RANKED, : settings.num_ranked]):
        picked, limit, share = result[index], columns[_TOP_K][index].long(), columns[_TOP_P][index]
        result[index] = _cut(picked, *_top_k_edges(picked, limit, share, settings.largest_top_k))
    for index in _groups(values[_NUCLEUS, : settings.num_nucleus]):
        picked, share = result[index], columns[_TOP_P][index]
        result[index] = _cut(picked, *_top_p_edges(picked, share))
    if settings.min_p:
        # The likeliest weight is 1, so min_p is a plain threshold.
        result.masked_fill_(result < columns[_MIN_P].to(result.dtype), 0)
    return result


def sample(row_weights: Tensor, uniform: Tensor) -> Tensor:
    """Tokens `[rows]` where each row's cumulative weight passes its number in [0, 1).

    Weights are added up in token-id order, which no rounding can reorder: noise of 1e-7 in the
    logits moves each boundary by as much and changes one token in millions. The sums are float64.
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


def _groups(rows: Tensor) -> tuple[Tensor, ...]:
    """Row numbers, as many as are cut at once; nothing for none."""
    return rows.long().split(_ROWS_AT_ONCE) if len(rows) else ()


def _cut(row_weights: Tensor, kept: Tensor, edge: Tensor) -> Tensor:
    """Sets all but the `kept` likeliest weights, the last of which is `edge`, to 0.

    `kept` and `edge` are `[rows, 1]`.
    """
    above, at_edge = row_weights > edge, row_weights == edge
    room = kept - above.sum(1, keepdim=True)
    keep = above | (at_edge & (at_edge.cumsum(1, dtype=torch.int32) <= room))
    return row_weights.masked_fill(~keep, 0)


def _top_k_edges(
    row_weights: Tensor, limit: Tensor, share: Tensor, largest: int
) -> tuple[Tensor, Tensor]:
    """How many tokens top-k, and top-p of what it leaves, keep, and the last one's weight.

    limit: top-k, share: top-p, both `[rows, 1]`; `largest` of the limits.
    """
    ranked = row_weights.topk(largest).values
    cumulative = ranked.cumsum(1, dtype=torch.float64)
    target = share * cumulative.gather(1, limit - 1)
    # A token stays if those before it do not reach top_p: the one that reaches it stays too, and
    # it lies within top-k, whose tokens make up the total.
    nucleus = 1 + (cumulative < target).sum(1, keepdim=True)
    kept = torch.where(share < 1, nucleus, limit)
    return kept, ranked.gather(1, kept - 1)


def _top_p_edges(row_weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens top-p keeps, and the last one's weight; `[rows, 1]` each.

    share: top-p, `[rows, 1]`. Histograms of mass find the bucket in which it is reached, then the
    bucket of those in it, down to the one weight.
    """
    # The clamp is for weights that are not numbers, which `sample` reports.
    bits = row_weights.view(torch.int32).clamp(0, 0x3F800000)
    mass = row_weights.to(torch.float64)
    before, target = torch.zeros_like(share), share * mass.sum(1, keepdim=True)
    inside = torch.ones_like(bits, dtype=torch.bool)
    above = torch.zeros_like(share, dtype=torch.long)  # how many are in larger buckets
    edge = torch.zeros_like(above)
    for shift, buckets in _LEVELS:
        largest_first = (buckets - 1 - (bits >> shift) % (1 << (buckets - 1).bit_length())).long()
        sums = mass.new_zeros((len(mass), buckets))
        sums.scatter_add_(1, largest_first, mass.masked_fill(~inside, 0))
        cumulative = sums.cumsum(1) + before
        # Sums in another order may fall short of the target by rounding: then it is the last one.
        last = (sums > 0).cumsum(1).argmax(1, keepdim=True)
        crossing = torch.minimum(torch.searchsorted(cumulative, target), last)
        before = torch.where(
            crossing > 0, cumulative.gather(1, (crossing - 1).clamp(min=0)), before
        )
        above += (inside & (largest_first < crossing)).sum(1, keepdim=True)
        inside &= largest_first == crossing
        edge += (buckets - 1 - crossing) << shift
    weight = edge.int().view(torch.float32)
    needed = ((target - before) / weight).ceil().clamp(min=1)
    return above + torch.minimum(needed, inside.sum(1, keepdim=True)).long(), weight


Floats = npt.NDArray[np.float32]
# Top-p sorts the weights from here up, which is nearly always enough, before it sorts all.
_CANDIDATE = np.float32(2.0**-12)


def sample_on_cpu(
    logits: Floats, params: Sequence[SamplingParams], uniform: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Tokens `[rows]` where each row's cumulative weight passes its number in [0, 1).

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
    """`weigh` of one row `[vocab]`; no numbers if its logits are none."""
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
