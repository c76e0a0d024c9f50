"""Attention kernels at shapes that no spec names, and what does not change their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.torch.attention import Scoring
from baton.engine.kernels.triton import prefill_attention as prefill
from baton.engine.kernels.triton.attention_common import FP8_TO_BF16, INT8_TO_BF16
from baton.engine.kernels.triton.attention_specs import decode_trial, draw, prefill_trial
from baton.engine.kernels.triton.decode_attention import decode_attention, plan_decode
from baton.engine.kernels.triton.launch_configs import LEAST_TILE_ROWS, MOST_TILE_ROWS
from baton.engine.kernels.triton.prefill_attention import plan_tiles, prefill_attention
from baton.engine.kernels.triton.specs import Key, Trial, relative_error
from tests.unit.engine.kernels.ptx import run_ptx

CPU = torch.device("cpu")
SMALL: Key = {"kv_heads": 2, "group": 2, "head_size": 32, "layers": 2, "dtype": "fp32", "ragged": 1}


@dataclass(frozen=True)
class Inputs:
    """Tensors of a launch: of decode rows, or of chunks (context_lens and query_lens)."""

    q: Tensor
    pool: Tensor
    tables: Tensor
    lens: tuple[Tensor, ...]
    scoring: Scoring

    @classmethod
    def of(cls, *lens: list[int], **scoring: Any) -> Inputs:
        """Decode rows that see so many tokens; with a second list, chunks behind them."""
        torch.manual_seed(len(lens[0]))
        window = scoring.get("window")
        counts = lens[1] if len(lens) > 1 else [0] * len(lens[0])
        seen = [
            range(max(0, a + bool(b) - window) if window else 0, a + b)
            for a, b in zip(lens[0], counts, strict=True)
        ]
        drawn = draw(SMALL, CPU, seen, sum(counts) or len(lens[0]))
        lengths = tuple(torch.tensor(x, dtype=torch.int32) for x in lens)
        return cls(*drawn, lengths, Scoring(0.3, **scoring))

    def run(self, programs: int = 2) -> Tensor:
        out = torch.empty_like(self.q)
        arguments = (self.q, self.pool, 1, self.tables)
        if len(self.lens) == 1:
            plan = plan_decode(self.q, self.pool, *self.lens, self.scoring.window, programs)
            decode_attention(*arguments, plan, self.scoring, out)
            return out
        group = self.q.shape[1] // self.pool.shape[3]
        tiles = plan_tiles(self.lens[1], len(self.q), group)
        prefill_attention(*arguments, *self.lens, tiles, self.scoring, out)
        return out


@pytest.mark.parametrize("trial", [decode_trial, prefill_trial])
@pytest.mark.parametrize("seed", range(5))
def test_random_shapes(trial: Callable[[Key, torch.device], Trial], seed: int) -> None:
    torch.manual_seed(seed)
    group, kv_heads, blocks = (int(torch.randint(1, most, ())) for most in (9, 4, 4))
    made = trial(
        {
            "group": group, "kv_heads": kv_heads, "layers": 2, "block_size": 16 * blocks,
            "head_size": 16 * int(torch.randint(1, 9, ())), "dtype": "fp32", "ragged": seed,
            "window": int(torch.randint(1, 80, ())) if seed % 2 else 0, "programs": 3 * seed,
            "softcap": seed % 3, "sinks": seed // 2 % 2,
            "batch": 3, "context": 60, "tokens": 60,
        },
        CPU,
    )  # fmt: skip
    config = {"num_warps": 4, "num_stages": 1, "TILE": 16 << seed % 3}
    resident = {"PER_PROCESSOR": 1} if trial is decode_trial else {}
    (found,), (wanted,) = made.run({**config, **resident}), made.reference()
    assert relative_error(found, wanted) <= 1


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 4, 4)], ids=["plain", "sinks"])
def test_decode_rows_of_unlike_lengths_however_they_are_shared_out(sinks: Tensor | None) -> None:
    inputs = Inputs.of([700, 17, 0, 31, 1, 16, 90], sinks=sinks)
    whole = inputs.run(1)
    assert not whole[2].any(), "a padding row gives zeros"
    for programs in (2, 5, 33, 100):
        torch.testing.assert_close(inputs.run(programs), whole, atol=1e-5, rtol=1e-5)
    for row in range(len(whole)):
        q, tables, lens = (x[row : row + 1] for x in (inputs.q, inputs.tables, inputs.lens[0]))
        alone = replace(inputs, q=q, tables=tables, lens=(lens,))
        torch.testing.assert_close(alone.run(4)[0], whole[row], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "window"),
    [([32768, *[500] * 131], None), ([32768, *[500] * 131], 4096), ([1], None), ([0, 0], None),
     ([5000], None), ([*range(0, 4000, 9)], 100)],
)  # fmt: skip
@pytest.mark.parametrize("programs", [1, 33, 264])
def test_every_program_gets_as_many_tiles_of_keys(
    lengths: list[int], window: int | None, programs: int
) -> None:
    pool = torch.empty(1, 1, 2, 2, 16, 32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    q = torch.empty(len(lengths), 4, 32)
    plan = plan_decode(q, pool, seq_lens, window, programs)
    tile = plan.config["TILE"]
    firsts = [max(0, n - window) // tile if window else 0 for n in lengths]
    tiles = [max(1, -(-n // tile) - first) for n, first in zip(lengths, firsts, strict=True)]
    assert plan.ends.tolist() == list(accumulate(tiles))
    owner = [row for row, count in enumerate(tiles) for _ in range(count)]
    share = -(-len(owner) // programs)
    given = [owner[at : at + share] for at in range(0, programs * share, share)]
    assert plan.firsts.tolist() == [its[0] if its else len(lengths) for its in given]
    assert max(map(len, given)) <= len(owner) / programs + 1


@pytest.mark.parametrize("window", [None, 24])
def test_prompt_in_chunks_gives_what_it_gives_at_once(window: int | None) -> None:
    inputs = Inputs.of([0], [70], window=window)
    whole = inputs.run()
    for begin, end in ((0, 13), (13, 14), (14, 70)):
        lens = torch.tensor([begin], dtype=torch.int32), torch.tensor([end - begin]).int()
        part = replace(inputs, q=inputs.q[begin:end], lens=lens)
        torch.testing.assert_close(part.run(), whole[begin:end], atol=1e-5, rtol=1e-5)


def test_tiles_of_a_long_chunk_are_not_along_an_axis_that_cuda_bounds(monkeypatch) -> None:
    """With more than 64 heads a KV head each token is a tile; y and z hold 65,535."""
    grids = list[tuple[int, ...]]()

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(prefill, "prefill_kernel", Launches())
    lens = torch.tensor([0], dtype=torch.int32), torch.tensor([70_000], dtype=torch.int32)
    q = torch.zeros(1, 72, 16)  # no row is read
    pool, table = torch.zeros(1, 1, 2, 1, 16, 16), torch.zeros(1, 1, dtype=torch.int32)
    tiles = prefill.Tiles(torch.zeros(70_000, 3, dtype=torch.int32), 1, 128)
    prefill.prefill_attention(q, pool, 0, table, *lens, tiles, Scoring(1.0), q, {"num_warps": 4})
    assert grids == [(70_000,)]


def test_reaches_blocks_beyond_2_to_the_31_elements() -> None:
    # Virtual memory for the most part: only the last block is ever touched.
    num_blocks = 2**31 // (2 * 16 * 16) + 8
    pool = torch.empty(num_blocks, 1, 2, 1, 16, 16, dtype=torch.float16)
    torch.manual_seed(0)
    pool[-1] = torch.randn(pool.shape[1:]).half()
    q = torch.randn(1, 2, 16).half()
    tables = torch.tensor([[num_blocks - 1]], dtype=torch.int32)
    lengths = torch.tensor([16], dtype=torch.int32)
    plan = plan_decode(q, pool, lengths, None)
    out, near = torch.empty_like(q), torch.empty_like(q)
    decode_attention(q, pool, 0, tables, plan, Scoring(0.3), out)
    decode_attention(q, pool[-1:].clone(), 0, tables * 0, plan, Scoring(0.3), near)
    assert torch.equal(out, near)


@pytest.mark.parametrize(
    ("counts", "group"),
    [([1], 1), ([5, 0, 3], 4), ([300], 1), ([1, 200, 33], 4), ([19, 18, 37], 7), ([9] * 5, 128),
     ([40, 0, 1] * 50, 4)],
)  # fmt: skip
def test_tiles_cover_every_row_once_and_late_ones_first(counts: list[int], group: int) -> None:
    tiles = plan_tiles(torch.tensor(counts, dtype=torch.int32), sum(counts), group)
    assert tiles.tokens == tiles.rows // group
    assert LEAST_TILE_ROWS <= tiles.rows <= MOST_TILE_ROWS
    assert len(tiles.places) <= sum(counts)
    starts = [sum(counts[:sequence]) for sequence in range(len(counts))]
    covered: Counter[int] = Counter()
    before: dict[int, int] = {}
    used = [place for place in tiles.places.tolist() if place[0] >= 0]
    for sequence, first, row in used:
        assert row == starts[sequence] + first
        assert first < before.get(sequence, counts[sequence])
        before[sequence] = first
        covered.update(range(row, row + min(tiles.tokens, counts[sequence] - first)))
    assert covered == Counter(range(sum(counts)))
    assert len(used) == sum(-(-count // tiles.tokens) for count in counts)
    short = torch.full((8,), 4, dtype=torch.int32)  # tiles are as small as chunks are
    assert plan_tiles(short, 32, 4).rows == LEAST_TILE_ROWS
    assert plan_tiles(short * 5, 160, 4).rows == MOST_TILE_ROWS


@pytest.mark.parametrize(
    ("text", "dtype"), [(INT8_TO_BF16, torch.int8), (FP8_TO_BF16, torch.float8_e4m3fn)]
)
def test_eight_bits_to_bfloat16(text: str, dtype: torch.dtype) -> None:
    """Every pair of elements, beside another one."""
    pairs = torch.arange(1 << 16).to(torch.int16)
    pairs = torch.stack([pairs, pairs.flip(0)], 1).contiguous()
    even, odd = (x.view(torch.bfloat16) for x in run_ptx(text, pairs.view(torch.int32), 2))
    wanted = pairs.view(torch.int8).view(dtype).to(torch.bfloat16).view(-1, 2)
    for found, by in ((even.flatten(), wanted[:, 0]), (odd.flatten(), wanted[:, 1])):
        known = ~by.isnan()
        assert known.sum() > 60000
        assert torch.equal(found.view(torch.int16)[known], by.view(torch.int16)[known])
