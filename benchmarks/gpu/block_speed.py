"""How fast KV blocks move within a GPU's memory: gathered, scattered, copied, summed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import torch

from benchmarks.gpu import paged
from benchmarks.gpu.clock import Clock, clock_of
from benchmarks.gpu.device import device_of
from benchmarks.gpu.job import Case, Cell, Event, Job, in_time
from benchmarks.gpu.paged import Geometry
from benchmarks.gpu.targets import OF_COPY
from benchmarks.shapes import GPU_SHAPES
from kvtransfer.kernels import blocks
from kvtransfer.pool import KvPool, Slots

_MOVED = 512 << 20  # bytes
_AT_ONCE = 8  # calls


def events(job: Job) -> Iterator[Event]:
    """One row for each kernel."""
    yield from in_time(job, "blocks", list(cases(job, clock_of(device_of(job)))))


def cases(job: Job, clock: Clock) -> Iterator[Case]:
    """Blocks of an 8B model, in random order."""
    device = device_of(job)
    shape = GPU_SHAPES["smoke" if job.smoke else "8B"]
    bf16 = torch.bfloat16
    g = Geometry(shape.heads, shape.kv_heads, shape.head_size, 16, bf16, bf16)
    block_bytes = shape.layers * 16 * g.token_bytes
    count = job.sized(_MOVED // block_bytes, _MOVED // block_bytes, 3)
    source, target = (
        KvPool(paged.random_pool(g, count + 8, shape.layers, device)) for _ in range(2)
    )
    dice = random.Random(0)
    local, remote = (
        Slots(tuple(dice.sample(range(count + 8), count)), 16 * count) for _ in range(2)
    )
    staging = torch.empty(source.nbytes(local), dtype=torch.uint8, device=device)
    sums = torch.zeros(1, dtype=torch.int64, device=device)
    calls: tuple[tuple[str, Callable[[], object], int], ...] = (  # how often bytes are touched
        ("gather blocks", lambda: blocks.gather(source, local, staging, sums, 0), 2),
        ("scatter blocks", lambda: blocks.scatter(staging, target, remote, sums, 0), 2),
        ("copy blocks", lambda: blocks.copy(source, local, target, remote, sums, 0), 2),
        ("sum blocks", lambda: blocks.checksum(source, local, sums, 0), 1),
    )
    for name, call, times in calls:
        yield name, _case(job, clock, call, times * source.nbytes(local))


def _case(
    job: Job, clock: Clock, call: Callable[[], object], moved: int
) -> Callable[[], Mapping[str, Cell]]:
    def measure() -> Mapping[str, Cell]:
        # Not as a graph: block numbers come from the host with each call, which runs ahead.
        seconds = clock.seconds([call] * _AT_ONCE, graph=False)
        cells: dict[str, Cell] = {"us": seconds * 1e6, "GB/s": moved / seconds / 1e9}
        if job.ceilings:
            cells[OF_COPY] = moved / seconds / job.ceilings.copy_bytes_per_s
        return cells

    return measure
