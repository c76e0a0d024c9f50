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

from baton.cuda import compute_capability

_LEAST_CAPABILITY = 90
_capability = lru_cache(maxsize=64)(compute_capability)


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
