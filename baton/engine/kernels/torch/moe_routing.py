"""MoE routing in plain torch: the reference of the routing kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def route(scores: Tensor, per_token: int, normed: bool) -> tuple[Tensor, Tensor]:
    """The best experts of each row, best first: float32 shares and int64 numbers, each
    `[rows, per_token]`.

    scores: `[rows, experts]`; of equal ones the lower expert is taken first · normed: shares are of
    those taken, not of all experts.
    """
    best, numbers = scores.float().sort(dim=-1, descending=True, stable=True)
    best, numbers = (x[:, :per_token].contiguous() for x in (best, numbers))
    if normed:
        return torch.softmax(best, dim=-1), numbers
    return torch.softmax(scores.float(), dim=-1).gather(1, numbers), numbers
