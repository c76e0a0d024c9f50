"""Products of LoRA adapters: rows of a tile that share an adapter are multiplied together.

Programs are launched for every pair of a tile and a slot; one whose tile has no row of its slot
ends at once. So grids depend on sizes alone, as CUDA graphs need, and nothing is sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.torch.lora import LoraMatrices
from baton.engine.kernels.torch.lora import add_lora as reference_add_lora
from baton.engine.kernels.triton.pdl import launch, launch_dependents, wait_for_inputs
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Trial, dtype_of

_LEAST_RANK = 16  # of a tensor core product
_FEW_ROWS = 64  # up to here, as in decode steps, the depth is split among programs
_SPLIT = 4
_DEPTH, _OUTPUTS = 128, 128  # of a tile


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x, a, slots, inner, num_rows, depth, max_rank, x_stride, ROWS: tl.constexpr,
    RANK: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, FLOAT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """inner `[SPLIT, rows, sections, RANK]`: parts of `x @ A.T`."""
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    tile, slot = tl.program_id(0), tl.program_id(1)
    section, part = tl.program_id(2) // SPLIT, tl.program_id(2) % SPLIT
    sections = tl.num_programs(2) // SPLIT
    rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    own = tl.load(slots + rows, mask=rows < num_rows, other=-1) == slot
    if tl.max(own.to(tl.int32), 0) > 0:
        TYPE: tl.constexpr = tl.float32 if FLOAT else a.dtype.element_ty
        ranks, columns = tl.arange(0, RANK), tl.arange(0, DEPTH)
        lines = a + (slot.to(tl.int64) * sections + section) * max_rank * depth
        steps = tl.cdiv(depth, DEPTH)
        sums = tl.zeros([ROWS, RANK], dtype=tl.float32)
        for step in range(part * steps // SPLIT, (part + 1) * steps // SPLIT):
            at = step * DEPTH + columns
            inside = at < depth
            left = tl.load(
                x + rows[:, None] * x_stride + at[None, :],
                mask=own[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            right = tl.load(
                lines + ranks[None, :] * depth + at[:, None],
                mask=(ranks < max_rank)[None, :] & inside[:, None], other=0.0,
            )  # fmt: skip
            sums = tl.dot(left.to(TYPE), right.to(TYPE), sums, input_precision="ieee")
        to = ((part * num_rows + rows) * sections + section) * RANK
        tl.store(inner + to[:, None] + ranks[None, :], sums, mask=own[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    inner, b, slots, y, num_rows, outputs, max_rank, end_0, end_1, end_2, SECTIONS: tl.constexpr,
    ROWS: tl.constexpr, RANK: tl.constexpr, OUTPUTS: tl.constexpr, SPLIT: tl.constexpr,
    FLOAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y += inner @ B. A tile of outputs belongs to one section."""
    wait_for_inputs(PDL)
    launch_dependents(PDL)
    tile, slot, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    own = tl.load(slots + rows, mask=rows < num_rows, other=-1) == slot
    if tl.max(own.to(tl.int32), 0) > 0:
        section, first, end = 0, number * OUTPUTS, end_0
        if SECTIONS > 1:
            before = tl.cdiv(end_0, OUTPUTS)
            if number >= before:
                section, first, end = 1, end_0 + (number - before) * OUTPUTS, end_1
            if SECTIONS > 2:
                before += tl.cdiv(end_1 - end_0, OUTPUTS)
                if number >= before:
                    section, first, end = 2, end_1 + (number - before) * OUTPUTS, end_2
        TYPE: tl.constexpr = tl.float32 if FLOAT else b.dtype.element_ty
        ranks, columns = tl.arange(0, RANK), first + tl.arange(0, OUTPUTS)
        sums = tl.zeros([ROWS, RANK], dtype=tl.float32)
        for part in tl.static_range(SPLIT):
            at = ((part * num_rows + rows) * SECTIONS + section) * RANK
            sums += tl.load(inner + at[:, None] + ranks[None, :], mask=own[:, None], other=0.0)
        inside = columns < end
        right = tl.load(
            b + (slot.to(tl.int64) * max_rank + ranks[:, None]) * outputs + columns[None, :],
            mask=(ranks < max_rank)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        added = tl.dot(sums.to(b.dtype.element_ty).to(TYPE), right.to(TYPE), input_precision="ieee")
        to = y + rows[:, None] * outputs + columns[None, :]
        mask = own[:, None] & inside[None, :]
        before_y = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, (before_y + added).to(y.dtype.element_ty), mask=mask)


def add_lora(y: Tensor, x: Tensor, slots: Tensor, lora: LoraMatrices) -> None:
    """See `baton.engine.kernels.torch.lora.add_lora`. Never waits for the device."""
    (num_rows, outputs), (num_slots, _, depth) = y.shape, lora.a.shape
    assert y.is_contiguous() and x.stride(1) == 1
    few, rank = num_rows <= _FEW_ROWS, max(_LEAST_RANK, triton.next_power_of_2(lora.max_rank))
    tile_rows, split = (16, _SPLIT) if few else (64, 1)
    sections, tiles = len(lora.ends), triton.cdiv(num_rows, tile_rows)
    # The interpreter multiplies few types.
    inner = torch.empty(split, num_rows, sections, rank, dtype=torch.float32, device=x.device)
    launch(
        _shrink_kernel, (tiles, num_slots, sections * split), x, lora.a, slots, inner, num_rows,
        depth, lora.max_rank, x.stride(0), ROWS=tile_rows, RANK=rank, DEPTH=_DEPTH, SPLIT=split,
        FLOAT=x.device.type == "cpu", num_warps=4,
    )  # fmt: skip
    columns = sum(triton.cdiv(len(section), _OUTPUTS) for section in lora.sections)
    ends = (*lora.ends, 0, 0)[:3]
    launch(
        _expand_kernel, (tiles, num_slots, columns), inner, lora.b, slots, y, num_rows, outputs,
        lora.max_rank, *ends, SECTIONS=sections, ROWS=tile_rows, RANK=rank, OUTPUTS=_OUTPUTS,
        SPLIT=split, FLOAT=x.device.type == "cpu", num_warps=4,
    )  # fmt: skip


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, size, rank = (int(shape[name]) for name in ("rows", "size", "rank"))
    slots, dtype = int(shape["slots"]), dtype_of(shape)
    ends = {1: (size,), 2: (size // 2, size), 3: (size // 2, size - size // 4, size)}
    sections = int(shape["sections"])

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device).to(dtype)

    a, b = random(slots, sections * rank, size), random(slots, rank, size)
    ranks = torch.full((slots,), rank, dtype=torch.int32, device=device)
    lora = LoraMatrices(a / size**0.5, b / rank**0.5, ends[sections], ranks)
    x, y = random(rows, size), random(rows, size)
    of_rows = (torch.arange(rows, device=device) % (slots + 1) - 1).int()

    def run(config: Config | None) -> tuple[Tensor]:
        out = y.clone()
        add_lora(out, x, of_rows, lora)
        return (out,)

    def reference() -> tuple[Tensor]:
        out = y.clone()
        reference_add_lora(out, x, of_rows, lora)
        return (out,)

    return Trial({"rows": rows, "size": size}, run, reference)


SPECS = (
    KernelSpec(
        "add_lora",
        _trial,
        cases=(
            {"rows": 5, "size": 4096, "rank": 16, "slots": 2, "sections": 3},
            {"rows": 200, "size": 2048, "rank": 16, "slots": 4, "sections": 2},
            {"rows": 70, "size": 300, "rank": 24, "slots": 3, "sections": 1},
            {"rows": 9, "size": 300, "rank": 8, "slots": 8, "sections": 3, "dtype": "fp32"},
            {"rows": 33, "size": 512, "rank": 64, "slots": 2, "sections": 2, "dtype": "fp16"},
        ),
    ),
)
