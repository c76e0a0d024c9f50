"""Rotary embedding and KV cache write: everything between the QKV projection and attention.

One launch norms and rotates heads, quantises K and V, and writes them to their slots. The
projection is read once, and queries are written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.torch.attention import pool_of_layer, write_kv
from baton.engine.kernels.torch.rms_norm import rms_norm
from baton.engine.kernels.torch.rope import rotate
from baton.engine.kernels.torch.row_quantization import FP8, SCALE_BYTES, is_quantized, unpack_rows
from baton.engine.kernels.triton.attention_common import in_order, pool_steps, stored_elements
from baton.engine.kernels.triton.launch_configs import choose
from baton.engine.kernels.triton.row_quantization import bits_of, scale_of
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Outputs, Trial, dtype_of


class Rotation(NamedTuple):
    """What is done to the heads of a layer.

    cos, sin: tables of `baton.engine.models.rope` `[max_context, head_size]` · q_norm, k_norm:
    weights `[head_size]` of the RMS norm of each head, or None, with its epsilon · query_scales:
    float32 `[max_context, 1]`, which multiply queries, or None · norm_last: norms follow the
    rotation · norm_values: values are normed, without a weight.
    """

    cos: Tensor | None
    sin: Tensor | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    query_scales: Tensor | None = None
    norm_last: bool = False
    norm_values: bool = False

    @property
    def arguments(self) -> tuple[Tensor | float | None, ...]:
        """Arguments of a kernel."""
        return self[:6]

    @property
    def options(self) -> dict[str, bool]:
        """Constants of a kernel."""
        return {"NORM_LAST": self.norm_last, "NORM_VALUES": self.norm_values}


NO_ROTATION = Rotation(None, None)


@triton.jit
def load_angles(cos, sin, position, dims, HEAD_SIZE: tl.constexpr):
    """Loads cosines and sines of a position, float32 `[1, HEAD_PAD]`."""
    at = position.to(tl.int64) * HEAD_SIZE + dims
    inside = dims < HEAD_SIZE
    cosines = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    sines = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    return cosines[None, :], sines[None, :]


@triton.jit
def rotate_heads(
    heads, live, dims, weights, cosines, sines, eps, HEAD_SIZE: tl.constexpr,
    NORM_LAST: tl.constexpr = False,
):  # fmt: skip
    """Loads, norms (unless weights is None) and rotates heads: `[heads, HEAD_PAD]`.

    heads: pointers `[heads]` · live: which heads exist · NORM_LAST: the norm follows. An element is
    rotated with its partner in the other half.
    """
    element = heads.dtype.element_ty
    is_first = dims < HEAD_SIZE // 2
    partners = tl.where(is_first, dims + HEAD_SIZE // 2, dims - HEAD_SIZE // 2)
    mask = live[:, None] & (dims < HEAD_SIZE)[None, :]
    x = tl.load(heads[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(heads[:, None] + partners[None, :], mask=mask, other=0.0).to(tl.float32)
    if weights is not None and not NORM_LAST:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_SIZE + eps)[:, None]
        own = tl.load(weights + dims, mask=dims < HEAD_SIZE, other=0.0).to(tl.float32)
        other = tl.load(weights + partners, mask=dims < HEAD_SIZE, other=0.0).to(tl.float32)
        # Rounded as the decoder's `rms_norm` rounds.
        kept = weights.dtype.element_ty
        x = ((x * inverse).to(kept).to(tl.float32) * own[None, :]).to(element)
        partner = ((partner * inverse).to(kept).to(tl.float32) * other[None, :]).to(element)
        x = x.to(tl.float32)
        partner = partner.to(tl.float32)
    partner = tl.where(is_first[None, :], -partner, partner)
    # Rounded to the model's type before quantisation, as if it had been stored.
    x = (x * cosines + partner * sines).to(element)
    if NORM_LAST and weights is not None:
        x = normed_heads(x, dims, weights, eps, HEAD_SIZE)
    return x


@triton.jit
def normed_heads(x, dims, weights, eps, HEAD_SIZE: tl.constexpr):
    """Heads `[heads, HEAD_PAD]` after an RMS norm; weights may be None."""
    wide = x.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_SIZE + eps)[:, None]
    if weights is not None:
        own = tl.load(weights + dims, mask=dims < HEAD_SIZE, other=0.0).to(tl.float32)
        wide = wide.to(weights.dtype.element_ty).to(tl.float32) * own[None, :]
    return wide.to(x.dtype)


@triton.jit
def load_values(heads, live, dims, eps, HEAD_SIZE: tl.constexpr, NORMED: tl.constexpr):
    """Loads values `[heads, HEAD_PAD]`, and norms them if NORMED. Arguments: see `rotate_heads`."""
    mask = live[:, None] & (dims < HEAD_SIZE)[None, :]
    v = tl.load(heads[:, None] + dims[None, :], mask=mask, other=0.0)
    return normed_heads(v, dims, None, eps, HEAD_SIZE) if NORMED else v


@triton.jit
def scaled_queries(q, query_scales, position):
    """Queries times the scale of their position, if there are scales."""
    if query_scales is not None:
        q = (q.to(tl.float32) * tl.load(query_scales + position)).to(q.dtype)
    return q


@triton.jit
def store_kv(
    blocks, live, slot, dims, x, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr, FP8_POOL: tl.constexpr,
):  # fmt: skip
    """Stores rows `[heads, HEAD_PAD]` in a slot of each head's block, quantised if the pool is.

    blocks: pointers `[heads]`, to pairs of 8-bit elements or to elements · live: which heads exist.
    """
    mask = live[:, None] & (dims < HEAD_SIZE)[None, :]
    if QUANTIZED:
        wide = tl.where(mask, x.to(tl.float32), 0.0)
        largest = tl.max(tl.abs(wide), 1)
        rows = blocks.to(tl.pointer_type(tl.int8)) + slot * HEAD_SIZE
        bits = bits_of(wide, largest[:, None], FP8_POOL)
        tl.store(rows[:, None] + dims[None, :], bits, mask=mask)
        scales = (blocks + BLOCK_SIZE * HEAD_SIZE // 2).to(tl.pointer_type(tl.float32))
        tl.store(scales + slot, scale_of(largest, FP8_POOL), mask=live)
    else:
        tl.store((blocks + slot * HEAD_SIZE)[:, None] + dims[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["layer"])
def _rope_and_write_kernel(
    qkv, positions, slots, cos, sin, q_weights, k_weights, eps, query_scales, q_out, pool,
    layer, num_layers, row_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PART_STEP: tl.constexpr,
    HEAD_STEP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROW_SIZE: tl.constexpr, QUANTIZED: tl.constexpr,
    FP8_POOL: tl.constexpr, NORM_LAST: tl.constexpr, NORM_VALUES: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Processes HEADS heads of a row. Grid `[rows, parts]`; first parts of queries, then of K and
    V."""
    q_parts: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dims = tl.arange(0, HEAD_PAD)
    # A padding row may have any position: it is rotated as position 0, and its result is not read.
    position = tl.maximum(tl.load(positions + row), 0)
    cosines, sines = load_angles(cos, sin, position, dims, HEAD_SIZE)

    qkv += row * row_stride
    if part < q_parts:
        heads = part * HEADS + tl.arange(0, HEADS)
        live = heads < NUM_HEADS
        q = rotate_heads(
            qkv + heads * HEAD_SIZE, live, dims, q_weights, cosines, sines, eps, HEAD_SIZE,
            NORM_LAST,
        )  # fmt: skip
        q = scaled_queries(q, query_scales, position)
        at = (row * NUM_HEADS + heads)[:, None] * HEAD_SIZE + dims[None, :]
        tl.store(q_out + at, q, mask=live[:, None] & (dims < HEAD_SIZE)[None, :])
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            heads = (part - q_parts) * HEADS + tl.arange(0, HEADS)
            live = heads < NUM_KV_HEADS
            own = qkv + (NUM_HEADS + heads) * HEAD_SIZE
            k = rotate_heads(own, live, dims, k_weights, cosines, sines, eps, HEAD_SIZE, NORM_LAST)
            own += NUM_KV_HEADS * HEAD_SIZE
            v = load_values(own, live, dims, eps, HEAD_SIZE, NORM_VALUES)

            block = slot // BLOCK_SIZE * num_layers + layer
            slot %= BLOCK_SIZE
            rows = block * (2 * NUM_KV_HEADS) + heads * HEAD_STEP
            blocks = pool + rows * (BLOCK_SIZE * ROW_SIZE)
            store_kv(blocks, live, slot, dims, k, BLOCK_SIZE, HEAD_SIZE, QUANTIZED, FP8_POOL)
            blocks += PART_STEP * BLOCK_SIZE * ROW_SIZE
            store_kv(blocks, live, slot, dims, v, BLOCK_SIZE, HEAD_SIZE, QUANTIZED, FP8_POOL)


def rope_and_write(
    qkv: Tensor, positions: Tensor, slots: Tensor, rotation: Rotation, pool: Tensor, layer: int,
    num_heads: int, num_kv_heads: int, config: Config | None = None, *, only_reads: bool = False,
) -> Tensor:  # fmt: skip
    """Normed and rotated queries `[rows, num_heads, head_size]`; writes K and V to the pool.

    qkv: `[rows, (num_heads + 2 * num_kv_heads) * head_size]` · positions: int32 `[rows]` · slots:
    int32 `[rows]`, block * block_size + offset; -1 writes nothing · pool: `[num_blocks, num_layers,
    2, num_kv_heads, block_size, row_size]` of qkv's type, int8 or float8_e4m3fn, or what a layer
    sees of one · config: None is the one in effect · only_reads: qkv has queries only. Two rows of
    a launch have different slots.
    """
    rows, width = qkv.shape
    kv_heads, block_size, row_size = pool.shape[3:]
    written = 0 if only_reads else num_kv_heads
    head_size = width // (num_heads + 2 * written)
    quantized = is_quantized(pool.dtype)
    assert (num_heads + 2 * written) * head_size == width and kv_heads == num_kv_heads
    assert row_size == head_size + (SCALE_BYTES if quantized else 0) and head_size % 4 == 0
    assert rotation.cos is not None and rotation.sin is not None
    assert qkv.stride(1) == 1 and rotation.cos.is_contiguous() and rotation.sin.is_contiguous()
    assert in_order(pool) and (quantized or pool.dtype == qkv.dtype)
    num_layers = pool.stride(0) // (2 * kv_heads * block_size * row_size)
    q = qkv.new_empty((rows, num_heads, head_size))
    key = {"rows": rows, "heads": num_heads, "kv_heads": num_kv_heads}
    config = config or choose("rope_and_write", key, qkv.device)
    heads = config["HEADS"]
    grid = (rows, triton.cdiv(num_heads, heads) + triton.cdiv(written, heads))
    _rope_and_write_kernel[grid](
        qkv, positions, slots, *rotation.arguments, q, stored_elements(pool), layer, num_layers,
        qkv.stride(0), NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, **pool_steps(pool),
        HEAD_SIZE=head_size, HEAD_PAD=triton.next_power_of_2(head_size), BLOCK_SIZE=block_size,
        ROW_SIZE=row_size // 2 if quantized else row_size, QUANTIZED=quantized,
        FP8_POOL=pool.dtype == FP8, **rotation.options, **config,
    )  # fmt: skip
    return q


def rotated_heads(parts: Sequence[Tensor], positions: Tensor, rotation: Rotation) -> list[Tensor]:
    """Queries, and keys and values if there are any, as the kernels' results, in float32 but where
    those are rounded. positions: int64 `[rows]`."""
    assert rotation.cos is not None and rotation.sin is not None
    angles = [table[positions, None].float() for table in (rotation.cos, rotation.sin)]
    found = list(parts)
    for at, weight in zip(
        range(min(2, len(parts))), (rotation.q_norm, rotation.k_norm), strict=False
    ):
        x = parts[at]
        if weight is not None and not rotation.norm_last:
            x = rms_norm(x, weight, rotation.eps)
        x = rotate(x.float(), *angles).to(x.dtype)
        if weight is not None and rotation.norm_last:
            x = rms_norm(x, weight, rotation.eps)
        found[at] = x
    if rotation.query_scales is not None:
        found[0] = (found[0] * rotation.query_scales[positions, None]).to(found[0].dtype)
    if rotation.norm_values and len(found) > 2:
        found[2] = rms_norm(found[2], None, rotation.eps)
    return found


def _trial(shape: Key, device: torch.device) -> Trial:
    rows, heads, kv_heads = (int(shape[name]) for name in ("rows", "heads", "kv_heads"))
    head_size, dtype = int(shape.get("head_size", 128)), dtype_of(shape)
    kv_dtype = dtype_of(shape, "kv") if "kv" in shape else dtype
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_size, device=device).to(dtype)
    scales = torch.rand(rows, 1, device=device) + 0.5 if "scaled" in shape else None
    angles = torch.randn(rows, head_size // 2, device=device).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = torch.rand(2, head_size, device=device).to(dtype).unbind()
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    written = torch.where(slots % 5 == 4, -1, slots) if "padding" in shape else slots
    row_size = head_size + (SCALE_BYTES if is_quantized(kv_dtype) else 0)
    row_size *= int(shape.get("shared_by", 1))
    blocks = (triton.cdiv(rows, 16), 2, 2, kv_heads, 16, row_size)
    pool, layer = torch.zeros(blocks, dtype=torch.uint8, device=device).to(kv_dtype), 1
    if "shared_by" in shape:
        pool, layer = pool_of_layer(pool, layer, kv_heads, head_size)
    q_norm, k_norm = norms if "norms" in shape else (None, None)
    options = bool(shape.get("last")), bool(shape.get("values"))
    rotation = Rotation(cos, sin, q_norm, k_norm, 1e-5, scales, *options)
    expected_pool = pool.clone()

    def seen(pool: Tensor) -> Tensor:
        quantized = is_quantized(kv_dtype) and device.type != "meta"
        return unpack_rows(pool, torch.float32) if quantized else pool

    def run(config: Config | None) -> Outputs:
        q = rope_and_write(qkv, slots, written, rotation, pool, layer, heads, kv_heads, config)
        return q, seen(pool)

    def reference() -> Outputs:
        """The kernel's results, computed by torch with float32 rotation."""
        parts = qkv.view(rows, -1, head_size).split((heads, kv_heads, kv_heads), dim=1)
        q, k, v = rotated_heads(parts, slots.long(), rotation)
        live = written >= 0
        write_kv(expected_pool, layer, slots[live].long(), k[live], v[live])
        return q, seen(expected_pool)

    return Trial(
        {"rows": rows, "heads": heads, "kv_heads": kv_heads},
        run,
        reference,
        moved_bytes=2 * qkv.nbytes,
        # 8-bit numbers may differ by one step of rounding.
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
            {**_HEADS, "heads": 8, "head_size": 256, "shared_by": 2, "norms": 1, "values": 1},
            {**_HEADS, "norms": 1, "last": 1, "scaled": 1},
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
