"""Products of LoRA adapters in plain torch: the reference of faster kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.torch.linear import product


@dataclass(frozen=True, eq=False)
class LoraMatrices:
    """What the adapters of all slots add to one product.

    The product's outputs are divided into sections (query, key and value; gate and up), and an
    adapter has an A of its own for each. Ranks are padded with zeros to `max_rank`.

    a: `[slots, sections * max_rank, in]` · b: `[slots, max_rank, out]`, scales included · ends:
    where each section ends · ranks: int32 `[slots]`, the largest rank of the slot's adapter.
    """

    a: Tensor
    b: Tensor
    ends: tuple[int, ...]
    ranks: Tensor

    @property
    def max_rank(self) -> int:
        return self.b.shape[1]

    @property
    def sections(self) -> list[range]:
        """The outputs of each section."""
        return [range(*pair) for pair in zip((0, *self.ends), self.ends, strict=False)]


def add_lora(y: Tensor, x: Tensor, slots: Tensor, lora: LoraMatrices) -> None:
    """Adds `x @ A.T @ B` of each row's adapter to y, in float32.

    y: `[rows, out]` · x: `[rows, in]` · slots: int32 `[rows]`, -1 without an adapter.
    """
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        rows = torch.where(slots == slot)[0]
        wide, rank = x[rows].float(), lora.max_rank
        for number, section in enumerate(lora.sections):
            a = lora.a[slot, number * rank : (number + 1) * rank].float()
            b = lora.b[slot, :, section.start : section.stop].float()
            added = product(product(wide, a), b.T)
            columns = y[:, section.start : section.stop]
            columns[rows] = (columns[rows].float() + added).to(y.dtype)
