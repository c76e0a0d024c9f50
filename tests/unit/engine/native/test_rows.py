"""What native code does to rows one by one, against the torch reference."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from baton.engine.models.config import Rope
from baton.engine.models.decoder import rms_norm, rope_tables, rotate
from baton.engine.ops.native import library
from baton.engine.ops.torch.attention import write_kv
from baton.engine.ops.torch.linear import silu_gate
from tests.unit.engine.native.paged_rows import EPS, LAYER, Heads, PagedRows, native, random_tensor

pytestmark = pytest.mark.skipif(native is None, reason="no native library can be built here")

SPANS = [(0, 1), (17, 1), (480, 1), (0, 40), (90, 33)]
# float32 differs in the order of additions only; bf16 may round to a neighbour, twice.
TOLERANCE = {
    torch.float32: {"rtol": 3e-6, "atol": 3e-7},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-3},
}
DTYPES = tuple(TOLERANCE)
# One rounding of what is turned, which may fall to either neighbour.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def add_rms_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, threads: int = 1) -> Tensor:
    out, eps = torch.empty_like(hidden), ctypes.c_float(EPS)
    library.require(hidden.dtype).baton_add_rms_norm(
        threads, at(hidden), at(added), at(weight), eps, *hidden.shape, at(out)
    )
    return out


def silu_mul(gate_up: Tensor, threads: int = 1) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype)
    library.require(gate_up.dtype).baton_silu_mul(threads, at(gate_up), rows, size, at(out))
    return out


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100, 576, 1536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_gate_equal_their_references_with_the_same_bits_in_any_batch(
    dtype: torch.dtype, size: int
) -> None:
    weight = random_tensor(size, seed=1).to(dtype)
    for added in (random_tensor(7, size, seed=2).to(dtype), None):
        hidden = random_tensor(7, size).to(dtype)
        expected = hidden + added if added is not None else hidden.clone()
        got = add_rms_norm(hidden, added, weight, threads=2)
        assert torch.equal(hidden, expected)
        torch.testing.assert_close(got, rms_norm(expected, weight, EPS), **TOLERANCE[dtype])
        for row in range(7):
            assert torch.equal(add_rms_norm(expected[row : row + 1], None, weight)[0], got[row])
    gate_up = (random_tensor(9, 2 * size) * 8).to(dtype)
    got = silu_mul(gate_up, threads=2)
    torch.testing.assert_close(got, silu_gate(gate_up), **TOLERANCE[dtype])
    for row in range(9):
        assert torch.equal(silu_mul(gate_up[row : row + 1])[0], got[row])


def test_silu_of_extremes() -> None:
    gate = torch.tensor([[-1e30, -100.0, -87.4, -0.0, 0.0, 87.4, 100.0, 1e30]])
    got = silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-6)


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
    rows.rotate(rows.qkv, *tables(head_size), norms, threads=2)
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
    _, k, v = split(rows)
    pool = rows.pool.clone()
    write_kv(pool, LAYER, rows.placed()[1].slots, k, v)
    rows.rotate(rows.qkv, torch.ones(512, 64), torch.zeros(512, 64))
    assert torch.equal(rows.pool, pool)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotated_row_has_the_same_bits_whatever_its_batch(dtype: torch.dtype, int8: bool) -> None:
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
