"""Products with group-quantised weights: int4, MXFP4 (W4A16) and fp8 in blocks (W8A16).

Weights are packed when they are loaded, as in Marlin (https://arxiv.org/abs/2408.11743): a 16-bit
word holds elements of one output that lie a quarter (of 8 bits: half) of a step of 128 inputs apart,
so that a few bit operations on two words at once bring them to where bfloat16 or float16 has them.
A weight is the left factor of its product, which tensor cores take from registers.

Few rows are multiplied with weights as they are unpacked; for many, the weight is written out in the
type of the activations, for a product by cuBLAS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, pad

from baton.engine.ops.triton.attention_common import TRITON_TYPES
from baton.engine.ops.triton.launch import launch, wait_for_inputs
from baton.engine.ops.triton.skinny_matmul import new_counters, prefetch, tile_rows
from baton.engine.ops.triton.spec import Config, KernelSpec, Key, Trial, dtype_of, product_of
from baton.engine.ops.triton.tuning import choose
from baton.engine.weights.quantize import FP8
from baton.engine.weights.weight import (
    Fp8BlockWeight,
    FourBitWeight,
    GroupScaledWeight,
    Int4Weight,
    Mxfp4Weight,
    Weight,
)

NAME = "group_scaled_linear"

# More rows are torch's product; so many are a tile.
MOST_ROWS = 512
_TILE_ROWS = 256
STEP = 128  # inputs that are packed together
TILE = 64  # outputs that are, and lie next to each other
_STEP, _TILE = tl.constexpr(STEP), tl.constexpr(TILE)

# Two words $4 as four planes of numbers from 0 to 15, plus 128.
INT4_BF16 = """{
    .reg .b32 moved;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    shr.b32 moved, $4, 4;
    lop3.b32 $1, moved, 0x000f000f, 0x43004300, 0xea;
    shr.b32 moved, $4, 8;
    lop3.b32 $2, moved, 0x000f000f, 0x43004300, 0xea;
    shr.b32 moved, $4, 12;
    lop3.b32 $3, moved, 0x000f000f, 0x43004300, 0xea;
}"""
# The same plus 1024.
INT4_FP16 = INT4_BF16.replace("0x43004300", "0x64006400")
# The same as they are: bfloat16's smallest, times 2 ** -133.
INT4_SYMMETRIC_BF16 = """{
    .reg .b32 moved;
    and.b32 $0, $4, 0x000f000f;
    shr.b32 moved, $4, 4;
    and.b32 $1, moved, 0x000f000f;
    shr.b32 moved, $4, 8;
    and.b32 $2, moved, 0x000f000f;
    shr.b32 moved, $4, 12;
    and.b32 $3, moved, 0x000f000f;
}"""
# Four planes of E2M1 numbers, times 2 ** -126: its bits at the end of bfloat16's exponent.
MXFP4_BF16 = """{
    .reg .b32 moved, sign, high;
    and.b32 $0, $4, 0x81c081c0;
    shl.b32 moved, $4, 3;
    and.b32 $1, moved, 0x81c081c0;
    shl.b32 moved, $4, 6;
    and.b32 $2, moved, 0x81c081c0;
    shl.b32 sign, $4, 1;
    and.b32 sign, sign, 0x80008000;
    shr.b32 high, $4, 5;
    lop3.b32 sign, high, 0x01000100, sign, 0xea;
    shr.b32 moved, $4, 4;
    lop3.b32 $3, moved, 0x00c000c0, sign, 0xea;
}"""
# Two planes of e4m3 numbers, times 2 ** -120: as above. (NaN becomes 480.)
FP8_BF16 = """{
    .reg .b32 moved, sign;
    shl.b32 moved, $2, 8;
    and.b32 sign, moved, 0x80008000;
    shl.b32 moved, $2, 4;
    lop3.b32 $0, moved, 0x07f007f0, sign, 0xea;
    and.b32 sign, $2, 0x80008000;
    shr.b32 moved, $2, 4;
    lop3.b32 $1, moved, 0x07f007f0, sign, 0xea;
}"""
_INT4_BF16, _INT4_FP16 = tl.constexpr(INT4_BF16), tl.constexpr(INT4_FP16)
_INT4_SYMMETRIC_BF16, _MXFP4_BF16 = tl.constexpr(INT4_SYMMETRIC_BF16), tl.constexpr(MXFP4_BF16)
_FP8_BF16 = tl.constexpr(FP8_BF16)

# Factors that scales have beside their own, so that what planes have less is made up for; where a
# large scale would have no room for it, sums have the rest, 2 ** 64.
_FACTOR = {"int4": 1.0, "int4_symmetric": 2.0**69, "fp8": 2.0**120, "mxfp4": 2.0**62}
_SUMS_FACTOR = {"int4": 1.0, "int4_symmetric": 2.0**64, "fp8": 1.0, "mxfp4": 2.0**64}
# What planes of int4 are more by, less which a zero point is held.
_BASE = {torch.bfloat16: -128.0, torch.float16: -1024.0, torch.float32: -128.0}


@triton.jit
def _fma(a, b, c, TYPE: tl.constexpr):
    """`a * b + c`, rounded once, two elements an instruction."""
    if TYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.bfloat16,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float16,
            is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _plain_plane(words, PLANE: tl.constexpr, FORMAT: tl.constexpr):
    """One plane of words as `planes` has it, float32, in Triton's own operations."""
    w = words.to(tl.int32)
    if FORMAT == "int4":
        return ((w >> 4 * PLANE) & 15).to(tl.float32) + 128.0
    elif FORMAT == "int4_symmetric":
        return ((w >> 4 * PLANE) & 15).to(tl.float32)
    elif FORMAT == "fp8":
        bits = (w >> 8 * PLANE) & 255
        return (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True)
    elif PLANE < 3:
        return (((w << 3 * PLANE) & 0x81C0) << 16).to(tl.float32, bitcast=True)
    else:
        bits = ((w << 1) & 0x8000) | ((w >> 5) & 0x0100) | ((w >> 4) & 0x00C0)
        return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def planes(words, FORMAT: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr):
    """The planes of words int16, before `scaled`: of TYPE, or float32 if they are PLAIN."""
    if PLAIN:
        if FORMAT == "fp8":
            return _plain_plane(words, 0, FORMAT), _plain_plane(words, 1, FORMAT)
        else:
            return (
                _plain_plane(words, 0, FORMAT), _plain_plane(words, 1, FORMAT),
                _plain_plane(words, 2, FORMAT), _plain_plane(words, 3, FORMAT),
            )  # fmt: skip
    elif FORMAT == "fp8":
        return tl.inline_asm_elementwise(
            _FP8_BF16, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif FORMAT == "mxfp4":
        return tl.inline_asm_elementwise(
            _MXFP4_BF16, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif FORMAT == "int4_symmetric":
        return tl.inline_asm_elementwise(
            _INT4_SYMMETRIC_BF16, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif TYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _INT4_BF16, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _INT4_FP16, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _field(fields, padded, NUMBER: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr):
    """A field of a step's, `[outputs]`: two of 16 bits are a word, WIDE ones are float32."""
    if WIDE:
        return tl.load(fields + NUMBER * padded).to(tl.float32, bitcast=True)
    else:
        word = tl.load(fields + NUMBER // 2 * padded)
        return (word >> 16 * (NUMBER % 2)).to(tl.int16).to(TYPE, bitcast=True)


@triton.jit
def group_scale(
    fields, padded, NUMBER: tl.constexpr, FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_LOWS: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """What `scaled` takes of a step's group of a number: scale, low and less, `[outputs]`."""
    WIDE: tl.constexpr = TYPE == tl.float32
    if FORMAT == "mxfp4":  # powers of two: bytes, and with an offset bfloat16's exponents
        exponent = ((tl.load(fields) >> 8 * NUMBER) & 255) + 62
        if PLAIN:
            scale = (exponent << 23).to(tl.float32, bitcast=True)
        else:
            scale = (exponent << 7).to(tl.int16).to(TYPE, bitcast=True)
        return scale, scale, scale
    else:
        COUNT: tl.constexpr = 1 + HAS_ZEROS + HAS_LOWS
        scale = _field(fields, padded, COUNT * NUMBER, TYPE, WIDE)
        less = scale
        low = scale
        if HAS_ZEROS:
            less = _field(fields, padded, COUNT * NUMBER + 1, TYPE, WIDE)
        elif FORMAT == "int4":
            NONE: tl.constexpr = -1032.0 if TYPE == tl.float16 else -136.0
            less = tl.full(scale.shape, NONE, tl.float32 if PLAIN else TYPE)
        elif FORMAT == "int4_symmetric":  # 8 times the scale
            less = scale.to(tl.float32) * (-(2.0**-130))
            if not PLAIN:
                less = less.to(TYPE)
        if HAS_LOWS:
            low = _field(fields, padded, COUNT * NUMBER + COUNT - 1, TYPE, WIDE)
        return scale, low, less


@triton.jit
def scaled(
    raw, scale, low, less, FORMAT: tl.constexpr, HAS_LOW: tl.constexpr, TYPE: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Elements `[outputs, inputs]` of a plane, of one group; the rest `[outputs]` as in
    `group_scale`. Of TYPE, or PLAIN ones in float32, rounded to TYPE.
    """
    if PLAIN:
        if FORMAT == "int4_symmetric":
            return ((raw - 8.0) * (scale.to(tl.float32) * 2.0**-133)[:, None]).to(TYPE).to(tl.float32)
        number = raw
        if FORMAT == "int4":
            if TYPE == tl.float16:
                raw += 896.0  # float16's planes are more by 1024, not by 128
            number = raw + less.to(tl.float32)[:, None]
        whole = scale.to(tl.float32)
        if HAS_LOW:
            whole += low.to(tl.float32)
        return (number * whole[:, None]).to(TYPE).to(tl.float32)
    else:
        nothing = tl.full([1, 1], -0.0, TYPE)
        if FORMAT == "int4":
            raw = _fma(raw, tl.full([1, 1], 1.0, TYPE), less[:, None], TYPE)
        elif FORMAT == "int4_symmetric":
            nothing = less[:, None]
        if HAS_LOW:
            nothing = _fma(raw, low[:, None], nothing, TYPE)
        return _fma(raw, scale[:, None], nothing, TYPE)


@triton.jit
def _beside(a, b):
    """`[outputs, 2 * inputs]` of two halves: registers keep what they have."""
    both = tl.permute(tl.join(a, b), (0, 2, 1))
    return tl.reshape(both, (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _plane(
    raw, PLANE: tl.constexpr, fields, padded, FORMAT: tl.constexpr, GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_LOWS: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 2 if FORMAT == "fp8" else 4
    scale, low, less = group_scale(
        fields, padded, PLANE * GROUPS // PLANES, FORMAT, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN
    )
    return scaled(raw[PLANE], scale, low, less, FORMAT, HAS_LOWS, TYPE, PLAIN)


@triton.jit
def step_numbers(
    raw, fields, padded, FORMAT: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_LOWS: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The numbers of a step, `[outputs, STEP]`."""
    first = _beside(
        _plane(raw, 0, fields, padded, FORMAT, GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN),
        _plane(raw, 1, fields, padded, FORMAT, GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN),
    )
    if FORMAT == "fp8":
        return first
    else:
        return _beside(
            first,
            _beside(
                _plane(raw, 2, fields, padded, FORMAT, GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN),
                _plane(raw, 3, fields, padded, FORMAT, GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN),
            ),
        )


@triton.jit(do_not_specialize=["num_rows"])
def _group_scaled_linear(
    x, words, fields, bias, out, partials, counters, num_rows, num_outputs, depth, padded,
    PARTS: tl.constexpr, FORMAT: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_LOWS: tl.constexpr, FACTOR: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr,
    WHOLE: tl.constexpr, IS_SPLIT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some outputs of some rows, over a part of the depth. Grid `[rows, outputs, parts]`.

    The last program of some outputs adds up all parts of their sums.
    """
    WIDTH: tl.constexpr = _STEP // (2 if FORMAT == "fp8" else 4)
    tile, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    has_row = rows < num_rows
    steps = tl.cdiv(depth, _STEP)
    first, last = part * steps // parts, (part + 1) * steps // parts
    if PDL and AHEAD > 0:  # lines of 64 words, of the first steps
        LINES: tl.constexpr = _TILE * WIDTH // 64
        line = tl.arange(0, OUTPUTS // _TILE * AHEAD * LINES)
        of_tile = tl.minimum(
            tile * (OUTPUTS // _TILE) + line // (AHEAD * LINES), padded // _TILE - 1
        )
        line = tl.minimum(first * LINES + line % (AHEAD * LINES), steps * LINES - 1)
        prefetch(words + (of_tile.to(tl.int64) * (steps * LINES) + line) * 64)
    wait_for_inputs(PDL)
    column, inputs = tl.arange(0, WIDTH), tl.arange(0, _STEP)
    left = words + (outputs // _TILE).to(tl.int64)[:, None] * (steps * _TILE * WIDTH)
    left += (outputs % _TILE)[:, None] * WIDTH + column[None, :]
    own_fields = fields + tl.minimum(outputs, padded - 1)
    right = x + rows.to(tl.int64)[None, :] * depth + inputs[:, None]
    sums = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    # Or else the sums may be zeros behind the loop, for which ptxas waits for each of its products.
    tl.assume(first < last)
    for step in range(first, last):
        if WHOLE:
            held = tl.load(left + step * (_TILE * WIDTH))
            a = tl.load(right + step * _STEP, mask=has_row[None, :], other=0.0)
        else:
            is_held = (outputs < padded)[:, None]
            held = tl.load(left + step * (_TILE * WIDTH), mask=is_held, other=0)
            wanted = has_row[None, :] & (inputs + step * _STEP < depth)[:, None]
            a = tl.load(right + step * _STEP, mask=wanted, other=0.0)
        numbers = step_numbers(
            planes(held, FORMAT, TYPE, PLAIN), own_fields + step * PARTS * padded, padded, FORMAT,
            GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN,
        )  # fmt: skip
        if PLAIN:
            a = a.to(tl.float32)
        sums = tl.dot(numbers, a, sums, input_precision="ieee")
    sums *= FACTOR
    has_output = outputs < num_outputs
    wanted = has_output[:, None] & has_row[None, :]
    to = rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    if IS_SPLIT:
        size = num_rows * num_outputs
        tl.store(partials + part * size + to, sums, mask=wanted)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == parts - 1
        if is_last:
            tl.store(counters + tile, 0)  # for the next launch
            sums = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
            AT_ONCE: tl.constexpr = 4 if ROWS <= 16 else 2  # as registers hold them
            for begin in range(0, parts, AT_ONCE):
                for next in tl.static_range(AT_ONCE):
                    other = begin + next
                    sums += tl.load(
                        partials + other * size + to, mask=wanted & (other < parts), other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
            _store(sums, bias, out, to, outputs, has_output, wanted)
    else:
        _store(sums, bias, out, to, outputs, has_output, wanted)


@triton.jit
def _store(sums, bias, out, to, outputs, has_output, wanted):
    if bias is not None:
        sums += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[:, None]
    tl.store(out + to, sums.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _dequantize(
    words, fields, out, num_outputs, depth, padded, PARTS: tl.constexpr, FORMAT: tl.constexpr,
    GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_LOWS: tl.constexpr, FACTOR: tl.constexpr,
    TYPE: tl.constexpr, PLAIN: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """A step of some outputs. Grid `[padded / OUTPUTS, steps]`."""
    PLANES: tl.constexpr = 2 if FORMAT == "fp8" else 4
    WIDTH: tl.constexpr = _STEP // PLANES
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, WIDTH)
    step, steps = tl.program_id(1), tl.num_programs(1)
    place = (outputs // _TILE).to(tl.int64) * steps + step
    right = words + (place * _TILE + outputs % _TILE)[:, None] * WIDTH + column[None, :]
    raw = planes(tl.load(right), FORMAT, TYPE, PLAIN)
    to = out + outputs.to(tl.int64)[:, None] * depth + column[None, :]
    has_output = (outputs < num_outputs)[:, None]
    for plane in tl.static_range(PLANES):
        first = step * _STEP + plane * WIDTH
        if plane * GROUPS % PLANES < GROUPS:
            scale, low, less = group_scale(
                fields + step * PARTS * padded + outputs, padded, plane * GROUPS // PLANES, FORMAT,
                HAS_ZEROS, HAS_LOWS, TYPE, PLAIN,
            )  # fmt: skip
        number = scaled(raw[plane], scale, low, less, FORMAT, HAS_LOWS, TYPE, PLAIN)
        number = number.to(tl.float32) * FACTOR
        inside = has_output & (first + column < depth)[None, :]
        tl.store(to + first, number.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class PackedWeight(Weight):
    """A group-quantised weight as a GPU's kernels take it, for activations of one type.

    words: int16 `[tiles, steps, TILE, STEP / elements of a word]`, outputs and inputs filled up ·
    fields: int32 `[steps, parts, tiles * TILE]`; for each group of a step its scale, less its zero
    point if the format has any, and the rest of the scale if dtype cut that off: two fields of
    dtype in a word, or one float32. Of MXFP4 four exponents · order: int64 `[in]`, see `Int4Weight`
    · counters: int32 of `new_counters`, which no other stream uses.
    """

    format: str
    sizes: tuple[int, int]
    dtype: torch.dtype
    groups: int
    has_zeros: bool
    has_lows: bool
    words: Tensor
    fields: Tensor
    order: Tensor | None
    counters: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.sizes

    @property
    def padded(self) -> int:
        """Outputs of all tiles."""
        return self.fields.shape[2]

    @property
    def has_kernel(self) -> bool:
        """Whether few rows have a kernel of their own: others are unpacked for torch's product."""
        return _has_kernel(self.format, self.dtype)

    @property
    def options(self) -> dict[str, Any]:
        """How kernels are compiled for it."""
        return {
            "PARTS": self.fields.shape[1], "FORMAT": self.format, "GROUPS": self.groups,
            "HAS_ZEROS": self.has_zeros, "HAS_LOWS": self.has_lows,
            "FACTOR": _SUMS_FACTOR[self.format],
            "TYPE": TRITON_TYPES[self.dtype] if self.has_kernel else tl.float32,
            "PLAIN": self.words.device.type == "cpu" or not self.has_kernel,
        }  # fmt: skip

    def empty(self, outputs: int, device: torch.device) -> PackedWeight:
        """One of so many outputs in its format, of any numbers."""
        tiles, parts = triton.cdiv(outputs, TILE), self.fields.shape[1]
        _, steps, *tile = self.words.shape
        return replace(
            self,
            sizes=(outputs, self.sizes[1]),
            words=torch.empty((tiles, steps, *tile), dtype=torch.int16, device=device),
            fields=torch.empty((steps, parts, tiles * TILE), dtype=torch.int32, device=device),
            counters=new_counters(outputs, device),
        )

    def with_fields(self, has_zeros: bool, has_lows: bool) -> PackedWeight:
        """The same with fields of these kinds, too, as another weight may have them."""
        has_zeros, has_lows = has_zeros or self.has_zeros, has_lows or self.has_lows
        if (has_zeros, has_lows) == (self.has_zeros, self.has_lows):
            return self
        kind, count = _kind(self.format, self.dtype), 1 + self.has_zeros + self.has_lows
        each = self.fields.transpose(1, 2).contiguous().view(kind)[..., : self.groups * count]
        parts = list(each.unflatten(2, (-1, count)).permute(3, 0, 2, 1))
        format = "int4" if self.format == "int4_symmetric" else self.format
        parts[0] = parts[0] * (_FACTOR[format] / _FACTOR[self.format])
        if has_zeros > self.has_zeros:
            parts.insert(1, torch.full_like(parts[0], _BASE[kind] - Int4Weight.MIDDLE))
        if has_lows > self.has_lows:
            parts.append(torch.zeros_like(parts[0]))
        return replace(
            self, format=format, has_zeros=has_zeros, has_lows=has_lows, fields=_fields(parts)
        )

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Never waits for the device."""
        return group_scaled_linear(x if self.order is None else x[:, self.order], self, bias)


def pack(weight: GroupScaledWeight, dtype: torch.dtype) -> PackedWeight | None:
    """A weight for activations of dtype; None if its groups are none that kernels take."""
    format, has_zeros, has_lows = format_of(weight), False, False
    (outputs, inputs), group = weight.shape, weight.group
    if group % STEP and (STEP % group or group < STEP // 4):
        return None
    scales = _by_group(weight.scales.float(), group)
    groups = scales.shape[1]
    if format == "mxfp4":
        fractions, exponents = weight.scales.frexp()
        if groups != 4 or not (fractions == 0.5).all() or exponents.max() > 192 - 127:
            return None
        held = _by_group((exponents + 127).clamp_min(0).to(torch.uint8), group)
        fields = _words_of(held.transpose(1, 2).contiguous())
    else:
        kind = _kind(format, dtype)
        if format == "int4" and kind == torch.bfloat16 and weight.zeros is None:
            if (scales == scales.to(kind)).all():
                format = "int4_symmetric"
        scales = scales * _FACTOR[format]
        parts = [scales.to(kind)]
        if isinstance(weight, Int4Weight) and weight.zeros is not None:
            has_zeros = True
            parts.append(_BASE[kind] - _by_group(weight.zeros, group).to(kind))
        low = (scales - parts[0].float()).to(kind)
        if has_lows := bool(low.any()):
            parts.append(low)
        fields = _fields(parts)
    return PackedWeight(
        format, (outputs, inputs), dtype, groups, has_zeros, has_lows,
        torch.cat([_words(weight, format, first) for first in range(0, outputs, _AT_ONCE)]),
        fields.contiguous(),
        weight.order if isinstance(weight, Int4Weight) else None,
        new_counters(outputs, fields.device),
    )  # fmt: skip


def _by_group(parts: Tensor, group: int) -> Tensor:
    """`[out, groups]` → `[steps, groups of a step, padded]`; larger groups are in all their steps."""
    outputs, groups = parts.shape
    parts = parts.repeat_interleave(max(1, group // STEP), dim=1)
    of_step = max(1, STEP // group)
    return pad(parts.T, (0, -outputs % TILE, 0, -parts.shape[1] % of_step)).unflatten(0, (-1, of_step))


def _fields(parts: Sequence[Tensor]) -> Tensor:
    """Parts `[steps, groups, padded]` as `PackedWeight` has them."""
    each = torch.stack(tuple(parts), dim=2).flatten(1, 2).transpose(1, 2)
    whole = each.shape[2] * each.itemsize % 4 == 0
    return _words_of(each.contiguous() if whole else pad(each, (0, 1)))


def _words_of(each: Tensor) -> Tensor:
    """`[steps, padded, fields]`, whole words → int32 `[steps, parts, padded]`."""
    return each.view(torch.int32).transpose(1, 2).contiguous()


def _kind(format: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a weight's fields."""
    return dtype if _has_kernel(format, dtype) else torch.float32


_AT_ONCE = 64 * TILE  # outputs that are packed at once, so that no large copies exist


def _words(weight: GroupScaledWeight, format: str, first: int) -> Tensor:
    """Outputs from the first on, packed."""
    rows = slice(first, first + _AT_ONCE)
    held = weight.values[rows].view(torch.uint8)
    numbers = weight.nibbles(rows) if isinstance(weight, FourBitWeight) else held
    count, inputs = numbers.shape
    full = pad(numbers, (0, -inputs % STEP, 0, -count % TILE))
    number_of_planes = 2 if format == "fp8" else 4
    plane = (
        full.view(-1, TILE, full.shape[1] // STEP, number_of_planes, STEP // number_of_planes)
        .permute(3, 0, 2, 1, 4)
        .to(torch.int32)
    )
    if format == "mxfp4":
        sign, size = plane >> 3, plane & 7
        words = sign[0] << 15 | size[0] << 6 | sign[1] << 12 | size[1] << 3 | sign[2] << 9 | size[2]
        words |= sign[3] << 14 | size[3] >> 2 << 13 | (size[3] & 3) << 10
    else:
        bits = 16 // number_of_planes
        words = plane[0]
        for number in range(1, number_of_planes):
            words = words | plane[number] << bits * number
    return words.to(torch.int16)


def _has_kernel(format: str, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 or (dtype == torch.float16 and format[:4] == "int4")


def format_of(weight: Weight) -> str:
    """The name by which kernels know a weight's numbers."""
    if isinstance(weight, Mxfp4Weight):
        return "mxfp4"
    return "fp8" if isinstance(weight, Fp8BlockWeight) else "int4"


def dequantized(weight: PackedWeight) -> Tensor:
    """The matrix `[out, in]`, of the weight's dtype."""
    outputs, depth = weight.shape
    out = torch.empty((outputs, depth), dtype=weight.dtype, device=weight.words.device)
    _dequantize[(weight.padded // TILE, weight.words.shape[1])](
        weight.words, weight.fields, out, outputs, depth, weight.padded, OUTPUTS=TILE, num_warps=4,
        num_stages=1, **weight.options,
    )  # fmt: skip
    return out


def group_scaled_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, config: Config | None = None
) -> Tensor:
    """`x @ weight.T + bias`: x `[rows, in]` of the weight's dtype, bias `[out]` → `[rows, out]`.

    x's columns are in the order of the weight's · config: of the launch; None is that of `tuning`,
    `{"LIBRARY": 1}` is a product by torch.
    """
    (num_rows, depth), (num_outputs, _) = x.shape, weight.shape
    assert x.dtype == weight.dtype
    if config is None and num_rows <= MOST_ROWS and weight.has_kernel:
        config = choose(NAME, _key(weight, num_rows), x.device)
    if config is None or "LIBRARY" in config:
        return linear(x, dequantized(weight), bias)
    x, rows = x.contiguous(), min(tile_rows(num_rows), _TILE_ROWS)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    tiles, row_tiles = triton.cdiv(num_outputs, config["OUTPUTS"]), triton.cdiv(num_rows, rows)
    sizes = dict(config)
    parts = min(sizes.pop("SPLIT"), weight.words.shape[1]) if row_tiles == 1 else 1
    partials = None
    if parts > 1:
        partials = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device)
    launch(
        _group_scaled_linear, (row_tiles, tiles, parts), x, weight.words, weight.fields, bias, out,
        partials, weight.counters, num_rows, num_outputs, depth, weight.padded,
        WHOLE=depth % STEP == 0 and weight.padded % config["OUTPUTS"] == 0, ROWS=rows,
        IS_SPLIT=parts > 1, **weight.options, **sizes,
    )  # fmt: skip
    return out


def _key(weight: PackedWeight, rows: int) -> Key:
    outputs, depth = weight.shape
    return {
        "rows": tile_rows(rows), "outputs": outputs, "depth": depth, "format": weight.format,
    }  # fmt: skip


def random_weight(format: str, outputs: int, depth: int, device: torch.device) -> GroupScaledWeight:
    """format: "int4", with zero points "awq", "fp8" or "mxfp4", in groups as checkpoints have."""
    group = {"int4": Int4Weight.GROUP, "mxfp4": Mxfp4Weight.GROUP}.get(format, math.gcd(STEP, depth))
    groups = (outputs, depth // group)

    def numbers(end: int, columns: int) -> Tensor:
        return torch.randint(0, end, (outputs, columns), dtype=torch.uint8, device=device)

    scales = torch.rand(groups, device=device) / 50 + 0.01
    if format == "fp8":
        full = torch.randn(outputs, depth, device=device) * 2 ** (numbers(15, depth) - 12.0)
        return Fp8BlockWeight(full.to(FP8), scales)
    if format == "mxfp4":
        return Mxfp4Weight(numbers(256, depth // 2), scales.log2().round().exp2())
    if format == "awq":
        return Int4Weight(numbers(256, depth // 2), scales.half().float(), numbers(17, groups[1]))
    return Int4Weight(numbers(256, depth // 2), scales.bfloat16().float())


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, outputs, depth = (int(shape[name]) for name in ("rows", "outputs", "depth"))
    dtype, meta = dtype_of(shape), device.type == "meta"
    # What a kernel is compiled for depends on numbers, of which a few outputs have enough.
    made = (min(outputs, TILE), torch.device("cpu")) if meta else (outputs, device)
    weight = random_weight(str(shape.get("weight", "int4")), made[0], depth, made[1])
    packed = pack(weight, dtype)
    assert packed is not None
    if meta:
        packed = packed.empty(outputs, device)
    x = torch.randn(rows, depth, device=device).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype) if shape.get("bias") else None

    def reference() -> tuple[Tensor]:
        exact = x.double() @ weight.dequantized(torch.float64).T
        return ((exact if bias is None else exact + bias.double()).to(dtype),)

    return Trial(
        _key(packed, rows),
        lambda config: (group_scaled_linear(x, packed, bias, config),),
        reference,
        moved_bytes=packed.num_bytes + x.itemsize * rows * (depth + outputs),
        flops=2.0 * rows * outputs * depth,
    )


SPECS = (
    KernelSpec(
        NAME,
        _trial,
        cases=[
            {"rows": rows, "outputs": outputs, "depth": depth, "weight": weight, "dtype": dtype,
             "bias": bias}
            for rows, outputs, depth, weight, dtype, bias in (
                (16, 256, 512, "int4", "bf16", 0),
                (64, 256, 512, "int4", "bf16", 1),
                (9, 100, 320, "int4", "fp16", 1),
                (16, 256, 512, "awq", "bf16", 0),
                (64, 256, 512, "awq", "fp16", 0),
                (16, 256, 512, "fp8", "bf16", 1),
                (64, 256, 512, "fp8", "bf16", 0),
                (16, 256, 512, "mxfp4", "bf16", 0),
                (64, 72, 288, "mxfp4", "bf16", 1),
                (100, 100, 320, "int4", "bf16", 1),
                (16, 100, 256, "awq", "fp32", 1),
                (16, 100, 256, "fp8", "fp16", 0),
                (16, 100, 320, "mxfp4", "fp32", 0),
            )
        ],
        configs=lambda key: [
            {"LIBRARY": 1},
            *(
                config
                for config in product_of(
                    OUTPUTS=(64, 128, 256), SPLIT=(1, 2, 3, 4, 6, 8, 12, 16), AHEAD=(4,), num_warps=(4, 8),
                    num_stages=(3, 4, 6),
                )
                if _fits(config, key)
            ),
        ],
        shapes=[
            {"rows": rows, "outputs": outputs, "depth": depth, "weight": weight}
            for outputs, depth in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
            for rows in (16, 64)
            for weight in ("int4", "fp8", "mxfp4")
        ],
    ),
)  # fmt: skip


def _fits(config: Config, key: Key) -> bool:
    """Whether stages fit a multiprocessor, and programs are as many as it takes at once."""
    outputs, bits = config["OUTPUTS"], 8 if key["format"] == "fp8" else 4
    rows = min(int(key["rows"]), _TILE_ROWS)
    bytes_of_stage = STEP * (outputs * bits // 8 + 2 * rows)
    programs = triton.cdiv(int(key["outputs"]), outputs) * config["SPLIT"]
    return (
        outputs * rows <= 128 * 32 * config["num_warps"]
        and config["num_stages"] * bytes_of_stage <= 200 * 1024
        and 96 <= programs <= 900
        and int(key["depth"]) // STEP >= 4 * config["SPLIT"]
    )
