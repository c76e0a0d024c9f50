"""Floors by hand, and targets that name what is measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import attention_speed, engine, floors, sizes
from benchmarks.gpu.floors import Storage
from benchmarks.gpu.job import Ceilings, Row
from benchmarks.gpu.our_engine import BF16
from benchmarks.gpu.targets import (
    DECODE,
    DECODE_ATTENTION,
    HANDOFF,
    PREFILL,
    PREFILL_ATTENTION,
    TARGETS,
    TRANSFER,
    Target,
    verdicts,
)  # fmt: skip
from benchmarks.shapes import GPU_SHAPES, SHAPES

EIGHT, ONE = GPU_SHAPES["8B"], GPU_SHAPES["1B"]
CEILINGS = Ceilings(copy_bytes_per_s=3e12, matmul_flops=7e14)


def test_shapes_have_the_size_of_the_models_they_are_named_after() -> None:
    assert EIGHT.num_parameters == 8_030_261_248
    assert ONE.num_parameters == 1_235_814_400


def test_shapes_of_cpus_do_not_name_those_of_gpus() -> None:
    assert not set(SHAPES) & set(GPU_SHAPES)


def test_a_decode_step_reads_all_weights_but_the_embedding() -> None:
    embedding, norms = 128256 * 4096, (2 * 32 + 1) * 4096
    assert floors.weight_bytes(EIGHT) == 2 * (EIGHT.num_parameters - embedding - norms)
    # Tied: the embedding is the output layer.
    assert floors.weight_bytes(ONE) == 2 * (ONE.num_parameters - (2 * 16 + 1) * 2048)


def test_kv_of_a_token() -> None:
    assert floors.kv_bytes(EIGHT) == 128 << 10
    assert floors.kv_bytes(EIGHT, Storage(weight=1, kv=1)) == 2 * 32 * 8 * (128 + 4)


def test_the_floor_of_a_step_is_what_it_reads_at_the_copy_rate() -> None:
    wanted = (floors.weight_bytes(EIGHT) + 64 * 512 * (128 << 10)) / 3e12
    assert floors.decode_step_s(EIGHT, 64, 512, CEILINGS) == pytest.approx(wanted)


def test_attention_counts_what_each_token_sees() -> None:
    # Tokens 3 and 4 of a sequence see 3 and 4 keys: 7 pairs, each 2 * 128 multiply-adds a head.
    assert floors.attention_flops(EIGHT, 2, prefix=2) == 7 * 2 * 2 * 128 * 32


def test_prefill_counts_matrices_attention_and_one_row_of_scores() -> None:
    matrices = 2 * 10 * (EIGHT.num_parameters - 2 * 128256 * 4096 - (2 * 32 + 1) * 4096)
    attention = 32 * floors.attention_flops(EIGHT, 10)
    assert floors.prefill_flops(EIGHT, 10) == matrices + attention + 2 * 128256 * 4096
    assert floors.prefill_s(EIGHT, 10, CEILINGS) == floors.prefill_flops(EIGHT, 10) / 7e14


def test_every_target_names_a_row_that_a_full_run_has() -> None:
    bf16 = torch.bfloat16
    rows = {(TRANSFER, "cuda_ipc"), (HANDOFF, "cuda_ipc")}
    for batch in attention_speed.BATCHES:
        for context in attention_speed.CONTEXTS:
            rows.add((DECODE_ATTENTION, attention_speed.decode_name(bf16, batch, context)))
    for prompt in attention_speed.PROMPTS:
        rows.add((PREFILL_ATTENTION, attention_speed.prefill_name(*prompt)))
    rows |= {(DECODE, engine.decode_name(EIGHT, BF16, batch)) for batch in sizes.BATCHES}
    rows |= {(PREFILL, engine.prefill_name(EIGHT, BF16, n)) for n in sizes.PROMPTS}
    assert {(target.table, target.row) for target in TARGETS} <= rows


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [(0.8, False, "met"), (0.79, False, "missed"), (0.8, True, "met"), (0.81, True, "missed"),
     (float("nan"), False, "missed"), (None, True, "not measured")],
)  # fmt: skip
def test_a_verdict(value: float | None, at_most: bool, verdict: str) -> None:
    assert Target("any", "table", "row", "cell", 0.8, at_most).verdict(value) == verdict


def test_verdicts_take_their_values_from_the_tables() -> None:
    first = TARGETS[0]
    events = [Row(first.table, first.row, {first.cell: 0.9}), Row("other", first.row, {})]
    found = verdicts(events)
    assert [one["target"] for one in found] == [target.text for target in TARGETS]
    assert (found[0]["value"], found[0]["verdict"]) == (0.9, "met")
    assert {one["verdict"] for one in found[1:]} == {"not measured"}
