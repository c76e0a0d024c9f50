"""Drives native rotary embedding and attention over scattered blocks, beside their references."""

from __future__ import annotations

import random
from ctypes import POINTER, Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.ops.native import library
from baton.engine.ops.native.model import Pool
from baton.engine.ops.torch.attention import RowPositions, attend, place

native = library.load()

LAYERS, LAYER = 2, 1
EPS = 1e-5
SCALE_BYTES = 4


class CSpan(Structure):
    """`Span` of kernels.h."""

    _fields_ = (
        ("first_row", c_int32),
        ("count", c_int32),
        ("context", c_int32),
        ("table", c_void_p),
    )


class CShape(Structure):
    """`AttentionShape` of kernels.h."""

    _fields_ = (
        ("heads", c_int32),
        ("layer", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("eps", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
    )


@dataclass(frozen=True)
class Heads:
    """What attention looks like in a model."""

    kv_heads: int = 2
    group: int = 3
    head_size: int = 64
    block_size: int = 16
    window: int = 0
    dtype: torch.dtype = torch.float32
    int8: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return self.head_size**-0.5


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
    """A pool in which some sequences own scattered blocks; block 0 is nobody's.

    What nobody owns is NaN, so that reading it shows.
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
        self.pool = quantised(values) if heads.int8 else torch.full_like(values, torch.nan)
        if not heads.int8:
            self.pool[self.owned] = values[self.owned]
        self.qkv = random_tensor(
            sum(span.count for span in self.spans),
            (heads.heads + 2 * heads.kv_heads) * heads.head_size,
            seed=seed + 1,
        ).to(heads.dtype)

    def attend(
        self, spans: list[Span] | None = None, qkv: Tensor | None = None, threads: int = 1
    ) -> Tensor:
        """`[rows, heads * head_size]` from the native kernel."""
        spans, qkv = spans or self.spans, self.qkv if qkv is None else qkv
        out = torch.full((len(qkv), self.heads.heads * self.heads.head_size), torch.nan)
        out = out.to(self.heads.dtype)
        shape = CShape(heads=self.heads.heads, scale=self.heads.scale, window=self.heads.window)
        self._call("attend", threads, qkv, spans, shape, out)
        return out

    def rotate(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        spans: list[Span] | None = None,
        threads: int = 1,
    ) -> None:
        """Turns q of qkv in place and writes K and V to the pool, natively."""
        shape = CShape(heads=self.heads.heads, eps=EPS, cos=cos.data_ptr(), sin=sin.data_ptr())
        if norms is not None:
            shape.q_norm, shape.k_norm = (weight.data_ptr() for weight in norms)
        self._call("rotate", threads, qkv, spans or self.spans, shape)

    def reference(self) -> Tensor:
        """`[rows, heads * head_size]` float32: the torch path over the same numbers."""
        pool = dequantised(self.pool) if self.heads.int8 else self.pool.float()
        q = self.qkv[:, : self.heads.heads * self.heads.head_size].float()
        q = q.view(len(q), self.heads.heads, self.heads.head_size)
        window = self.heads.window or None
        pool = pool.nan_to_num()  # the reference pads block_tables with block 0
        return attend(q, pool, LAYER, self.placed().attention, self.heads.scale, window)

    def placed(self) -> RowPositions:
        """Where the torch path finds the rows; sequences of one row come first."""
        width = max(len(span.blocks) for span in self.spans)
        query_lens = [span.count for span in self.spans]
        rows = sum(query_lens)
        batch = StepBatch(
            token_ids=torch.zeros(rows, dtype=torch.int32),
            context_lens=torch.tensor([span.context for span in self.spans], dtype=torch.int32),
            query_lens=torch.tensor(query_lens, dtype=torch.int32),
            block_tables=torch.tensor(
                [span.blocks + [0] * (width - len(span.blocks)) for span in self.spans],
                dtype=torch.int32,
            ),
            logit_rows=torch.arange(rows, dtype=torch.int32),
            num_decodes=query_lens.count(1),
        )
        return place(batch, self.heads.block_size)

    def _call(
        self,
        name: str,
        threads: int,
        qkv: Tensor,
        spans: list[Span],
        shape: CShape,
        out: Tensor | None = None,
    ) -> None:
        shape.layer = LAYER
        # An entry behind those needed is no block at all.
        block_tables = [
            torch.tensor([*self._needed(span), 1 << 30], dtype=torch.int32) for span in spans
        ]
        structs, row = (CSpan * len(spans))(), 0
        for struct, span, table in zip(structs, spans, block_tables, strict=True):
            struct.first_row, struct.count, struct.context = row, span.count, span.context
            struct.table = table.data_ptr()
            row += span.count
        heads = self.heads
        pool = Pool(
            self.pool.data_ptr(),
            LAYERS,
            heads.kv_heads,
            heads.block_size,
            heads.head_size,
            heads.int8,
        )
        function = library.require(heads.dtype)[f"baton_{name}"]
        results = [out.data_ptr()] if out is not None else []
        function.argtypes = (
            *(c_int32, c_void_p, POINTER(CSpan), c_int32, POINTER(CShape), POINTER(Pool)),
            *(c_void_p for _ in results),
        )
        function.restype = None
        function(threads, qkv.data_ptr(), structs, len(spans), shape, pool, *results)

    def _needed(self, span: Span) -> list[int]:
        return span.blocks[: -(-(span.context + span.count) // self.heads.block_size)]


def quantised(values: Tensor) -> Tensor:
    """int8 `[..., size + 4]` of `[..., size]`: rows as int8 and their scale's bytes behind them."""
    wide = values.float()
    peaks = wide.abs().amax(-1, keepdim=True)
    # Not `127 / peaks`, which torch computes as a product with the reciprocal.
    inverse = torch.where(peaks > 0, torch.tensor(127.0) / peaks, 0)
    units = (wide * inverse).round().to(torch.int8)
    return torch.cat((units, (peaks / 127).view(torch.int8)), dim=-1)


def dequantised(pool: Tensor) -> Tensor:
    """float32 `[..., size]` of int8 `[..., size + 4]`."""
    units, scales = pool[..., :-SCALE_BYTES], pool[..., -SCALE_BYTES:]
    return units.float() * scales.contiguous().view(torch.float32)
