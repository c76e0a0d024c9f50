"""Parts of both attention kernels: an online softmax over keys read through a block table. A pool
is `[num_blocks, num_layers, 2, num_kv_heads, block_size, row_size]`, K at 0 and V at 1, or what a
layer sees of one (`kernels.torch.attention.pool_of_layer`), as layer 0. Rows have the queries'
type, or one byte an element, with the float32 scales behind all rows of the block
(`kernels.torch.row_quantization.split_rows`). Offsets exceed 2**31 and are int64. 8-bit elements
are loaded in pairs, as int16: GPUs have an instruction (ldmatrix) that arranges 16-bit elements
from shared memory for a product, and none for 8 bits. Products are then computed for even and odd
elements: scores are the sum of both, and the weighted V has two halves. Softmax is online (Milakov
and Gimelshein 2018): its state is the largest score, the sum of weights and the weighted sum of V,
all in float32 and in powers of two, which are one instruction."""

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

# The largest score before the first one. Finite, so that a row that has seen no key gets weights of
# 0 and not NaN, the exponential of infinity minus infinity.
LOWEST = tl.constexpr(-1e30)

TRITON_TYPES = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
}  # fmt: skip

# Converts two pairs of 8-bit elements ($2) to bfloat16, even ones in $0 and odd ones in $1.
# Triton's conversions take two to three times as many instructions. An int8 is 128 plus its low 7
# bits, which are bits of a bfloat16, minus 128 or, if negative, minus 256.
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
# e4m3 has the bits of bfloat16 with another exponent bias: times 2 ** 120. (NaN, which is never
# written, becomes 480.)
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

# The window of a model without one, which no context reaches.
NO_WINDOW = 2**31 - 1


def pool_sizes(q: Tensor, pool: Tensor) -> tuple[dict[str, Any], dict[str, int | str]]:
    """The kernels' constants for a pool and queries `[rows, heads, head_size]`, and the key of
    their configurations. The caller must not change them."""
    rows, steps = pool.shape[3:], pool.stride()[2:4]
    return _pool_sizes(q.shape[1:], q.dtype, rows, steps, pool.dtype, q.device.type)


@lru_cache(maxsize=256)
def _pool_sizes(
    queries: torch.Size, query_type: torch.dtype, rows: torch.Size, steps: tuple[int, ...],
    row_type: torch.dtype, device_type: str,
) -> tuple[dict[str, Any], dict[str, int | str]]:  # fmt: skip
    heads, head_size = queries
    kv_heads, block_size, row_size = rows
    quantized = is_quantized(row_type)
    assert heads % kv_heads == 0 and (quantized or row_type == query_type)
    assert row_size == head_size + (SCALE_BYTES if quantized else 0)
    assert head_size % 16 == 0 and block_size % 16 == 0, "the backend takes no other models"
    k_type = v_type = TRITON_TYPES[query_type]
    if quantized and query_type == torch.float16:
        # A weight times a row's scale may underflow float16; bfloat16 represents all 8-bit values.
        v_type = tl.bfloat16
    if device_type == "cpu":  # the interpreter cannot multiply bfloat16
        k_type, v_type = (tl.float32 if of == tl.bfloat16 else of for of in (k_type, v_type))
    # A product needs a depth of at least 16; for 8-bit rows it covers every second element.
    padded = max(32 if quantized else 16, int(triton.next_power_of_2(head_size)))
    key: dict[str, int | str] = {
        "head_size": padded, "query_bytes": query_type.itemsize, "kv_bytes": row_type.itemsize,
    }  # fmt: skip
    return {
        "HEADS": heads, "KV_HEADS": kv_heads, "BLOCK_SIZE": block_size, **_steps(rows, steps),
        "ROW_SIZE": row_size // 2 if quantized else row_size,
        "HEAD_SIZE": head_size, "HEAD_PAD": padded, "QUANTIZED": quantized,
        "FP8": row_type == FP8, "K_TYPE": k_type, "V_TYPE": v_type,
    }, key  # fmt: skip


def _steps(rows: torch.Size, strides: tuple[int, ...]) -> dict[str, int]:
    part, head = (stride // (rows[1] * rows[2]) for stride in strides)
    return {"PART_STEP": part, "HEAD_STEP": head}


def pool_steps(pool: Tensor) -> dict[str, int]:
    """How far V is from K, and a head from the next, in blocks of a head's rows."""
    return _steps(pool.shape[3:], pool.stride()[2:4])


def in_order(pool: Tensor) -> bool:
    """Whether a pool is contiguous, or what a layer sees of one that is."""
    return pool.is_contiguous() or (pool.shape[1] == 1 and pool[0, 0, 0, 0].is_contiguous())


def stored_elements(pool: Tensor) -> Tensor:
    """A pool as kernels read it: 8-bit elements in pairs, as int16."""
    return pool.view(torch.int16) if is_quantized(pool.dtype) else pool


def score_arguments(scoring: Scoring) -> tuple[float, float | None, Tensor | None]:
    """Kernel arguments for a scoring: scale and softcap for powers of two, and sinks."""
    softcap = scoring.softcap * LOG2_E if scoring.softcap else None
    return scoring.scale * LOG2_E, softcap, scoring.sinks


def attention_reference(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, context_lens: Tensor,
    query_lens: Tensor, scoring: Scoring,
) -> Tensor:  # fmt: skip
    """`prefill_attention` by the engine's attention in torch, in float64; memory that no row may
    read can hold NaN."""
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
def initial_state(sinks, heads, wanted):
    """Initial total and largest score of rows of these heads. A sink adds a weight and no value."""
    if sinks is None:
        total = tl.zeros(heads.shape, dtype=tl.float32)
        largest = tl.full(heads.shape, LOWEST, dtype=tl.float32)
    else:
        total = tl.full(heads.shape, 1.0, dtype=tl.float32)
        largest = tl.load(sinks + heads, mask=wanted, other=0.0) * _LOG2_E
    return total, largest


@triton.jit
def load_rows(base, rows, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Elements of KV rows, or pairs of elements, `[keys, PAD]`; 0 beyond the head size. base:
    pointer to one layer, K or V, and head · rows: int64 `[keys]`, offsets in elements."""
    columns = tl.arange(0, PAD)
    at = base + rows[:, None] + columns[None, :]
    return tl.load(at) if SIZE == PAD else tl.load(at, mask=(columns < SIZE)[None, :], other=0)


@triton.jit
def load_scales(base, blocks, slots, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr):
    """Scales of KV rows, float32 `[keys]`.

    base: as in `load_rows` · blocks: int64 `[keys]`, offsets of blocks in elements · slots:
    `[keys]`.
    """
    return tl.load((base + blocks + BLOCK_SIZE * SIZE).to(tl.pointer_type(tl.float32)) + slots)


@triton.jit
def unpack(pairs, FP8: tl.constexpr, TYPE: tl.constexpr):
    """Even and odd elements of pairs of 8-bit elements, as TYPE."""
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
def window_at(position, window, CHUNKED: tl.constexpr):
    """The number of tokens that those at a position attend to."""
    return position % window + 1 if CHUNKED else window


@triton.jit
def within(keys, least, most):
    """Positions of keys, clamped to least .. most - 1; least None is 0."""
    lowest = 0 if least is None else least
    return tl.maximum(tl.minimum(keys, most - 1), lowest)


@triton.jit
def load_blocks(
    block_table, at, least, most, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PARTLY: tl.constexpr
):
    """Blocks of the TILE keys from position `at`, int32 `[TILE]`, for `attend_range`; if not
    PARTLY, 0 from `most` on."""
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
def split_even_odd(x, QUANTIZED: tl.constexpr):
    """Even and odd columns of x `[rows, HEAD_PAD]` for 8-bit KV; otherwise x twice."""
    even, odd = x, x
    if QUANTIZED:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return even, odd


@triton.jit
def join_even_odd(even, odd, QUANTIZED: tl.constexpr):
    """The inverse of `split_even_odd`."""
    return tl.interleave(even, odd) if QUANTIZED else even


@triton.jit
def attend_range(
    q, q_odd, weighted, weighted_odd, total, largest, k_base, v_base, block_table, begin, end,
    least, most, positions, window, scale, softcap, block_stride, BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, QUANTIZED: tl.constexpr, FP8: tl.constexpr,
    V_TYPE: tl.constexpr, TILE: tl.constexpr, PARTLY: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Adds a range of a sequence's keys to the softmax state of query rows, and returns the state.
    q, q_odd: queries `[rows, HEAD_PAD]` after `split_even_odd` · weighted, weighted_odd: weighted
    sum of V in float32, split likewise · total, largest: float32 `[rows]` · k_base, v_base:
    pointers to one layer and head in block 0 · block_table: int32, the sequence's · begin, end: the
    range; begin is a multiple of TILE · positions: int32 `[rows]`, of the queries · scale, softcap:
    for powers of two; softcap may be None · window: of all rows, or int32 `[rows]`.

    PARTLY: keys before `least` (if not None) and from `most` on are masked and not read; otherwise
    the tiles are full · CAUSAL: a row sees no key after its position · WINDOWED: nor one `window`
    or more positions before it.
    """
    key = tl.arange(0, TILE)
    SIZE: tl.constexpr = HEAD_SIZE // 2 if QUANTIZED else HEAD_SIZE
    PAD: tl.constexpr = HEAD_PAD // 2 if QUANTIZED else HEAD_PAD
    # Block numbers are loaded one tile ahead: loads of K and V depend on them, and are pipelined
    # over several iterations only if they do not wait for a load in the same iteration.
    blocks = load_blocks(block_table, begin, least, most, TILE, BLOCK_SIZE, PARTLY)
    for at in tl.range(begin, end, TILE):
        keys = at + key
        visible = None
        if PARTLY:
            # A masked key is replaced by another key: its memory may hold NaN, which a weight of 0
            # does not remove, and a mask on every load takes half as many registers again.
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
            # A scale applies to a key's whole row, so it can multiply the score: exact, and one
            # multiplication a score, not one an element. On Blackwell, products of float32 with
            # widened types are tf32 in spite of "ieee" (triton#10176), which rounds less than 8-bit
            # KV does.
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

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        decay = tl.exp2(largest - new_largest)
        total = total * decay + tl.sum(weights, 1)
        largest = new_largest

        v = load_rows(v_base, rows, SIZE, PAD)
        weighted *= decay[:, None]
        if QUANTIZED:
            weights *= load_scales(v_base, begins, slots, BLOCK_SIZE, SIZE)[None, :]
            weights = weights.to(V_TYPE)
            v_even, v_odd = unpack(v, FP8, V_TYPE)
            weighted = tl.dot(weights, v_even, weighted, input_precision="ieee")
            weighted_odd *= decay[:, None]
            weighted_odd = tl.dot(weights, v_odd, weighted_odd, input_precision="ieee")
        else:
            weighted = tl.dot(weights.to(V_TYPE), v.to(V_TYPE), weighted, input_precision="ieee")
        blocks = load_blocks(block_table, at + TILE, least, most, TILE, BLOCK_SIZE, PARTLY)
    return weighted, weighted_odd, total, largest
