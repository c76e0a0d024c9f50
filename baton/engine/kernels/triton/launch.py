"""Launches that overlap the end of the kernel in front (programmatic dependent launch, PDL).

From Hopper on, a kernel's programs can be put on the GPU, and can do what depends on no other
kernel, while the kernel in front of it still runs. A kernel launched so must call
`wait_for_inputs`, in every program and before it reads or writes what other kernels write or read:
it returns when the kernel in front has ended, with all that this one itself had waited for, and so
keeps the order of a stream. CUDA graphs capture such launches as they are.
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
    """Waits for the kernel in front."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_next(PDL: tl.constexpr):
    """Lets the next kernel's programs be launched, once all of this one have come here."""
    if PDL:
        gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Launches a kernel that takes `PDL` and calls `wait_for_inputs`; with PDL where there is."""
    pdl = _has_pdl(next(one.device for one in args if isinstance(one, torch.Tensor)))
    options = {"launch_pdl": True} if pdl else {}
    kernel[grid](*args, PDL=pdl, **kwargs, **options)


def _has_pdl(device: torch.device) -> bool:
    """Whether a device has it; launches on the meta device are compiled for another, or interpreted
    as a CPU's."""
    if device.type == "meta" and not triton.knobs.runtime.interpret:
        return bool(triton.runtime.driver.active.get_current_target().arch >= _LEAST_CAPABILITY)
    return device.type == "cuda" and _capability(device) >= _LEAST_CAPABILITY


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# Query rows of a tile: the fewest that tensor cores take, and the most that registers hold.
LEAST_TILE_ROWS, MOST_TILE_ROWS = 16, 128


def tile_rows(num_rows: int, sequences: int, group: int) -> int:
    """Rows of a tile for chunks of `num_rows` rows in all: the average chunk, padded.

    group: rows that each of these becomes, such as the query heads that share a KV head.
    """
    average = -(-num_rows // max(sequences, 1)) * group
    return min(max(LEAST_TILE_ROWS, int(triton.next_power_of_2(average))), MOST_TILE_ROWS)
