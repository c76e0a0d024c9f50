"""Pools of KV for tests of attention kernels: whatever a kernel must not read is poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.weights.quantize import SCALE_BYTES, is_quantized, pack_rows

FP8 = torch.float8_e4m3fn
LAYERS = 2
LAYER = 1
SCALE = 0.3

# How far a kernel may be from float32: by the rounding of its result, and of its weights.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
QUANTIZED_TOLERANCE = {**TOLERANCE, torch.float16: 1e-2, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Heads:
    """How a test's queries and KV look."""

    heads: int
    kv_heads: int
    head_size: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kept: torch.dtype | None = None

    @property
    def kv_type(self) -> torch.dtype:
        """Of the pool."""
        return self.kept or self.dtype

    @property
    def tolerance(self) -> float:
        """How far a kernel may be from its reference."""
        return (QUANTIZED_TOLERANCE if self.kept else TOLERANCE)[self.dtype]

    def queries(self, rows: int) -> Tensor:
        """Random q `[rows, heads, head_size]`."""
        return torch.randn(rows, self.heads, self.head_size).to(self.dtype)


def paged(heads: Heads, seen: list[range], poison: float = torch.nan) -> tuple[Tensor, Tensor]:
    """A pool and tables int32 `[sequences, blocks]` with KV of the positions of each that are seen.

    All other slots hold poison. Blocks lie in a random order, none is number 0, and that is what
    tables name for blocks of which no position is seen.
    """
    size = heads.block_size
    width = max(-(-span.stop // size) for span in seen) + 2
    num_blocks = 1 + len(seen) * width
    row = heads.head_size + (SCALE_BYTES if is_quantized(heads.kv_type) else 0)
    shape = (num_blocks, LAYERS, 2, heads.kv_heads, size, row)
    pool = poisoned(heads, shape, poison)
    tables = torch.zeros(len(seen), width, dtype=torch.int32)
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    for sequence, span in enumerate(seen):
        for index in range(span.start // size, -(-span.stop // size) if span else 0):
            tables[sequence, index] = free.pop()
        for position in span:
            at = pool[tables[sequence, position // size], LAYER, :, :, position % size]
            at.copy_(stored(heads, torch.randn(2, heads.kv_heads, heads.head_size)))
    return pool.view(heads.kv_type), tables


def stored(heads: Heads, values: Tensor) -> Tensor:
    """Vectors `[..., head_size]` as rows of a pool; bytes of int8 if it is quantized."""
    if is_quantized(heads.kv_type):
        return pack_rows(values, heads.kv_type).view(torch.int8)
    return values.to(heads.dtype)


def poisoned(heads: Heads, shape: tuple[int, ...], poison: float) -> Tensor:
    """A pool of nothing but poison; bytes of int8 if it is quantized."""
    if not is_quantized(heads.kv_type):
        return torch.full(shape, poison, dtype=heads.dtype)
    pool = torch.full(shape, 0x7F, dtype=torch.int8)  # NaN as fp8
    pool[..., -SCALE_BYTES:] = torch.tensor([poison]).view(torch.int8)
    return pool


def seen_by(length: int, window: int | None) -> range:
    """Positions that the last of so many tokens sees."""
    return range(max(0, length - window) if window else 0, length)
