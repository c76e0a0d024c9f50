"""Products of a mixture of experts: each row with the experts that it takes, in one launch.

A slot is one of the experts of one row. Slots are sorted by expert, and each expert's are cut into
tiles, on the device and without waiting for it: the grid follows from shapes, so that a CUDA graph
can hold it, and programs beyond the last tile end at once (as in vLLM's fused_moe, and in the
grouped products of MegaBlocks, https://arxiv.org/abs/2211.15841). Experts' matrices stay where they
were loaded: kernels are given their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.attention import Tiles, plan_tiles, tile_rows
from baton.engine.ops.triton.group_matmul import group_sums, numbers_of
from baton.engine.ops.triton.rows import quantize_rows
from baton.engine.ops.triton.spec import Config, KernelSpec, Key, Trial, dtype_of, product_of
from baton.engine.ops.triton.tuning import choose
from baton.engine.weights.quantize import FP8
from baton.engine.weights.weight import (
    DenseWeight,
    Fp8BlockWeight,
    Fp8Weight,
    GroupScaledWeight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    RowScaledWeight,
    Weight,
)
from baton.errors import ConfigError

NAME = "grouped_matmul"
_POINTED = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv, torch.uint8: tl.uint8,
}  # fmt: skip
Held = DenseWeight | RowScaledWeight | GroupScaledWeight


@dataclass(frozen=True)
class Slots:
    """The experts that rows take, by expert.

    order: int32 `[slots]`, the slot at each place, row * per_row + which of the row's experts;
    behind those of all experts anything · counts: int32 `[experts]`, slots of each · tiles: of an
    expert's places, as attention's.
    """

    order: Tensor
    counts: Tensor
    tiles: Tiles
    per_row: int


def sort_slots(taken: Tensor, experts: int) -> Slots:
    """taken: experts `[rows, per_row]`, of so many; higher numbers are in none of the tiles.

    Waits for nothing on the device.
    """
    assert taken.is_contiguous()
    order, counts = (
        torch.empty(size, dtype=torch.int32, device=taken.device)
        for size in (taken.numel(), experts)
    )
    _sort_slots[(experts,)](taken, order, counts, len(order), BLOCK=1024, num_warps=4)
    return Slots(order, counts, plan_tiles(counts, len(order), 1), taken.shape[1])


@triton.jit(do_not_specialize=["num_slots"])
def _sort_slots(taken, order, counts, num_slots, BLOCK: tl.constexpr):
    """The slots of one expert, in their order, behind those of lower ones. Grid `[experts]`.

    In torch it takes six operations, each of which takes as long.
    """
    expert = tl.program_id(0)
    lower = tl.zeros([BLOCK], dtype=tl.int32)
    own = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, num_slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        number = tl.load(taken + slot, mask=slot < num_slots, other=0x7FFFFFFF)
        lower += (number < expert).to(tl.int32)
        own += (number == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(own, 0))
    place = tl.sum(lower, 0)
    for first in range(0, num_slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        number = tl.load(taken + slot, mask=slot < num_slots, other=0x7FFFFFFF)
        here = (number == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(here, 0) - 1, slot, mask=here > 0)
        place += tl.sum(here, 0)


@dataclass(frozen=True)
class GroupedWeight:
    """The same matrix `[out, in]` of every expert of a layer, and its biases `[out]`, or none.

    values, scales, zeros, bias: int64 `[experts]`, addresses; scales and zeros of formats with any.
    """

    weights: tuple[Held, ...]
    biases: tuple[Tensor, ...]
    values: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> GroupedWeight:
        """Raises ConfigError where experts are of several formats or in act-order."""
        held = tuple(map(_uniform, weights))
        if len({type(one) for one in held}) > 1:
            raise ConfigError(
                "some experts of a layer are quantised and some are not, which computes on a CPU "
                "only: add --device cpu"
            )
        given = tuple(bias for bias in biases if bias is not None)
        values, scales, zeros = map(_addresses, zip(*map(_tensors, held), strict=True))
        assert values is not None
        return cls(held, given, values, scales, zeros, _addresses(given))

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return _tensors(self.weights[0])[0].dtype

    def apply(
        self, x: Tensor, slots: Slots, shares: Tensor | None = None, config: Config | None = None
    ) -> Tensor:
        """Each slot's row times its expert's matrix: of x's type.

        Without shares x is `[rows, in]`, and the result `[slots, out]` by place in `slots.order`;
        with shares, float32 `[slots]`, x is by place, and the result by slot and weighed. config:
        of the launch; None is that of `tuning`.
        """
        (num_outputs, depth), tiles = self.weights[0].shape, slots.tiles
        out = torch.empty((len(slots.order), num_outputs), dtype=x.dtype, device=x.device)
        config = config or choose(NAME, _key(self, tiles.rows), x.device)
        first, row_scales = self.weights[0], None
        group = first.group if isinstance(first, GroupScaledWeight) else 0
        if isinstance(first, RowScaledWeight):
            x, row_scales = quantize_rows(x, self.dtype)
        assert x.is_contiguous() and (shares is None or shares.is_contiguous())
        is_int8 = x.dtype == torch.int8
        # The interpreter has products of few types.
        factors = tl.float32 if x.device.type == "cpu" and not is_int8 else _POINTED[x.dtype]
        grid = (len(tiles.places), triton.cdiv(num_outputs, config["OUTPUTS"]))
        _grouped_matmul[grid](
            x, row_scales, self.values, self.scales, self.zeros, self.bias, slots.order,
            slots.counts, tiles.places, shares, out, num_outputs, depth, PER_ROW=slots.per_row,
            STORED=tl.uint8 if group else _POINTED[self.dtype], GROUP=group,
            NUMBERS=numbers_of(first), BIAS=_POINTED[out.dtype], TYPE=factors,
            SUMS=tl.int32 if is_int8 else tl.float32, WHOLE=depth % config["DEPTH"] == 0,
            ROWS=tiles.rows, **config,
        )  # fmt: skip
        return out


def _uniform(weight: Weight) -> Held:
    """A weight with zero points, if they are int4's."""
    assert isinstance(weight, DenseWeight | RowScaledWeight | GroupScaledWeight)
    if not isinstance(weight, Int4Weight):
        return weight
    if weight.order is not None:
        raise ConfigError("experts in act-order compute on a CPU only: add --device cpu")
    zeros = torch.full_like(weight.scales, Int4Weight.MIDDLE, dtype=torch.uint8)
    return replace(weight, zeros=zeros) if weight.zeros is None else weight


def _tensors(weight: Held) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values, scales and zero points."""
    if isinstance(weight, DenseWeight):
        return weight.tensor, None, None
    return weight.values, weight.scales, getattr(weight, "zeros", None)


def _addresses(tensors: Sequence[Tensor | None]) -> Tensor | None:
    found = [one for one in tensors if one is not None]
    if not found:
        return None
    assert all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in found)
    addresses = [one.data_ptr() for one in found]
    return torch.tensor(addresses, dtype=torch.int64, device=found[0].device)


@triton.jit
def _expert_row(addresses, expert, columns, wanted, TYPE: tl.constexpr):
    """Elements of an expert's vector, float32."""
    row = tl.load(addresses + expert).to(tl.pointer_type(TYPE))
    return tl.load(row + columns, mask=wanted, other=0.0).to(tl.float32)


@triton.jit
def _grouped_matmul(
    x, row_scales, values, scales, zeros, biases, order, counts, places, shares, out, num_outputs,
    depth, PER_ROW: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr, NUMBERS: tl.constexpr,
    BIAS: tl.constexpr, TYPE: tl.constexpr, SUMS: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of an expert's places, and some outputs. Grid `[tiles, outputs / OUTPUTS]`."""
    place = places + tl.program_id(0) * 3
    expert = tl.load(place)
    if expert < 0:
        return
    at = tl.load(place + 2) + tl.arange(0, ROWS)
    has_row = tl.arange(0, ROWS) < tl.load(counts + expert) - tl.load(place + 1)
    slots = tl.load(order + at, mask=has_row, other=0)
    if shares is None:
        rows = slots // PER_ROW
        to = at
    else:
        rows = at
        to = slots
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    has_output = outputs < num_outputs
    matrix = tl.multiple_of(tl.load(values + expert).to(tl.pointer_type(STORED)), 16)
    left = x + rows.to(tl.int64) * depth
    if GROUP > 0:
        scale = tl.load(scales + expert).to(tl.pointer_type(tl.float32))
        zero = zeros
        if zeros is not None:
            zero = tl.load(zeros + expert).to(tl.pointer_type(tl.uint8))
        found = group_sums(
            left, matrix, scale, zero, outputs, has_row, has_output, depth, GROUP, NUMBERS, TYPE,
            ROWS, OUTPUTS,
        )  # fmt: skip
    else:
        right = matrix + outputs.to(tl.int64)[None, :] * depth
        sums = tl.zeros([ROWS, OUTPUTS], dtype=SUMS)
        for first in range(0, depth, DEPTH):
            column = first + tl.arange(0, DEPTH)
            has_left = has_row[:, None]
            has_right = has_output[None, :]
            if not WHOLE:
                has_left = has_left & (column < depth)[None, :]
                has_right = has_right & (column < depth)[:, None]
            a = tl.load(left[:, None] + column[None, :], mask=has_left, other=0.0)
            b = tl.load(right + column[:, None], mask=has_right, other=0.0)
            sums = tl.dot(a.to(TYPE), b.to(TYPE), sums, input_precision="ieee", out_dtype=SUMS)
        found = sums.to(tl.float32)
    if row_scales is not None:
        row_scale = tl.load(row_scales + rows, mask=has_row, other=0.0)
        scale = _expert_row(scales, expert, outputs, has_output, tl.float32)
        found *= row_scale[:, None] * scale[None, :]
    if biases is not None:
        found += _expert_row(biases, expert, outputs, has_output, BIAS)[None, :]
    if shares is not None:
        found *= tl.load(shares + slots, mask=has_row, other=0.0)[:, None]
    target = out + to.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


def _key(weight: GroupedWeight, rows: int) -> Key:
    outputs, depth = weight.weights[0].shape
    bits = 4 if weight.dtype == torch.uint8 else 8 * weight.dtype.itemsize
    return {"rows": rows, "outputs": outputs, "depth": depth, "bits": bits}


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, experts, per_row, outputs, depth = (
        int(shape[name]) for name in ("rows", "experts", "per_row", "outputs", "depth")
    )
    dtype, is_down = dtype_of(shape), bool(shape.get("down"))
    formats: dict[str, Callable[[Tensor], Weight]] = {
        "int8": Int8Weight.of, "fp8": Fp8Weight.of, "int4": Int4Weight.of,
        "fp8_block": lambda dense: Fp8BlockWeight(
            dense.to(FP8), torch.rand(outputs, depth // 64, device=device) / 8
        ),
        "mxfp4": lambda dense: Mxfp4Weight(
            torch.randint(0, 256, (outputs, depth // 2), dtype=torch.uint8, device=device),
            torch.rand(outputs, depth // Mxfp4Weight.GROUP, device=device) / 8,
        ),
    }  # fmt: skip
    held: Callable[[Tensor], Weight] = formats.get(str(shape.get("weight")), DenseWeight)

    def drawn() -> Weight:
        return held(torch.randn(outputs, depth, device=device).to(dtype))

    biases = [torch.randn(outputs, device=device).to(dtype) for _ in range(experts)]
    with_bias = bool(shape.get("bias"))
    weight = GroupedWeight.of(
        [drawn() for _ in range(experts)], biases if with_bias else [None] * experts
    )
    scores = torch.rand(rows, experts, device=device)
    scores[:, 0] = 0  # an expert that no row takes
    taken = scores.topk(per_row).indices
    slots = cache(partial(sort_slots, taken, experts))
    x = torch.randn(rows * per_row if is_down else rows, depth, device=device).to(dtype)
    shares = torch.rand(rows * per_row, device=device) if is_down else None

    def reference() -> tuple[Tensor]:
        out = torch.empty(rows * per_row, outputs, dtype=dtype, device=device)
        at, order = 0, taken.flatten().argsort(stable=True)
        for number, count in enumerate(taken.flatten().bincount(minlength=experts).tolist()):
            places = torch.arange(at, at + count, device=device)
            at += count
            own = order[places]
            bias = biases[number].float() if with_bias else None
            one = weight.weights[number]
            if isinstance(one, DenseWeight):
                one = DenseWeight(one.tensor.float())
            found = one.apply(x[places if is_down else own // per_row].float(), bias)
            to, scale = (own, shares[own, None]) if shares is not None else (places, 1.0)
            out[to] = (found * scale).to(dtype)
        return (out,)

    return Trial(
        _key(weight, tile_rows(taken.numel(), experts, 1)),
        lambda config: (weight.apply(x, slots(), shares, config),),
        reference,
        moved_bytes=sum(one.num_bytes for one in weight.weights),
        flops=2.0 * rows * per_row * outputs * depth,
    )


_SIZES: Key = {"rows": 40, "experts": 6, "per_row": 2, "outputs": 96, "depth": 256}
_CASES: tuple[Key, ...] = (
    {},
    {"down": 1, "bias": 1},
    {"rows": 300, "per_row": 4, "bias": 1},
    {"rows": 600, "per_row": 4, "down": 1, "depth": 200},
    {"dtype": "fp16", "rows": 3, "experts": 40, "per_row": 4},
    {"dtype": "fp32", "bias": 1},
    {"dtype": "fp32", "down": 1, "rows": 600, "per_row": 4},
    {"weight": "int8", "bias": 1},
    {"weight": "int8", "rows": 600, "per_row": 4, "down": 1},
    {"weight": "fp8", "down": 1, "least": 89},
    {"weight": "int4", "bias": 1},
    {"weight": "int4", "rows": 600, "per_row": 4, "down": 1},
    {"weight": "fp8_block", "bias": 1},
    {"weight": "mxfp4", "bias": 1},
)


def _configs(key: Key) -> list[Config]:
    """Those whose tiles in flight fit a multiprocessor's shared memory."""
    return [
        config
        for config in product_of(
            OUTPUTS=(32, 64, 128), DEPTH=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3, 4)
        )
        if config["num_stages"] * config["DEPTH"] * int(key["bits"]) // 8
        * (config["OUTPUTS"] + int(key["rows"])) <= 160 * 1024
    ]  # fmt: skip


SPECS = (
    KernelSpec(
        NAME,
        _trial,
        cases=[{**_SIZES, **case} for case in _CASES],
        configs=_configs,
        # Of Qwen3-30B-A3B and gpt-oss-120b: a batch that decodes, and a chunk of 2,048 tokens.
        shapes=[
            {"rows": rows, "experts": 128, "per_row": per_row, **sizes}
            for per_row, inner, hidden in ((8, 768, 2048), (4, 2880, 2880))
            for sizes in (
                {"outputs": 2 * inner, "depth": hidden},
                {"outputs": hidden, "depth": inner, "down": 1},
            )
            for rows in (16, 64, 2048)
        ],
    ),
)
