"""How fast kernels on rows are: they only move bytes, so that the copy's rate is their ceiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from baton.engine.models.config import Rope
from baton.engine.models.decoder import rope_tables
from baton.engine.ops.triton.activation import silu_mul
from baton.engine.ops.triton.norm import add_rms_norm
from baton.engine.ops.triton.rope_kv import rope_and_write
from baton.engine.ops.triton.row_quantize import quantize_rows
from benchmarks.gpu import paged
from benchmarks.gpu.clock import Clock, clock_of, rotations
from benchmarks.gpu.device import device_of, has_fp8
from benchmarks.gpu.job import Case, Cell, Event, Job, in_time
from benchmarks.gpu.paged import Geometry
from benchmarks.gpu.targets import OF_COPY
from benchmarks.shapes import GPU_SHAPES, Shape

Make = Callable[[Shape, int, torch.device], Callable[[], object]]
"""(shape, rows, device) → a call on inputs made for it."""

_BF16 = torch.bfloat16


def _drawn(rows: int, size: int, device: torch.device) -> Tensor:
    return torch.randn(rows, size, dtype=_BF16, device=device)


def _norm(shape: Shape, rows: int, device: torch.device) -> Callable[[], object]:
    x, residual = (_drawn(rows, shape.hidden, device) for _ in range(2))
    weight = torch.ones(shape.hidden, dtype=_BF16, device=device)
    return lambda: add_rms_norm(x, residual, weight, 1e-5)


def _silu(shape: Shape, rows: int, device: torch.device) -> Callable[[], object]:
    x = _drawn(rows, 2 * shape.intermediate, device)
    return lambda: silu_mul(x)


def _quantise(shape: Shape, rows: int, device: torch.device) -> Callable[[], object]:
    x = _drawn(rows, shape.hidden, device)
    return lambda: quantize_rows(x, torch.float8_e4m3fn)


def _rope(shape: Shape, rows: int, device: torch.device) -> Callable[[], object]:
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_size
    g = Geometry(heads, kv_heads, size, 16, _BF16, _BF16)
    pool = paged.random_pool(g, -(-rows // 16), 1, device)
    qkv = _drawn(rows, (heads + 2 * kv_heads) * size, device)
    places = torch.arange(rows, dtype=torch.int32, device=device)
    cos, sin = (table.to(device, _BF16) for table in rope_tables(Rope(10000.0), size, rows))
    return lambda: rope_and_write(qkv, places, places, cos, sin, pool, 0, heads, kv_heads)


def events(job: Job) -> Iterator[Event]:
    """One row for each kernel."""
    yield from in_time(job, "rows", list(cases(job, clock_of(device_of(job)))))


def cases(job: Job, clock: Clock) -> Iterator[Case]:
    """An 8B model's sizes, for a decode step and for a chunk."""
    shape = GPU_SHAPES["smoke" if job.smoke else "8B"]
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_size
    kinds: tuple[tuple[str, Make, int], ...] = (  # bytes of a row, read and written
        ("add and norm", _norm, 4 * 2 * shape.hidden),
        ("silu and multiply", _silu, 3 * 2 * shape.intermediate),
        ("rope and write", _rope, 2 * 2 * qkv),
        ("quantise rows to fp8", _quantise, 3 * shape.hidden),
    )
    if not has_fp8(device_of(job)):
        kinds = kinds[:-1]
    for rows in job.sized((64, 8192), (8192,), (5,)):
        for name, make, row_bytes in kinds:
            yield f"{name}, {rows} rows", _case(job, clock, shape, rows, make, rows * row_bytes)


def _case(
    job: Job, clock: Clock, shape: Shape, rows: int, make: Make, moved: int
) -> Callable[[], Mapping[str, Cell]]:
    def measure() -> Mapping[str, Cell]:
        device = device_of(job)
        calls = [make(shape, rows, device) for _ in range(rotations(moved, device))]
        seconds = clock.seconds(calls)
        cells: dict[str, Cell] = {"us": seconds * 1e6, "GB/s": moved / seconds / 1e9}
        if job.ceilings:
            cells[OF_COPY] = moved / seconds / job.ceilings.copy_bytes_per_s
        return cells

    return measure
