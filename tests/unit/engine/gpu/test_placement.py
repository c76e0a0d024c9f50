"""Rows find their place: positions, slots and lengths."""

import pytest
import torch

from baton.engine.batch import StepBatch
from baton.engine.ops.torch.attention import place
from baton.engine.ops.triton.placement import place_rows


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def batch(query_lens, context_lens, block_size):
    """Sequences over scattered blocks, their block_tables one block wider than they need."""
    width = max(map(sum, zip(context_lens, query_lens, strict=True))) // block_size + 2
    block_tables = torch.randperm(
        len(query_lens) * width, generator=torch.Generator().manual_seed(5)
    ).int()
    return StepBatch(
        token_ids=torch.zeros(sum(query_lens), dtype=torch.int32),
        context_lens=ints(context_lens),
        query_lens=ints(query_lens),
        block_tables=block_tables.view(len(query_lens), width),
        logit_rows=ints([]),
        num_decodes=query_lens.count(1),
    )


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1], [0]),
        ([1, 1, 1], [0, 15, 100]),
        ([5], [0]),
        ([1, 1, 7, 40, 2], [31, 4, 0, 16, 333]),
        ([300, 2], [0, 16]),
        ([1] * 40 + [3] * 30, [7] * 70),
    ],
)
def test_rows_lie_where_the_torch_model_puts_them(query_lens, context_lens, block_size):
    step = batch(query_lens, context_lens, block_size)
    got = place_rows(
        step.context_lens, step.query_lens, step.block_tables, sum(query_lens), block_size
    )
    assert all(part.dtype == torch.int32 for part in (got.positions, got.slots, got.lengths))
    positions, attention = place(step, block_size)
    assert got.positions.tolist() == positions.tolist()
    assert got.slots.tolist() == attention.slots.tolist()
    num_decodes = step.num_decodes
    assert got.lengths[:num_decodes].tolist() == attention.decode_lengths.tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 33])
def test_kernels_find_aligned_addresses_whatever_the_number_of_rows(rows):
    """Triton compiles a kernel once more for others."""
    got = place_rows(ints([0] * rows), None, torch.zeros((rows, 1), dtype=torch.int32), rows, 16)
    for part in (got.positions, got.slots, got.lengths):
        assert part.is_contiguous() and part.data_ptr() % 16 == 0
