"""Group-quantised weights as kernels take them: int4, MXFP4 (W4A16) and fp8 in blocks (W8A16).

They are packed when they are loaded, as in Marlin (https://arxiv.org/abs/2408.11743). A word of 16
bits holds elements of one output that lie a plane apart: a quarter of a step of 128 inputs, or half
of one where elements have 8 bits. So a few bit operations on two words at once bring a
plane's numbers to where bfloat16 or float16 has them, where tensor cores take them from. What these
numbers are more, or are multiplied with, then, the fields of their group make up for.
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
from baton.engine.quantization.fp8 import Fp8BlockWeight
from baton.engine.quantization.group_scaled import FourBitWeight, GroupScaledWeight
from baton.engine.quantization.int4 import Int4Weight
from baton.engine.quantization.mxfp4 import Mxfp4Weight

STEP = 128  # inputs that are packed together
TILE = 64  # outputs that are, and lie next to each other
_PACKED_AT_ONCE = 64 * TILE  # outputs, so that no large copies exist

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

# What fields have scales multiplied with, because planes have less; where a large scale leaves no
# room for that, sums have the rest, 2 ** 64. ("int4" has any zero points, "int4_symmetric" none.)
_FACTOR = {"int4": 1.0, "int4_symmetric": 2.0**69, "fp8": 2.0**120, "mxfp4": 2.0**62}
_SUMS_FACTOR = {"int4": 1.0, "int4_symmetric": 2.0**64, "fp8": 1.0, "mxfp4": 2.0**64}
# What planes of int4 are more by, less which a zero point is held.
_BASE = {torch.bfloat16: -128.0, torch.float16: -1024.0, torch.float32: -128.0}


@triton.jit
def _fma(a, b, c, TYPE: tl.constexpr):
    """`a * b + c`, rounded once, two elements an instruction."""
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
    """One plane of words, float32, in Triton's own operations."""
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
    """The planes of words int16, before `scaled`: of TYPE, or float32 if they are PLAIN."""
    if PLAIN:  # fp8's are the first two
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
        INT4: tl.constexpr = _INT4_BF16 if FORMAT == "int4" else _INT4_SYMMETRIC_BF16
        TEXT: tl.constexpr = _MXFP4_BF16 if FORMAT == "mxfp4" else INT4
        found = tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return found


@triton.jit
def _field(fields, padded, NUMBER: tl.constexpr, TYPE: tl.constexpr):
    """A step's field of a number, `[outputs]`: two of 16 bits are a word, or one of float32."""
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
    """Of a step's group of a number `[outputs]`: its scale, what TYPE cut off that, and what is
    added to planes, or symmetric int4 to the product.
    """
    if FORMAT == "mxfp4":  # powers of two: bytes, and with an offset bfloat16's exponents
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
    elif FORMAT == "int4_symmetric":  # 8 times the scale, less the factors of both
        more = scale.to(tl.float32) * (-(2.0**-130))
        if not PLAIN:
            more = more.to(TYPE)
    return scale, low, more


@triton.jit
def scaled_plane(
    raw, PLANE: tl.constexpr, fields, padded, FORMAT: tl.constexpr, GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_LOWS: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Elements of one of a step's planes `[outputs, inputs]`, with the fields at pointers
    `[outputs]`. Of TYPE, or PLAIN ones in float32, rounded to TYPE.
    """
    PLANES: tl.constexpr = 2 if FORMAT == "fp8" else 4
    number = raw[PLANE]
    scale, low, more = _group_fields(
        fields, padded, PLANE * GROUPS // PLANES, FORMAT, HAS_ZEROS, HAS_LOWS, TYPE, PLAIN
    )
    if PLAIN:
        whole = scale.to(tl.float32)
        if HAS_LOWS:
            whole += low.to(tl.float32)
        if FORMAT == "int4":
            if tl.float16 == TYPE:
                number += 896.0  # float16's planes are more by 1024, not by 128
            number += more.to(tl.float32)[:, None]
        elif FORMAT == "int4_symmetric":
            number -= 8.0
            whole *= 2.0**-133
        number = (number * whole[:, None]).to(TYPE).to(tl.float32)
    else:
        nothing = tl.full([1, 1], -0.0, TYPE)
        if FORMAT == "int4":
            number = _fma(number, tl.full([1, 1], 1.0, TYPE), more[:, None], TYPE)
        elif FORMAT == "int4_symmetric":
            nothing = more[:, None]
        if HAS_LOWS:
            nothing = _fma(number, low[:, None], nothing, TYPE)
        number = _fma(number, scale[:, None], nothing, TYPE)
    return number


@triton.jit
def _beside(a, b):
    """`[outputs, 2 * inputs]` of two halves: registers keep what they have."""
    both = tl.permute(tl.join(a, b), (0, 2, 1))
    return tl.reshape(both, (a.shape[0], 2 * a.shape[1]))


@triton.jit
def step_numbers(
    raw, fields, padded, FORMAT: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_LOWS: tl.constexpr, TYPE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """All elements of a step, `[outputs, STEP]`, of its planes."""
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
    def num_bytes(self) -> int:
        """Of all its tensors."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))

    @property
    def padded(self) -> int:
        """Outputs of all tiles."""
        return self.fields.shape[2]

    @property
    def has_kernel(self) -> bool:
        """Whether products unpack it in registers; others are unpacked for torch's product."""
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


def pack(weight: GroupScaledWeight, dtype: torch.dtype) -> PackedWeight | None:
    """A weight for activations of dtype; None if its groups are none that kernels take."""
    (outputs, inputs), group = weight.shape, weight.group
    if group % STEP and (STEP % group or group < STEP // 4):
        return None
    zeros, order, format = None, None, "fp8"
    if isinstance(weight, Int4Weight):
        zeros, order, format = weight.zeros, weight.order, "int4"
    scales, has_lows = _by_step(weight.scales.float(), group), False
    if isinstance(weight, Mxfp4Weight):
        format, fields = "mxfp4", _exponents(weight)
        if fields is None:
            return None
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
    """`[out, groups]` → `[steps, groups of a step, padded]`; large groups are in several steps."""
    parts = parts.repeat_interleave(max(1, group // STEP), dim=1)
    of_step = max(1, STEP // group)
    whole = pad(parts.T, (0, -parts.shape[0] % TILE, 0, -parts.shape[1] % of_step))
    steps: Tensor = whole.unflatten(0, (-1, of_step))
    return steps


def _exponents(weight: Mxfp4Weight) -> Tensor | None:
    """Four scales of a step in a word, as float32's exponents; None if they are not such."""
    fractions, exponents = weight.scales.frexp()  # of half the scales, so those of the scales
    if weight.group != STEP // 4 or not (fractions == 0.5).all() or exponents.max() > 65:
        return None
    return _joined(_by_step((exponents + 127).clamp_min(0).to(torch.uint8), weight.group))


def _fields(parts: Sequence[Tensor]) -> Tensor:
    """Parts `[steps, groups, padded]` as `PackedWeight` has them."""
    each = torch.stack(tuple(parts), dim=2).flatten(1, 2)
    return _joined(pad(each, (0, 0, 0, each.shape[1] * each.itemsize // 2 % 2)))


def _joined(each: Tensor) -> Tensor:
    """`[steps, fields, padded]`, whole words of them → int32 `[steps, parts, padded]`."""
    return each.transpose(1, 2).contiguous().view(torch.int32).transpose(1, 2).contiguous()


def _has_kernel(format: str, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 or (dtype == torch.float16 and format == "int4")


def _kind(format: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a weight's fields."""
    return dtype if _has_kernel(format, dtype) else torch.float32


def _words(weight: GroupScaledWeight, format: str, first: int) -> Tensor:
    """Outputs from the first on, packed."""
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


def random_weight(format: str, outputs: int, depth: int, device: torch.device) -> GroupScaledWeight:
    """format: "int4", with zero points "awq", "fp8" or "mxfp4", in groups as checkpoints have."""
    group = {"int4": Int4Weight.GROUP, "mxfp4": Mxfp4Weight.GROUP}.get(
        format, math.gcd(STEP, depth)
    )
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
