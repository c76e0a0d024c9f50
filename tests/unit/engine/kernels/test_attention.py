"""Attention kernels as their references, and the references as the engine's attention.

Whatever a kernel must not read is poisoned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from baton.engine.ops.torch.attention import AttentionBatch, PrefillSegment, attend
from baton.engine.ops.triton.decode_attention import (
    MOST_SPLITS,
    PROGRAMS_PER_PROCESSOR,
    decode_attention,
    decode_attention_reference,
    splits_for,
)
from baton.engine.ops.triton.prefill_attention import (
    LEAST_ROWS,
    MOST_ROWS,
    plan_tiles,
    prefill_attention,
    prefill_attention_reference,
)
from baton.engine.ops.triton.spec import Config
from baton.engine.weights.quantize import SCALE_BYTES, is_quantized, pack_rows

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
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


# Lengths of decode rows, around the borders of blocks of 16 and 32, and of splits of 32 and more
# keys; 0 is padding. Chunks: (tokens before it, tokens in it), around borders of blocks and tiles.
LENGTHS = [1, 16, 17, 0, 33, 64, 97, 130]
CHUNKS = [(0, 1), (15, 2), (16, 17), (0, 33), (50, 31), (0, 0), (64, 1)]


@dataclass(frozen=True)
class Inputs:
    """Tensors of a launch, and what is launched on them."""

    q: Tensor
    pool: Tensor
    tables: Tensor
    lens: tuple[Tensor, ...]
    window: int | None

    def run(
        self, splits: int = 0, config: Config | None = None, out: Tensor | None = None
    ) -> Tensor:
        """By the kernel."""
        arguments = (self.q, self.pool, LAYER, self.tables, *self.lens)
        if len(self.lens) == 1:
            return decode_attention(*arguments, SCALE, self.window, splits, config, out)
        group = self.q.shape[1] // self.pool.shape[3]
        tiles = plan_tiles(self.lens[1], len(self.q), group)
        return prefill_attention(*arguments, tiles, SCALE, self.window, config, out)

    def reference(self) -> Tensor:
        """By plain torch."""
        arguments = (self.q, self.pool, LAYER, self.tables, *self.lens, SCALE, self.window)
        by = decode_attention_reference if len(self.lens) == 1 else prefill_attention_reference
        return by(*arguments)


def decode_rows(
    heads: Heads, window: int | None = None, lengths: list[int] = LENGTHS,
    poison: float = torch.nan,
) -> Inputs:  # fmt: skip
    """Rows that see so many tokens."""
    torch.manual_seed(len(lengths))
    spans = [range(max(0, n - window) if window else 0, n) for n in lengths]
    pool, tables = paged(heads, spans, poison)
    lens = (torch.tensor(lengths, dtype=torch.int32),)
    return Inputs(heads.queries(len(lengths)), pool, tables, lens, window)


def chunks_of(
    heads: Heads, window: int | None = None, chunks: list[tuple[int, int]] = CHUNKS,
    poison: float = torch.nan,
) -> Inputs:  # fmt: skip
    """Chunks of several sequences."""
    torch.manual_seed(len(chunks))
    spans = [
        range(max(0, context + 1 - window) if window and count else 0, context + count)
        for context, count in chunks
    ]
    pool, tables = paged(heads, spans, poison)
    lens = tuple(x.contiguous() for x in torch.tensor(chunks, dtype=torch.int32).unbind(1))
    return Inputs(heads.queries(int(lens[1].sum())), pool, tables, lens, window)


BOTH = pytest.mark.parametrize("of", [decode_rows, chunks_of], ids=["decode", "prefill"])


@BOTH
@pytest.mark.parametrize(
    ("heads", "window", "splits"),
    [
        (Heads(7, 1, 16), None, 2),
        (Heads(8, 1, 80, block_size=32), None, 0),
        (Heads(4, 2, 96, block_size=48), None, 2),
        (Heads(4, 2, 16), 1, 2),
        (Heads(4, 2, 16), 20, 3),
        (Heads(2, 1, 32, block_size=32), 64, 2),
        (Heads(4, 2, 64, dtype=FP16), None, 3),
        (Heads(4, 2, 64, dtype=BF16), 40, 3),
        (Heads(4, 2, 64, kept=torch.int8), None, 3),
        (Heads(4, 2, 80, dtype=BF16, kept=torch.int8), None, 2),
        (Heads(4, 2, 64, dtype=FP16, kept=torch.int8), 50, 2),
        (Heads(2, 1, 64, dtype=FP16, kept=FP8), None, 2),
        (Heads(2, 1, 64, dtype=BF16, kept=FP8), None, 2),
    ],
    ids=str,
)
def test_kernel_equals_reference_and_reads_nothing_else(
    of: Callable[..., Inputs], heads: Heads, window: int | None, splits: int
) -> None:
    inputs = of(heads, window)
    out = inputs.run(splits)
    assert out.dtype == heads.dtype
    torch.testing.assert_close(out, inputs.reference(), atol=heads.tolerance, rtol=heads.tolerance)
    if of is decode_rows:
        assert torch.equal(out[LENGTHS.index(0)], torch.zeros_like(out[0]))


@BOTH
@pytest.mark.parametrize("seed", range(5))
def test_random_shapes(of: Callable[..., Inputs], seed: int) -> None:
    torch.manual_seed(seed)
    group, kv_heads, blocks = (int(torch.randint(1, most, ())) for most in (9, 4, 4))
    heads = Heads(group * kv_heads, kv_heads, 16 * int(torch.randint(1, 9, ())), 16 * blocks)
    window = int(torch.randint(1, 80, ())) if seed % 2 else None
    lengths = torch.randint(0, 60, (3, 2)).tolist()
    if of is decode_rows:
        lengths = [a + b for a, b in lengths]
    config = Config(4, 1, {"TILE": 16 << seed % 3, "LEAST_SPLIT": 16})
    if of is chunks_of:
        config = Config(4, 1, {"TILE": 16 << seed % 3})
    inputs = of(heads, window, lengths)
    out = inputs.run(int(torch.randint(0, 5, ())), config)
    torch.testing.assert_close(out, inputs.reference(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kept", "window"), [(None, None), (None, 21), (torch.int8, None)])
def test_references_equal_the_engine(kept: torch.dtype | None, window: int | None) -> None:
    heads, nothing = Heads(6, 2, 32, kept=kept), torch.empty(0)
    inputs = decode_rows(heads, window, [1, 16, 33, 70], poison=1.0)
    batch = AttentionBatch(nothing, 4, inputs.tables.long(), inputs.lens[0].long(), ())
    expected = attend(inputs.q, inputs.pool, LAYER, batch, SCALE, window)
    torch.testing.assert_close(inputs.reference().flatten(1), expected, atol=1e-5, rtol=1e-5)

    inputs = chunks_of(heads, window, [(0, 1), (16, 17), (0, 33), (50, 31)], poison=1.0)
    contexts, counts = (lens.tolist() for lens in inputs.lens)
    segments = tuple(
        PrefillSegment(sum(counts[:at]), counts[at], context, table.long())
        for at, (context, table) in enumerate(zip(contexts, inputs.tables, strict=True))
    )
    batch = AttentionBatch(nothing, 0, nothing, nothing, segments)
    expected = attend(inputs.q, inputs.pool, LAYER, batch, SCALE, window)
    torch.testing.assert_close(inputs.reference().flatten(1), expected, atol=1e-5, rtol=1e-5)


@BOTH
def test_writes_where_it_is_told_to_and_the_same_again(of: Callable[..., Inputs]) -> None:
    inputs = of(Heads(2, 1, 16))
    rows = len(inputs.q)
    out = torch.full((rows + 2, 2, 16), 7.0)
    inputs.run(2, out=out[1:-1])
    assert torch.equal(out[1:-1], inputs.run(2))
    assert torch.equal(out[[0, -1]], torch.full((2, 2, 16), 7.0))


def test_any_number_of_splits_gives_the_same() -> None:
    inputs = decode_rows(Heads(4, 2, 32), None, [130, 90, 0, 31])
    whole = inputs.run(1)
    for splits in (2, 5, 9):
        torch.testing.assert_close(inputs.run(splits), whole, atol=1e-5, rtol=1e-5)


def test_a_rows_result_does_not_depend_on_those_beside_it() -> None:
    inputs = decode_rows(Heads(4, 2, 32), None, [120, 7, 64])
    together = inputs.run(3)
    for row in range(3):
        one = slice(row, row + 1)
        alone = Inputs(inputs.q[one], inputs.pool, inputs.tables[one], (inputs.lens[0][one],), None)
        assert torch.equal(alone.run(3)[0], together[row])


@pytest.mark.parametrize("window", [None, 24])
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(window: int | None) -> None:
    inputs = chunks_of(Heads(4, 2, 32), window, [(0, 70)], poison=1.0)
    whole = inputs.run()
    for begin, end in ((0, 13), (13, 14), (14, 70)):
        lens = torch.tensor([begin], dtype=torch.int32), torch.tensor([end - begin]).int()
        part = Inputs(inputs.q[begin:end], inputs.pool, inputs.tables, lens, window)
        torch.testing.assert_close(part.run(), whole[begin:end], atol=1e-5, rtol=1e-5)


def test_reaches_blocks_beyond_2_to_the_31_elements() -> None:
    # Virtual memory for the most part: only the last block is ever touched.
    num_blocks = 2**31 // (2 * 16 * 16) + 8
    pool = torch.empty(num_blocks, 1, 2, 1, 16, 16, dtype=FP16)
    torch.manual_seed(0)
    pool[-1] = torch.randn(pool.shape[1:]).to(FP16)
    q = torch.randn(1, 2, 16).to(FP16)
    tables = torch.tensor([[num_blocks - 1]], dtype=torch.int32)
    lengths = torch.tensor([16], dtype=torch.int32)
    out = decode_attention(q, pool, 0, tables, lengths, SCALE, None)
    near = decode_attention(q, pool[-1:].clone(), 0, tables * 0, lengths, SCALE, None)
    assert torch.equal(out, near)


@pytest.mark.parametrize(
    ("programs", "longest", "processors"),
    list(product((1, 8, 64, 5000), (0, 1, 16, 1000), (1, 132))),
)
def test_splits_fill_the_gpu_and_no_more(programs: int, longest: int, processors: int) -> None:
    splits = splits_for(programs, longest, processors)
    wanted = PROGRAMS_PER_PROCESSOR * processors
    assert 1 <= splits <= max(1, min(longest, MOST_SPLITS))
    assert splits == 1 or (splits - 1) * programs < wanted
    assert splits * programs >= wanted or splits == max(1, min(longest, MOST_SPLITS))


@pytest.mark.parametrize(
    ("q", "pool"),
    [
        (torch.empty(1, 3, 16), torch.empty(1, 1, 2, 2, 16, 16)),  # heads that share unevenly
        (torch.empty(1, 2, 24), torch.empty(1, 1, 2, 2, 16, 24)),  # a head size
        (torch.empty(1, 2, 16), torch.empty(1, 1, 2, 2, 8, 16)),  # a block size
        (torch.empty(1, 2, 16), torch.empty(1, 1, 2, 2, 16, 32)),  # a row of another size
        (torch.empty(1, 2, 16), torch.empty(1, 1, 2, 2, 16, 16, dtype=BF16)),  # another type
        (torch.empty(1, 2, 16), torch.empty(1, 1, 2, 2, 16, 16, dtype=torch.int8)),  # no scale
    ],
)
def test_what_does_not_fit_is_refused(q: Tensor, pool: Tensor) -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"heads|KV rows|multiples|queries"):
        decode_attention(q, pool, 0, table, table[0], SCALE, None)


@pytest.mark.parametrize(
    ("counts", "group"),
    [
        ([1], 1),
        ([5, 0, 3], 4),
        ([300], 1),
        ([1, 200, 33, 64], 4),
        ([19, 18, 37], 7),
        ([9] * 5, 128),
    ],
)
def test_plan_covers_every_row_once_and_late_ones_first(counts: list[int], group: int) -> None:
    tiles = plan_tiles(torch.tensor(counts, dtype=torch.int32), sum(counts), group)
    assert tiles.tokens == tiles.rows // group
    assert LEAST_ROWS <= tiles.rows <= MOST_ROWS
    assert len(tiles.places) <= sum(counts)
    starts = [sum(counts[:sequence]) for sequence in range(len(counts))]
    covered: Counter[int] = Counter()
    before: dict[int, int] = {}
    used = [place for place in tiles.places.tolist() if place[0] >= 0]
    for sequence, first, row in used:
        assert row == starts[sequence] + first
        assert first < before.get(sequence, counts[sequence])
        before[sequence] = first
        covered.update(range(row, row + min(tiles.tokens, counts[sequence] - first)))
    assert covered == Counter(range(sum(counts)))
    assert len(used) == sum(-(-count // tiles.tokens) for count in counts)


def test_tiles_are_as_small_as_chunks_are() -> None:
    short = torch.full((8,), 4, dtype=torch.int32)
    assert plan_tiles(short, 32, 4).rows == LEAST_ROWS
    assert plan_tiles(short * 5, 160, 4).rows == MOST_ROWS
    with pytest.raises(ValueError, match="129 query heads"):
        plan_tiles(short, 32, 129)
