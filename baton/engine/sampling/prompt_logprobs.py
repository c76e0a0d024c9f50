"""Log-probabilities of a prompt's tokens, from the logits of the preceding positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.scheduler import ScheduledSequence

_ROWS = 32  # processed at a time, so that log-probabilities stay in the cache


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
    logprobs, ranks, ids, best = (torch.cat(column).cpu().numpy() for column in zip(*columns))  # noqa: B905 - equally long
    order = np.lexsort((ids, -best))
    ids, best = (np.take_along_axis(column, order, 1) for column in (ids, best))
    return PromptLogprobs(logprobs, ranks, ids, best)


def _part(logprobs: Tensor, chosen: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = logprobs.gather(1, chosen)
    best = logprobs.topk(min(top, logprobs.shape[1]))
    return own[:, 0], 1 + (logprobs > own).sum(1), best.indices, best.values
