"""How results are held against references."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.gpu import errors, paged
from benchmarks.gpu.errors import Error, Wrong
from benchmarks.gpu.paged import Geometry

CPU = torch.device("cpu")


def test_an_error_is_a_norm_over_all_and_of_the_worst_row() -> None:
    wanted = torch.ones(4, 2, 8)
    found = wanted.clone()
    found[2] += 0.5
    error = errors.compare(found, wanted)
    assert error.worst_row == pytest.approx(0.5) and error.whole == pytest.approx(0.25)
    with pytest.raises(Wrong, match=r"error 2\.5e-01, of the worst row 5\.0e-01"):
        error.check()


def test_a_row_of_nothing_is_held_against_the_others() -> None:
    wanted = torch.ones(2, 8)
    wanted[0] = 0
    assert errors.compare(wanted, wanted) == Error(0.0, 0.0, errors.BOUNDS[torch.float32] * 2)
    found = wanted.clone()
    found[0, 0] = 0.1
    with pytest.raises(Wrong):
        errors.compare(found, wanted).check()


def test_rounding_is_allowed_and_what_is_more_is_not() -> None:
    exact = torch.randn(64, 256)
    rounded = exact.bfloat16()
    errors.compare(rounded.float().bfloat16(), rounded).check()
    with pytest.raises(Wrong):
        errors.compare((exact * 1.02).bfloat16(), rounded).check()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_places_that_were_not_written_are_found(value: float) -> None:
    found = torch.ones(3, 4)
    found[1, 2] = value
    with pytest.raises(Wrong, match="no numbers"):
        errors.compare(found, torch.ones(3, 4))


def test_shapes_and_types_count() -> None:
    for other in (torch.ones(4, 3), torch.ones(3, 4, dtype=torch.float64)):
        with pytest.raises(Wrong, match=r"not \(3, 4\)"):
            errors.compare(other, torch.ones(3, 4))
        with pytest.raises(Wrong, match="bit"):
            errors.equal(other, torch.ones(3, 4))


def test_equal_is_equal_to_the_bit() -> None:
    minus = torch.tensor([-0.0])
    assert errors.equal(minus, minus.clone()).share == 0
    with pytest.raises(Wrong, match="bit"):
        errors.equal(minus, torch.tensor([0.0]))


def test_tables_name_blocks_of_their_own() -> None:
    dice = random.Random(1)
    found = paged.scattered([17, 0, 16, 33], 16, CPU, dice)
    used = [row[:count] for row, count in zip(found.tables.tolist(), (2, 0, 1, 3), strict=True)]
    blocks = [block for row in used for block in row]
    assert len(set(blocks)) == 6 and 0 not in blocks and max(blocks) < found.num_blocks
    assert found.tables.dtype == torch.int32 and found.tables[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_pool_has_finite_rows_of_the_layout_s_size(kv: torch.dtype) -> None:
    g = Geometry(4, 2, 16, 16, torch.bfloat16, kv)
    pool = paged.random_pool(g, 3, 2, CPU)
    assert pool.dtype == kv and pool.nbytes == 3 * 2 * 16 * g.token_bytes
    assert pool.float().isfinite().all() or kv != torch.bfloat16


def test_blocks_of_nobody_are_spoilt() -> None:
    g = Geometry(2, 2, 16, 16, torch.float32, torch.float32)
    pool = paged.random_pool(g, 4, 1, CPU)
    paged.spoil(pool, torch.tensor([[2, 0]], dtype=torch.int32))
    assert pool[2].isfinite().all() and pool[0].isfinite().all()
    assert pool[1].isnan().all() and pool[3].isnan().all()
