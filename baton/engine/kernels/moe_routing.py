"""How a mixture of experts selects the experts of a row: one set of options. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Routing:
    """The options of `baton.engine.kernels.torch.moe_routing.route`.

    per_token: number of experts that a row takes · normed: whether their shares add up to 1 (before
    `scale`) · sigmoid: whether scores are sigmoids of the router's outputs, or a softmax over all
    experts · groups, taken_groups: experts are in groups of neighbours, and a row takes experts of
    its best `taken_groups` only · group_top: number of a group's best scores whose sum is the
    group's · scale: multiplies shares.
    """

    per_token: int
    normed: bool
    sigmoid: bool = False
    groups: int = 1
    taken_groups: int = 1
    group_top: int = 1
    scale: float = 1.0
