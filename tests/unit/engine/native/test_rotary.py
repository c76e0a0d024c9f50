"""Native rotary embedding and KV writes against the torch reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.models.config import Rope
from baton.engine.models.decoder import rms_norm, rope_tables, rotate
from baton.engine.ops.torch.attention import write_kv
from tests.unit.engine.native.paged_rows import (
    EPS,
    LAYER,
    Heads,
    PagedRows,
    native,
    random_tensor,
)

pytestmark = pytest.mark.skipif(native is None, reason="no native library can be built here")

SPANS = [(0, 1), (17, 1), (480, 1), (0, 40), (90, 33)]
DTYPES = (torch.float32, torch.bfloat16)
# One rounding of the result, which may fall to either neighbour.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def tables(head_size: int) -> tuple[Tensor, Tensor]:
    return rope_tables(Rope(theta=10_000.0), head_size, 512)


def random_norms(heads: Heads) -> tuple[Tensor, Tensor]:
    q, k = random_tensor(2, heads.head_size, seed=5).to(heads.dtype)
    return q, k


def split(rows: PagedRows) -> tuple[Tensor, Tensor, Tensor]:
    heads = rows.heads
    counts = (heads.heads, heads.kv_heads, heads.kv_heads)
    q, k, v = rows.qkv.view(len(rows.qkv), -1, heads.head_size).split(counts, dim=1)
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_size", [16, 48, 64, 80, 256])
def test_equals_the_reference(head_size: int, normed: bool, dtype: torch.dtype) -> None:
    heads = Heads(head_size=head_size, dtype=dtype)
    rows = PagedRows(heads, SPANS)
    norms = random_norms(heads) if normed else None
    q, k, v = split(rows)
    if norms is not None:
        q, k = rms_norm(q, norms[0], EPS), rms_norm(k, norms[1], EPS)
    placed = rows.placed()
    angles = [table[placed.positions][:, None] for table in tables(head_size)]
    q, k = (rotate(x.float(), *angles).to(dtype) for x in (q, k))
    pool = rows.pool.clone()
    write_kv(pool, LAYER, placed.attention.slots, k, v.clone())
    rows.rotate(rows.qkv, *tables(head_size), norms, threads=2)
    limit = TOLERANCE[dtype] * (4 if normed else 1)  # the unit-size and the weighted row, too
    torch.testing.assert_close(split(rows)[0], q, rtol=limit, atol=limit)
    keys, expected_keys = rows.pool[:, :, 0], pool[:, :, 0]
    torch.testing.assert_close(keys, expected_keys, rtol=limit, atol=limit, equal_nan=True)
    # V is not turned, and nothing but the rows' own slots is written.
    assert torch.equal(rows.pool[:, :, 1].nan_to_num(), pool[:, :, 1].nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rows_are_those_of_the_reference_to_the_bit(dtype: torch.dtype) -> None:
    rows = PagedRows(Heads(dtype=dtype, int8=True), SPANS)
    rows.qkv[3] = 0.0
    _, k, v = split(rows)
    pool = rows.pool.clone()
    write_kv(pool, LAYER, rows.placed().attention.slots, k, v)
    rows.rotate(rows.qkv, torch.ones(512, 64), torch.zeros(512, 64))
    assert torch.equal(rows.pool, pool)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_its_batch(dtype: torch.dtype, int8: bool) -> None:
    heads = Heads(dtype=dtype, int8=int8)
    together, alone = PagedRows(heads, [(0, 100)]), PagedRows(heads, [(0, 100)])
    norms = random_norms(heads)
    together.rotate(together.qkv, *tables(64), norms, threads=3)
    (span,) = alone.spans
    for start, end in ((0, 1), (1, 20), (20, 37), (37, 100)):
        part = alone.qkv[start:end]
        alone.rotate(part, *tables(64), norms, [span.part(start, end)])
    q_size = heads.heads * heads.head_size
    assert torch.equal(together.qkv[:, :q_size], alone.qkv[:, :q_size])
    assert torch.equal(together.pool.view(torch.uint8), alone.pool.view(torch.uint8))
