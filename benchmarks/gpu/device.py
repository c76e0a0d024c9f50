"""A job's device and its memory."""

from __future__ import annotations

import gc

import torch

from benchmarks.gpu.job import Job

_FP8_CAPABILITY = (8, 9)


def device_of(job: Job) -> torch.device:
    """A job's device, which becomes this thread's."""
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def has_fp8(device: torch.device) -> bool:
    """Whether kernels can read float8_e4m3fn there; Triton's interpreter can."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def free(job: Job) -> None:
    """Gives memory that nothing refers to back to the device."""
    gc.collect()
    if job.device != "cpu":
        torch.cuda.empty_cache()
