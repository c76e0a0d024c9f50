"""Specs of decode and prefill attention: trials, cases, and candidates for tuning."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial

import torch
import triton
from torch import Tensor

from baton.engine.kernels.torch.attention import Scoring, pool_of_layer, write_kv
from baton.engine.kernels.torch.row_quantization import (
    FP8,
    SCALE_BYTES,
    is_quantized,
    pack_rows,
    split_rows,
    unpack_rows,
)
from baton.engine.kernels.triton.attention_common import attention_reference, pool_sizes
from baton.engine.kernels.triton.decode_attention import (
    DecodePlan,
    config_key,
    decode_attention,
    plan_decode,
)
from baton.engine.kernels.triton.launch_configs import tile_rows
from baton.engine.kernels.triton.prefill_attention import plan_tiles, prefill_attention
from baton.engine.kernels.triton.rope_kv import Rotation, rotated_heads
from baton.engine.kernels.triton.specs import (
    Config,
    KernelSpec,
    Key,
    Trial,
    dtype_of,
    product_of,
    text_of,
)

_DRAWN_AT_ONCE = 1 << 28  # random elements in float32 at a time


def random_pool(
    num_blocks: int, layers: int, kv_heads: int, head_size: int, kv: torch.dtype,
    device: torch.device, block_size: int = 16,
) -> Tensor:  # fmt: skip
    """A pool of random rows, quantised as the write kernel does."""
    quantized = is_quantized(kv)
    row_size = head_size + (SCALE_BYTES if quantized else 0)
    shape = (num_blocks, layers, 2, kv_heads, block_size, row_size)
    pool = torch.empty(shape, dtype=torch.int8 if quantized else kv, device=device)
    for part in pool.split(max(1, _DRAWN_AT_ONCE // pool[0].numel())):
        if not quantized:
            part.normal_()
        elif device.type != "meta":
            drawn = torch.randn(*part.shape[:-1], head_size, device=device)
            part.copy_(pack_rows(drawn, kv).view(torch.int8))
    return pool.view(kv)


def draw(
    shape: Key, device: torch.device, seen: list[range], rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, a pool with KV of sequences, and their block tables in random order.

    shape: "dtype", "kv", "head_size", "group" (heads that share a KV head), "kv_heads", "layers",
    "shared_by" (layers in the place of one) and "block_size"; with "ragged", KV that no query sees
    is NaN · seen: visible positions of each sequence · rows: number of queries.
    """
    sizes: Key = {"head_size": 128, "group": 4, "kv_heads": 8, "layers": 1, "block_size": 16}
    head_size, group, kv_heads, layers, block_size = (
        int(shape.get(name, size)) for name, size in sizes.items()
    )
    dtype = dtype_of(shape)
    kv = dtype_of(shape, "kv") if "kv" in shape else dtype
    counts = [-(-span.stop // block_size) for span in seen]
    used, width = sum(counts), max(1, *counts)
    wide_size = head_size * int(shape.get("shared_by", 1))
    pool = random_pool(used + 4, layers, kv_heads, wide_size, kv, device, block_size)
    if wide_size != head_size:
        pool, _ = pool_of_layer(pool, 1, kv_heads, head_size)
    order = 1 + torch.randperm(used, dtype=torch.int32, device=device)
    block_tables = torch.zeros(len(seen), width, dtype=torch.int32, device=device)
    for row, part in zip(block_tables, order.split(counts), strict=True):
        row[: len(part)] = part
    if "ragged" in shape and device.type != "meta":
        _poison(pool, block_tables.cpu(), seen)
    q = torch.randn(rows, kv_heads * group, head_size, device=device).to(dtype)
    return q, pool, block_tables


def _poison(pool: Tensor, block_tables: Tensor, seen: list[range]) -> None:
    """Sets unseen KV to NaN: in quantised rows the scale, and every fp8 number."""
    block_size = pool.shape[4]
    hidden = torch.ones(pool.shape[0], block_size, dtype=torch.bool)
    for table, span in zip(block_tables, seen, strict=True):
        at = torch.tensor(span, dtype=torch.long)
        hidden[table[at // block_size].long(), at % block_size] = False
    hidden = hidden.to(pool.device)
    if not is_quantized(pool.dtype):
        pool.permute(0, 4, 1, 2, 3, 5)[hidden] = torch.nan
        return
    elements, scales = split_rows(pool.view(torch.int8))
    elements.permute(0, 4, 1, 2, 3, 5)[hidden] = 0x7F
    nan = torch.tensor([torch.nan], device=pool.device).view(torch.int8)
    scales.permute(0, 4, 1, 2, 3, 5)[hidden] = nan


def _ragged(shape: Key, count: int, most: int) -> list[int]:
    """Lengths: `most` each; with "ragged", which is the seed, random ones between 0 and most."""
    if "ragged" not in shape:
        return [most] * count
    dice = random.Random(int(shape["ragged"]) + count)  # noqa: S311 - lengths of a test
    return [most, *(dice.choice((0, dice.randint(0, most))) for _ in range(count - 1))]


def decode_trial(shape: Key, device: torch.device) -> Trial:
    """Decode rows with "context" tokens each; by default 64 rows of 4,096, which fill a GPU."""
    count = int(shape.get("batch", 64))
    lengths = _ragged(shape, count, int(shape.get("context", 4096)))
    return _trial(shape, device, [length - 1 for length in lengths], [1] * count, decodes=True)


def prefill_trial(shape: Key, device: torch.device) -> Trial:
    """Chunks of "tokens" tokens after "context" tokens, in "batch" sequences."""
    count = int(shape["batch"])
    before, tokens = (_ragged(shape, count, int(shape[name])) for name in ("context", "tokens"))
    return _trial(shape, device, before, tokens, decodes=False)


def _trial(
    shape: Key, device: torch.device, before: list[int], tokens: list[int], *, decodes: bool
) -> Trial:
    """A trial for sequences of `tokens` tokens after contexts `before`; -1 is padding."""
    window, programs = int(shape.get("window", 0)) or None, int(shape.get("programs", 0))
    chunked = bool(shape.get("chunked"))

    def first(position: int) -> int:
        oldest = position + 1 - window if window else 0
        return position // window * window if window and chunked else max(0, oldest)

    seen = [range(first(a), a + b) if b else range(0) for a, b in zip(before, tokens, strict=True)]
    q, pool, block_tables = draw(shape, device, seen, sum(tokens))
    context_lens, query_lens = (
        torch.tensor(lens, dtype=torch.int32).to(device) for lens in (before, tokens)
    )
    given = (q, pool, pool.shape[1] - 1, block_tables)
    sinks = 2 * torch.randn(q.shape[1], device=device) if shape.get("sinks") else None
    softcap = float(shape.get("softcap", 0))
    scoring = Scoring(float(q.shape[2] ** -0.5), window, softcap, sinks, chunked)
    _, key = pool_sizes(q, pool)

    def reference() -> tuple[Tensor]:
        found = attention_reference(*given, context_lens.clamp_min(0), query_lens, scoring)
        return (found.masked_fill_((context_lens < 0)[:, None, None], 0) if decodes else found,)

    if "rope" in shape:
        return _rope_trial(shape, q, pool, block_tables, context_lens, scoring, programs)
    if decodes:
        seq_lens, plans = context_lens + 1, dict[str, DecodePlan]()

        def run(config: Config | None) -> tuple[Tensor]:
            name = text_of(config or {})
            if name not in plans:  # as one plan serves all layers of a step
                plans[name] = plan_decode(
                    q, pool, seq_lens, window, programs, config, chunked=chunked
                )
            out = torch.empty_like(q)
            decode_attention(*given, plans[name], scoring, out)
            return (out,)

        return Trial(
            config_key(q, pool, len(seq_lens)),
            run,
            reference,
            moved_bytes=sum(map(len, seen)) * pool[0, 0].nbytes // pool.shape[4],
        )
    group = q.shape[1] // pool.shape[3]
    tiles = cache(partial(plan_tiles, query_lens, len(q), group, q.shape[2]))
    pairs = sum(b * a + b * (b + 1) / 2 for a, b in zip(before, tokens, strict=True))

    def run_prefill(config: Config | None) -> tuple[Tensor]:
        out = torch.empty_like(q)
        prefill_attention(*given, context_lens, query_lens, tiles(), scoring, out, config)
        return (out,)

    return Trial(
        {**key, "rows": tile_rows(len(q), len(query_lens), group, q.shape[2])},
        run_prefill,
        reference,
        flops=4.0 * q.shape[1] * q.shape[2] * pairs,
    )


def _rope_trial(
    shape: Key, q: Tensor, pool: Tensor, block_tables: Tensor, context_lens: Tensor,
    scoring: Scoring, programs: int,
) -> Trial:  # fmt: skip
    """Decode rows whose K and V are written by the same launch.

    shape: "norms": heads are normed; "last": after the rotation; "values": values, too · "scaled":
    queries are, by their position · "reads": K and V are another layer's.
    """
    rows, heads, head_size = q.shape
    layer, kv_heads, block_size = pool.shape[1] - 1, *pool.shape[3:5]
    reads = bool(shape.get("reads"))
    width = heads + (0 if reads else 2 * kv_heads)
    qkv = torch.randn(rows, width * head_size, device=q.device).to(q.dtype)
    drawn = torch.randn(block_tables.shape[1] * block_size, head_size // 2, device=q.device)
    cos, sin = (table.repeat(1, 2).to(q.dtype) for table in (drawn.cos(), drawn.sin()))
    norms = torch.rand(2, head_size, device=q.device).to(q.dtype).unbind()
    q_norm, k_norm = norms if "norms" in shape else (None, None)
    scales = torch.rand(len(cos), 1, device=q.device) + 0.5 if "scaled" in shape else None
    options = bool(shape.get("last")), bool(shape.get("values"))
    rotation = Rotation(cos, sin, q_norm, k_norm, 1e-5, scales, *options)
    given, seq_lens = pool.clone(), context_lens + 1

    def places() -> tuple[Tensor, Tensor]:
        """Positions and slots of the rows that are not padding."""
        at = context_lens[context_lens >= 0].long()
        tables = block_tables[context_lens >= 0]
        blocks = tables.gather(1, at[:, None] // block_size)[:, 0].long()
        return at, blocks * block_size + at % block_size

    def written(pool: Tensor) -> Tensor:
        if q.device.type == "meta":
            return pool
        _, slots = places()
        values = unpack_rows(pool, torch.float32) if is_quantized(pool.dtype) else pool
        return values[slots // block_size, layer, :, :, slots % block_size]

    def run(config: Config | None) -> tuple[Tensor, ...]:
        window, chunked = scoring.window, scoring.chunked
        plan = plan_decode(q, pool, seq_lens, window, programs, config, chunked=chunked)
        places = (pool, layer, block_tables, plan, scoring)
        out = torch.empty_like(q)
        decode_attention(qkv, *places, out, rotation, only_reads=reads)
        return out, written(pool)

    def reference() -> tuple[Tensor, ...]:
        parts = [heads] if reads else [heads, kv_heads, kv_heads]
        positions = context_lens.clamp_min(0).long()
        q, *kv = rotated_heads(
            qkv.view(rows, -1, head_size).split(parts, dim=1), positions, rotation
        )
        live, (_, slots) = context_lens >= 0, places()
        if kv:
            write_kv(given, layer, slots, *(x[live] for x in kv))
        lens = context_lens.clamp_min(0), live.int()
        # The reference has no padding rows.
        found = torch.zeros_like(q)
        found[live] = attention_reference(q[live], given, layer, block_tables, *lens, scoring)
        return found, written(given)

    tolerance = {torch.int8: 0.02, FP8: 0.08}.get(pool.dtype)
    return Trial(config_key(q, pool, rows), run, reference, tolerance=tolerance)


_FP8: Key = {"kv": "fp8", "least": 89}  # loading fp8 needs sm_89
_WINDOW: Key = {"window": 40}
_SIZES: Key = {"kv_heads": 8, "layers": 2}
_HEADS: tuple[Key, ...] = (
    {}, {"kv": "int8"}, _FP8,
    {"dtype": "fp16"}, {"dtype": "fp16", "kv": "int8"}, {"dtype": "fp16", **_FP8},
    {"dtype": "fp32"}, {"dtype": "fp32", "kv": "int8"},
    {"head_size": 64, "group": 7}, {"head_size": 80, "group": 1},
    {"kv": "int8", "head_size": 96, "group": 3}, {"head_size": 256, "group": 8}, {"group": 32},
    {"head_size": 64, "group": 8, "sinks": 1}, {"kv": "int8", "softcap": 2, "sinks": 1},
    {"head_size": 256, "group": 2, "softcap": 2},
)  # fmt: skip

_ROPE_CASES: tuple[Key, ...] = (
    {"programs": 5}, {"kv": "int8", "norms": 1, "programs": 3}, {**_FP8, **_WINDOW, "programs": 2},
    {"dtype": "fp16", "head_size": 64, "norms": 1}, {"dtype": "fp32", "head_size": 80, "group": 1},
    {"kv": "int8", "head_size": 96, "group": 3, "programs": 9},
    {"head_size": 256, "group": 8, "norms": 1, "sinks": 1},
    {"head_size": 256, "group": 2, "norms": 1, "values": 1, "shared_by": 4, **_WINDOW},
    {"norms": 1, "last": 1, "scaled": 1, "chunked": 1, **_WINDOW, "programs": 3},
    {"head_size": 512, "group": 8, "norms": 1, "reads": 1},
)  # fmt: skip
# Of layers with heads of their own, and with attention by chunks.
_OWN_HEADS: Key = {"head_size": 512, "group": 8, "shared_by": 2, "chunked": 1, **_WINDOW}


def _prefill_cases() -> list[Key]:
    """Chunks that fill large tiles, with a window for every second kind of heads; short chunks."""
    long = [
        {**heads, **(_WINDOW if at % 2 else {}), "tokens": 16 if "fp32" in heads.values() else 70}
        for at, heads in enumerate(_HEADS)
    ]
    short: list[Key] = [{**_WINDOW, "tokens": 70}, {"tokens": 16}, {"tokens": 4, "kv": "int8"}]
    return [
        {**case, **_SIZES, "batch": 3, "context": 60, "ragged": at}
        for at, case in enumerate([*long, *short, {**_OWN_HEADS, "tokens": 20}])
    ]


def _configs(**sizes: tuple[int, ...]) -> Callable[[Key], list[Config]]:
    """Configurations whose tiles of K and V in flight fit a multiprocessor's shared memory."""

    def fitting(key: Key) -> list[Config]:
        row_bytes = int(triton.next_power_of_2(int(key["head_size"]))) * int(key["kv_bytes"])
        return [
            config
            for config in product_of(TILE=(16, 32, 64, 128), **sizes)
            if (config["num_stages"] - 1) * 2 * config["TILE"] * row_bytes <= 144 * 1024
        ]

    return fitting


# Shapes of served models: Llama 3, Qwen 2.5 and 3, Gemma 3 and 4.
_SHAPES: list[Key] = [
    *({"head_size": size, "kv": kv} for size in (64, 128, 256) for kv in ("bf16", "int8")),
    {"head_size": 512, "group": 8, "kv": "bf16", "kv_heads": 2},
]

SPECS = (
    KernelSpec(
        "decode_attention",
        decode_trial,
        cases=[
            {**heads, **use, **_SIZES, "batch": 4, "context": 150, "ragged": at}
            for at, heads in enumerate(_HEADS)
            for use in ({"programs": 5}, {**_WINDOW, "programs": 2})
        ]
        + [{**_OWN_HEADS, **_SIZES, "batch": 4, "context": 150, "ragged": 1}],
        configs=_configs(num_warps=(2, 4, 8), num_stages=(2, 3, 4), PER_PROCESSOR=(1, 2, 3, 4)),
        shapes=[*_SHAPES, *({"head_size": size, "kv": "bf16", "batch": 8} for size in (64, 128))],
    ),
    KernelSpec(
        "decode_attention_with_rope",
        decode_trial,
        cases=[
            {**heads, **_SIZES, "rope": 1, "batch": 4, "context": 150, "ragged": at}
            for at, heads in enumerate(_ROPE_CASES)
        ],
    ),
    KernelSpec(
        "prefill_attention",
        prefill_trial,
        cases=_prefill_cases(),
        configs=_configs(num_warps=(4, 8), num_stages=(1, 2, 3, 4)),
        # Short chunks after long contexts, and chunks of 2,048 tokens, which fill the largest
        # tiles.
        shapes=[
            {**shape, "batch": batch, "context": context, "tokens": tokens}
            for shape in _SHAPES
            for batch, context, tokens in ((64, 2048, 4), (64, 2048, 16), (4, 0, 2048))
        ],
    ),
)
