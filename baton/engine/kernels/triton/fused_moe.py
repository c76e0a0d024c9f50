"""MoE products (fused experts): each row times the matrices of its experts, in one launch.

The slots of each expert are split into tiles (`moe_routing.py`), and programs beyond the last tile
exit at once, as in vLLM's fused_moe and in MegaBlocks (https://arxiv.org/abs/2211.15841). Matrices
stay where they were loaded: the kernel gets their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.activation import Activation
from baton.engine.kernels.moe_routing import Routing
from baton.engine.kernels.torch import moe_routing
from baton.engine.kernels.torch.activation import act_mul
from baton.engine.kernels.torch.row_quantization import FP8
from baton.engine.kernels.triton.activation import gated
from baton.engine.kernels.triton.group_scaled_packing import (
    STEP,
    TILE,
    PackedWeight,
    pack,
    planes,
    step_numbers,
)
from baton.engine.kernels.triton.launch_configs import LEAST_TILE_ROWS, choose, tile_rows
from baton.engine.kernels.triton.moe_routing import FEW_ROWS, ExpertSlots, route
from baton.engine.kernels.triton.pdl import launch, wait_for_inputs
from baton.engine.kernels.triton.row_quantization import quantize_rows
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Trial, dtype_of, product_of
from baton.engine.quantization.config import NVFP4_GROUP
from baton.engine.quantization.fp8 import Fp8BlockWeight, Fp8Weight
from baton.engine.quantization.group_scaled import GroupScaledWeight
from baton.engine.quantization.int4 import Int4Weight
from baton.engine.quantization.int8 import Int8Weight, RowScaledWeight
from baton.engine.quantization.linear_weight import DenseWeight, LinearWeight
from baton.engine.quantization.mxfp4 import Mxfp4Weight
from baton.errors import ConfigError

NAME = "fused_moe"
_POINTED = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv, torch.uint8: tl.uint8,
    torch.int16: tl.int16,
}  # fmt: skip
_STEP, _TILE = tl.constexpr(STEP), tl.constexpr(TILE)
Held = DenseWeight | RowScaledWeight | PackedWeight


@dataclass(frozen=True)
class MoeWeight:
    """One matrix `[out, in]` of every expert of a layer, such as `down`, and biases `[out]`, if
    any.

    values, scales, bias: int64 `[experts]`, addresses of the tensors. Of a `PackedWeight` these are
    words and fields; a dense weight has no scales.
    """

    weights: tuple[Held, ...]
    biases: tuple[Tensor, ...]
    values: Tensor
    scales: Tensor | None
    bias: Tensor | None

    @classmethod
    def from_weights(
        cls, weights: Sequence[LinearWeight | PackedWeight], biases: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> MoeWeight:  # fmt: skip
        """Prepares the experts' matrices for activations of dtype.

        Raises ConfigError if experts have different formats, or one that no kernel supports."""
        held = _uniform([_held(weight, dtype) for weight in weights])
        if len({(type(one), getattr(one, "format", "")) for one in held}) > 1:
            raise ConfigError(
                "some experts of a layer are quantised and some are not, which a CPU supports "
                "only: add --device cpu"
            )
        given = tuple(bias for bias in biases if bias is not None)
        values, scales = map(_addresses, zip(*map(_tensors, held), strict=True))
        assert values is not None
        return cls(held, given, values, scales, _addresses(given))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return _tensors(self.weights[0])[0].dtype

    def apply(
        self, x: Tensor, slots: ExpertSlots, activation: Activation | None = None,
        config: Config | None = None,
    ) -> Tensor:  # fmt: skip
        """The product of each slot's row and its expert's matrix, in x's type.

        With an activation (gate and up): x is `[rows, in]`, and the result is `act_mul` of the
        products, `[slots, out / 2]`, ordered by place. Without (down): x is ordered by place, and
        the result is `[slots, out]`, ordered by slot and multiplied by its share. With few slots
        the depth may be split: the result is then float32 `[slots * parts, out]`, which `moe_sum`
        adds up. config: None is the one in effect.
        """
        num_outputs, depth = self.weights[0].shape
        size, num_slots = num_outputs // 2 if activation else num_outputs, slots.taken.numel()
        config = config or choose(NAME, _key(self, slots.tile_rows), x.device)
        dtype, split = x.dtype, 1
        if activation is None and slots.tiles is None:
            step = STEP if isinstance(self.weights[0], PackedWeight) else config["DEPTH"]
            split = min(config["SPLIT"], triton.cdiv(depth, step))
        out = torch.empty(
            (num_slots * split, size), dtype=dtype if split == 1 else torch.float32, device=x.device
        )
        first, row_scales, options = self.weights[0], None, dict[str, Any]()
        if isinstance(first, RowScaledWeight):
            x, row_scales = quantize_rows(x, self.dtype)
        assert x.is_contiguous()
        is_int8 = x.dtype == torch.int8
        if isinstance(first, PackedWeight):
            options = {**first.options, "padded": first.padded}
        else:  # the interpreter multiplies few types
            wide = x.device.type == "cpu" and not is_int8
            options["TYPE"] = tl.float32 if wide else _POINTED[x.dtype]
        width = config["OUTPUTS"] // 2 if activation else config["OUTPUTS"]
        num_tiles = num_slots if slots.tiles is None else len(slots.tiles)
        launch(
            _fused_moe, (num_tiles, triton.cdiv(size, width), split),
            x, row_scales, self.values, self.scales, self.bias, slots.taken,
            slots.order, slots.tiles, slots.shares, out, size, depth,
            PER_ROW=slots.taken.shape[1], STORED=_POINTED[self.dtype], BIAS=_POINTED[dtype],
            SUMS=tl.int32 if is_int8 else tl.float32, GATED=activation is not None,
            GELU=activation == "gelu_tanh", SWIGLU_OAI=activation == "swigluoai",
            WHOLE=depth % max(STEP, config["DEPTH"]) == 0 and size % width == 0,
            ROWS=max(LEAST_TILE_ROWS, slots.tile_rows), **options,
            **{**config, "SPLIT": split},
        )  # fmt: skip
        return out


def _held(weight: LinearWeight | PackedWeight, dtype: torch.dtype) -> Held:
    """A weight in a format that the kernel supports."""
    if isinstance(weight, GroupScaledWeight):
        packed = pack(weight, dtype)
        if packed is None:
            raise ConfigError(
                f"experts quantised in groups of {weight.group} inputs run on a CPU only: "
                "add --device cpu"
            )
        weight = packed
    if isinstance(weight, PackedWeight) and weight.order is not None:
        raise ConfigError("experts in act-order run on a CPU only: add --device cpu")
    assert isinstance(weight, DenseWeight | RowScaledWeight | PackedWeight)
    return weight


def _uniform(weights: Sequence[Held]) -> tuple[Held, ...]:
    """Gives all packed weights the same fields."""
    packed = [one for one in weights if isinstance(one, PackedWeight)]
    has = any(one.has_zeros for one in packed), any(one.has_lows for one in packed)
    return tuple(one.with_fields(*has) if isinstance(one, PackedWeight) else one for one in weights)


def _tensors(weight: Held) -> tuple[Tensor, Tensor | None]:
    """Values and scales."""
    if isinstance(weight, DenseWeight):
        return weight.tensor, None
    if isinstance(weight, RowScaledWeight):
        return weight.values, weight.scales
    return weight.words, weight.fields


def _addresses(tensors: Sequence[Tensor | None]) -> Tensor | None:
    found = [one for one in tensors if one is not None]
    if not found:
        return None
    assert all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in found)
    addresses = [one.data_ptr() for one in found]
    return torch.tensor(addresses, dtype=torch.int64, device=found[0].device)


@triton.jit
def _expert_row(addresses, expert, columns, wanted, TYPE: tl.constexpr):
    """Loads elements of an expert's vector as float32."""
    row = tl.load(addresses + expert).to(tl.pointer_type(TYPE))
    return tl.load(row + columns, mask=wanted, other=0.0).to(tl.float32)


@triton.jit
def _packed_sums(
    right, words, fields, output, has_output, has_row, depth, padded, PARTS: tl.constexpr,
    FORMAT: tl.constexpr, FACTOR: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_LOWS: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Product of some outputs of a `PackedWeight` and rows at pointers right, in float32."""
    WIDTH: tl.constexpr = _STEP // (2 if FORMAT == "fp8" else 4)
    steps = tl.cdiv(depth, _STEP)
    first, last = tl.program_id(2) * steps // SPLIT, (tl.program_id(2) + 1) * steps // SPLIT
    words += (output // _TILE).to(tl.int64)[:, None] * (steps * _TILE * WIDTH)
    words += (output % _TILE)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    fields += tl.minimum(output, padded - 1)
    at = tl.arange(0, _STEP)
    right = right[None, :] + at[:, None]
    sums = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    tl.assume(first < last)  # see `_group_scaled_linear`
    for step in range(first, last):
        if WHOLE:
            held = tl.load(words + step * (_TILE * WIDTH))
            x = tl.load(right + step * _STEP, mask=has_row[None, :], other=0.0)
        else:
            held = tl.load(words + step * (_TILE * WIDTH), mask=has_output[:, None], other=0)
            wanted = has_row[None, :] & (at + step * _STEP < depth)[:, None]
            x = tl.load(right + step * _STEP, mask=wanted, other=0.0)
        numbers = step_numbers(
            planes(held, FORMAT, TYPE, PLAIN), fields + step * PARTS * padded, padded, FORMAT,
            GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN,
        )  # fmt: skip
        if PLAIN:
            x = x.to(tl.float32)
        sums = tl.dot(numbers, x, sums, input_precision="ieee")
    return sums * FACTOR


@triton.jit
def _fused_moe(
    x, row_scales, values, scales, biases, taken, order, tiles, shares, out, size, depth, padded=0,
    PER_ROW: tl.constexpr = 1, STORED: tl.constexpr = None, BIAS: tl.constexpr = None,
    TYPE: tl.constexpr = None, SUMS: tl.constexpr = None, GATED: tl.constexpr = False,
    GELU: tl.constexpr = False, SWIGLU_OAI: tl.constexpr = False, WHOLE: tl.constexpr = False,
    ROWS: tl.constexpr = 16, OUTPUTS: tl.constexpr = 64, DEPTH: tl.constexpr = 64,
    SPLIT: tl.constexpr = 1, PDL: tl.constexpr = False, FORMAT: tl.constexpr = "",
    FACTOR: tl.constexpr = 1.0, PARTS: tl.constexpr = 0, GROUPS: tl.constexpr = 0,
    HAS_ZEROS: tl.constexpr = False, HAS_LOWS: tl.constexpr = False, PLAIN: tl.constexpr = False,
):  # fmt: skip
    """Product of one tile of slots and OUTPUTS rows of the matrix.

    The matrix is the left operand: slots may be few, and tensor cores need many rows there, read
    straight from shared memory. If GATED, rows of gate and up alternate. Grid `[tiles, outputs /
    OUTPUTS, SPLIT]`, the last axis being parts of the depth.
    """
    number = tl.program_id(0)
    wait_for_inputs(PDL)
    if order is None:
        expert = tl.load(taken + number)
        first_place = number
        count = 1
    else:
        expert = tl.load(tiles + number * 3)
        first_place = tl.load(tiles + number * 3 + 1)
        count = tl.load(tiles + number * 3 + 2)
    if expert < 0:
        return
    has_row = tl.arange(0, ROWS) < count
    place = first_place + tl.arange(0, ROWS)
    slot = place
    if order is not None:
        slot = tl.load(order + place, mask=has_row, other=0)
    if GATED:
        row = slot // PER_ROW
        to = place
        column = tl.program_id(1) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS) // 2
        output = column + tl.arange(0, OUTPUTS) % 2 * size
    else:
        row = place
        to = slot
        column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        output = column
    has_output = column < size
    matrix = tl.multiple_of(tl.load(values + expert).to(tl.pointer_type(STORED)), 16)
    right = x + row.to(tl.int64) * depth
    if FORMAT != "":
        found = _packed_sums(
            right, matrix, tl.load(scales + expert).to(tl.pointer_type(tl.int32)), output,
            has_output, has_row, depth, padded, PARTS, FORMAT, FACTOR, GROUPS, HAS_ZEROS, HAS_LOWS,
            TYPE, PLAIN, WHOLE, ROWS, OUTPUTS, SPLIT,
        )  # fmt: skip
    else:
        left = matrix + output.to(tl.int64)[:, None] * depth
        sums = tl.zeros([OUTPUTS, ROWS], dtype=SUMS)
        turns = tl.cdiv(depth, DEPTH)
        part = tl.program_id(2)
        for turn in range(part * turns // SPLIT, (part + 1) * turns // SPLIT):
            at = turn * DEPTH + tl.arange(0, DEPTH)
            has_left = has_output[:, None]
            has_right = has_row[None, :]
            if not WHOLE:
                has_left = has_left & (at < depth)[None, :]
                has_right = has_right & (at < depth)[:, None]
            a = tl.load(left + at[None, :], mask=has_left, other=0.0)
            b = tl.load(right[None, :] + at[:, None], mask=has_right, other=0.0)
            sums = tl.dot(a.to(TYPE), b.to(TYPE), sums, input_precision="ieee", out_dtype=SUMS)
        found = sums.to(tl.float32)
    if row_scales is not None:
        row_scale = tl.load(row_scales + row, mask=has_row, other=0.0)
        scale = _expert_row(scales, expert, output, has_output, tl.float32)
        found *= scale[:, None] * row_scale[None, :]
    if biases is not None:
        wanted = has_output & (tl.program_id(2) == 0)
        found += _expert_row(biases, expert, output, wanted, BIAS)[:, None]
    element: tl.constexpr = out.dtype.element_ty
    to = to.to(tl.int64) * SPLIT + tl.program_id(2)
    target = out + to[None, :] * size
    if GATED:
        pairs = found.to(element).reshape(OUTPUTS // 2, 2, ROWS).permute(0, 2, 1)
        gate, up = tl.split(pairs)
        column = tl.program_id(1) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        product = gated(gate, up, GELU, SWIGLU_OAI)
        tl.store(
            target + column[:, None], product, mask=(column < size)[:, None] & has_row[None, :]
        )
    else:
        found *= tl.load(shares + slot, mask=has_row, other=0.0)[None, :]
        mask = has_output[:, None] & has_row[None, :]
        tl.store(target + column[:, None], found.to(element), mask=mask)


def _key(weight: MoeWeight, rows: int) -> Key:
    outputs, depth = weight.weights[0].shape
    first, bits = weight.weights[0], 8 * weight.dtype.itemsize
    if isinstance(first, PackedWeight):
        bits = 8 if first.format == "fp8" else 4
    return {"rows": rows, "outputs": outputs, "depth": depth, "bits": bits}


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, experts, per_row, outputs, depth = (
        int(shape[name]) for name in ("rows", "experts", "per_row", "outputs", "depth")
    )
    dtype, is_down = dtype_of(shape), bool(shape.get("down"))
    # Packing needs real numbers: one small matrix stands for all.
    is_packed = shape.get("weight") in ("int4", "fp8_block", "mxfp4", "nvfp4")
    stands_in = is_packed and device.type == "meta"
    held = torch.device("cpu") if stands_in else device
    size = (TILE if stands_in else outputs, depth)
    formats: dict[str, Callable[[Tensor], LinearWeight]] = {
        "int8": Int8Weight.from_dense, "fp8": Fp8Weight.from_dense, "int4": Int4Weight.from_dense,
        "fp8_block": lambda dense: Fp8BlockWeight(
            dense.to(FP8), torch.rand(size[0], depth // 64, device=held) / 8
        ),
        "mxfp4": lambda dense: Mxfp4Weight(
            torch.randint(0, 256, (size[0], depth // 2), dtype=torch.uint8, device=held),
            2.0 ** torch.randint(-8, -2, (size[0], depth // Mxfp4Weight.GROUP), device=held),
        ),
        "nvfp4": lambda dense: Mxfp4Weight(
            torch.randint(0, 256, (size[0], depth // 2), dtype=torch.uint8, device=held),
            torch.rand(size[0], depth // NVFP4_GROUP, device=held) / 8,
        ),
    }  # fmt: skip
    made: Callable[[Tensor], LinearWeight] = formats.get(str(shape.get("weight")), DenseWeight)
    number = 2 if stands_in else experts
    weights = [made(torch.randn(size, device=held).to(dtype)) for _ in range(number)]
    if shape.get("zeros"):  # of all but one
        weights[1:] = [
            replace(one, zeros=torch.randint_like(one.scales, 17).to(torch.uint8))
            for one in weights[1:]
            if isinstance(one, Int4Weight)
        ]
    given: Sequence[LinearWeight | PackedWeight] = weights
    if stands_in:
        *_, last = _uniform([_held(one, dtype) for one in weights])
        assert isinstance(last, PackedWeight)
        given = [last.empty(outputs, device)] * experts
    biases = [torch.randn(outputs, device=device).to(dtype) for _ in range(experts)]
    with_bias = bool(shape.get("bias"))
    weight = MoeWeight.from_weights(given, biases if with_bias else [None] * experts, dtype)
    addresses: dict[str, Any] = {
        name: part.to(device) for name, part in vars(weight).items() if isinstance(part, Tensor)
    }
    weight = replace(weight, **addresses)
    scores = torch.rand(rows, experts, device=device)
    scores[:, 0] = -9  # an expert that no row selects
    few_rows = rows if shape.get("few") else FEW_ROWS
    slots = cache(lambda: route(scores, Routing(per_row, True), few_rows=few_rows))
    num_rows = rows * per_row if is_down else rows
    x = (torch.randn(num_rows, depth, device=device) / depth**0.5).to(dtype)

    def reference() -> tuple[Tensor]:
        shares, taken = moe_routing.route(scores, Routing(per_row, True))
        flat = taken.flatten()
        order = flat.argsort(stable=True)
        if rows <= few_rows:
            order = torch.arange(len(flat), device=device)
        out = torch.empty(len(flat), outputs if is_down else outputs // 2, device=device)
        for number, one in enumerate(weights):
            places = torch.where(flat[order] == number)[0]
            own = order[places]
            bias = biases[number].float() if with_bias else None
            wide = DenseWeight(one.tensor.float()) if isinstance(one, DenseWeight) else one
            found = wide.apply(x[places if is_down else own // per_row].float(), bias)
            if is_down:
                out[own] = found * shares.flatten()[own, None]
            else:
                out[places] = act_mul(found.to(dtype).float(), "swigluoai")
        return (out.to(dtype),)

    def run(config: Config | None) -> tuple[Tensor]:
        found = weight.apply(x, slots(), None if is_down else "swigluoai", config)
        return (found.unflatten(0, (rows * per_row, -1)).sum(1).to(dtype),)

    return Trial(
        _key(weight, 1 if rows <= few_rows else tile_rows(rows * per_row, experts, 1)),
        run,
        reference,
        moved_bytes=sum(one.num_bytes for one in weights),
        flops=2.0 * rows * per_row * outputs * depth,
    )


_SIZES: Key = {"rows": 40, "experts": 6, "per_row": 2, "outputs": 96, "depth": 256}
_CASES: tuple[Key, ...] = (
    {},
    {"down": 1, "bias": 1},
    {"few": 1, "bias": 1},
    {"few": 1, "down": 1, "weight": "int8"},
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
    {"weight": "int4", "zeros": 1, "dtype": "fp16"},
    {"weight": "fp8_block", "bias": 1},
    {"weight": "mxfp4", "bias": 1},
    {"weight": "nvfp4"},
    {"weight": "mxfp4", "rows": 600, "per_row": 4, "down": 1, "depth": 160},
)


def _configs(key: Key) -> list[Config]:
    """Configurations whose tiles in flight fit a multiprocessor's shared memory."""
    return [
        config
        for config in product_of(
            OUTPUTS=(64, 128, 256), DEPTH=(64, 128), num_warps=(4, 8), num_stages=(3, 4, 6),
            SPLIT=(1, 2, 4) if key["rows"] == 1 else (1,),
        )
        if config["num_stages"] * config["DEPTH"] * int(key["bits"]) // 8
        * (config["OUTPUTS"] + int(key["rows"])) <= 220 * 1024
    ]  # fmt: skip


SPECS = (
    KernelSpec(
        NAME,
        _trial,
        cases=[{**_SIZES, **case} for case in _CASES],
        configs=_configs,
        # Qwen3-30B-A3B and gpt-oss-120b: decode batches, and a chunk of 2,048 tokens.
        shapes=[
            {"rows": rows, "experts": 128, "per_row": per_row, **sizes, **form}
            for per_row, inner, hidden, form in (
                (8, 768, 2048, {}),
                (4, 2880, 2880, {"weight": "mxfp4"}),
            )
            for sizes in (
                {"outputs": 2 * inner, "depth": hidden},
                {"outputs": hidden, "depth": inner, "down": 1},
            )
            for rows in (1, 64, 2048)
        ],
    ),
)
