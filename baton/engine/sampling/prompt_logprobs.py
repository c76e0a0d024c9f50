"""Log-probabilities of a prompt's own tokens, from the logits of the rows before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.scheduler import ScheduledSequence
from baton.errors import InternalError

_ROWS = 32  # worked on at a time: their log-probabilities stay in the cache


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Of consecutive prompt tokens, each given those before it. Under the model alone.

    logprobs: float32 `[tokens]` · ranks: int64 `[tokens]`, 1 where no token is likelier · top_ids,
    top_logprobs: `[tokens, k]`, the likeliest, best first, of equals the lowest id.
    """

    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]


def of_prompts(
    work: Sequence[ScheduledSequence], logits: Tensor
) -> tuple[Tensor, dict[str, PromptLogprobs]]:
    """(the logits of rows that sample, by sequence id what was asked for of the others).

    logits: float32 `[rows, vocab]` of each work's `scored` positions, then of those that it samples
    at. Raises InternalError for logits that are not numbers.
    """
    found: dict[str, PromptLogprobs] = {}
    sampling, at = list[int](), 0
    for item in work:
        if scored := item.scored:
            sequence, end = item.sequence, at + len(scored)
            targets = sequence.tokens[scored.start + 1 : scored.stop + 1]
            if (top := sequence.params.prompt_logprobs) is not None:  # else they are for pooling
                found[sequence.seq_id] = logprobs_of(logits[at:end], targets, top)
            at = end
        if item.samples:
            sampling += range(at, at := at + 1 + len(item.proposed))
    if len(sampling) == len(logits):
        return logits, found
    return logits.index_select(0, torch.tensor(sampling, device=logits.device).long()), found


def logprobs_of(logits: Tensor, token_ids: Sequence[int], top: int) -> PromptLogprobs:
    """Of the token that follows each row; logits float32 `[rows, vocab]`."""
    targets = torch.tensor(token_ids, device=logits.device)[:, None]
    parts = zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)
    columns = [_part(rows.log_softmax(1), chosen, top) for rows, chosen in parts]
    logprobs, ranks, ids, best = (torch.cat(column).cpu().numpy() for column in zip(*columns))  # noqa: B905 - equally long
    if np.isnan(logprobs).any():
        raise InternalError("logits are not finite numbers: the model's output is broken")
    order = np.lexsort((ids, -best))
    ids, best = (np.take_along_axis(column, order, 1) for column in (ids, best))
    return PromptLogprobs(logprobs, ranks, ids, best)


def _part(logprobs: Tensor, chosen: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = logprobs.gather(1, chosen)
    best = logprobs.topk(min(top, logprobs.shape[1]))
    return own[:, 0], 1 + (logprobs > own).sum(1), best.indices, best.values
