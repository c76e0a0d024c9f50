"""What machine code says of a kernel, and budgets that it is held to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from baton.engine.kernels.triton import sass
from baton.engine.kernels.triton.check import Compiled, over_budget

ONE = Compiled(
    "_kernel", "sm_90", "rows=16", registers=64, shared=61440, spill=0, programs=448, rounds=0.75,
    a_weight=4.0, products=Counter(HGMMA=8), loads=Counter({16: 8, 4: 1}), ms=1.0, ptx="",
)  # fmt: skip


def test_a_loop_is_counted() -> None:
    loop = sass._loop([
        "LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR4][R2.64]", "@!P0 LDG.E.U8 R3, desc[UR4][R2.64]",
        "LDG.E R3, desc[UR4][R2.64]", "UTMALDG.2D [UR8], [UR4]", "LDS.128 R4, [R5]",
        "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24, !UPT", "@P1 BRA `(.L_x_1)",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4", "IMMA.16832.S8.S8 R4, R8, R12, R4",
    ])  # fmt: skip
    assert loop.instructions == 9
    assert loop.products == Counter(HGMMA=1, HMMA=1, IMMA=1)
    assert loop.multiplied == 64 * 16 * 16 // 4 + 16 * 8 * 16 + 16 * 8 * 32
    assert loop.loads == Counter({16: 1, 1: 1, 4: 1, 0: 1})


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "places"),
    [(64, 61440, 4, 3 * 132), (255, 1024, 8, 132), (32, 0, 1, 32 * 132), (40, 16, 32, 132)],
)
def test_places_are_bounded_by_what_is_short(
    registers: int, shared: int, warps: int, places: int
) -> None:
    assert sass.PROCESSORS[90].places(registers, shared, warps) == places


@pytest.mark.parametrize(
    ("worse", "complaint"),
    [({"a_weight": 5.5}, "a_weight is 5.50, more than 5"),
     ({"spill": 16}, "spill is 16.00, more than 0"),
     ({"products": Counter(HMMA=8)}, "no HGMMA in its loop"),
     ({"loads": Counter({16: 2, 4: 4})}, "4 loads of less than 16 bytes, more than 1"),
     ({"rounds": 1.13}, "1.13 rounds: most of a GPU is idle in the second"), ({}, "")],
)  # fmt: skip
def test_what_is_worse_than_its_budget_is_named(worse: dict[str, Any], complaint: str) -> None:
    budget = {"a_weight": 5, "spill": 0, "products": "HGMMA", "loads": 16, "narrow": 1}
    one, others = replace(ONE, **worse), [({"rows": 64}, {"a_weight": 0})]
    assert over_budget(one, {"rows": 16}, [*others, ({}, budget)]) == [complaint][: bool(complaint)]
    assert over_budget(one, {"rows": 16}, others) == []
