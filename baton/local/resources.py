"""Divides this machine's cores and GPUs among the workers of a local cluster.

Two engines on the same core slow each other down. GPUs are divided such that the two roles share
none as long as there are two.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.config import EngineConfig
from baton.errors import ConfigError

# One of them exists where NVIDIA's driver is; without it torch need not be started.
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_COUNT = "import torch; print(torch.cuda.device_count())"
_COUNT_TIMEOUT_S = 60.0
_MAX_GPU_THREADS = 4  # a worker on a GPU computes little on its cores: it launches kernels


@dataclass(frozen=True)
class Share:
    """What one worker gets: `cpus` to be pinned to (empty: unpinned) and a number of threads.

    And of GPUs: `device`, and the part of its memory that is the worker's; empty: as configured.
    """

    cpus: tuple[int, ...]
    threads: int
    device: str = ""
    gpu_memory: float = 0.0


def shares(
    engine: EngineConfig, names: Sequence[str], prefill: int, gpus: int, say: Callable[[str], None]
) -> list[Share]:
    """What each of `names` gets; the first `prefill` are prefill workers. `gpus` is their number.

    `say` gets the placement on GPUs and warnings. Raises ConfigError like `devices`.
    """
    chosen = devices(engine, prefill, len(names) - prefill, gpus)
    cores = sorted(os.sched_getaffinity(0))
    if not any(chosen):
        divided = divide_cores(cores, len(names), engine.threads)
        if (threads := sum(share.threads for share in divided)) > len(cores):
            say(
                f"warning: {len(names)} workers use {threads} threads on {len(cores)} cores: they "
                "will slow each other down; start fewer workers or lower --threads"
            )
        return divided
    threads = engine.threads or min(_MAX_GPU_THREADS, max(1, len(cores) // len(names)))
    each = Counter(chosen)
    places = ", ".join(f"{name} on {device}" for name, device in zip(names, chosen, strict=True))
    say(f"GPUs: {places}")
    if (most := max(each.values())) > 1:
        part = engine.gpu_memory / most
        say(
            f"workers of one GPU divide --gpu-memory {engine.gpu_memory:g}: down to {part:.3g} each"
        )
    return [Share((), threads, device, engine.gpu_memory / each[device]) for device in chosen]


def divide_cores(cores: Sequence[int], workers: int, threads: int = 0) -> list[Share]:
    """One share for each worker: neighbouring cores, disjoint, sizes that differ by at most one.

    With fewer cores than workers none is pinned and each gets one thread. `threads`, if not 0, is
    the configured number: then each gets that many, and none is pinned.
    """
    if threads or len(cores) < workers:
        return [Share((), threads or 1)] * workers
    divided, begin = [], 0
    for worker in range(workers):
        size = len(cores) // workers + (worker < len(cores) % workers)
        divided.append(Share(tuple(cores[begin : begin + size]), size))
        begin += size
    return divided


def count_gpus() -> int:
    """How many GPUs torch sees in processes like the workers. Blocks for seconds if any are here.

    Counted in a process of its own, so that this one need not import torch.
    """
    if not any(file.exists() for file in _DRIVER_FILES):
        return 0
    command = [sys.executable, "-c", _COUNT]
    try:
        counted = subprocess.run(
            command, capture_output=True, text=True, timeout=_COUNT_TIMEOUT_S, check=True
        )
        return int(counted.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0  # a worker with --device cuda says why there is none


def devices(engine: EngineConfig, prefill: int, decode: int, gpus: int) -> list[str]:
    """Each worker's device, prefill workers' first; empty strings where no GPU is used.

    A device with a number is used by all workers. Raises ConfigError when a GPU is configured and
    there is none.
    """
    workers = prefill + decode
    if engine.simulate or engine.device == "cpu" or (engine.device == "auto" and not gpus):
        return [""] * workers
    if engine.device.startswith("cuda:"):
        return [engine.device] * workers
    if not gpus:
        raise ConfigError(
            "--device cuda: torch sees no GPU here (nvidia-smi shows those that the driver knows); "
            "use --device cpu"
        )
    return [f"cuda:{number}" for number in assign_gpus(prefill, decode, gpus)]


def assign_gpus(prefill: int, decode: int, gpus: int) -> list[int]:
    """A GPU's number for each prefill worker, then for each decode worker.

    From two GPUs on, each role has some to itself, as many as its part of the workers, and its
    workers take turns on them; so with enough GPUs each worker has its own.
    """
    if gpus < 2:
        return [0] * (prefill + decode)
    used = min(gpus, prefill + decode)
    # prefill's: [0, first) · decode's: [first, used)
    first = min(max(1, round(used * prefill / (prefill + decode))), used - 1)
    return [
        *(number % first for number in range(prefill)),
        *(first + number % (used - first) for number in range(decode)),
    ]
