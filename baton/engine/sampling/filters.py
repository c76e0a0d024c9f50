"""The distribution a token is drawn from (temperature, top-k, top-p, min-p), and the draw.

Top-k and top-p both keep the n likeliest tokens of a row, for an n of the row's own, and need only
the n-th weight. A whole vocabulary is never sorted: that would cost more than the rest of a step.
Of equally likely tokens at the edge the lowest ids stay, so that top_k=1 is greedy. On a CPU
`baton.engine.sampling.row_sampling` does the same faster.

Nothing here waits for the device: shapes follow from the settings, which the host knows. They come
as one array, so that one copy brings them to a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.sampling import SamplingParams

# Entries summed first, so that a draw scans vocab / 512 sums and then 512 weights.
_BLOCK = 512
_ROWS_AT_ONCE = 64  # cut at once: each weight takes some forty bytes meanwhile
# Top-p sorts weights into buckets by their leading bits, which order positive floats by size, then
# those of the bucket in which it is reached by the next bits, until all bits are known.
_LEVELS = ((18, (0x3F800000 >> 18) + 1), (9, 1 << 9), (0, 1 << 9))  # (bits behind, buckets)

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _RANKED, _NUCLEUS = range(6)
NUM_SETTINGS = 6  # rows of `Settings.values`


class Settings(NamedTuple):
    """What `weights` needs of the settings of some rows.

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


def weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Unnormalised probabilities `[rows, vocab]`: 1 for the likeliest token, 0 for dropped ones.

    `logits` is `[rows, vocab]` float32 and is not changed; every temperature is above 0.
    """
    settings = settings_of(params, logits.shape[1])
    return weigh(logits, torch.from_numpy(settings.values).to(logits.device), settings)


def weigh(logits: Tensor, values: Tensor, settings: Settings) -> Tensor:
    """`weights`, where `values` is `settings.values` on the device of the logits."""
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
    # The clamp is for weights that are not numbers, which `draw` reports.
    bits = row_weights.view(torch.int32).clamp(0, 0x3F800000)
    mass = row_weights.to(torch.float64)
    before, target = torch.zeros_like(share), share * mass.sum(1, keepdim=True)
    inside = torch.ones_like(bits, dtype=torch.bool)
    above = torch.zeros_like(share, dtype=torch.long)  # how many are in larger buckets
    edge = torch.zeros_like(above)
    for shift, buckets in _LEVELS:
        largest_first = (buckets - 1 - (bits >> shift) % _span(buckets)).long()
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


def _span(buckets: int) -> int:
    """What leading bits are counted modulo."""
    return 1 << (buckets - 1).bit_length()
