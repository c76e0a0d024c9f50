"""Padded decode batches: the ladder, where numbers lie, and what capturing leaves behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.backends.gpu.device import HostStream, Work
from baton.engine.backends.gpu.graphs import (
    DecodeGraphs,
    batch_sizes,
    num_elements,
    sections,
    table_widths,
)
from baton.engine.backends.gpu.launches import BlockTables, GpuSettings
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.errors import ConfigError
from baton.sampling import SamplingParams
from tests.unit.engine.gpu.driving import CONFIG, MODEL, SIZE, new_pool


@given(st.integers(1, 1024))
def test_every_batch_finds_a_size_with_little_padding(max_batch: int) -> None:
    sizes = batch_sizes(max_batch)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_batch
    for rows in range(1, max_batch + 1):
        padding = next(size for size in sizes if size >= rows) - rows
        assert padding < max(8, rows / 4)


def test_the_sizes_of_an_ordinary_engine() -> None:
    assert batch_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert batch_sizes(160)[11:] == (80, 96, 112, 128, 160)
    assert table_widths(200) == (200,)
    assert table_widths(256) == (256,)
    assert table_widths(2048) == (128, 512, 2048)
    assert table_widths(8192) == (128, 512, 2048, 8192)


@given(st.integers(1, 300), st.integers(1, 70))
def test_sections_are_aligned_apart_and_fit_their_memory(rows: int, width: int) -> None:
    flat = torch.zeros(num_elements(rows, width), dtype=torch.int32)
    parts = sections(flat, rows, width)
    for number, part in enumerate(parts[:4], 1):
        assert part.is_contiguous()
        assert part.storage_offset() % 32 == 0
        part.add_(number)
    assert parts.all.unique().tolist() in ([1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert [int(part.sum()) for part in parts[:4]] == [rows, 2 * rows, 3 * rows, 4 * rows * width]
    smaller = sections(flat, max(1, rows - 1), width)
    assert len(smaller.all) <= len(flat)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_tables_are_those_of_their_sequences(dice: object) -> None:
    """Whoever sits where, and whatever became of lists of blocks since."""
    import random  # noqa: PLC0415

    assert isinstance(dice, random.Random)
    block_tables = BlockTables(3, 10)
    alive = [Sequence(str(i), [1], 1, SamplingParams()) for i in range(9)]
    for _ in range(30):
        some = dice.sample(alive, dice.randint(1, 3))
        for one in some:
            change = dice.randrange(4)
            if change == 0:
                one.block_ids = [dice.randrange(1, 50) for _ in range(dice.randint(1, 10))]
            elif change == 1 and len(one.block_ids) < 10:
                one.block_ids.append(dice.randrange(1, 50))
            elif change == 2:
                del one.block_ids[dice.randint(1, 10) :]
            one.block_ids = one.block_ids or [7]
        width = dice.choice((5, 10))
        into = torch.full((len(some), width), -9, dtype=torch.int32)
        block_tables.gather(some, into)
        for one, row in zip(some, into.tolist(), strict=True):
            assert row == (one.block_ids + [0] * 10)[:width]
            assert block_tables.blocks(one) == one.block_ids


class CountingLane(HostStream):
    """Captures as a graph does: runs nothing meanwhile that would count, and replays later."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, work: Work) -> Work:
        self.captured += 1
        work()

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def test_captured_shapes_are_replayed_give_the_same_and_leave_the_pool_alone() -> None:
    stream, pool = CountingLane(), new_pool(12)
    with torch.inference_mode():
        graphs = DecodeGraphs(MODEL, pool, stream, 5, 16)
        seen: list[tuple[int, int]] = []
        figures = graphs.capture(lambda done, total: seen.append((done, total)))
        assert figures.sizes == (1, 2, 4, 5)
        assert figures.num_graphs == stream.captured == 4
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert not pool.any()
        pool += torch.linspace(-1, 1, pool.numel()).view_as(pool)
        for rows in range(1, 6):
            shape = graphs.shape(rows, 3)
            inputs = graphs.inputs(*shape)
            inputs.token_ids.copy_(torch.arange(shape[0]) + 3)
            inputs.context_lens.fill_(-1)
            inputs.context_lens[:rows] = torch.arange(rows) + 2
            inputs.block_tables.zero_()
            inputs.block_tables[:rows, :3] = torch.arange(3) + torch.arange(rows)[:, None]
            mine = pool.clone()
            expected = MODEL.decode(
                inputs.token_ids, inputs.context_lens, inputs.block_tables, mine
            )
            got = graphs.decode(*shape)
            assert got.shape == (shape[0], CONFIG.vocab_size)
            assert torch.equal(got[:rows], expected[:rows])
            assert torch.equal(pool, mine)
    assert stream.replayed == 5


class FailingLane(HostStream):
    def capture(self, work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_captured_is_told_with_the_option_that_helps() -> None:
    limits = GpuSettings(2, 8, SIZE)
    runner = GpuRunner(MODEL, new_pool(1), Sampler(frozenset(), 96), limits, FailingLane())
    with pytest.raises(ConfigError, match=r"not permitted.*--no-graphs"):
        runner.prepare(lambda done, total: None)


def test_a_batch_beyond_the_ladder_is_nobodys() -> None:
    graphs = DecodeGraphs(MODEL, new_pool(1), HostStream(), 4, SIZE)
    with pytest.raises(StopIteration):
        graphs.shape(5, 1)
