"""Log-probabilities of sampled tokens, and of a prompt's from the logits before each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.scheduler import ScheduledSequence

_ROWS = 32  # processed at a time, so that log-probabilities stay in the cache


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the tokens that the row's grammar allows.

    No other sampling setting changes them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens, without sampling settings.

    logprobs: float32 `[tokens]` · ranks: int64 `[tokens]`, 1 for the likeliest token · top_ids,
    top_logprobs: `[tokens, k]`, the likeliest tokens, best first, equal ones by id.
    """

    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]


def split_prompt_logprobs(
    work: Sequence[ScheduledSequence], logits: Tensor
) -> tuple[Tensor, dict[str, PromptLogprobs]]:
    """(logits of the rows to sample, prompt log-probabilities by sequence id).

    logits: float32 `[rows, vocab]`, for each work first of its `scored` positions, then of those it
    samples at.
    """
    found: dict[str, PromptLogprobs] = {}
    sampling, at = list[int](), 0
    for item in work:
        if scored := item.scored:
            sequence, end = item.sequence, at + len(scored)
            targets = sequence.tokens[scored.start + 1 : scored.stop + 1]
            if (top := sequence.params.prompt_logprobs) is not None:  # else they are for pooling
                found[sequence.seq_id] = compute_logprobs(logits[at:end], targets, top)
            at = end
        if item.samples:
            sampling += range(at, at := at + 1 + len(item.proposed))
    if len(sampling) == len(logits):
        return logits, found
    return logits.index_select(0, torch.tensor(sampling, device=logits.device).long()), found


def compute_logprobs(logits: Tensor, token_ids: Sequence[int], top: int) -> PromptLogprobs:
    """Log-probabilities of the token after each row; NaN where a row's logits are not finite.

    logits: float32 `[rows, vocab]`.
    """
    targets = torch.tensor(token_ids, device=logits.device)[:, None]
    parts = zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)
    columns = [_part(rows.log_softmax(1), chosen, top) for rows, chosen in parts]
    found = (torch.cat(column).cpu().numpy() for column in zip(*columns))  # noqa: B905 - equally long
    return PromptLogprobs(*found)


def _part(logprobs: Tensor, chosen: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = logprobs.gather(1, chosen)
    return own[:, 0], 1 + (logprobs > own).sum(1), *likeliest(logprobs, top)


def token_logprobs(
    logprobs: Tensor, token_ids: Sequence[int], wanted: Sequence[int]
) -> list[TokenLogprobs]:
    """What each row's caller wants: of its sampled token, and of as many of the likeliest.

    logprobs: float32 `[rows, vocab]`.
    """
    chosen = logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    ids, best = likeliest(logprobs, max(wanted))
    rows = zip(token_ids, chosen, ids.tolist(), best.tolist(), wanted, strict=True)
    return [possible(*row) for row in rows]


def possible(
    token_id: int, logprob: float, top_ids: Sequence[int], top: Sequence[float], wanted: int
) -> TokenLogprobs:
    """A token's log-probability, and the first `wanted` of the likeliest that are possible."""
    found = [pair for pair in zip(top_ids, top, strict=True) if pair[1] > -np.inf]
    return TokenLogprobs(token_id, logprob, tuple(found[:wanted]))


def likeliest(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids int64, values) `[rows, count]` of the likeliest tokens, best first, equal ones by id.

    logprobs: `[rows, vocab]`. `count` is reduced to the vocabulary.
    """
    best, ids = logprobs.topk(min(count, logprobs.shape[1]))
    edge = best[:, -1:] if count else best.new_full((len(best), 1), torch.nan)
    # `topk` takes any of the tokens that equal the last; these are the rows where it left some out.
    cut = (logprobs == edge).sum(1) > (best == edge).sum(1)
    for row in (cut & (edge[:, 0] > -torch.inf)).nonzero()[:, 0]:
        above = int((best[row] > edge[row]).sum())
        equal = (logprobs[row] == edge[row]).nonzero()[:, 0]
        ids[row, above:] = equal[: ids.shape[1] - above]
    ids, order = ids.sort(1)
    best, by_value = best.gather(1, order).sort(dim=1, descending=True, stable=True)
    return ids.gather(1, by_value), best
