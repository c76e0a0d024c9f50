"""Slots of experts are sorted as torch sorts them."""

from __future__ import annotations

import pytest
import torch

from baton.engine.ops.triton.grouped_matmul import sort_slots


@pytest.mark.parametrize(("rows", "per_row", "experts"), [(1, 1, 1), (5, 2, 6), (700, 3, 40)])
def test_slots_are_sorted_by_expert(rows: int, per_row: int, experts: int) -> None:
    """Some take an expert that is not here, numbered behind those that are."""
    generator = torch.Generator().manual_seed(rows)
    taken = torch.randint(experts + 1, (rows, per_row), generator=generator)
    slots = sort_slots(taken, experts)
    counts = taken.flatten().bincount(minlength=experts + 1)[:experts]
    assert torch.equal(slots.counts.long(), counts)
    here = int(counts.sum())
    assert torch.equal(slots.order[:here].long(), taken.flatten().argsort(stable=True)[:here])
    places = slots.tiles.places
    assert {*places[places[:, 0] >= 0, 0].tolist()} == {*counts.nonzero().flatten().tolist()}
