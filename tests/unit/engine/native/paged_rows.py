"""Drives native rotary embedding and attention over scattered blocks, beside their references."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from baton.engine.kernels.native import interface, library
from baton.engine.kernels.native.interface import AttentionShape, Norm, Pool
from baton.engine.kernels.torch.attention import AttentionBatch, Scoring, attend, place
from baton.engine.kernels.torch.row_quantization import pack_rows, unpack_rows
from tests.unit.engine.paged import batch_of

LAYERS, LAYER = 2, 1
EPS = 1e-5


@dataclass(frozen=True)
class Heads:
    """What attention looks like in a model."""

    kv_heads: int = 2
    group: int = 3
    head_size: int = 64
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    with_sinks: bool = False
    dtype: torch.dtype = torch.float32
    int8: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @cached_property
    def sinks(self) -> Tensor | None:
        return 3 * random_tensor(self.heads, seed=9) if self.with_sinks else None


@dataclass(frozen=True)
class Span:
    """Rows of a sequence: `count` of them from position `context` on, over its `blocks`."""

    context: int
    count: int
    blocks: list[int] = field(default_factory=list)

    def part(self, start: int, end: int) -> Span:
        """The rows at positions [start, end) alone, with the blocks they need."""
        return Span(start, end - start, self.blocks)


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class PagedRows:
    """A pool in which some sequences own scattered blocks; block 0 is no one's.

    What is in no sequence is NaN, so that reading it shows.
    """

    def __init__(self, heads: Heads, spans: list[tuple[int, int]], seed: int = 0) -> None:
        self.heads = heads
        size = heads.block_size
        needed = [-(-(context + count) // size) for context, count in spans]
        free = random.Random(seed).sample(range(1, sum(needed) + 9), sum(needed))
        self.spans = [
            Span(context, count, [free.pop() for _ in range(blocks)])
            for (context, count), blocks in zip(spans, needed, strict=True)
        ]
        self.owned = torch.tensor(sorted(block for span in self.spans for block in span.blocks))
        shape = (sum(needed) + 9, LAYERS, 2, heads.kv_heads, size, heads.head_size)
        values = random_tensor(*shape, seed=seed).to(heads.dtype)
        if heads.int8:
            self.pool = pack_rows(values, torch.int8)
        else:
            self.pool = torch.full_like(values, torch.nan)
            self.pool[self.owned] = values[self.owned]
        rows, width = sum(span.count for span in self.spans), heads.heads + 2 * heads.kv_heads
        self.qkv = random_tensor(rows, width * heads.head_size, seed=seed + 1).to(heads.dtype)

    def attend(
        self, spans: list[Span] | None = None, qkv: Tensor | None = None, threads: int = 1
    ) -> Tensor:
        """`[rows, heads * head_size]` from the native kernel."""
        spans, qkv = spans or self.spans, self.qkv if qkv is None else qkv
        out = torch.full((len(qkv), self.heads.heads * self.heads.head_size), torch.nan)
        out = out.to(self.heads.dtype)
        heads = self.heads
        sinks = heads.sinks.data_ptr() if heads.sinks is not None else None
        shape = AttentionShape(
            heads=heads.heads, scale=heads.scale, cap=heads.softcap, window=heads.window,
            sinks=sinks,
        )  # fmt: skip
        self._call("attend", threads, qkv, spans, shape, out)
        return out

    def rotate(
        self, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None = None, threads: int = 1
    ) -> None:
        """Turns q of qkv in place and writes K and V to the pool, natively."""
        shape = AttentionShape(
            heads=self.heads.heads, eps=EPS, cos=cos.data_ptr(), sin=sin.data_ptr()
        )
        if norms is not None:
            shape.q_norm, shape.k_norm = (Norm(weight.data_ptr()) for weight in norms)
        self._call("rotate", threads, self.qkv, self.spans, shape)

    def reference(self) -> Tensor:
        """`[rows, heads * head_size]` float32: the torch path over the same numbers."""
        heads = self.heads
        pool = unpack_rows(self.pool, torch.float32) if heads.int8 else self.pool.float()
        q = self.qkv[:, : heads.heads * heads.head_size].float()
        q = q.view(len(q), heads.heads, heads.head_size)
        pool = pool.nan_to_num()  # the reference pads block_tables with block 0
        _, attention = self.placed()
        scoring = Scoring(heads.scale, heads.window or None, heads.softcap, heads.sinks)
        return attend(q, pool, LAYER, attention, scoring)

    def placed(self) -> tuple[Tensor, AttentionBatch]:
        """Where the torch path finds the rows; sequences of one row come first."""
        contexts = [span.context for span in self.spans]
        counts = [span.count for span in self.spans]
        tables = [span.blocks for span in self.spans]
        batch = batch_of([0] * sum(counts), contexts, counts, tables)
        positions, (attention,) = place(batch, self.heads.block_size)
        return positions, attention

    def _call(
        self, name: str, threads: int, qkv: Tensor, spans: list[Span], shape: AttentionShape,
        out: Tensor | None = None,
    ) -> None:  # fmt: skip
        shape.layer = LAYER
        heads = self.heads
        needed = [-(-(span.context + span.count) // heads.block_size) for span in spans]
        # An entry behind those needed is no block at all.
        tables = [
            torch.tensor([*span.blocks[:count], 1 << 30], dtype=torch.int32)
            for span, count in zip(spans, needed, strict=True)
        ]
        structs, row = (interface.Span * len(spans))(), 0
        for at, (span, table) in enumerate(zip(spans, tables, strict=True)):
            structs[at] = interface.Span(row, span.count, span.context, table.data_ptr())
            row += span.count
        all_heads = (heads.kv_heads, 0, heads.kv_heads)
        sizes = (LAYERS, *all_heads, heads.block_size, heads.head_size, heads.int8, 1)
        pool = Pool(self.pool.data_ptr(), *sizes)
        function = getattr(library.require(heads.dtype), f"baton_{name}")
        results = [out.data_ptr()] if out is not None else []
        function(threads, qkv.data_ptr(), structs, len(spans), shape, pool, *results)
