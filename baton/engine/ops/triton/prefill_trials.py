"""Prefill attention compiled without a GPU, and tuned on one."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.ops.triton.attention_trials import (
    GROUP,
    KV_HEADS,
    SHAPES,
    Heads,
    fitting,
    full_pool,
    heads_of,
)
from baton.engine.ops.triton.prefill_attention import (
    MOST_ROWS,
    NAME,
    plan_tiles,
    prefill_attention,
    prefill_kernel,
)
from baton.engine.ops.triton.spec import CompileCase, Config, KernelSpec, Key, Trial


def _cases() -> list[CompileCase]:
    wide, narrow = Config(8, 3, {"TILE": 64}), Config(8, 2, {"TILE": 32})
    few, exact = Config(4, 3, {"TILE": 64}), Config(8, 1, {"TILE": 16})
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    int8, fp8 = torch.int8, torch.float8_e4m3fn
    return [
        heads.case(
            prefill_kernel,
            config,
            {"contexts": "*i32", "counts": "*i32", "places": "*i32"},
            {"TOKENS": rows // heads.group, "ROWS": rows, "WINDOWED": windowed},
            f"{rows} rows" + (" windowed" if windowed else ""),
        )
        for heads, rows, config, windowed in (
            (Heads(bf16, bf16), 128, wide, False),
            (Heads(bf16, bf16), 128, wide, True),
            (Heads(bf16, int8), 128, wide, False),
            (Heads(bf16, fp8), 128, wide, False),
            (Heads(fp16, fp16), 128, wide, True),
            (Heads(fp16, int8), 128, wide, False),
            (Heads(fp16, fp8), 128, wide, False),
            (Heads(fp32, fp32), 64, exact, True),
            (Heads(fp32, int8), 64, exact, False),
            (Heads(bf16, bf16, 64, 7), 128, wide, False),
            (Heads(bf16, bf16, 80, 1), 128, wide, True),
            (Heads(bf16, bf16, 256, 8), 128, narrow, False),
            (Heads(bf16, bf16), 64, few, False),
            (Heads(bf16, int8), 16, few, True),
        )
    ]


def _candidates(key: Key) -> list[Config]:
    return fitting(
        [
            Config(warps, stages, {"TILE": tile})
            for tile in (16, 32, 64, 128)
            for warps in (4, 8)
            for stages in (1, 2, 3, 4)
        ],
        key,
    )


def _inputs(key: Key, device: torch.device) -> Trial:
    """Chunks of 2,048 tokens that fill tiles of 128 rows, or short ones with long contexts."""
    heads, rows = heads_of(key), int(key["rows"])
    sequences, context, count = (4, 0, 2048) if rows == MOST_ROWS else (64, 2048, rows // GROUP)
    pool, tables = full_pool(heads, sequences, context + count, device)
    shape = (sequences * count, KV_HEADS * heads.group, heads.head_size)
    q = torch.randn(shape, dtype=heads.query_type, device=device)
    contexts = torch.full((sequences,), context, dtype=torch.int32, device=device)
    counts = torch.full_like(contexts, count)
    tiles = plan_tiles(counts, len(q), heads.group)

    def run(config: Config) -> Tensor:
        return prefill_attention(
            q, pool, 0, tables, contexts, counts, tiles, 0.1, None, config=config
        )

    return Trial(key, run)


SPEC = KernelSpec(
    NAME,
    _cases(),
    _candidates,
    tuple({**shape, "rows": rows} for shape in SHAPES for rows in (16, 64, MOST_ROWS)),
    _inputs,
)
