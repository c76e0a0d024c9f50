"""What the attention kernels share: a sequence's keys, read through its block table.

A pool is `[num_blocks, num_layers, 2, num_kv_heads, block_size, row_size]`, K at 0 and V at 1; rows
are of the queries' type, or one byte an element with their float32 scales behind those of the whole
block (`kernels.torch.row_quantization.split_rows`). Offsets into it pass 2**31 and are int64.

Elements of eight bits are loaded in pairs, as int16, because GPUs bring 16 bits from shared memory
into the order of a product in one instruction and have none for 8. Products are then of even and of
odd elements: scores are the sum of both, and V's are two halves of the result.

Softmax is online (Milakov and Gimelshein 2018): a state of the largest score, the sum of weights
and the weighted sum of V, all float32 and in powers of two, which are one instruction.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.torch.attention import AttentionBatch, PrefillSegment, Scoring, attend
from baton.engine.kernels.torch.row_quantization import FP8, SCALE_BYTES, is_quantized, unpack_rows

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)

# Stands for no score yet. Finite, so that a row that sees no key so far has weights of 0 and not
# the exponential of infinity less infinity.
LOWEST = tl.constexpr(-1e30)

TRITON_TYPES = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
}  # fmt: skip

# Two pairs of eight-bit elements $2 as bfloat16, the even ones in $0 and the odd ones in $1.
# Triton's conversions take two to three times as many instructions.
# int8 is 128 plus its low 7 bits, which bfloat16 has as bits, less 128 or, below 0, less 256.
INT8_TO_BF16 = """{
    .reg .b32 odd, low, top, one;
    mov.b32 one, 0x3f803f80;
    shr.b32 odd, $2, 8;
    lop3.b32 low, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 top, $2, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 $0, low, one, top;
    lop3.b32 low, odd, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 top, odd, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 $1, low, one, top;
}"""
# e4m3's bits are those of bfloat16 with another bias of the exponent: times 2 ** 120. (NaN becomes
# 480: it is never written.)
FP8_TO_BF16 = """{
    .reg .b32 moved, sign, factor, zero;
    mov.b32 factor, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    shl.b32 moved, $2, 8;
    and.b32 sign, moved, 0x80008000;
    shl.b32 moved, $2, 4;
    lop3.b32 moved, moved, 0x07f007f0, sign, 0xea;
    fma.rn.bf16x2 $0, moved, factor, zero;
    and.b32 sign, $2, 0x80008000;
    shr.b32 moved, $2, 4;
    lop3.b32 moved, moved, 0x07f007f0, sign, 0xea;
    fma.rn.bf16x2 $1, moved, factor, zero;
}"""
_INT8_TO_BF16, _FP8_TO_BF16 = tl.constexpr(INT8_TO_BF16), tl.constexpr(FP8_TO_BF16)

# The window of a model without one: no context is as long.
NO_WINDOW = 2**31 - 1


def pool_sizes(q: Tensor, pool: Tensor) -> tuple[dict[str, Any], dict[str, int | str]]:
    """What a kernel's code depends on in a pool and queries q `[rows, heads, head_size]` of it, as
    the kernels name it; and what its best sizes do, heads as tiles hold them. Not to be changed.
    """
    return _pool_sizes(q.shape[1:], q.dtype, pool.shape[3:], pool.dtype, q.device.type)


@lru_cache(maxsize=256)
def _pool_sizes(
    queries: torch.Size, query_type: torch.dtype, rows: torch.Size, row_type: torch.dtype,
    device_type: str,
) -> tuple[dict[str, Any], dict[str, int | str]]:  # fmt: skip
    heads, head_size = queries
    kv_heads, block_size, row_size = rows
    quantized = is_quantized(row_type)
    assert heads % kv_heads == 0 and (quantized or row_type == query_type)
    assert row_size == head_size + (SCALE_BYTES if quantized else 0)
    assert head_size % 16 == 0 and block_size % 16 == 0, "the backend takes no other models"
    k_type = v_type = TRITON_TYPES[query_type]
    if quantized and query_type == torch.float16:
        # A weight times a row's scale may be less than float16 has; all eight-bit values are
        # bfloat16 as well.
        v_type = tl.bfloat16
    if device_type == "cpu":  # the interpreter keeps bfloat16 as whole numbers: no products
        k_type, v_type = (tl.float32 if of == tl.bfloat16 else of for of in (k_type, v_type))
    # Products add up 16 elements at least, and of eight-bit rows every second one.
    padded = max(32 if quantized else 16, int(triton.next_power_of_2(head_size)))
    key: dict[str, int | str] = {
        "head_size": padded, "query_bytes": query_type.itemsize, "kv_bytes": row_type.itemsize,
    }  # fmt: skip
    return {
        "HEADS": heads, "KV_HEADS": kv_heads, "BLOCK_SIZE": block_size,
        "ROW_SIZE": row_size // 2 if quantized else row_size,
        "HEAD_SIZE": head_size, "HEAD_PAD": padded, "QUANTIZED": quantized,
        "FP8": row_type == FP8, "K_TYPE": k_type, "V_TYPE": v_type,
    }, key  # fmt: skip


def elements(pool: Tensor) -> Tensor:
    """A pool as kernels read it: elements of eight bits in pairs, as int16."""
    return pool.view(torch.int16) if is_quantized(pool.dtype) else pool


def scored(scoring: Scoring) -> tuple[float, float | None, Tensor | None]:
    """How kernels are given it, but for the window: scale and softcap for powers of two, sinks."""
    softcap = scoring.softcap * LOG2_E if scoring.softcap else None
    return scoring.scale * LOG2_E, softcap, scoring.sinks


def attention_reference(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, context_lens: Tensor,
    query_lens: Tensor, scoring: Scoring,
) -> Tensor:  # fmt: skip
    """As `prefill_attention`, by the engine's attention in torch: in float64, whatever lies where
    none may read.
    """
    values = unpack_rows(pool, torch.float32) if is_quantized(pool.dtype) else pool
    segments, row = [], 0
    for table, context, count in zip(
        block_tables.long(), context_lens.tolist(), query_lens.tolist(), strict=True
    ):
        if count:
            blocks = table[: -(-(context + count) // pool.shape[4])]
            segments.append(PrefillSegment(row, count, context, blocks))
        row += count
    nothing = torch.empty(0, device=q.device)
    batch = AttentionBatch(nothing, 0, nothing, nothing, tuple(segments))
    found = attend(q.double(), values.double().nan_to_num(), layer, batch, scoring)
    return found.view(q.shape).to(q.dtype)


@triton.jit
def first_state(sinks, heads, wanted):
    """What rows of these heads begin with: total and largest. A sink has a weight and no value."""
    if sinks is None:
        total = tl.zeros(heads.shape, dtype=tl.float32)
        largest = tl.full(heads.shape, LOWEST, dtype=tl.float32)
    else:
        total = tl.full(heads.shape, 1.0, dtype=tl.float32)
        largest = tl.load(sinks + heads, mask=wanted, other=0.0) * _LOG2_E
    return total, largest


@triton.jit
def load_rows(base, rows, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Elements of KV rows, or pairs of them, `[keys, PAD]`; 0 behind a head's end.

    base: of one layer, part and head · rows: int64 `[keys]`, elements from there.
    """
    columns = tl.arange(0, PAD)
    at = base + rows[:, None] + columns[None, :]
    return tl.load(at) if SIZE == PAD else tl.load(at, mask=(columns < SIZE)[None, :], other=0)


@triton.jit
def load_scales(base, blocks, slots, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr):
    """Scales of KV rows, float32 `[keys]`.

    base: as `load_rows` takes it · blocks: int64 `[keys]`, elements from there · slots: `[keys]`.
    """
    return tl.load((base + blocks + BLOCK_SIZE * SIZE).to(tl.pointer_type(tl.float32)) + slots)


@triton.jit
def unpack(pairs, FP8: tl.constexpr, TYPE: tl.constexpr):
    """The even and the odd ones of eight-bit elements that were loaded in pairs, as TYPE."""
    if TYPE == tl.bfloat16:  # noqa: SIM300
        even, odd = tl.inline_asm_elementwise(
            _FP8_TO_BF16 if FP8 else _INT8_TO_BF16, "=&r,=&r,r", [pairs],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even = pairs.to(tl.int8)
        odd = (pairs >> 8).to(tl.int8)
        if FP8:
            even = even.to(tl.float8e4nv, bitcast=True)
            odd = odd.to(tl.float8e4nv, bitcast=True)
        even = even.to(TYPE)
        odd = odd.to(TYPE)
    return even, odd


@triton.jit
def within(keys, least, most):
    """Positions of keys, moved to the nearest in least .. most - 1; least None is 0."""
    lowest = 0 if least is None else least
    return tl.maximum(tl.minimum(keys, most - 1), lowest)


@triton.jit
def load_blocks(
    block_table, at, least, most, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PARTLY: tl.constexpr
):
    """The blocks of a tile's keys from position `at` on, int32 `[TILE]`, as `attend_range` reads
    them; if not PARTLY, 0 from `most` on.
    """
    keys = at + tl.arange(0, TILE)
    if PARTLY:
        blocks = tl.load(block_table + within(keys, least, most) // BLOCK_SIZE)
    elif TILE % BLOCK_SIZE == 0:  # tiles then begin where blocks begin
        entries = block_table + at // BLOCK_SIZE + tl.arange(0, TILE) // BLOCK_SIZE
        blocks = tl.load(entries, mask=keys < most, other=0)
    else:
        blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=keys < most, other=0)
    return blocks


@triton.jit
def halves(x, QUANTIZED: tl.constexpr):
    """x `[rows, HEAD_PAD]` as `attend_range` takes it: its even and odd columns over eight-bit KV,
    else itself twice.
    """
    even, odd = x, x
    if QUANTIZED:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return even, odd


@triton.jit
def joined(even, odd, QUANTIZED: tl.constexpr):
    """What `halves` was given."""
    return tl.interleave(even, odd) if QUANTIZED else even


@triton.jit
def attend_range(
    q, q_odd, weighted, weighted_odd, total, largest, k_base, v_base, block_table, begin, end,
    least, most, positions, window, scale, softcap, block_stride, BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, QUANTIZED: tl.constexpr, FP8: tl.constexpr,
    V_TYPE: tl.constexpr, TILE: tl.constexpr, PARTLY: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Adds a range of a sequence's keys to the softmax of rows of queries.

    q, q_odd: `halves` of queries `[rows, HEAD_PAD]` · weighted and weighted_odd, such halves in
    float32, total and largest, float32 `[rows]`: the state, returned as it is then · k_base,
    v_base: of one layer and head in block 0 · block_table: int32, the sequence's · begin, end: the
    range; begin is a multiple of TILE · positions: int32 `[rows]`, of the queries · scale: of
    scores, for powers of two, and softcap, or None.

    PARTLY: keys before `least`, unless that is None, and from `most` on are neither read nor seen;
    else all of the range's tiles are · CAUSAL: a row sees no key behind its position · WINDOWED:
    nor one that is `window` or more before it.
    """
    key = tl.arange(0, TILE)
    SIZE: tl.constexpr = HEAD_SIZE // 2 if QUANTIZED else HEAD_SIZE
    PAD: tl.constexpr = HEAD_PAD // 2 if QUANTIZED else HEAD_PAD
    # The blocks of a tile are loaded one tile ahead: its loads of K and V depend on them, and are
    # kept under way over several iterations only if they wait for no load of their own.
    blocks = load_blocks(block_table, begin, least, most, TILE, BLOCK_SIZE, PARTLY)
    for at in tl.range(begin, end, TILE):
        keys = at + key
        visible = None
        if PARTLY:
            # In place of a key that is not to be read, another one is: what lies there may be NaN,
            # which a weight of 0 would not take away, and a mask on every load takes half as many
            # registers again.
            slots = within(keys, least, most) % BLOCK_SIZE
            visible = (keys < most)[None, :]
            if least is not None:
                visible = visible & (keys >= least)[None, :]
        elif TILE % BLOCK_SIZE == 0:
            slots = key % BLOCK_SIZE
        else:
            slots = keys % BLOCK_SIZE
        if CAUSAL:
            visible = visible & (keys[None, :] <= positions[:, None])
        if WINDOWED:
            visible = visible & (keys[None, :] > (positions - window)[:, None])
        begins = blocks.to(tl.int64) * block_stride
        rows = begins + slots * SIZE

        k = load_rows(k_base, rows, SIZE, PAD)
        if QUANTIZED:
            # A scale is the same for a key's whole row, and so can come behind the product: exact,
            # and one multiplication for a score instead of one for each element. On Blackwell
            # products of float32 with what was narrower are tf32 in spite of "ieee"
            # (triton#10176); they round less than eight-bit KV did.
            k_even, k_odd = unpack(k, FP8, q.dtype)
            scores = tl.dot(q, tl.trans(k_even), input_precision="ieee")
            scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee")
            scores *= load_scales(k_base, begins, slots, BLOCK_SIZE, SIZE)[None, :] * scale
        else:
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if softcap is not None:  # tanh(x) is 1 - 2 / (1 + exp(2 * x))
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * _LOG2_E / softcap))))
        if PARTLY:
            scores = tl.where(visible, scores, float("-inf"))

        above = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - above[:, None])
        faded = tl.exp2(largest - above)
        total = total * faded + tl.sum(weights, 1)
        largest = above

        v = load_rows(v_base, rows, SIZE, PAD)
        weighted *= faded[:, None]
        if QUANTIZED:
            weights *= load_scales(v_base, begins, slots, BLOCK_SIZE, SIZE)[None, :]
            weights = weights.to(V_TYPE)
            v_even, v_odd = unpack(v, FP8, V_TYPE)
            weighted = tl.dot(weights, v_even, weighted, input_precision="ieee")
            weighted_odd *= faded[:, None]
            weighted_odd = tl.dot(weights, v_odd, weighted_odd, input_precision="ieee")
        else:
            weighted = tl.dot(weights.to(V_TYPE), v.to(V_TYPE), weighted, input_precision="ieee")
        blocks = load_blocks(block_table, at + TILE, least, most, TILE, BLOCK_SIZE, PARTLY)
    return weighted, weighted_odd, total, largest
