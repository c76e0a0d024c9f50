"""Every kind of step has run before an engine serves: no request waits for a compiler."""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor

from baton.engine.backends.gpu.device import HostStream
from baton.engine.backends.gpu.launches import GpuSettings
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.backends.gpu.warmup import step_shapes
from baton.engine.batch import StepBatch
from baton.engine.ops.triton.decode_attention import splits_for
from baton.engine.ops.triton.prefill_attention import plan_tiles
from baton.engine.sampling.sampler import Sampler
from tests.unit.engine.gpu.driving import CONFIG, EOS, MODEL, SIZE, new_pool


def test_steps_run_before_requests_and_write_into_one_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, seen = MODEL.step, set[tuple[int, int, int]]()

    def watched(batch: StepBatch, pool: Tensor) -> Tensor:
        logits = step(batch, pool)
        assert logits.shape == (len(batch.query_lens), CONFIG.vocab_size)
        rows = len(batch.token_ids)
        seen.add((batch.num_decodes, rows - batch.num_decodes, batch.block_tables.shape[1]))
        return logits

    monkeypatch.setattr(MODEL, "step", watched)
    settings = GpuSettings(3, 24, SIZE, graphs=False, chunk_tokens=10)
    pool = new_pool(4)
    runner = GpuRunner(MODEL, pool, Sampler(EOS, CONFIG.vocab_size), settings, HostStream())
    assert runner.prepare(lambda done, total: None) is None
    chunks = {(0, 2, 1), (0, 3, 1), (0, 4, 1), (0, 6, 2), (0, 8, 2), (0, 12, 3), (0, 13, 4)}
    num_decodes = {(1, 0, 1), (2, 0, 1), (3, 0, 1)}
    assert seen == chunks | num_decodes | {(1, 2, width) for width in (1, 2, 4, 6)}
    assert pool[0].any() and not pool[1:].any()


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_they_have_every_tile_of_chunks_that_a_step_can_have(group: int) -> None:
    settings = GpuSettings(64, 4096, 16, chunk_tokens=512)
    warmed_up = {
        plan_tiles(torch.tensor([kind.chunk]), kind.chunk, group).rows
        for kind in step_shapes(settings)
        if kind.chunk > 1
    }
    for rows in range(2, 512 + 64 + 1):  # sequences with drafts are chunks, too
        assert plan_tiles(torch.tensor([rows]), rows, group).rows in warmed_up


@pytest.mark.parametrize("kv_heads", [1, 4, 8, 32])
def test_they_share_a_row_among_as_many_programs_as_a_step_can(kv_heads: int) -> None:
    def padded(rows: int, width: int) -> int:
        return int(triton.next_power_of_2(splits_for(rows * kv_heads, width * 16 // 256, 132)))

    settings = GpuSettings(64, 20000, 16, chunk_tokens=512)
    warmed_up = {
        padded(kind.num_decodes, kind.width) for kind in step_shapes(settings) if kind.num_decodes
    }
    for rows in (1, 2, 3, 5, 8, 20, 64):
        for width in range(1, settings.table_width + 1):
            assert padded(rows, width) in warmed_up
