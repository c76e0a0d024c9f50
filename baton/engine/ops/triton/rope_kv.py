"""What lies between the projection of queries, keys and values and attention, in one launch.

Norms of heads, rotary embedding, quantisation and the write to the pool of KV: the fused
projection is read once, queries are written once, and K and V go straight to their slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.models.decoder import rms_norm, rotate
from baton.engine.ops.torch.attention import write_kv
from baton.engine.ops.triton.launch import launch, wait_for_inputs
from baton.engine.ops.triton.rows import bits_of, scale_of
from baton.engine.ops.triton.spec import Config, KernelSpec, Key, Outputs, Trial, dtype_of
from baton.engine.ops.triton.tuning import choose
from baton.engine.weights.quantize import FP8, SCALE_BYTES, is_quantized, unpack_rows


@triton.jit
def _turned(
    qkv, at, mask, weights, columns, inside, cosines, sines, eps, HEAD_SIZE: tl.constexpr
):  # fmt: skip
    """Halves of heads `[heads, HALF]`, at unit mean square times weights (unless None), turned."""
    element = qkv.dtype.element_ty
    first = tl.load(qkv + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv + at + HEAD_SIZE // 2, mask=mask, other=0.0).to(tl.float32)
    if weights is not None:
        squares = tl.sum(first * first + second * second, 1)
        inverse = tl.rsqrt(squares / HEAD_SIZE + eps)[:, None]
        left = tl.load(weights + columns, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(weights + HEAD_SIZE // 2 + columns, mask=inside, other=0.0).to(tl.float32)
        # Rounded where `rms_norm` of the decoder rounds.
        kept = weights.dtype.element_ty
        first = ((first * inverse).to(kept).to(tl.float32) * left[None, :]).to(element)
        second = ((second * inverse).to(kept).to(tl.float32) * right[None, :]).to(element)
        first = first.to(tl.float32)
        second = second.to(tl.float32)
    # To the model's type before it is quantised, as if it had been written whole.
    turned = (first * cosines - second * sines).to(element)
    return turned, (second * cosines + first * sines).to(element)


@triton.jit
def _put(
    places, slot, columns, live, inside, first, second, BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr, QUANTIZED: tl.constexpr, FP8_POOL: tl.constexpr,
):  # fmt: skip
    """Halves `[heads, HALF]` to a slot of heads of a block (pointers `[heads]`), where live and
    inside.
    """
    left = (places + slot * HEAD_SIZE)[:, None] + columns[None, :]
    mask = live[:, None] & inside[None, :]
    if QUANTIZED:
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
        tl.store(left, bits_of(first, largest[:, None], FP8_POOL), mask=mask)
        tl.store(left + HEAD_SIZE // 2, bits_of(second, largest[:, None], FP8_POOL), mask=mask)
        scales = (places + BLOCK_SIZE * HEAD_SIZE).to(tl.pointer_type(tl.float32))
        tl.store(scales + slot, scale_of(largest, FP8_POOL), mask=live)
    else:
        tl.store(left, first, mask=mask)
        tl.store(left + HEAD_SIZE // 2, second, mask=mask)


@triton.jit(do_not_specialize=["layer"])
def _rope_and_write_kernel(
    qkv, positions, slots, cos, sin, q_weights, k_weights, q_out, pool,
    layer, num_layers, row_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr, FP8_POOL: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): HEADS heads of a row; first those of queries, then those of K and V."""
    wait_for_inputs(PDL)
    q_parts: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    # HALF is a power of two, and may be more than half a head.
    columns = tl.arange(0, HALF)
    inside = columns < HEAD_SIZE // 2
    # A padding row may have any position: it is turned like the first, and nobody reads it.
    angles = tl.maximum(tl.load(positions + row), 0).to(tl.int64) * HEAD_SIZE + columns
    # A table's second half repeats the first.
    cosines = tl.load(cos + angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(sin + angles, mask=inside, other=0.0).to(tl.float32)[None, :]

    qkv += row * row_stride
    if part < q_parts:
        heads = part * HEADS + tl.arange(0, HEADS)
        at = heads[:, None] * HEAD_SIZE + columns[None, :]
        mask = (heads < NUM_HEADS)[:, None] & inside[None, :]
        first, second = _turned(
            qkv, at, mask, q_weights, columns, inside, cosines, sines, eps, HEAD_SIZE
        )
        q_out += row * (NUM_HEADS * HEAD_SIZE)
        tl.store(q_out + at, first, mask=mask)
        tl.store(q_out + at + HEAD_SIZE // 2, second, mask=mask)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            heads = (part - q_parts) * HEADS + tl.arange(0, HEADS)
            live = heads < NUM_KV_HEADS
            at = (NUM_HEADS + heads)[:, None] * HEAD_SIZE + columns[None, :]
            mask = live[:, None] & inside[None, :]
            k_first, k_second = _turned(
                qkv, at, mask, k_weights, columns, inside, cosines, sines, eps, HEAD_SIZE
            )
            at += NUM_KV_HEADS * HEAD_SIZE
            v_first = tl.load(qkv + at, mask=mask, other=0.0)
            v_second = tl.load(qkv + at + HEAD_SIZE // 2, mask=mask, other=0.0)

            block = slot // BLOCK_SIZE * num_layers + layer
            slot %= BLOCK_SIZE
            places = pool + (block * (2 * NUM_KV_HEADS) + heads) * (BLOCK_SIZE * ROW_SIZE)
            _put(
                places, slot, columns, live, inside, k_first, k_second, BLOCK_SIZE, HEAD_SIZE,
                QUANTIZED, FP8_POOL,
            )  # fmt: skip
            places += NUM_KV_HEADS * BLOCK_SIZE * ROW_SIZE
            _put(
                places, slot, columns, live, inside, v_first, v_second, BLOCK_SIZE, HEAD_SIZE,
                QUANTIZED, FP8_POOL,
            )  # fmt: skip


def rope_and_write(
    qkv: Tensor, positions: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, pool: Tensor,
    layer: int, num_heads: int, num_kv_heads: int, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, eps: float = 0.0, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """Queries, normed and turned, `[rows, num_heads, head_size]`; K and V go to the pool.

    qkv: `[rows, (num_heads + 2 * num_kv_heads) * head_size]` · positions: int32 `[rows]` · slots:
    int32 `[rows]`, block * block_size + offset; -1 writes nothing · cos, sin: tables of
    `baton.engine.models.rope`, `[max_context, head_size]` · pool: `[num_blocks, num_layers, 2,
    num_kv_heads, block_size, row_size]` of qkv's type, int8 or float8_e4m3fn · q_norm, k_norm:
    `[head_size]`, weights of an RMS norm of each head with eps · config: of the launch; None is
    that of `tuning`. Two rows of a launch have different slots.
    """
    rows, width = qkv.shape
    _, num_layers, _, kv_heads, block_size, row_size = pool.shape
    head_size = width // (num_heads + 2 * num_kv_heads)
    quantized = is_quantized(pool.dtype)
    assert (num_heads + 2 * num_kv_heads) * head_size == width and kv_heads == num_kv_heads
    assert row_size == head_size + (SCALE_BYTES if quantized else 0) and head_size % 4 == 0
    assert qkv.stride(1) == 1 and cos.is_contiguous() and sin.is_contiguous()
    assert pool.is_contiguous() and (quantized or pool.dtype == qkv.dtype)
    q = qkv.new_empty((rows, num_heads, head_size))
    key = {"rows": rows, "heads": num_heads, "kv_heads": num_kv_heads}
    config = config or choose("rope_and_write", key, qkv.device)
    heads = config["HEADS"]
    grid = (rows, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
    launch(
        _rope_and_write_kernel, grid, qkv, positions, slots, cos, sin, q_norm, k_norm, q,
        pool.view(torch.int8) if quantized else pool,
        layer, num_layers, qkv.stride(0), eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_SIZE=head_size,
        HALF=triton.next_power_of_2(head_size // 2), BLOCK_SIZE=block_size, ROW_SIZE=row_size,
        QUANTIZED=quantized, FP8_POOL=pool.dtype == FP8, **config,
    )  # fmt: skip
    return q


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, heads, kv_heads = (int(shape[name]) for name in ("rows", "heads", "kv_heads"))
    head_size, dtype = int(shape.get("head_size", 128)), dtype_of(shape)
    kv_dtype = dtype_of(shape, "kv") if "kv" in shape else dtype
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_size, device=device).to(dtype)
    angles = torch.randn(rows, head_size // 2, device=device).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = torch.rand(2, head_size, device=device).to(dtype).unbind()
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    written = torch.where(slots % 5 == 4, -1, slots) if "padding" in shape else slots
    row_size = head_size + (SCALE_BYTES if is_quantized(kv_dtype) else 0)
    blocks = (triton.cdiv(rows, 16), 2, 2, kv_heads, 16, row_size)
    pool = torch.zeros(blocks, dtype=torch.uint8, device=device).to(kv_dtype)
    expected_pool = pool.clone()

    def seen(pool: Tensor) -> Tensor:
        quantized = is_quantized(kv_dtype) and device.type != "meta"
        return unpack_rows(pool, torch.float32) if quantized else pool

    def run(config: Config | None) -> Outputs:
        q_norm, k_norm = norms if "norms" in shape else (None, None)
        q = rope_and_write(
            qkv, slots, written, cos, sin, pool, 1, heads, kv_heads, q_norm, k_norm, 1e-5, config
        )
        return q, seen(pool)

    def reference() -> Outputs:
        """In plain torch; what is turned is float32 inside."""
        q, k, v = qkv.view(rows, -1, head_size).split((heads, kv_heads, kv_heads), dim=1)
        if "norms" in shape:
            q, k = (rms_norm(x, norm, 1e-5) for x, norm in zip((q, k), norms, strict=True))
        angles = [table[:, None].float() for table in (cos, sin)]
        q, k = (rotate(x.float(), *angles).to(dtype) for x in (q, k))
        live = written >= 0
        write_kv(expected_pool, 1, slots[live].long(), k[live], v[live])
        return q, seen(expected_pool)

    return Trial(
        {"rows": rows, "heads": heads, "kv_heads": kv_heads},
        run,
        reference,
        moved_bytes=2 * qkv.nbytes,
        # A number of eight bits may be rounded to its neighbour.
        tolerance={torch.int8: 0.02, FP8: 0.08}.get(kv_dtype),
    )


_HEADS: Key = {"rows": 20, "heads": 32, "kv_heads": 8, "padding": 1}

SPECS = (
    KernelSpec(
        "rope_and_write",
        _trial,
        cases=(
            _HEADS,
            {**_HEADS, "kv": "int8", "norms": 1},
            {**_HEADS, "kv": "fp8"},
            {**_HEADS, "dtype": "fp16", "head_size": 64, "norms": 1},
            {**_HEADS, "dtype": "fp32", "head_size": 80},
            {**_HEADS, "kv": "int8", "head_size": 256},
        ),
        configs=lambda key: [
            {"num_warps": warps, "num_stages": 1, "HEADS": heads}
            for heads in (1, 2, 4, 8, 16, 32)
            if heads <= triton.next_power_of_2(int(key["heads"]))
            for warps in (1, 2, 4, 8)
        ],
        shapes=[
            {"rows": rows, "heads": heads, "kv_heads": 8}
            for heads in (32, 64)
            for rows in (1, 32, 256, 8192)
        ],
    ),
)
