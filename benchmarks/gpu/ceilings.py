"""Part "machine": what this device is, and what it does at best."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator

import torch

from benchmarks.gpu.clock import Clock, clock_of
from benchmarks.gpu.device import device_of
from benchmarks.gpu.job import Ceilings, Doing, Event, Job, Row

TABLE, RATES = "machine", "ceilings"
_COPIED, _COPIED_SMOKE = 1 << 30, 1 << 20  # bytes
_MATMUL, _MATMUL_SMOKE = 8192, 64


class NoGpu(Exception):
    """There is nothing to measure on."""


def run(job: Job) -> Iterator[Event]:
    """The device, then its two ceilings."""
    device = torch.device(job.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NoGpu(f"torch {torch.__version__} sees no GPU here; --smoke is a dry run without one")
    yield Row(TABLE, "device", about(device))
    yield Doing(RATES, "a large copy, and a large product")
    clock = clock_of(device_of(job))
    found = measure(job, device, clock)
    yield Row(
        RATES,
        "measured",
        {"copy GB/s": found.copy_bytes_per_s / 1e9, "matmul TFLOP/s": found.matmul_flops / 1e12},
    )


def measure(job: Job, device: torch.device, clock: Clock) -> Ceilings:
    """The ceilings: a large copy, and a large product of random bfloat16 matrices."""
    nbytes = _COPIED_SMOKE if job.smoke else min(_COPIED, _memory(device) // 16)
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    copy_s = clock.seconds([lambda: target.copy_(source)])
    size = _MATMUL_SMOKE if job.smoke else _MATMUL
    # Zeros would take less power, and so a higher clock.
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    matmul_s = clock.seconds([lambda: torch.mm(left, right, out=out)])
    return Ceilings(2 * nbytes / copy_s, 2 * size**3 / matmul_s)


def about(device: torch.device) -> dict[str, str]:
    """Versions and sizes, as text."""
    told = {"torch": torch.__version__, "triton": _triton(), "python": platform.python_version()}
    if device.type != "cuda":
        return {"name": f"{device} ({platform.machine()})", **told}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "SMs": str(properties.multi_processor_count),
        "L2": f"{properties.L2_cache_size / 2**20:.0f} MiB",
        "driver": _driver(),
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, _nccl())),
        **told,
    }


def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def _nccl() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version()) if torch.distributed.is_nccl_available() else ()


def _triton() -> str:
    try:
        import triton  # noqa: PLC0415 - told, where it is not installed
    except ImportError:
        return "not installed"
    return str(triton.__version__)


def _driver() -> str:
    """As nvidia-smi tells it: torch does not."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return asked.stdout.split("\n")[0].strip()
