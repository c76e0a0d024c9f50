"""Paged attention in plain torch: the reference of faster kernels.

The KV pool is one tensor `[num_blocks, num_layers, parts, num_kv_heads, block_size, head_size]`, K
at 0 and V at 1 of the third axis, or latent rows that are both; or int8 or fp8 rows with their
scales (`row_quantization.pack_rows`).

In float32 on the CPU a query's result is the same to the bit in any batch or chunk: products run
over at least `MIN_QUERIES` query rows and a key count of `padded_keys`, `KEY_STEP` keys at a time,
where the BLAS library's order of additions depends on neither. The pool holds finite numbers only,
so that padded and invisible keys, with a weight of 0, add 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import starmap

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.kernels.torch.linear import is_exact
from baton.engine.kernels.torch.row_quantization import (
    is_quantized,
    quantized_bytes,
    split_rows,
    unpack_rows,
)

MIN_QUERIES = 8
SHORT_KEYS, KEY_STEP = 128, 512

# Float32 scores of a prefill segment, over (head, query, key), computed at a time: 128 MiB.
SCORES_AT_ONCE = 1 << 25

# On a CPU, decode rows are processed in groups whose gathered K stays in the cache.
GATHER_BYTES = 1 << 20


@dataclass(frozen=True)
class PrefillSegment:
    """Rows of one sequence that attend to its earlier tokens and to each other, causally.

    first_row, num_rows: where they lie in the batch · context: tokens before them, already in the
    pool · block_ids: int64 `[ceil((context + num_rows) / block_size)]`, in the sequence's order.
    """

    first_row: int
    num_rows: int
    context: int
    block_ids: Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """Where each row of a step reads and writes KV. Decode rows come first.

    slots: int64 `[rows]`, block_id * block_size + offset of each row's own K and V ·
    num_decode: number of decode rows · decode_tables: int64 `[num_decode, blocks]`, padded with
    0 · decode_lengths: int64 `[num_decode]`, tokens visible, the row's own included ·
    segments: the remaining rows, in order.
    """

    slots: Tensor
    num_decode: int
    decode_tables: Tensor
    decode_lengths: Tensor
    segments: tuple[PrefillSegment, ...]


def padded_keys(keys: int) -> int:
    """The key count that `keys` are padded to: 128, or the next multiple of 512."""
    return SHORT_KEYS if keys <= SHORT_KEYS else -(-keys // KEY_STEP) * KEY_STEP


def write_kv(pool: Tensor, layer: int, slots: Tensor, *kv: Tensor) -> None:
    """Writes each row's parts, `[rows, kv_heads, head_size]` each, to its slot of a layer."""
    kv_heads, block_size = pool.shape[3:5]
    rows, (of_block, of_layer, of_part, of_head) = _rows(pool)
    blocks, offsets = slots // block_size, slots % block_size
    heads = torch.arange(kv_heads, device=pool.device) * of_head
    for part, values in enumerate(kv):
        first_head = blocks * of_block + layer * of_layer + part * of_part
        at = first_head[:, None] + heads, offsets[:, None]
        if is_quantized(pool.dtype):
            pieces = zip(split_rows(rows), quantized_bytes(values, pool.dtype), strict=True)
        else:
            pieces = zip((rows,), (values,), strict=True)
        for places, written in pieces:
            places[at] = written


def pool_of_layer(pool: Tensor, layer: int, kv_heads: int, head_size: int) -> tuple[Tensor, int]:
    """The pool as a layer with these heads sees it, and the layer's index there.

    Such a layer's K and V are as large as the K or V of a layer of the pool's own shape, or a part
    of it: then several layers share its place, and each head's parts of them are neighbours. So a
    share of all heads is in the same share of a block, whatever a layer's heads.
    """
    blocks, layers, parts, heads, block_size, size = pool.shape
    if (kv_heads, head_size) == (heads, size):
        return pool, layer
    shared_by = heads * size // (kv_heads * head_size)
    if shared_by == 1:
        return pool.view(blocks, layers, parts, kv_heads, block_size, head_size), layer
    places = (layers * parts, kv_heads, shared_by // 2, 2, block_size, head_size)
    place, at = divmod(layer, shared_by // 2)
    seen = pool.view(blocks, *places)[:, place, :, at]
    return seen.transpose(1, 2)[:, None], 0


def _rows(pool: Tensor) -> tuple[Tensor, list[int]]:
    """The rows of a pool `[rows, block_size, row_size]`, of which each is a block of one head, and
    how many lie between neighbours of its first four axes."""
    pool = _storage(pool)
    size = pool.shape[4] * pool.shape[5]
    strides = [stride // size for stride in pool.stride()[:4]]
    count = 1 + sum((n - 1) * by for n, by in zip(pool.shape, strides, strict=False))
    return pool.as_strided((count, *pool.shape[4:]), (size, *pool.stride()[4:])), strides


def _storage(rows: Tensor) -> Tensor:
    """Quantised rows viewed as int8, which all operations support; others unchanged."""
    return rows.view(torch.int8) if is_quantized(rows.dtype) else rows


@dataclass(frozen=True)
class Scoring:
    """A layer's attention scores.

    scale: of products of queries and keys · window: number of tokens that a row attends to, itself
    included; None: all · softcap: see `softcapped` · sinks: float32 `[heads]`, a further score of
    each head's softmax, whose value is 0 · chunked: a row attends to tokens from the last multiple
    of the window on.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunked: bool = False


def softcapped(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`, and x itself where the cap is 0."""
    return torch.tanh(x / cap) * cap if cap else x


def attend(q: Tensor, pool: Tensor, layer: int, batch: AttentionBatch, scoring: Scoring) -> Tensor:
    """Attention of every row over its sequence, whose KV has been written to the pool.

    q `[rows, heads, head_size]` → `[rows, heads * head_size]`.
    """
    outputs = []
    if batch.num_decode:
        outputs.append(_attend_decode(q[: batch.num_decode], pool, layer, batch, scoring))
    for segment in batch.segments:
        rows = q[segment.first_row : segment.first_row + segment.num_rows]
        outputs.append(_attend_segment(rows, pool, layer, segment, scoring))
    return torch.cat(outputs).view(q.shape[0], -1)


def _attend_decode(
    q: Tensor, pool: Tensor, layer: int, batch: AttentionBatch, scoring: Scoring
) -> Tensor:
    """Attention of decode rows: `[num_decode, heads, head_size]`."""
    lengths, block_tables = batch.decode_lengths, batch.decode_tables
    step = len(q)
    if q.device.type == "cpu":
        row_bytes = pool[0, 0, 0].nbytes * block_tables.shape[1]
        step = max(1, GATHER_BYTES // row_bytes)
    groups = zip(q.split(step), block_tables.split(step), lengths.split(step), strict=True)
    parts = []
    for queries, some, visible_tokens in groups:
        k, v = _gather(pool, layer, some, q)
        visible = _visible(visible_tokens[:, None] - 1, k.shape[2], scoring)
        parts.append(_weigh(queries[:, :, None], k, v, visible, scoring).squeeze(2))
    return torch.cat(parts)


def _attend_segment(
    q: Tensor, pool: Tensor, layer: int, segment: PrefillSegment, scoring: Scoring
) -> Tensor:
    """Attention of several rows of a sequence: `[num_rows, heads, head_size]`."""
    k, v = _gather(pool, layer, segment.block_ids[None], q)
    keys = k.shape[2]
    positions = torch.arange(segment.context, segment.context + len(q), device=q.device)
    queries = q.transpose(0, 1)[None]
    if not (is_exact(q) or scoring.softcap or scoring.sinks is not None):
        visible = _visible(positions, keys, scoring)
        out = F.scaled_dot_product_attention(
            queries, k, v, attn_mask=visible, scale=scoring.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    step = max(MIN_QUERIES, SCORES_AT_ONCE // (q.shape[1] * keys))
    parts = [
        _weigh(some, k, v, _visible(at[None], keys, scoring), scoring)
        for some, at in zip(queries.split(step, dim=2), positions.split(step), strict=True)
    ]
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def _gather(pool: Tensor, layer: int, block_tables: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous K and V of a layer, each `[sequences, kv_heads, keys, head_size]` of q's type.

    Of latent rows they are the same tensor.

    block_tables: `[sequences, blocks]`. Keys are padded with block 0 where `is_exact`.
    """
    parts, kv_heads, block_size, row_size = pool.shape[2:]
    keys = block_tables.shape[1] * block_size
    if is_exact(q):
        keys = padded_keys(keys)
        block_tables = F.pad(block_tables, (0, -(-keys // block_size) - block_tables.shape[1]))
    # A pool row is a head's K or V of a block, so that copying rows needs no transposition.
    held_rows, (of_block, of_layer, of_part, of_head) = _rows(pool)
    heads = torch.arange(kv_heads, device=pool.device)[:, None] * of_head
    rows = block_tables[:, None] * of_block + layer * of_layer + heads
    flat = held_rows.flatten(1)
    shape = (*rows.shape, block_size, row_size)
    gathered = []
    for part in range(parts):
        held = flat.index_select(0, (rows + part * of_part).view(-1)).view(shape)
        if is_quantized(pool.dtype):
            held = unpack_rows(held.view(pool.dtype), q.dtype)
        gathered.append(held.flatten(2, 3)[:, :, :keys])
    return gathered[0], gathered[-1]


def _visible(positions: Tensor, keys: int, scoring: Scoring) -> Tensor:
    """Which of the first `keys` tokens are visible at `positions`: bool `[..., keys]`."""
    #  0 ....... position - window | position - window + 1 ........ position | position + 1 ...
    #  too old                     | visible, `window` tokens                | not yet there
    key = torch.arange(keys, device=positions.device)
    visible = key <= positions[..., None]
    if (window := scoring.window) is not None:
        oldest = positions // window * window if scoring.chunked else positions - window + 1
        visible &= key >= oldest[..., None]
    return visible


def _weigh(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
    """Softmax attention with float32 weights, one product for each sequence and KV head.

    q `[sequences, heads, queries, head_size]`, k and v `[sequences, kv_heads, keys, head_size]`,
    visible `[sequences, queries, keys]` → like q. The heads that share a KV head are rows of one
    product: far faster on a CPU than repeating K and V.
    """
    sequences, heads, queries, head_size = q.shape
    kv_heads, keys = k.shape[1:3]
    groups, rows = sequences * kv_heads, heads // kv_heads * queries
    grouped = q.reshape(groups, rows, head_size) * scoring.scale
    if is_exact(q) and rows < MIN_QUERIES:
        grouped = F.pad(grouped, (0, 0, 0, MIN_QUERIES - rows))
    scores = torch.bmm(grouped, k.reshape(groups, keys, head_size).transpose(1, 2))
    scores = softcapped(scores, scoring.softcap)
    by_query = scores[:, :rows].view(sequences, kv_heads, -1, queries, keys)
    by_query.masked_fill_(~visible[:, None, None], -torch.inf)
    if scoring.sinks is not None:
        sinks = (
            scoring.sinks.to(scores.dtype).view(kv_heads, -1, 1).expand(sequences, -1, -1, queries)
        )
        sinks = F.pad(sinks.reshape(groups, rows), (0, scores.shape[1] - rows))
        scores = torch.cat((scores, sinks[..., None]), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    if scoring.sinks is not None:
        weights = weights[..., :keys].contiguous()
    values = v.reshape(groups, keys, head_size)
    # BLAS adds deep products in pieces whose lengths depend on the depth; these lengths do not.
    step = KEY_STEP if is_exact(q) else keys
    pairs = zip(weights.split(step, dim=2), values.split(step, dim=1), strict=True)
    out = reduce(torch.add, starmap(torch.bmm, pairs))
    return out[:, :rows].reshape(q.shape)


def place(
    batch: StepBatch, block_size: int, num_groups: int = 1
) -> tuple[Tensor, list[AttentionBatch]]:
    """The positions of a batch's rows, int64 `[rows]`, and where they read and write KV in each
    group of layers."""
    context_lens, query_lens, tables = (
        x.long() for x in (batch.context_lens, batch.query_lens, batch.block_tables)
    )
    positions, owner = positions_of(batch)
    lens = query_lens.cumsum(0) - query_lens, query_lens, context_lens
    return positions, [
        _place_group(positions, owner, *lens, tables[:, group::num_groups], batch, block_size)
        for group in range(num_groups)
    ]


def positions_of(batch: StepBatch) -> tuple[Tensor, Tensor]:
    """The positions of a batch's rows, and their sequences, int64 `[rows]` each."""
    context_lens, query_lens = batch.context_lens.long(), batch.query_lens.long()
    rows = torch.arange(len(batch.token_ids), device=query_lens.device)
    sequences = torch.arange(len(query_lens), device=query_lens.device)
    owner = sequences.repeat_interleave(query_lens, output_size=len(rows))
    #  row:       0 1 2 | 3 4 5 6    query_lens 3, 4: sequences begin at rows 0, 3
    #  position:  5 6 7 | 0 1 2 3    context_lens 5, 0
    begins = query_lens.cumsum(0) - query_lens
    return rows - (begins - context_lens)[owner], owner


def _place_group(
    positions: Tensor, owner: Tensor, begins: Tensor, query_lens: Tensor, context_lens: Tensor,
    tables: Tensor, batch: StepBatch, block_size: int,
) -> AttentionBatch:  # fmt: skip
    """Where rows read and write KV by one group's block tables `[sequences, blocks]`."""
    blocks = tables[owner, positions // block_size]
    decodes, width = batch.num_decodes, tables.shape[1]
    segments = []
    if decodes < len(query_lens):
        if decodes:  # a chunk's table may be far wider than those of decode rows
            width = int(context_lens[:decodes].max()) // block_size + 1
        chunks = (x[decodes:].tolist() for x in (begins, query_lens, context_lens))
        for table, begin, count, context in zip(tables[decodes:], *chunks, strict=True):
            needed = -(-(context + count) // block_size)
            segments.append(PrefillSegment(begin, count, context, table[:needed]))
    return AttentionBatch(
        slots=blocks * block_size + positions % block_size,
        num_decode=decodes,
        decode_tables=tables[:decodes, :width],
        decode_lengths=context_lens[:decodes] + 1,
        segments=tuple(segments),
    )
