"""Programmatic dependent launch (PDL): kernels that start while the kernel in front still runs.

Since Hopper, a kernel's programs can start, and do work that depends on no other kernel, before the
kernel in front has ended. Each program of such a kernel must call `wait_for_inputs` before it
accesses memory that other kernels write or read. The call returns when the kernel in front has
ended, including what that one waited for, so that the order of a stream is kept. CUDA graphs
capture these launches unchanged.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LEAST_CAPABILITY = 90


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Waits until the kernel in front has ended."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Allows the next kernel to start, once all programs of this one have called this."""
    if PDL:
        gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Launches a kernel that has a constant `PDL` and calls `wait_for_inputs`; with PDL if
    supported."""
    pdl = _has_pdl(next(one.device for one in args if isinstance(one, torch.Tensor)))
    options = {"launch_pdl": True} if pdl else {}
    kernel[grid](*args, PDL=pdl, **kwargs, **options)


def _has_pdl(device: torch.device) -> bool:
    """Whether a device supports PDL; the meta device stands for the architecture to compile for."""
    if device.type == "meta" and not triton.knobs.runtime.interpret:
        return bool(triton.runtime.driver.active.get_current_target().arch >= _LEAST_CAPABILITY)
    return device.type == "cuda" and _capability(device) >= _LEAST_CAPABILITY


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# Query rows of a tile: the fewest that tensor cores take, and the most that registers hold.
LEAST_TILE_ROWS, MOST_TILE_ROWS = 16, 128
WIDE_HEAD = 256


def most_tile_rows(head_size: int) -> int:
    """Most query rows of a tile of attention; their sums are in registers."""
    return MOST_TILE_ROWS if head_size <= WIDE_HEAD else MOST_TILE_ROWS // 4


def tile_rows(num_rows: int, sequences: int, group: int, head_size: int = 0) -> int:
    """Rows of a tile for chunks of `num_rows` rows in all: the average chunk, padded.

    group: rows that each of these becomes, such as the query heads that share a KV head ·
    head_size: of attention.
    """
    average = -(-num_rows // max(sequences, 1)) * group
    rows = max(LEAST_TILE_ROWS, int(triton.next_power_of_2(average)))
    return min(rows, most_tile_rows(head_size))
