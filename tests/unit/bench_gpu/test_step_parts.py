"""Where a step's time goes, as a table."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.gpu import step_parts


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::Fill>(int)",
         "vectorized_elementwise_kernel"),
        ("void at::native::(anonymous namespace)::cat_batched<int>(float*)", "cat_batched"),
        ("decode_kernel", "decode_kernel"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
    ],
)  # fmt: skip
def test_a_kernel_is_named_without_templates_and_arguments(name: str, short: str) -> None:
    assert step_parts.short(name) == short


def test_a_step_is_its_kernels_and_what_is_left() -> None:
    times = Counter({f"k{n}": 100.0 * (20 - n) for n in range(10)})
    calls = Counter(dict.fromkeys(times, 6))
    rows = step_parts.table(times, calls, steps=2, step_us=10_000.0)
    assert [name for name, _ in rows] == [
        *(f"k{n}" for n in range(8)), "other kernels", "idle, or waiting",
    ]  # fmt: skip
    assert rows[0][1] == {"us a step": 1000.0, "of step": 0.1, "calls": 3.0}
    assert rows[-2][1]["us a step"] == (1200 + 1100) / 2
    assert sum(float(cells["of step"] or 0) for _, cells in rows) == pytest.approx(1.0)


def test_kernels_that_overlap_leave_no_negative_rest() -> None:
    rows = step_parts.table(Counter({"k": 50.0}), Counter({"k": 1}), steps=1, step_us=40.0)
    assert rows[-1][1]["us a step"] == 0.0
