"""Packing of group-quantised weights for kernels: int4, MXFP4 and NVFP4 (W4A16), fp8 (W8A16).

Weights are packed when they are loaded, as in Marlin (https://arxiv.org/abs/2408.11743). A 16-bit
word holds elements of one output that are a plane apart: a quarter of a step of 128 inputs, or half
a step if elements have 8 bits. A few bit operations on two words then turn a plane into bfloat16 or
float16 numbers in registers, where tensor cores read them. These numbers have an offset or a
factor, which the fields of their group compensate.
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
from torch.nn.functional import pad

from baton.engine.kernels.torch.row_quantization import FP8
from baton.engine.kernels.triton.attention_common import TRITON_TYPES
from baton.engine.kernels.triton.skinny_matmul import new_counters
from baton.engine.quantization.config import NVFP4_GROUP
from baton.engine.quantization.fp8 import Fp8BlockWeight
from baton.engine.quantization.group_scaled import FourBitWeight, GroupScaledWeight
from baton.engine.quantization.int4 import Int4Weight
from baton.engine.quantization.mxfp4 import Mxfp4Weight

STEP = 128  # inputs packed together
TILE = 64  # outputs packed together, which are contiguous
_PACKED_AT_ONCE = 64 * TILE  # outputs, which bounds temporary copies

# Converts two words ($4) to four planes of numbers from 0 to 15, plus 128.
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
# As INT4_BF16, but plus 1024 in float16.
INT4_FP16 = INT4_BF16.replace("0x43004300", "0x64006400")
# As INT4_BF16, but without an offset: bfloat16 subnormals, times 2 ** -133.
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
# Converts to four planes of E2M1 numbers times 2 ** -126: their bits end bfloat16's exponent.
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
# Converts to two planes of e4m3 numbers times 2 ** -120. (NaN becomes 480.)
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

# Factors of scales in the fields, which compensate the planes' factors. Where a large scale would
# overflow, sums get the rest, 2 ** 64. ("int4" has zero points, "int4_symmetric" has none.)
_FACTOR = {"int4": 1.0, "int4_symmetric": 2.0**69, "fp8": 2.0**120, "nvfp4": 2.0**63}
_SUMS_FACTOR = {
    "int4": 1.0, "int4_symmetric": 2.0**64, "fp8": 1.0, "mxfp4": 2.0**64, "nvfp4": 2.0**64,
}  # fmt: skip
# Negated offsets of int4 planes, which the fields of zero points include.
_BASE = {torch.bfloat16: -128.0, torch.float16: -1024.0, torch.float32: -128.0}


@triton.jit
def _fma(a, b, c, TYPE: tl.constexpr):
    """`a * b + c`, rounded once, two elements in an instruction."""
    if tl.bfloat16 == TYPE:
        found = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.bfloat16,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float16,
            is_pure=True, pack=2,
        )  # fmt: skip
    return found


@triton.jit
def _plain_plane(words, PLANE: tl.constexpr, FORMAT: tl.constexpr):
    """One plane of words as float32, without inline assembly."""
    w = words.to(tl.int32)
    if FORMAT == "int4":
        number = ((w >> 4 * PLANE) & 15).to(tl.float32) + 128.0
    elif FORMAT == "int4_symmetric":
        number = ((w >> 4 * PLANE) & 15).to(tl.float32)
    elif FORMAT == "fp8":
        bits = (w >> 8 * PLANE) & 255
        number = (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True)
    elif PLANE < 3:
        number = (((w << 3 * PLANE) & 0x81C0) << 16).to(tl.float32, bitcast=True)
    else:
        bits = ((w << 1) & 0x8000) | ((w >> 5) & 0x0100) | ((w >> 4) & 0x00C0)
        number = (bits << 16).to(tl.float32, bitcast=True)
    return number


@triton.jit
def planes(words, FORMAT: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr):
    """The unscaled planes of int16 words, of TYPE; if PLAIN, float32."""
    if PLAIN:  # fp8 uses the first two
        found = (
            _plain_plane(words, 0, FORMAT), _plain_plane(words, 1, FORMAT),
            _plain_plane(words, 2, FORMAT), _plain_plane(words, 3, FORMAT),
        )  # fmt: skip
    elif FORMAT == "fp8":
        found = tl.inline_asm_elementwise(
            _FP8_BF16, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif FORMAT == "int4" and tl.float16 == TYPE:
        found = tl.inline_asm_elementwise(
            _INT4_FP16, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        OTHER: tl.constexpr = _INT4_SYMMETRIC_BF16 if FORMAT == "int4_symmetric" else _MXFP4_BF16
        TEXT: tl.constexpr = _INT4_BF16 if FORMAT == "int4" else OTHER
        found = tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return found


@triton.jit
def _field(fields, padded, NUMBER: tl.constexpr, TYPE: tl.constexpr):
    """Field NUMBER of a step, `[outputs]`: a word holds two 16-bit fields, or one of float32."""
    if tl.float32 == TYPE:
        field = tl.load(fields + NUMBER * padded).to(tl.float32, bitcast=True)
    else:
        word = tl.load(fields + NUMBER // 2 * padded)
        field = (word >> 16 * (NUMBER % 2)).to(tl.int16).to(TYPE, bitcast=True)
    return field


@triton.jit
def _group_fields(
    fields, padded, NUMBER: tl.constexpr, FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_LOWS: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Fields of group NUMBER of a step, `[outputs]`: scale, its rounding error in TYPE, and the
    number added to planes, or, for symmetric int4, to the product."""
    if FORMAT == "mxfp4":  # powers of two, stored as exponents in bytes
        exponent = ((tl.load(fields) >> 8 * NUMBER) & 255) + 62
        if PLAIN:
            scale = (exponent << 23).to(tl.float32, bitcast=True)
        else:
            scale = (exponent << 7).to(tl.int16).to(TYPE, bitcast=True)
    else:
        COUNT: tl.constexpr = 1 + HAS_ZEROS + HAS_LOWS
        scale = _field(fields, padded, COUNT * NUMBER, TYPE)
    low = scale
    if HAS_LOWS:
        low = _field(fields, padded, COUNT * NUMBER + COUNT - 1, TYPE)
    more = scale
    if HAS_ZEROS:
        more = _field(fields, padded, COUNT * NUMBER + 1, TYPE)
    elif FORMAT == "int4":
        NONE: tl.constexpr = -1032.0 if tl.float16 == TYPE else -136.0
        more = tl.full(scale.shape, NONE, tl.float32 if PLAIN else TYPE)
    elif FORMAT == "int4_symmetric":  # 8 times the scale, without the factors of both
        more = scale.to(tl.float32) * (-(2.0**-130))
        if not PLAIN:
            more = more.to(TYPE)
    return scale, low, more


@triton.jit
def scaled_plane(
    raw, PLANE: tl.constexpr, fields, padded, FORMAT: tl.constexpr, GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_LOWS: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Scaled elements of a step's plane `[outputs, inputs]`; fields: pointers `[outputs]`. Of TYPE;
    if PLAIN, float32 rounded to TYPE."""
    PLANES: tl.constexpr = 2 if FORMAT == "fp8" else 4
    FIRST: tl.constexpr = PLANE * GROUPS // PLANES
    number = raw[PLANE]
    scale, low, more = _group_fields(
        fields, padded, FIRST, FORMAT, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN
    )
    scale, low, more = scale[:, None], low[:, None], more[:, None]
    if GROUPS > PLANES:  # a plane has two groups
        scales, lows, mores = _group_fields(
            fields, padded, FIRST + 1, FORMAT, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN
        )
        is_first = (tl.arange(0, number.shape[1]) < number.shape[1] // 2)[None, :]
        scale = tl.where(is_first, scale, scales[:, None])
        low, more = tl.where(is_first, low, lows[:, None]), tl.where(is_first, more, mores[:, None])
    if PLAIN:
        whole = scale.to(tl.float32)
        if HAS_LOWS:
            whole += low.to(tl.float32)
        if FORMAT == "int4":
            if tl.float16 == TYPE:
                number += 896.0  # the offset of float16 planes is 1024, not 128
            number += more.to(tl.float32)
        elif FORMAT == "int4_symmetric":
            number -= 8.0
            whole *= 2.0**-133
        number = (number * whole).to(TYPE).to(tl.float32)
    else:
        nothing = tl.full([1, 1], -0.0, TYPE)
        if FORMAT == "int4":
            number = _fma(number, tl.full([1, 1], 1.0, TYPE), more, TYPE)
        elif FORMAT == "int4_symmetric":
            nothing = more
        if HAS_LOWS:
            nothing = _fma(number, low, nothing, TYPE)
        number = _fma(number, scale, nothing, TYPE)
    return number


@triton.jit
def _beside(a, b):
    """Joins two halves to `[outputs, 2 * inputs]` without moving data between registers."""
    both = tl.permute(tl.join(a, b), (0, 2, 1))
    return tl.reshape(both, (a.shape[0], 2 * a.shape[1]))


@triton.jit
def step_numbers(
    raw, fields, padded, FORMAT: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_LOWS: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """All scaled elements of a step, `[outputs, STEP]`."""
    found = _beside(
        scaled_plane(raw, 0, fields, padded, FORMAT, GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN),
        scaled_plane(raw, 1, fields, padded, FORMAT, GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN),
    )
    if FORMAT != "fp8":
        further = _beside(
            scaled_plane(raw, 2, fields, padded, FORMAT, GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN),
            scaled_plane(raw, 3, fields, padded, FORMAT, GROUPS, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN),
        )
        found = _beside(found, further)
    return found


@dataclass(frozen=True)
class PackedWeight:
    """A group-quantised weight packed for a GPU's kernels and activations of one type.

    words: int16 `[tiles, steps, TILE, STEP / elements of a word]`, outputs and inputs padded ·
    fields: int32 `[steps, parts, tiles * TILE]`; for each group of a step its scale, the negated
    zero point if the format has one, and the scale's rounding error if dtype rounds it; a word
    holds two fields of dtype, one of float32, or four exponents of MXFP4 · order: int64 `[in]`, see
    `Int4Weight` · counters: int32 of `new_counters`, used by one stream.
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
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))

    @property
    def padded(self) -> int:
        """Padded number of outputs."""
        return self.fields.shape[2]

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel unpacks it in registers; if not, torch multiplies the dequantised
        matrix."""
        return _has_kernel(self.format, self.dtype)

    @property
    def options(self) -> dict[str, Any]:
        """The kernels' constants."""
        return {
            "PARTS": self.fields.shape[1], "FORMAT": self.format, "GROUPS": self.groups,
            "HAS_ZEROS": self.has_zeros, "HAS_LOWS": self.has_lows,
            "FACTOR": _SUMS_FACTOR[self.format],
            "TYPE": TRITON_TYPES[self.dtype] if self.has_kernel else tl.float32,
            "PLAIN": self.words.device.type == "cpu" or not self.has_kernel,
        }  # fmt: skip

    def empty(self, outputs: int, device: torch.device) -> PackedWeight:
        """A weight of the same format with another number of outputs and undefined numbers."""
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
        """Adds fields of zero points or rounding errors, as another weight may have them."""
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


def pack(weight: GroupScaledWeight, dtype: torch.dtype) -> PackedWeight | None:
    """Packs a weight for activations of dtype; None if kernels do not support its groups."""
    (outputs, inputs), group = weight.shape, weight.group
    zeros, order, format = None, None, "fp8"
    if isinstance(weight, Int4Weight):
        zeros, order, format = weight.zeros, weight.order, "int4"
    elif isinstance(weight, Mxfp4Weight):
        format = "nvfp4"
    if group % STEP and (STEP % group or group < STEP // (4 if format == "fp8" else 8)):
        return None
    scales, has_lows = _by_step(weight.scales.float(), group), False
    fields = _exponents(weight) if isinstance(weight, Mxfp4Weight) else None
    if fields is not None:
        format = "mxfp4"
    else:
        kind = _kind(format, dtype)
        is_exact = bool((scales == scales.to(kind)).all())
        if format == "int4" and zeros is None and is_exact and kind == torch.bfloat16:
            format = "int4_symmetric"
        scales = scales * _FACTOR[format]
        parts = [scales.to(kind)]
        if zeros is not None:
            parts.append(_BASE[kind] - _by_step(zeros, group).to(kind))
        lows = (scales - parts[0].float()).to(kind)
        if has_lows := bool(lows.any()):
            parts.append(lows)
        fields = _fields(parts)
    starts = range(0, outputs, _PACKED_AT_ONCE)
    return PackedWeight(
        format, (outputs, inputs), dtype, scales.shape[1], zeros is not None, has_lows,
        torch.cat([_words(weight, format, first) for first in starts]), fields, order,
        new_counters(outputs, fields.device),
    )  # fmt: skip


def _by_step(parts: Tensor, group: int) -> Tensor:
    """`[out, groups]` → `[steps, groups of a step, padded]`; a large group spans several steps."""
    parts = parts.repeat_interleave(max(1, group // STEP), dim=1)
    of_step = max(1, STEP // group)
    whole = pad(parts.T, (0, -parts.shape[0] % TILE, 0, -parts.shape[1] % of_step))
    steps: Tensor = whole.unflatten(0, (-1, of_step))
    return steps


def _exponents(weight: Mxfp4Weight) -> Tensor | None:
    """Four scales of a step as exponents in a word; None if a scale is not a power of two."""
    fractions, exponents = weight.scales.frexp()
    if weight.group != STEP // 4 or not (fractions == 0.5).all() or exponents.max() > 65:
        return None
    return _joined(_by_step((exponents + 127).clamp_min(0).to(torch.uint8), weight.group))


def _fields(parts: Sequence[Tensor]) -> Tensor:
    """Fields of a `PackedWeight` from parts `[steps, groups, padded]`."""
    each = torch.stack(tuple(parts), dim=2).flatten(1, 2)
    return _joined(pad(each, (0, 0, 0, each.shape[1] * each.itemsize // 2 % 2)))


def _joined(each: Tensor) -> Tensor:
    """`[steps, fields, padded]`, in multiples of a word → int32 `[steps, parts, padded]`."""
    return each.transpose(1, 2).contiguous().view(torch.int32).transpose(1, 2).contiguous()


def _has_kernel(format: str, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 or (dtype == torch.float16 and format == "int4")


def _kind(format: str, dtype: torch.dtype) -> torch.dtype:
    """Type of a weight's fields."""
    return dtype if _has_kernel(format, dtype) else torch.float32


def _words(weight: GroupScaledWeight, format: str, first: int) -> Tensor:
    """Packs _PACKED_AT_ONCE outputs, beginning with `first`."""
    rows = slice(first, first + _PACKED_AT_ONCE)
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
    if format in ("mxfp4", "nvfp4"):
        sign, size = plane >> 3, plane & 7
        words = sign[0] << 15 | size[0] << 6 | sign[1] << 12 | size[1] << 3 | sign[2] << 9 | size[2]
        words |= sign[3] << 14 | size[3] >> 2 << 13 | (size[3] & 3) << 10
    else:
        bits = 16 // number_of_planes
        words = plane[0]
        for number in range(1, number_of_planes):
            words = words | plane[number] << bits * number
    return words.to(torch.int16)


def random_weight(format: str, outputs: int, depth: int, device: torch.device) -> GroupScaledWeight:
    """A random weight; format: "int4", "awq" (int4 with zero points), "fp8", "mxfp4", "nvfp4"."""
    groups_of = {"int4": Int4Weight.GROUP, "mxfp4": Mxfp4Weight.GROUP, "nvfp4": NVFP4_GROUP}
    group = groups_of.get(format, math.gcd(STEP, depth))
    groups = (outputs, depth // group)

    def numbers(end: int, columns: int) -> Tensor:
        return torch.randint(0, end, (outputs, columns), dtype=torch.uint8, device=device)

    scales = torch.rand(groups, device=device) / 50 + 0.01
    if format == "fp8":
        full = torch.randn(outputs, depth, device=device) * 2 ** (numbers(15, depth) - 12.0)
        return Fp8BlockWeight(full.to(FP8), scales)
    if format == "mxfp4":
        return Mxfp4Weight(numbers(256, depth // 2), scales.log2().round().exp2())
    if format == "nvfp4":
        return Mxfp4Weight(numbers(256, depth // 2), (scales * 4096).to(FP8).float() * 1.7e-4)
    if format == "awq":
        return Int4Weight(numbers(256, depth // 2), scales.half().float(), numbers(17, groups[1]))
    return Int4Weight(numbers(256, depth // 2), scales.bfloat16().float())
