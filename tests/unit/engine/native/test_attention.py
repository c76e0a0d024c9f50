"""Native attention against the torch reference, and that a row's bits depend on nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine.native.paged_rows import Heads, PagedRows

pytestmark = pytest.mark.usefixtures("every_cpu")

KINDS = {
    "float32": Heads(),
    "bfloat16": Heads(dtype=torch.bfloat16),
    "float32 over int8": Heads(int8=True),
    "bfloat16 over int8": Heads(dtype=torch.bfloat16, int8=True),
}
# float32 differs in the order of additions. bf16: weights are rounded to 8 bits and so is the
# result, whose size is 1 at most where few keys count.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}
# Windows within one block, over several, and at the edges of blocks.
WINDOWS_AND_BLOCKS = (
    (0, 16), (0, 48), (1, 32), (50, 16), (50, 48), (64, 32), (300, 16), (300, 48),
)  # fmt: skip
SINGLES = [(0, 1), (15, 1), (16, 1), (63, 1), (64, 1), (700, 1), (1499, 1)]
CHUNKS = [(0, 2), (0, 130), (63, 3), (200, 64), (777, 33)]


def shaped(kind: str, **changes: Any) -> Heads:
    return replace(KINDS[kind], **changes)


def assert_equals_reference(rows: PagedRows, threads: int = 1) -> None:
    got, limit = rows.attend(threads=threads).float(), TOLERANCE[rows.heads.dtype]
    torch.testing.assert_close(
        got, rows.reference(), rtol=limit, atol=limit, msg=lambda text: f"{rows.heads}: {text}"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_reference(kind: str) -> None:
    """With every block size, number of heads that share a KV head, and size of a head."""
    for window, block_size in WINDOWS_AND_BLOCKS:
        heads = shaped(kind, window=window, block_size=block_size)
        assert_equals_reference(PagedRows(heads, SINGLES + CHUNKS), threads=2)
    for group in (*range(1, 9), 100):
        heads = shaped(kind, group=group, kv_heads=3)
        assert_equals_reference(PagedRows(heads, [(40, 1), (90, 1), (70, 5), (0, 80)]))
    for softcap in (0.5, 5.0, 50.0):
        assert_equals_reference(PagedRows(shaped(kind, softcap=softcap), SINGLES + CHUNKS))
    for window in (0, 1, 50):
        assert_equals_reference(
            PagedRows(shaped(kind, with_sinks=True, window=window), SINGLES + CHUNKS)
        )
    for head_size in range(16, 257, 16):
        assert_equals_reference(PagedRows(shaped(kind, head_size=head_size), [(100, 1), (80, 70)]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_scores_of_any_size_give_numbers(kind: str, softcap: float, sinks: bool) -> None:
    rows = PagedRows(shaped(kind, softcap=softcap, with_sinks=sinks), [(300, 1), (0, 150)])
    for factor in (0.0, 30.0, 3e4, 1e30):
        rows.qkv = (rows.qkv.sign() * factor).to(rows.qkv.dtype)
        assert rows.attend().isfinite().all()


def parts(rows: PagedRows, whole: Tensor, cuts: list[tuple[int, int]], threads: int) -> None:
    """Parts of the only span, all in one batch, get the bits they have in `whole`."""
    (span,) = rows.spans
    pieces = [span.part(start, end) for start, end in cuts]
    queries = [rows.qkv[start - span.context : end - span.context] for start, end in cuts]
    expected = [whole[start - span.context : end - span.context] for start, end in cuts]
    got = rows.attend(pieces, torch.cat(queries), threads)
    assert torch.equal(got.view(torch.uint8), torch.cat(expected).view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_a_row_has_the_same_bits_however_it_is_computed(kind: str, window: int, group: int) -> None:
    heads = shaped(kind, window=window, group=group)
    rows = PagedRows(heads, [(0, 720)])
    rows.qkv[::7] *= 20  # some rows see little but their largest scores
    whole = rows.attend()
    for threads in (1, 2, 5):
        parts(rows, whole, [(0, 720)], threads)
    ones = [(at, at + 1) for at in (0, 1, 63, 64, 65, 127, 128, 300, 511, 512, 513, 718, 719)]
    for one in ones:
        parts(rows, whole, [one], 1)
    parts(rows, whole, ones, 2)
    draw = random.Random(group)
    for size in (2, 3, 17, 64, 250):
        starts = [draw.randint(0, 720 - size) for _ in range(3)]
        parts(rows, whole, ones[:3] + [(start, start + size) for start in starts], 2)
    parts(rows, whole, [(start, min(start + 50, 720)) for start in range(0, 720, 50)], 2)
    (span,) = rows.spans
    last, first = span.blocks[-1], span.blocks[0]
    rows.pool[last] = rows.pool[first]  # later keys change nothing
    after = rows.attend()
    assert torch.equal(whole[:704], after[:704]) and not torch.equal(whole[704:], after[704:])
