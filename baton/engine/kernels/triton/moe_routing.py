"""MoE routing: selects the experts of each row, sorts (row, expert) pairs by expert, sums results.

A slot is one expert of one row. One launch computes slots from scores (of few rows the scores,
too), another sorts the slots by expert, like topk_softmax, moe_align_block_size and moe_fused_gate
of vLLM and SGLang. Nothing waits for the device, and grids follow from shapes, so that a CUDA graph
can hold the launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from baton.engine.kernels.moe_routing import Routing
from baton.engine.kernels.torch import moe_routing as reference
from baton.engine.kernels.triton.attention_common import LOWEST
from baton.engine.kernels.triton.launch_configs import tile_rows
from baton.engine.kernels.triton.pdl import launch, wait_for_inputs
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Trial, dtype_of

_SCORES = 2048  # maximum number in a program
_MANY = 512  # rows from which a program has more of them
FEW_ROWS = 4  # so few rows seldom share experts: each slot is a tile, and slots are not sorted


@dataclass(frozen=True)
class ExpertSlots:
    """The experts selected for rows.

    taken: int32 `[rows, per_row]`, experts numbered from this rank's first; -1 for padding and
    other ranks' experts · shares: float32 `[rows, per_row]`, weights of the experts' outputs ·
    tile_rows: maximum number of slots in a tile · order: int32 `[slots]`, the slot at each place,
    sorted by expert; undefined beyond the last one · tiles: int32 `[tiles, 3]`, a tile's expert,
    first place and number of places; -1 and undefined where there is no tile. order and tiles are
    None if each slot is a tile at the place of its own number.
    """

    taken: Tensor
    shares: Tensor
    tile_rows: int
    order: Tensor | None = None
    tiles: Tensor | None = None


@dataclass(frozen=True)
class FusedRouter:
    """A router's weight `[experts, in]` and bias `[experts]` or None, for scoring within `route`.

    arrived: int32 `[1]`, zero between launches; used by one launch at a time."""

    weight: Tensor
    bias: Tensor | None
    arrived: Tensor

    def takes(self, x: Tensor) -> bool:
        """Whether `route` can score these rows."""
        return len(x) <= FEW_ROWS and x.shape[1] <= 4096 and x.dtype == self.weight.dtype


def route(
    scores: Tensor, routing: Routing, own: range | None = None, correction: Tensor | None = None,
    lengths: Tensor | None = None, totals: Tensor | None = None, few_rows: int = FEW_ROWS,
    scored: tuple[FusedRouter, Tensor] | None = None, share_scale: Tensor | None = None,
) -> ExpertSlots:  # fmt: skip
    """Selects the best experts of each row, best first; of equal scores the lower number first.

    scores: `[rows, experts]`, the router's logits · own: experts on this rank; None is all ·
    correction: float32 `[experts]`, see the reference · lengths: int32 `[rows]`; rows of length 0
    select none · totals: int64 `[experts]`, counts of rows that are added to · few_rows: see
    FEW_ROWS · scored: a router and its input x `[rows, in]`; `scores` is then written ·
    share_scale: `[experts]`, which multiply shares, or None.
    """
    (rows, experts), per_row = scores.shape, routing.per_token
    own = own if own is not None else range(experts)
    assert scores.is_contiguous() and (totals is None or totals.is_contiguous())
    taken, shares = (
        torch.empty((rows, per_row), dtype=dtype, device=scores.device)
        for dtype in (torch.int32, torch.float32)
    )
    columns, device = triton.next_power_of_2(experts), scores.device
    # Rows of a program: few are fastest, but each program reads the counts of all programs.
    step = min(triton.next_power_of_2(rows), 4 if rows <= _MANY else 16)
    step = max(1, min(step, _SCORES // columns))
    height, ranks = tile_rows(rows * per_row, len(own), 1), None
    order = tiles = counts = x = weight = bias = arrived = None
    programs, each, depth = triton.cdiv(rows, step), 1, 1
    if rows <= few_rows:
        step, programs = triton.next_power_of_2(rows), 1
    else:
        # Each expert has at most one partial tile.
        most = min(rows * per_row, rows * per_row // height + len(own))
        order = torch.empty(rows * per_row, dtype=torch.int32, device=device)
        tiles = torch.empty((most, 3), dtype=torch.int32, device=device)
        ranks, counts = torch.empty_like(order), order.new_empty((programs, columns))
    if scored is not None:
        router, x = scored
        assert (
            order is None
            and router.takes(x)
            and x.is_contiguous()
            and router.weight.is_contiguous()
        )
        weight, bias, arrived, depth = router.weight, router.bias, router.arrived, x.shape[1]
        each = 2 if depth <= 2048 else 1
        programs = triton.cdiv(experts, each)
    launch(
        _route, (programs,), scores, x, weight, bias, arrived, correction, share_scale, lengths,
        taken, shares, totals, ranks, counts, rows, own.start, own.stop, depth, routing.scale,
        EXPERTS=experts, PER_ROW=per_row, NORMED=routing.normed, SIGMOID=routing.sigmoid,
        GROUPS=routing.groups, TAKEN_GROUPS=routing.taken_groups, GROUP_TOP=routing.group_top,
        ROWS=step, COLUMNS=columns, GROUP_COLUMNS=triton.next_power_of_2(routing.groups),
        EACH=each, DEPTH=triton.next_power_of_2(depth), num_warps=min(4, step),
    )  # fmt: skip
    if order is None or tiles is None:
        return ExpertSlots(taken, shares, 1)
    launch(
        _sort, (programs,), taken, ranks, counts, order, tiles, rows * per_row, programs,
        len(tiles), len(own), SLOTS=step * per_row, PADDED=triton.next_power_of_2(step * per_row),
        COLUMNS=columns, TILE=height, TILES=triton.cdiv(triton.cdiv(rows, height), programs),
        BLOCKS=min(64, triton.next_power_of_2(programs)), num_warps=4,
    )  # fmt: skip
    return ExpertSlots(taken, shares, height, order, tiles)


@triton.jit
def _by_score(scores, columns, COLUMNS: tl.constexpr):
    """Integers ordered as scores `[rows, COLUMNS]`, equal ones by descending column, which is in
    the lowest bits."""
    scores = tl.where(scores == 0, 0.0, scores)  # -0.0 becomes 0.0
    last = COLUMNS - 1 - columns
    if scores.dtype.scalar.primitive_bitwidth == 16:
        bits = scores.to(tl.int16, bitcast=True).to(tl.int32)
        order = (bits ^ (bits >> 31 & 0x7FFF)) << 16
    else:
        bits = scores.to(tl.int32, bitcast=True)
        order = (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(tl.int64) << 32
    return order | last


@triton.jit
def _score(
    scores, x, weight, bias, num_rows, depth, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    EACH: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the scores of EACH experts. Weights are loaded while the kernel in front runs."""
    expert = tl.program_id(0) * EACH + tl.arange(0, EACH)
    column = tl.arange(0, DEPTH)
    inside = (expert < EXPERTS)[:, None] & (column < depth)[None, :]
    factors = tl.load(weight + expert[:, None] * depth + column[None, :], mask=inside, other=0.0)
    added = tl.zeros([EACH], tl.float32)
    if bias is not None:
        added = tl.load(bias + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    for row in tl.static_range(ROWS):
        wanted = (column < depth) & (row < num_rows)
        part = tl.load(x + row * depth + column, mask=wanted, other=0.0).to(tl.float32)
        score = tl.sum(factors.to(tl.float32) * part[None, :], 1) + added
        is_score = (expert < EXPERTS) & (row < num_rows)
        tl.store(scores + row * EXPERTS + expert, score, mask=is_score)


@triton.jit
def _in_best_groups(
    choice, keys, expert, GROUPS: tl.constexpr, TAKEN_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr, GROUP_COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Which experts are in the groups of SIZE that a row takes. keys: `_by_score(choice)`."""
    LEAST: tl.constexpr = -(1 << (keys.dtype.scalar.primitive_bitwidth - 1))
    group = tl.arange(0, GROUP_COLUMNS)[None, :]
    group_scores = tl.full([choice.shape[0], GROUP_COLUMNS], LOWEST, tl.float32)
    for number in tl.static_range(GROUPS):
        left = tl.where(expert // SIZE == number, keys, LEAST)
        total = tl.zeros([choice.shape[0]], tl.float32)
        for _ in tl.static_range(GROUP_TOP):
            here = left == tl.max(left, 1)[:, None]
            total += tl.sum(tl.where(here, choice, 0.0), 1)
            left = tl.where(here, LEAST, left)
        group_scores = tl.where(group == number, total[:, None], group_scores)
    left = _by_score(group_scores, group, GROUP_COLUMNS)
    inside = tl.zeros(choice.shape, tl.int1)
    for _ in tl.static_range(TAKEN_GROUPS):
        best = tl.max(left, 1)
        number = GROUP_COLUMNS - 1 - (best & (GROUP_COLUMNS - 1)).to(tl.int32)
        inside = inside | (expert // SIZE == number[:, None])
        left = tl.where(left == best[:, None], LEAST, left)
    return inside


@triton.jit(do_not_specialize=["num_rows", "first", "end", "scale"])
def _route(
    scores, x, weight, bias, arrived, correction, share_scale, lengths, taken, shares, totals,
    ranks, counts, num_rows, first, end, depth, scale, EXPERTS: tl.constexpr, PER_ROW: tl.constexpr,
    NORMED: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, TAKEN_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr, EACH: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Routes ROWS rows over COLUMNS experts. Grid `[rows / ROWS]`.

    With a weight the grid is `[experts / EACH]`, and the last program to finish its scores routes
    all rows.
    """
    if weight is None:
        block = tl.program_id(0)
        wait_for_inputs(PDL)
    else:
        block = 0
        _score(scores, x, weight, bias, num_rows, depth, EXPERTS, ROWS, EACH, DEPTH, PDL)
        tl.debug_barrier()
        if tl.atomic_add(arrived, 1, sem="acq_rel") < tl.num_programs(0) - 1:
            return
        tl.store(arrived, 0)
    row = block * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, COLUMNS)[None, :]
    has_row = row < num_rows
    is_score = has_row[:, None] & (expert < EXPERTS)
    at = row.to(tl.int64)[:, None] * EXPERTS + expert
    given = tl.load(scores + at, mask=is_score, other=0.0, cache_modifier=".cg")
    wide = tl.where(is_score, given.to(tl.float32), LOWEST)
    powers = tl.exp(wide - tl.max(wide, 1)[:, None])
    if SIGMOID:
        powers = 1.0 / (1.0 + tl.exp(-tl.where(is_score, wide, 0.0)))
    choice = given
    if SIGMOID or GROUPS > 1 or correction is not None:
        choice = powers
        if not SIGMOID:
            choice = powers / tl.sum(powers, 1)[:, None]
        if correction is not None:
            choice += tl.load(correction + expert, mask=expert < EXPERTS, other=0.0)
    left = _by_score(choice, expert, COLUMNS)
    LEAST: tl.constexpr = -(1 << (left.dtype.scalar.primitive_bitwidth - 1))
    left = tl.where(expert < EXPERTS, left, LEAST)
    if GROUPS > 1:
        inside = _in_best_groups(
            choice, left, expert, GROUPS, TAKEN_GROUPS, GROUP_TOP, GROUP_COLUMNS, EXPERTS // GROUPS
        )
        left = tl.where(inside, left, LEAST)
    which = tl.full([ROWS, COLUMNS], -1, tl.int32)
    for number in tl.static_range(PER_ROW):
        best = tl.max(left, 1)
        here = expert == (COLUMNS - 1 - (best & (COLUMNS - 1)).to(tl.int32))[:, None]
        which = tl.where(here, number, which)
        left = tl.where(here, LEAST, left)
    is_taken = which >= 0
    share = powers
    if NORMED:
        share = powers / tl.sum(tl.where(is_taken, powers, 0.0), 1)[:, None]
    elif not SIGMOID:
        share = powers / tl.sum(powers, 1)[:, None]
    share = share * scale
    if share_scale is not None:
        factor = tl.load(share_scale + expert, mask=expert < EXPERTS, other=0.0)
        share = share * factor.to(tl.float32)

    counts_here = has_row
    if lengths is not None:
        counts_here = tl.load(lengths + row, mask=has_row, other=0) > 0
    takes = is_taken & counts_here[:, None]
    is_own = takes & (expert >= first) & (expert < end)
    slot = row[:, None] * PER_ROW + which
    is_slot = is_taken & has_row[:, None]
    tl.store(shares + slot, share, mask=is_slot)
    tl.store(taken + slot, tl.where(is_own, expert - first, -1), mask=is_slot)
    experts = tl.arange(0, COLUMNS)
    if totals is not None:
        added = tl.sum(takes.to(tl.int32), 0)
        tl.atomic_add(totals + experts, added.to(tl.int64), mask=added > 0, sem="relaxed")
    if ranks is not None:
        own = is_own.to(tl.int32)
        tl.store(ranks + slot, tl.cumsum(own, 0) - 1, mask=is_own)
        # Experts are numbered as in `taken`.
        to = counts + block * COLUMNS + experts - first
        tl.store(to, tl.sum(own, 0), mask=(experts >= first) & (experts < end))


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "most", "own"])
def _sort(
    taken, ranks, counts, order, tiles, num_slots, num_blocks, most, own, SLOTS: tl.constexpr,
    PADDED: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the places of one block's slots, and a share of the tiles. Grid `[blocks]`, as in
    `_route`.

    ranks: int32 `[slots]`, number of earlier slots of the block with the same expert · counts:
    int32 `[blocks, COLUMNS]`, slots of each block for each expert.
    """
    block = tl.program_id(0)
    expert = tl.arange(0, COLUMNS)
    within = tl.arange(0, PADDED)
    slot = block * SLOTS + within
    is_slot = (within < SLOTS) & (slot < num_slots)
    total = tl.zeros([COLUMNS], tl.int32)
    before = tl.zeros([COLUMNS], tl.int32)
    wait_for_inputs(PDL)
    number = tl.load(taken + slot, mask=is_slot, other=-1)
    rank = tl.load(ranks + slot, mask=number >= 0, other=0)
    for begin in range(0, num_blocks, BLOCKS):
        other = begin + tl.arange(0, BLOCKS)
        found = tl.load(
            counts + other[:, None] * COLUMNS + expert[None, :],
            mask=(other < num_blocks)[:, None] & (expert < own)[None, :], other=0,
        )  # fmt: skip
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((other < block)[:, None], found, 0), 0)
    first_place = tl.cumsum(total, 0) - total
    place = tl.gather(first_place + before, tl.maximum(number, 0), 0) + rank
    tl.store(order + place, slot, mask=number >= 0)
    num_tiles = (total + TILE - 1) // TILE
    first_tile = tl.cumsum(num_tiles, 0) - num_tiles
    for turn in tl.static_range(TILES):
        tile = turn * num_blocks + block
        to = tiles + (first_tile + tile) * 3
        tl.store(to, expert, mask=tile < num_tiles)
        tl.store(to + 1, first_place + tile * TILE, mask=tile < num_tiles)
        tl.store(to + 2, tl.minimum(total - tile * TILE, TILE), mask=tile < num_tiles)
    for begin in range(tl.sum(num_tiles, 0) + block * COLUMNS, most, num_blocks * COLUMNS):
        tl.store(tiles + (begin + expert) * 3, -1, mask=begin + expert < most)


def moe_sum(
    weighed: Tensor, slots: ExpertSlots, dtype: torch.dtype, stream: Tensor | None = None
) -> Tensor:
    """The sum of the outputs of each row's experts on this rank: `[rows, size]` of dtype.

    weighed: `[slots * parts, size]`, outputs times shares, each slot in one or several parts ·
    stream: `[rows, size]` of dtype, which the sum is added to in place.
    """
    rows, per_row = slots.taken.shape
    parts, size = len(weighed) // slots.taken.numel(), weighed.shape[1]
    out = torch.empty((rows, size), dtype=dtype, device=weighed.device)
    out = out if stream is None else stream
    assert out.is_contiguous() and out.dtype == dtype
    block = min(1024, triton.next_power_of_2(size))
    launch(
        _moe_sum, (rows, triton.cdiv(size, block)), weighed, slots.taken, out, size,
        PER_ROW=per_row, PARTS=parts, ADDS=stream is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _moe_sum(
    weighed, taken, out, size, PER_ROW: tl.constexpr, PARTS: tl.constexpr, ADDS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums BLOCK columns of a row. Grid `[rows, size / BLOCK]`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    wait_for_inputs(PDL)
    for number in tl.static_range(PER_ROW):
        slot = row * PER_ROW + number
        is_here = tl.load(taken + slot) >= 0
        for part in tl.static_range(PARTS):
            at = weighed + (slot * PARTS + part) * size + column
            found = tl.load(at, mask=column < size, other=0.0)
            total += tl.where(is_here, found.to(tl.float32), 0.0)
    to = out + row * size + column
    element = out.dtype.element_ty
    if ADDS:  # rounded where torch rounds
        before = tl.load(to, mask=column < size, other=0.0).to(tl.float32)
        total = before + total.to(element).to(tl.float32)
    tl.store(to, total.to(element), mask=column < size)


def _trial(shape: Key, device: torch.device) -> Trial:
    """Routing with equal scores, a part of the experts on this rank, and some padding rows.

    Undefined elements beyond the last slot and tile are not compared."""
    rows, experts, per_row = (int(shape[name]) for name in ("scored", "experts", "per_row"))
    scores = (4 * torch.randn(rows, experts, device=device)).to(dtype_of(shape))
    scores[:, 1:3] = scores[:, :1]  # the first is selected
    scored = None
    if depth := int(shape.get("depth", 0)):
        weight = torch.randn(experts, depth, device=device) / depth**0.5
        weight[1:3] = weight[:1]
        x = (2 * torch.randn(rows, depth, device=device)).to(scores.dtype)
        bias = torch.randn(experts, device=device).to(scores.dtype) if shape.get("bias") else None
        arrived = torch.zeros(1, dtype=torch.int32, device=device)
        scored = FusedRouter(weight.to(scores.dtype), bias, arrived), x
        wide, added = scored[0].weight.float(), bias if bias is None else bias.float()
    groups, taken, top = (int(shape.get(name, 1)) for name in ("groups", "taken", "top"))
    routing = Routing(
        per_row, bool(shape.get("normed")), bool(shape.get("sigmoid")), groups, taken, top,
        float(shape.get("scale", 1.0)),
    )  # fmt: skip
    correction = torch.randn(experts, device=device) if shape.get("corrected") else None
    factors = torch.rand(experts, device=device) if shape.get("scaled") else None
    start = int(shape.get("start", 0))
    own = range(start, experts - start)
    is_row = torch.arange(rows, device=device) % 5 != 3
    lengths = is_row.int() if shape.get("padding") else None
    totals = torch.zeros(experts, dtype=torch.int64, device=device)

    def run(config: Config | None) -> tuple[Tensor, ...]:
        totals.zero_()
        slots = route(
            scores, routing, own, correction, lengths, totals, scored=scored, share_scale=factors
        )
        found = (slots.shares, slots.taken, totals) + ((scores.clone(),) if scored else ())
        if slots.order is None or slots.tiles is None or device.type == "meta":
            return found
        tiles = slots.tiles[slots.tiles[:, 0] >= 0]
        here = int((slots.taken >= 0).sum())
        return (*found, slots.order[:here], tiles)

    def expected() -> tuple[Tensor, ...]:
        # From the scores that the launch wrote: other rounding may select other experts.
        shares, numbers = reference.route(scores, routing, correction)
        shares = shares if factors is None else shares * factors[numbers]
        counted = numbers if lengths is None else numbers[is_row]
        products = () if scored is None else (linear(x.float(), wide, added).to(scores.dtype),)
        found = (numbers - start).where((numbers >= own.start) & (numbers < own.stop), -1)
        if lengths is not None:
            found = found.where(is_row[:, None], -1)
        total = counted.flatten().bincount(minlength=experts)
        if rows <= FEW_ROWS:
            return shares, found.int(), total, *products
        flat, tiles, place = found.flatten(), list[tuple[int, int, int]](), 0
        order = flat.argsort(stable=True)[int((flat < 0).sum()) :].int()
        height = tile_rows(rows * per_row, len(own), 1)
        for expert, count in enumerate(flat[flat >= 0].bincount(minlength=len(own)).tolist()):
            for at in range(0, count, height):
                tiles.append((expert, place + at, min(height, count - at)))
            place += count
        listed = torch.tensor(tiles, dtype=torch.int32, device=device)
        return shares, found.int(), total, *products, order, listed

    return Trial({}, run, expected, moved_bytes=scores.nbytes)


def _moe_sum_trial(shape: Key, device: torch.device) -> Trial:
    rows, per_row, size = (int(shape[name]) for name in ("rows", "per_row", "size"))
    dtype, parts = dtype_of(shape), int(shape.get("parts", 1))
    weighed = torch.randn(rows, per_row, parts, size, device=device)
    weighed = weighed.to(dtype if parts == 1 else torch.float32)
    taken = torch.arange(rows * per_row, dtype=torch.int32, device=device).view(rows, per_row) % 4
    slots = ExpertSlots(taken - 1, torch.empty(0), 1)
    weighed[slots.taken < 0] = torch.nan  # other ranks' slots are not read
    stream = torch.randn(rows, size, device=device).to(dtype)

    def run(config: Config | None) -> tuple[Tensor]:
        to = stream.clone() if shape.get("adds") else None
        return (moe_sum(weighed.view(-1, size), slots, dtype, to),)

    def expected() -> tuple[Tensor]:
        here = weighed.float().where((slots.taken >= 0)[..., None, None], 0.0)
        sums = here.sum((1, 2)).to(dtype)
        return (sums + stream if shape.get("adds") else sums,)

    return Trial({}, run, expected, moved_bytes=weighed.nbytes)


_DEEPSEEK_V3: Key = {
    "experts": 256, "per_row": 8, "groups": 8, "taken": 4, "top": 2, "sigmoid": 1, "normed": 1,
    "corrected": 1, "scale": 2, "dtype": "fp32",
}  # fmt: skip
_CASES: tuple[Key, ...] = (
    {"scored": 1, "experts": 128, "per_row": 8, "normed": 1},
    {"scored": 2, "experts": 60, "per_row": 4, "start": 7, "padding": 1},
    {"scored": 5, "experts": 8, "per_row": 2, "normed": 1, "dtype": "fp32", "padding": 1},
    {"scored": 64, "experts": 128, "per_row": 8, "normed": 1, "padding": 1, "scaled": 1},
    {"scored": 100, "experts": 32, "per_row": 4, "dtype": "fp16", "start": 5},
    {"scored": 70, "experts": 512, "per_row": 10, "dtype": "fp32", "start": 100, "padding": 1},
    {"scored": 300, "experts": 128, "per_row": 4, "normed": 1, "padding": 1},
    {"scored": 1, "experts": 128, "per_row": 8, "normed": 1, "depth": 2048},
    {"scored": 4, "experts": 60, "per_row": 4, "depth": 200, "bias": 1, "dtype": "fp32"},
    {"scored": 3, **_DEEPSEEK_V3, "depth": 200},
    {"scored": 40, **_DEEPSEEK_V3, "padding": 1},
    {"scored": 9, **_DEEPSEEK_V3, "taken": 2, "normed": 0},
    {"scored": 20, "experts": 160, "per_row": 6, "groups": 8, "taken": 3, "scale": 16, "start": 20},
    {"scored": 7, "experts": 64, "per_row": 6, "normed": 1, "corrected": 1, "dtype": "fp32"},
)
SPECS = (
    KernelSpec("route", _trial, cases=_CASES),
    KernelSpec(
        "moe_sum",
        _moe_sum_trial,
        cases=(
            {"rows": 64, "per_row": 8, "size": 2048},
            {"rows": 1, "per_row": 4, "size": 2880, "parts": 4, "adds": 1},
            {"rows": 5, "per_row": 3, "size": 300, "dtype": "fp32", "adds": 1},
        ),
    ),
)
