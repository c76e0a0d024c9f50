"""MoE routing in plain torch: the reference of the routing kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.kernels.moe_routing import Routing


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The best experts of each row, best first: float32 shares and int64 numbers, each
    `[rows, per_token]`.

    logits: `[rows, experts]`, the router's; of equal ones the lower expert is taken first ·
    correction: float32 `[experts]`, added to scores to select experts, but not to their shares.
    """
    logits = logits.float()
    # In float32 torch's last bits of sigmoids depend on the number of rows.
    scores = torch.softmax(logits, dim=-1)
    if routing.sigmoid:
        scores = logits.double().sigmoid().float()
    # Of a softmax the order is that of its inputs, which do not underflow.
    choice = logits if correction is None and not routing.sigmoid else scores
    if routing.groups > 1:
        choice = scores
    if correction is not None:
        choice = choice + correction
    if routing.groups > 1:
        choice = choice.masked_fill(~_in_best_groups(choice, routing), -torch.inf)
    numbers = choice.sort(dim=-1, descending=True, stable=True).indices
    numbers = numbers[:, : routing.per_token].contiguous()
    if routing.normed and not routing.sigmoid:
        shares = torch.softmax(logits.gather(1, numbers), dim=-1)
    else:
        shares = scores.gather(1, numbers)
        if routing.normed:
            shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares * routing.scale, numbers


def _in_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """Which experts are in the groups that a row takes: bool, like `choice`."""
    by_group = choice.unflatten(1, (routing.groups, -1))
    group_scores = by_group.topk(routing.group_top, dim=-1).values.sum(dim=-1)
    best = group_scores.sort(dim=-1, descending=True, stable=True).indices
    taken = torch.zeros_like(group_scores, dtype=torch.bool)
    taken.scatter_(1, best[:, : routing.taken_groups], True)
    return taken.repeat_interleave(by_group.shape[2], dim=1)
