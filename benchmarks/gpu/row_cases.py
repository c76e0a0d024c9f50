"""Kernels on rows against their references, over random shapes: norms, gates, rope, quantising."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from baton.engine.models.config import Rope
from baton.engine.models.decoder import rope_tables
from baton.engine.ops.triton.activation import silu_mul, silu_mul_reference
from baton.engine.ops.triton.norm import add_rms_norm, add_rms_norm_reference
from baton.engine.ops.triton.rope_kv import rope_and_write, rope_and_write_reference
from baton.engine.ops.triton.row_quantize import quantize_rows, quantize_rows_reference
from baton.engine.weights.quantize import is_quantized, unpack_rows
from benchmarks.gpu import errors, paged
from benchmarks.gpu.device import device_of, has_fp8
from benchmarks.gpu.errors import Case, Error
from benchmarks.gpu.job import Job
from benchmarks.gpu.paged import name_of

_EPS = 1e-5
_POISONED = 4 << 20
_ONE_STEP = {torch.int8: 0.02, torch.float8_e4m3fn: 0.08}  # an 8-bit number may round otherwise


def cases(job: Job) -> Iterator[tuple[str, Case]]:
    """A kernel with a type; each call of it draws another shape."""
    device = device_of(job)
    eight = (torch.int8, torch.float8_e4m3fn) if has_fp8(device) else (torch.int8,)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        name = name_of(dtype)
        yield f"add and norm, {name}", _bound(norm, job, device, dtype)
        yield f"silu and multiply, {name}", _bound(silu, job, device, dtype)
        for kv in (dtype, *eight):
            yield f"rope and write, {name}, KV {name_of(kv)}", _bound(rope, job, device, dtype, kv)
    for to in eight:
        yield f"quantise rows, {name_of(to)}", _bound(quantise, job, device, torch.bfloat16, to)


def _bound(
    check: Callable[..., Error], job: Job, device: torch.device, *dtypes: torch.dtype
) -> Case:
    return lambda dice: check(job, device, dice, *dtypes)


def _rows(job: Job, dice: random.Random) -> int:
    return dice.choice((1, dice.randint(2, job.sized(700, 200, 9))))


def _size(job: Job, dice: random.Random) -> int:
    return dice.choice(job.sized((576, 2048, 3072, 4096, 8192, 14336), (576, 4096), (72, 128)))


def _drawn(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, size, device=device).to(dtype)


def norm(job: Job, device: torch.device, dice: random.Random, dtype: torch.dtype) -> Error:
    """With and without a residual, which is added to in place."""
    rows, size = _rows(job, dice), _size(job, dice)
    x, residual = (_drawn(rows, size, dtype, device) for _ in range(2))
    weight = _drawn(1, size, dtype, device)[0]
    has_residual = dice.random() < 0.7
    given = [residual.clone() if has_residual else None for _ in range(2)]
    errors.poison(device, _POISONED)
    found = add_rms_norm(x.clone(), given[0], weight, _EPS)
    wanted = add_rms_norm_reference(x.clone(), given[1], weight, _EPS)
    pairs = zip(found, wanted, strict=True)
    error = errors.worst([errors.compare(a, b) for a, b in pairs])
    return errors.at(error, f"{rows} rows of {size}, residual: {has_residual}")


def silu(job: Job, device: torch.device, dice: random.Random, dtype: torch.dtype) -> Error:
    """Gate and up, one behind the other."""
    rows, size = _rows(job, dice), _size(job, dice)
    x = _drawn(rows, 2 * size, dtype, device)
    errors.poison(device, _POISONED)
    return errors.at(errors.compare(silu_mul(x), silu_mul_reference(x)), f"{rows} rows of {size}")


def quantise(
    job: Job, device: torch.device, dice: random.Random, dtype: torch.dtype, to: torch.dtype
) -> Error:
    """To the bit; one row is zeros."""
    rows, size = _rows(job, dice), _size(job, dice)
    x = _drawn(rows, size, dtype, device)
    x[dice.randrange(rows)] = 0
    errors.poison(device, _POISONED)
    found, wanted = quantize_rows(x, to), quantize_rows_reference(x, to)
    return errors.at(
        errors.worst([errors.equal(a, b) for a, b in zip(found, wanted, strict=True)]),
        f"{rows} rows of {size}",
    )


def rope(
    job: Job, device: torch.device, dice: random.Random, dtype: torch.dtype, kv: torch.dtype
) -> Error:
    """Queries, and the whole pool: nothing else in it may have changed."""
    g = paged.geometry(job, dice, dtype, kv)
    rows, layers, num_blocks = _rows(job, dice), 2, job.sized(64, 32, 4)
    num_slots = num_blocks * g.block_size
    rows = min(rows, num_slots)
    slots = [slot if dice.random() < 0.9 else -1 for slot in dice.sample(range(num_slots), rows)]
    positions = [dice.randrange(200) for _ in range(rows)]
    at, to = (torch.tensor(x, dtype=torch.int32, device=device) for x in (positions, slots))
    qkv = _drawn(rows, (g.heads + 2 * g.kv_heads) * g.head_size, dtype, device)
    cos, sin = (table.to(device, dtype) for table in rope_tables(Rope(10000.0), g.head_size, 200))
    q_norm, k_norm = (_drawn(1, g.head_size, dtype, device)[0] for _ in range(2))
    normed = dice.random() < 0.5
    pool = paged.random_pool(g, num_blocks, layers, device)
    copy, layer = pool.clone(), dice.randrange(layers)

    def call(kernel: Callable[..., Tensor], into: Tensor) -> Tensor:
        errors.poison(device, _POISONED)
        norms = (q_norm, k_norm, _EPS) if normed else ()
        return kernel(qkv.clone(), at, to, cos, sin, into, layer, g.heads, g.kv_heads, *norms)

    found, wanted = call(rope_and_write, pool), call(rope_and_write_reference, copy)
    written = to >= 0
    both = [errors.compare(found[written], wanted[written]), _compare_pools(pool, copy, to, layer)]
    return errors.at(errors.worst(both), f"{g}, {rows} rows, norms: {normed}")


def _compare_pools(found: Tensor, wanted: Tensor, slots: Tensor, layer: int) -> Error:
    """What was not written is equal to the bit; what was, up to its type's rounding."""
    slots, block_size = slots[slots >= 0].long(), found.shape[4]
    blocks, offsets = slots // block_size, slots % block_size

    def take(pool: Tensor) -> Tensor:
        whole = pool.view(torch.int8) if is_quantized(pool.dtype) else pool
        rows = whole[blocks, layer, :, :, offsets].clone()
        whole[blocks, layer, :, :, offsets] = 0
        return rows.view(pool.dtype)

    ours, theirs = take(found), take(wanted)
    errors.equal(found, wanted)
    if not is_quantized(found.dtype):
        return errors.compare(ours, theirs)
    return errors.compare(
        unpack_rows(ours, torch.float32), unpack_rows(theirs, torch.float32),
        _ONE_STEP[found.dtype],
    )  # fmt: skip
