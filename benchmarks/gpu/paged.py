"""Pools of random KV and the tables of sequences in them: what attention kernels are given."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.weights.quantize import is_quantized, pack_rows
from benchmarks.gpu.job import Job

# (heads, KV heads, head size, block size), as public models have them.
_GEOMETRIES = ((32, 8, 128, 16), (14, 2, 64, 16), (9, 3, 64, 32), (16, 16, 80, 64))
_DRAWN_AT_ONCE = 1 << 28  # elements, which are float32 while they are drawn


@dataclass(frozen=True)
class Geometry:
    """What a kernel is compiled for."""

    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def scale(self) -> float:
        """Of scores."""
        return float(self.head_size**-0.5)

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer."""
        row = self.head_size * self.kv_dtype.itemsize
        return 2 * self.kv_heads * (row + (4 if is_quantized(self.kv_dtype) else 0))

    def __str__(self) -> str:
        return (
            f"{self.heads}/{self.kv_heads} heads of {self.head_size}, blocks of {self.block_size}, "
            f"{name_of(self.dtype)}, KV {name_of(self.kv_dtype)}"
        )


def name_of(dtype: torch.dtype) -> str:
    """As people write it."""
    known = {
        torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.int8: "int8",
        torch.float8_e4m3fn: "fp8",
    }  # fmt: skip
    return known[dtype]


def geometry(job: Job, dice: random.Random, dtype: torch.dtype, kv: torch.dtype) -> Geometry:
    """One of a few: each is compiled, which takes longer than it runs."""
    heads, kv_heads, head_size, block_size = dice.choice(
        job.sized(_GEOMETRIES, _GEOMETRIES[:2], ((4, 2, 16, 16),))
    )
    return Geometry(heads, kv_heads, head_size, block_size, dtype, kv)


def random_pool(g: Geometry, num_blocks: int, layers: int, device: torch.device) -> Tensor:
    """A pool whose every row is drawn, and quantised as writing it would."""
    shape = (num_blocks, layers, 2, g.kv_heads, g.block_size)
    extra = 4 if is_quantized(g.kv_dtype) else 0
    pool = torch.empty(
        (*shape, g.head_size + extra), dtype=torch.int8 if extra else g.kv_dtype, device=device
    )
    blocks_at_once = max(1, _DRAWN_AT_ONCE // (pool[0].numel()))
    for part in pool.split(blocks_at_once):
        if extra:
            drawn = torch.randn(*part.shape[:-1], g.head_size, device=device)
            part.copy_(pack_rows(drawn, g.kv_dtype).view(torch.int8))
        else:
            part.normal_()
    return pool.view(g.kv_dtype)


@dataclass(frozen=True)
class Sequences:
    """Tables `[sequences, width]` of distinct blocks; block 0 is nobody's, and stands for none."""

    tables: Tensor
    num_blocks: int  # that a pool needs


def scattered(
    lengths: list[int], block_size: int, device: torch.device, dice: random.Random, spare: int = 3
) -> Sequences:
    """Blocks for sequences of so many tokens, in random order, and some that nobody has."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = 1 + sum(counts) + spare
    blocks = list(range(1, num_blocks))
    dice.shuffle(blocks)
    rows, width = [], max(1, *counts)
    for count in counts:
        rows.append([*blocks[:count], *[0] * (width - count)])
        del blocks[:count]
    return Sequences(torch.tensor(rows, dtype=torch.int32, device=device), num_blocks)


def spoil(pool: Tensor, tables: Tensor) -> None:
    """Makes blocks that no table names unfit for any use, where their type can say so."""
    if is_quantized(pool.dtype):
        return
    named = torch.zeros(len(pool), dtype=torch.bool, device=pool.device)
    named[tables.long().flatten()] = True
    named[0] = True  # what lies behind a table's end may be read, and has no weight
    pool[~named] = float("nan")
    pool[0] = 1e4 if pool.dtype != torch.float16 else 1e3
