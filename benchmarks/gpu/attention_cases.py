"""Attention kernels against their references, over random shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from baton.engine.ops.triton.decode_attention import decode_attention, decode_attention_reference
from baton.engine.ops.triton.prefill_attention import (
    plan_tiles,
    prefill_attention,
    prefill_attention_reference,
)
from benchmarks.gpu import errors, paged
from benchmarks.gpu.device import device_of, has_fp8
from benchmarks.gpu.errors import Case, Error
from benchmarks.gpu.job import Job
from benchmarks.gpu.paged import Geometry, name_of

_KV = (None, torch.int8, torch.float8_e4m3fn)  # None: as the queries
_POISONED = 4 << 20


def cases(job: Job) -> Iterator[tuple[str, Case]]:
    """A kernel with a pair of types; each call of it draws another shape."""
    device = device_of(job)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for title, check in (("decode attention", decode), ("prefill attention", prefill)):
        for dtype in job.sized(dtypes, dtypes[:2], dtypes[:2]):
            for kv_dtype in _KV:
                kv = kv_dtype or dtype
                if kv == torch.float8_e4m3fn and not has_fp8(device):
                    continue
                name = f"{title}, {name_of(dtype)}, KV {name_of(kv)}"
                yield name, _bound(check, job, device, dtype, kv)


def _bound(
    check: Callable[..., Error], job: Job, device: torch.device, dtype: torch.dtype, kv: torch.dtype
) -> Case:
    def case(dice: random.Random) -> Error:
        return check(job, device, paged.geometry(job, dice, dtype, kv), dice)

    return case


def _window(job: Job, dice: random.Random) -> int | None:
    return dice.choice((None, None, 1, *job.sized((40, 1000), (40, 1000), (20,))))


def decode(job: Job, device: torch.device, g: Geometry, dice: random.Random) -> Error:
    """One row for each sequence; some are padding, which gives zeros."""
    longest = job.sized(6000, 2000, 70)
    rows = dice.randint(1, job.sized(40, 16, 4))
    lengths = [dice.choice((0, 1, dice.randint(1, longest))) for _ in range(rows)]
    lengths[0] = dice.randint(longest // 2, longest)
    sequences = paged.scattered(lengths, g.block_size, device, dice)
    layers = dice.randint(1, 3)
    pool = paged.random_pool(g, sequences.num_blocks, layers, device)
    paged.spoil(pool, sequences.tables)
    q = torch.randn(rows, g.heads, g.head_size, device=device).to(g.dtype)
    seen = torch.tensor(lengths, dtype=torch.int32, device=device)
    layer, window = dice.randrange(layers), _window(job, dice)
    splits = dice.choice((0, 0, 1, 3, 8))
    errors.poison(device, _POISONED)
    found = decode_attention(q, pool, layer, sequences.tables, seen, g.scale, window, splits=splits)
    wanted = decode_attention_reference(q, pool, layer, sequences.tables, seen, g.scale, window)
    where = f"{g}, window {window}, {splits} splits, lengths {lengths}"
    return errors.at(errors.compare(found, wanted), where)


def prefill(job: Job, device: torch.device, g: Geometry, dice: random.Random) -> Error:
    """Chunks behind contexts, one-row sequences first as in a step."""
    longest, most = job.sized((3000, 700), (1000, 300), (50, 20))
    counts = [dice.choice((1, dice.randint(1, most))) for _ in range(dice.randint(0, 4))]
    counts = sorted([*counts, dice.randint(most // 2, most)], key=lambda count: count > 1)
    contexts = [dice.choice((0, dice.randint(0, longest))) for _ in counts]
    lengths = [context + count for context, count in zip(contexts, counts, strict=True)]
    sequences = paged.scattered(lengths, g.block_size, device, dice)
    layers = dice.randint(1, 3)
    pool = paged.random_pool(g, sequences.num_blocks, layers, device)
    paged.spoil(pool, sequences.tables)
    q = torch.randn(sum(counts), g.heads, g.head_size, device=device).to(g.dtype)
    before, own = (torch.tensor(x, dtype=torch.int32, device=device) for x in (contexts, counts))
    tiles = plan_tiles(own, len(q), g.heads // g.kv_heads)
    layer, window = dice.randrange(layers), _window(job, dice)
    errors.poison(device, _POISONED)
    found = prefill_attention(q, pool, layer, sequences.tables, before, own, tiles, g.scale, window)
    wanted = prefill_attention_reference(
        q, pool, layer, sequences.tables, before, own, g.scale, window
    )
    where = f"{g}, window {window}, contexts {contexts}, counts {counts}"
    return errors.at(errors.compare(found, wanted), where)
