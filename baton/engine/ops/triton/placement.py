"""Where each row of a step belongs: its position, its slot in the pool, how many tokens it sees.

One small launch for what `baton.engine.ops.torch.attention` does in a dozen, and without asking the
device for a number: the grid depends on shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.spec import CompileCase, Config, KernelSpec, Key, Trial

CONFIG = Config(num_warps=4, num_stages=1, sizes={"ROWS": 128, "SEQUENCES": 32})

# The three lie apart by multiples of so many elements: kernels would be compiled once more, in the
# midst of serving, for addresses that are not aligned.
_ALIGNED = 32


@dataclass(frozen=True)
class Placement:
    """All int32 `[rows]`.

    positions: of each row in its sequence; 0 for padding · slots: block * block_size + offset of
    the row's own K and V; -1 for padding · lengths: tokens the row sees, its own included; 0 for
    padding.
    """

    positions: Tensor
    slots: Tensor
    lengths: Tensor


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "width"])
def _place_rows(
    contexts,
    ends,
    tables,
    positions,
    slots,
    lengths,
    num_rows,
    num_sequences,
    width,
    block_size,
    ONE_EACH: tl.constexpr,
    ROWS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    owner = rows
    begin = rows
    if not ONE_EACH:
        #  ends:   3       7          counts 3, 4
        #  row:    0 1 2 | 3 4 5 6    a row's owner is the number of ends at or before it
        owner = tl.zeros([ROWS], dtype=tl.int32)
        for first in range(0, num_sequences, SEQUENCES):
            sequences = first + tl.arange(0, SEQUENCES)
            end = tl.load(ends + sequences, mask=sequences < num_sequences, other=2147483647)
            owner += tl.sum((end[None, :] <= rows[:, None]).to(tl.int32), axis=1)
        begin = tl.load(ends + owner - 1, mask=inside & (owner > 0), other=0)
    context = tl.load(contexts + owner, mask=inside, other=-1)
    taken = context >= 0
    position = tl.where(taken, context + rows - begin, 0)
    entry = tables + owner.to(tl.int64) * width + position // block_size
    block = tl.load(entry, mask=taken, other=0)
    slot = tl.where(taken, block * block_size + position % block_size, -1)
    tl.store(positions + rows, position, mask=inside)
    tl.store(slots + rows, slot, mask=inside)
    tl.store(lengths + rows, tl.where(taken, position + 1, 0), mask=inside)


def place_rows(
    contexts: Tensor, counts: Tensor | None, tables: Tensor, num_rows: int, block_size: int
) -> Placement:
    """Rows of sequences, one after the other, over blocks of `block_size` tokens.

    contexts: int32 `[sequences]`, tokens before a sequence's first row; -1 makes padding of a
    sequence of one row · counts: int32 `[sequences]`, rows of each; None is one each · tables:
    int32 `[sequences, width]`, with the block of every row.
    """
    assert tables.is_contiguous(), "a sequence's blocks are `width` entries behind the one before"
    apart = -(-num_rows // _ALIGNED) * _ALIGNED
    held = torch.empty((3, apart), dtype=torch.int32, device=contexts.device)
    positions, slots, lengths = held[:, :num_rows].unbind()
    ends = contexts if counts is None else counts.cumsum(0, dtype=torch.int32)
    _place_rows[(triton.cdiv(num_rows, CONFIG["ROWS"]),)](
        contexts,
        ends,
        tables,
        positions,
        slots,
        lengths,
        num_rows,
        len(contexts),
        tables.shape[1],
        block_size,
        ONE_EACH=counts is None,
        **CONFIG.launch,
    )
    return Placement(positions, slots, lengths)


def place_rows_reference(
    contexts: Tensor, counts: Tensor | None, tables: Tensor, num_rows: int, block_size: int
) -> Placement:
    """The same in torch."""
    rows = torch.arange(num_rows, device=contexts.device)
    each = torch.ones_like(contexts) if counts is None else counts
    owner = torch.arange(len(contexts), device=rows.device)
    owner = owner.repeat_interleave(each, output_size=num_rows)
    begins = each.cumsum(0) - each
    padding = contexts[owner] < 0
    positions = (contexts[owner] + rows - begins[owner]).masked_fill(padding, 0)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    return Placement(
        positions.int(),
        slots.masked_fill(padding, -1).int(),
        (positions + 1).masked_fill(padding, 0).int(),
    )


def _case(name: str, one_each: bool) -> CompileCase:
    pointers = ("contexts", "ends", "tables", "positions", "slots", "lengths")
    numbers = ("num_rows", "num_sequences", "width", "block_size")
    types = dict.fromkeys(pointers, "*i32") | dict.fromkeys(numbers, "i32")
    constexprs = {"ONE_EACH": one_each, **CONFIG.sizes}
    return CompileCase(
        name, _place_rows, types, constexprs, CONFIG.num_warps, CONFIG.num_stages,
        aligned=("block_size",),
    )  # fmt: skip


def _inputs(key: Key, device: torch.device) -> Trial:
    rows = int(key["rows"])
    contexts = torch.arange(rows, dtype=torch.int32, device=device)
    tables = torch.zeros((rows, triton.cdiv(rows, 16)), dtype=torch.int32, device=device)
    return Trial(key, lambda _: place_rows(contexts, None, tables, rows, 16), 20 * rows)


SPEC = KernelSpec(
    name="placement",
    cases=(_case("one row each", True), _case("chunks", False)),
    candidates=lambda key: [CONFIG],
    shapes=({"rows": 64}, {"rows": 2048}),
    inputs=_inputs,
)
