"""Native rotary embedding and the writing of K and V, against the torch reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.torch.attention import write_kv
from baton.engine.kernels.torch.rms_norm import rms_norm
from baton.engine.kernels.torch.rope import rotate
from baton.engine.models.rope import rope_table
from baton.engine.models.rope_config import Rope
from tests.unit.engine.native.paged_rows import EPS, LAYER, Heads, PagedRows, random_tensor

pytestmark = pytest.mark.usefixtures("every_cpu")

SPANS = [(0, 1), (17, 1), (480, 1), (0, 40), (90, 33)]
# One rounding of what is turned, which may fall to either neighbour.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
DTYPES = tuple(ROUNDING)


def tables(head_size: int) -> tuple[Tensor, Tensor]:
    cos, sin = rope_table(Rope(theta=10_000.0), head_size, 512)
    return cos, sin


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
def test_rotation_equals_its_reference(head_size: int, normed: bool, dtype: torch.dtype) -> None:
    heads = Heads(head_size=head_size, dtype=dtype)
    rows = PagedRows(heads, SPANS)
    norms = random_norms(heads) if normed else None
    q, k, v = split(rows)
    if norms is not None:
        q, k = rms_norm(q, norms[0], EPS), rms_norm(k, norms[1], EPS)
    positions, attention = rows.placed()
    angles = [table[positions][:, None] for table in tables(head_size)]
    q, k = (rotate(x.float(), *angles).to(dtype) for x in (q, k))
    pool = rows.pool.clone()
    write_kv(pool, LAYER, attention.slots, k, v.clone())
    rows.rotate(*tables(head_size), norms, threads=2)
    limit = ROUNDING[dtype] * (4 if normed else 1)  # the unit-size and the weighted row, too
    torch.testing.assert_close(split(rows)[0], q, rtol=limit, atol=limit)
    keys, expected_keys = rows.pool[:, :, 0], pool[:, :, 0]
    torch.testing.assert_close(keys, expected_keys, rtol=limit, atol=limit, equal_nan=True)
    # V is not turned, and nothing but the rows' own slots is written.
    assert torch.equal(rows.pool[:, :, 1].nan_to_num(), pool[:, :, 1].nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rows_are_those_of_the_reference_to_the_bit(dtype: torch.dtype) -> None:
    rows = PagedRows(Heads(dtype=dtype, int8=True), SPANS)
    rows.qkv[3] = 0.0
    # 127 units of it would be infinitely many; none is denormal, which bfloat16 instructions flush.
    rows.qkv[4] = rows.qkv[4].sign() * (1 + rows.qkv[4].abs().clamp(max=1)) * 1e-37
    _, k, v = split(rows)
    pool = rows.pool.clone()
    write_kv(pool, LAYER, rows.placed()[1].slots, k, v)
    rows.rotate(torch.ones(512, 64), torch.zeros(512, 64))
    assert torch.equal(rows.pool, pool)
