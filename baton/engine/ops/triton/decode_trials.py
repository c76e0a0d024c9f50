"""Decode attention compiled without a GPU, and tuned on one."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from baton.engine.ops.triton.attention_trials import (
    KV_HEADS,
    SHAPES,
    Heads,
    fitting,
    full_pool,
    heads_of,
)
from baton.engine.ops.triton.decode_attention import (
    NAME,
    decode_attention,
    decode_kernel,
    group_pad,
    join_kernel,
)
from baton.engine.ops.triton.spec import CompileCase, Config, KernelSpec, Key, Trial


def _cases() -> list[CompileCase]:
    wide, narrow = Config(4, 3, {"TILE": 64}), Config(8, 2, {"TILE": 32})
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    int8, fp8 = torch.int8, torch.float8_e4m3fn
    least = {"LEAST_SPLIT": 256}
    cases = []
    for heads, config in (
        (Heads(bf16, bf16), wide),
        (Heads(bf16, int8), wide),
        (Heads(bf16, fp8), wide),
        (Heads(fp16, fp16), wide),
        (Heads(fp16, int8), wide),
        (Heads(fp16, fp8), wide),
        (Heads(fp32, fp32), narrow),
        (Heads(fp32, int8), narrow),
        (Heads(bf16, bf16, 64, 7), wide),
        (Heads(bf16, bf16, 80, 1), wide),
        (Heads(bf16, int8, 96, 3), wide),
        (Heads(bf16, bf16, 256, 8), narrow),
        (Heads(bf16, bf16, 128, 32), wide),
    ):
        for splits, windowed in ((True, False), (False, True)):
            cases.append(
                heads.case(
                    decode_kernel,
                    config,
                    {
                        "lengths": "*i32",
                        "splits": "i32",
                        **({"parts": "*fp32"} if splits else {}),
                    },
                    {
                        **({} if splits else {"parts": None}),
                        "WINDOWED": windowed,
                        "GROUP_PAD": group_pad(heads.group),
                        **least,
                    },
                    "split" if splits else "windowed",
                )
            )
    return cases


def _joins() -> list[CompileCase]:
    return [
        CompileCase(
            f"join {splits} splits of {element} {head_size}",
            join_kernel,
            {
                "parts": "*fp32",
                "lengths": "*i32",
                "out": f"*{element}",
                "window": "i32",
                "splits": "i32",
            },
            {
                "SPLITS_PAD": splits,
                "HEAD_SIZE": head_size,
                "HEAD_PAD": triton.next_power_of_2(head_size),
                "TILE": 64,
                "LEAST_SPLIT": 256,
            },
        )
        for element, head_size, splits in (("bf16", 128, 2), ("fp16", 80, 16), ("fp32", 256, 64))
    ]


def _candidates(key: Key) -> list[Config]:
    return fitting(
        [
            Config(warps, stages, {"TILE": tile, "LEAST_SPLIT": 256})
            for tile in (16, 32, 64, 128)
            for warps in (2, 4, 8)
            for stages in (2, 3, 4, 5)
        ],
        key,
    )


def _inputs(key: Key, device: torch.device) -> Trial:
    """64 rows of 4,096 tokens each: a batch that fills a GPU."""
    rows, tokens = 64, 4096
    heads = heads_of(key)
    pool, tables = full_pool(heads, rows, tokens, device)
    shape = (rows, KV_HEADS * heads.group, heads.head_size)
    q = torch.randn(shape, dtype=heads.query_type, device=device)
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device=device)

    def run(config: Config) -> Tensor:
        return decode_attention(q, pool, 0, tables, lengths, 0.1, None, config=config)

    return Trial(key, run, pool.nbytes)


SPEC = KernelSpec(NAME, (*_cases(), *_joins()), _candidates, SHAPES, _inputs)
