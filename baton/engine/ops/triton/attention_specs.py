"""Both attention kernels as they are compiled without a GPU, compared and tuned on one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import triton
from torch import Tensor

from baton.engine.ops.triton import decode_attention as decode
from baton.engine.ops.triton import prefill_attention as prefill
from baton.engine.ops.triton.attention_common import kernel_key
from baton.engine.ops.triton.spec import DTYPES, Config, KernelSpec, Key, Trial
from baton.engine.weights.quantize import SCALE_BYTES, is_quantized, pack_rows

BLOCK_SIZE = 16
KV_HEADS = 8
_DRAWN_AT_ONCE = 1 << 28  # elements, which are float32 while they are drawn


def random_pool(
    num_blocks: int, layers: int, kv_heads: int, head_size: int, kv: torch.dtype,
    device: torch.device, block_size: int = BLOCK_SIZE,
) -> Tensor:  # fmt: skip
    """A pool whose every row is drawn, and quantised as writing it would."""
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


@dataclass(frozen=True)
class Batch:
    """Sequences with KV in a pool of one layer, their blocks in random order, and queries of them.

    Blocks that no table names hold NaN where their type has it; block 0, which tables name behind a
    sequence's end, may be read but has no weight.
    """

    q: Tensor
    pool: Tensor
    block_tables: Tensor

    @classmethod
    def of(cls, shape: Key, device: torch.device, seq_lens: list[int], rows: int) -> Batch:
        """rows: queries. shape: its "dtype", "kv", "head_size" and "group" (heads of a KV head)."""
        dtype = DTYPES[str(shape.get("dtype", "bf16"))]
        kv = DTYPES[str(shape["kv"])] if "kv" in shape else dtype
        head_size, group = int(shape.get("head_size", 128)), int(shape.get("group", 4))
        counts = [-(-seq_len // BLOCK_SIZE) for seq_len in seq_lens]
        used, width = sum(counts), max(1, *counts)
        pool = random_pool(used + 4, 1, KV_HEADS, head_size, kv, device)
        order = 1 + torch.randperm(used, dtype=torch.int32, device=device)
        block_tables = torch.zeros(len(seq_lens), width, dtype=torch.int32, device=device)
        for row, part in zip(block_tables, order.split(counts), strict=True):
            row[: len(part)] = part
        if not is_quantized(kv):
            pool[used + 1 :] = torch.nan
            pool[0] = 1e3
        q = torch.randn(rows, KV_HEADS * group, head_size, device=device).to(dtype)
        return cls(q, pool, block_tables)

    @property
    def token_bytes(self) -> int:
        """K and V of one token."""
        return self.pool[0].numel() // BLOCK_SIZE * self.pool.itemsize


def _ragged(shape: Key, count: int, least: int, most: int) -> list[int]:
    """Lengths: `most` each, or with "ragged" between least and most, drawn from it as a seed."""
    if "ragged" not in shape:
        return [most] * count
    dice = random.Random(int(shape["ragged"]) + count)  # noqa: S311 - lengths of a test
    return [most, *(dice.choice((least, dice.randint(least, most))) for _ in range(count - 1))]


def _fitting(configs: list[Config], key: Key) -> list[Config]:
    """Those whose tiles of K and V in flight fit a multiprocessor's shared memory."""
    row_bytes = int(triton.next_power_of_2(int(key["head_size"]))) * int(key["kv_bytes"])
    return [
        config
        for config in configs
        if (config.num_stages - 1) * 2 * config["TILE"] * row_bytes <= 144 * 1024
    ]


def decode_trial(shape: Key, device: torch.device) -> Trial:
    """Rows of "context" tokens each, 64 of 4,096 by default: a batch that fills a GPU."""
    count, context = int(shape.get("batch", 64)), int(shape.get("context", 4096))
    tokens = _ragged(shape, count, 0, context)
    batch = Batch.of(shape, device, tokens, count)
    seq_lens = torch.tensor(tokens, dtype=torch.int32).to(device)
    window, splits = int(shape.get("window", 0)) or None, int(shape.get("splits", 0))
    scale = batch.q.shape[2] ** -0.5
    arguments = (batch.q, batch.pool, 0, batch.block_tables, seq_lens, scale, window)
    return Trial(
        kernel_key(batch.q, batch.pool),
        lambda config: (decode.decode_attention(*arguments, splits=splits, config=config),),
        lambda: (decode.decode_attention_reference(*arguments),),
        moved_bytes=sum(min(n, window or n) for n in tokens) * batch.token_bytes,
    )


def prefill_trial(shape: Key, device: torch.device) -> Trial:
    """Chunks of "tokens" tokens after "context" others, of "batch" sequences."""
    count, context, most = (int(shape[name]) for name in ("batch", "context", "tokens"))
    before, tokens = _ragged(shape, count, 0, context), _ragged(shape, count, 1, most)
    batch = Batch.of(shape, device, [a + b for a, b in zip(before, tokens, strict=True)],
                     sum(tokens))  # fmt: skip
    context_lens, query_lens = (
        torch.tensor(x, dtype=torch.int32).to(device) for x in (before, tokens)
    )
    group, scale = batch.q.shape[1] // KV_HEADS, batch.q.shape[2] ** -0.5
    tiles = prefill.plan_tiles(query_lens, len(batch.q), group)
    window = int(shape.get("window", 0)) or None
    arguments = (batch.q, batch.pool, 0, batch.block_tables, context_lens, query_lens)
    pairs = sum(b * a + b * (b + 1) / 2 for a, b in zip(before, tokens, strict=True))
    return Trial(
        {**kernel_key(batch.q, batch.pool), "rows": tiles.rows},
        lambda config: (prefill.prefill_attention(*arguments, tiles, scale, window, config),),
        lambda: (prefill.prefill_attention_reference(*arguments, scale, window),),
        flops=4.0 * batch.q.shape[1] * batch.q.shape[2] * pairs,
    )


Shape: TypeAlias = dict[str, int | str]

_WIDE, _NARROW = Config(4, 3, {"TILE": 64}), Config(8, 2, {"TILE": 32})
_FP8: Shape = {"kv": "fp8", "least": 89}  # what the kernels load needs sm_89


def _decode_cases() -> list[tuple[Key, Config]]:
    heads: tuple[tuple[Shape, Config], ...] = (
        ({}, _WIDE),
        ({"kv": "int8"}, _WIDE),
        (_FP8, _WIDE),
        ({"dtype": "fp16"}, _WIDE),
        ({"dtype": "fp16", "kv": "int8"}, _WIDE),
        ({"dtype": "fp16", **_FP8}, _WIDE),
        ({"dtype": "fp32"}, _NARROW),
        ({"dtype": "fp32", "kv": "int8"}, _NARROW),
        ({"head_size": 64, "group": 7}, _WIDE),
        ({"head_size": 80, "group": 1}, _WIDE),
        ({"kv": "int8", "head_size": 96, "group": 3}, _WIDE),
        ({"head_size": 256, "group": 8}, _NARROW),
        ({"group": 32}, _WIDE),
    )
    uses: tuple[Shape, ...] = ({"splits": 3}, {"window": 40, "splits": 1})
    return [
        (
            {**shape, **use, "batch": 4, "context": 150, "ragged": at},
            Config(config.num_warps, config.num_stages, {**config.sizes, "LEAST_SPLIT": 256}),
        )
        for at, (shape, config) in enumerate(heads)
        for use in uses
    ]


def _prefill_cases() -> list[tuple[Key, Config]]:
    wide = Config(8, 3, {"TILE": 64})
    few, exact = Config(4, 3, {"TILE": 64}), Config(8, 1, {"TILE": 16})
    window: Shape = {"window": 40}
    long: Shape = {"tokens": 70}
    cases: tuple[tuple[Shape, Config], ...] = (
        (long, wide),
        ({**long, **window}, wide),
        ({**long, "kv": "int8"}, wide),
        ({**long, **_FP8}, wide),
        ({**long, "dtype": "fp16", **window}, wide),
        ({**long, "dtype": "fp16", "kv": "int8"}, wide),
        ({**long, "dtype": "fp16", **_FP8}, wide),
        ({"tokens": 16, "dtype": "fp32", **window}, exact),
        ({"tokens": 16, "dtype": "fp32", "kv": "int8"}, exact),
        ({**long, "head_size": 64, "group": 7}, wide),
        ({**long, "head_size": 80, "group": 1, **window}, wide),
        ({**long, "head_size": 256, "group": 8}, Config(8, 2, {"TILE": 32})),
        ({"tokens": 16}, few),
        ({"tokens": 4, "kv": "int8", **window}, few),
    )
    return [
        ({**shape, "batch": 3, "context": 60, "ragged": at}, config)
        for at, (shape, config) in enumerate(cases)
    ]


def _configs(
    warps: tuple[int, ...], stages: tuple[int, ...], **sizes: int
) -> Callable[[Key], list[Config]]:
    made = [
        Config(w, s, {"TILE": tile, **sizes})
        for tile in (16, 32, 64, 128)
        for w in warps
        for s in stages
    ]
    return lambda key: _fitting(made, key)


# The shapes of models as they are served: those of Llama 3, Qwen 2.5 and 3, and Gemma.
_SHAPES: tuple[Shape, ...] = tuple(
    {"head_size": head_size, "kv": kv} for head_size in (64, 128, 256) for kv in ("bf16", "int8")
)

SPECS = (
    KernelSpec(
        decode.NAME, decode_trial, _decode_cases(),
        _configs((2, 4, 8), (2, 3, 4, 5), LEAST_SPLIT=256), _SHAPES,
    ),
    KernelSpec(
        prefill.NAME, prefill_trial, _prefill_cases(), _configs((4, 8), (1, 2, 3, 4)),
        # Short chunks with long contexts, and chunks of 2,048 tokens that fill the largest tiles.
        tuple(
            {**shape, "batch": batch, "context": context, "tokens": tokens}
            for shape in _SHAPES
            for batch, context, tokens in ((64, 2048, 4), (64, 2048, 16), (4, 0, 2048))
        ),
    ),
)  # fmt: skip
