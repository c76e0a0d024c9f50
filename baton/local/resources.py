"""Divides this machine's cores and GPUs among the workers of a local cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from baton.config import EngineConfig
from baton.errors import ConfigError

# One of them exists if NVIDIA's driver is loaded; otherwise torch need not be started.
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_COUNT = "import torch; print(torch.cuda.device_count())"
_COUNT_TIMEOUT_S = 60.0
_MAX_GPU_THREADS = 4  # a worker on a GPU only launches kernels


@dataclass(frozen=True)
class Share:
    """The cores and the GPU of one worker."""

    cpus: tuple[int, ...]  # to pin threads to; empty: not pinned
    threads: int
    device: str = ""  # empty: as configured
    gpu_memory: float = 0.0  # share of the GPU's memory


def shares(
    engine: EngineConfig,
    names: Sequence[str],
    prefill: int,
    gpus: int,
    say: Callable[[str], None],
    ranks: Sequence[int] = (),
) -> list[Share]:
    """The share of each of `names`, prefill workers first; `say` gets the placement and warnings.

    ranks: number of ranks of each (default: 1). Raises ConfigError if more GPUs are configured than
    there are.
    """
    chosen = devices(engine, prefill, len(names) - prefill, gpus, ranks)
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
    say("GPUs: " + ", ".join(f"{name} on {at}" for name, at in zip(names, chosen, strict=True)))
    each, memory = Counter(chosen), engine.gpu_memory
    if (most := max(each.values())) > 1:
        say(f"workers on one GPU share --gpu-memory {memory:g}: at least {memory / most:.3g} each")
    return [Share((), threads, device, memory / each[device]) for device in chosen]


def divide_cores(cores: Sequence[int], workers: int, threads: int = 0) -> list[Share]:
    """A share for each worker: disjoint neighbouring cores, in sizes that differ by at most one.

    With fewer cores than workers, or a configured number of threads, workers are not pinned.
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
    """Number of GPUs that torch sees, counted in a subprocess, which can take seconds."""
    if not any(file.exists() for file in _DRIVER_FILES):
        return 0
    command = [sys.executable, "-c", _COUNT]
    try:
        return int(
            subprocess.check_output(
                command, stderr=subprocess.DEVNULL, text=True, timeout=_COUNT_TIMEOUT_S
            )
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0  # a worker with --device cuda reports the cause


def devices(
    engine: EngineConfig, prefill: int, others: int, gpus: int, ranks: Sequence[int] = ()
) -> list[str]:
    """Device of each worker, prefill workers first; empty strings without GPUs.

    From two GPUs on, each role gets GPUs in proportion to its workers, which are spread over them;
    with enough GPUs each worker has its own. Workers of several ranks share none: each has the GPUs
    from its device on, one a rank.
    """
    workers = prefill + others
    if engine.simulate or engine.device == "cpu" or (engine.device == "auto" and not gpus):
        return [""] * workers
    if engine.device.startswith("cuda:"):
        return [engine.device] * workers
    if not gpus:
        raise ConfigError(
            "--device cuda: torch sees no GPU (nvidia-smi shows those of the driver); "
            "use --device cpu"
        )
    if max(ranks, default=1) > 1:
        if sum(ranks) > gpus:
            raise ConfigError(
                f"--tp: these workers need {sum(ranks)} GPUs, one a rank, and torch sees {gpus}; "
                "use fewer workers or ranks, or --device cpu"
            )
        return [f"cuda:{first}" for first in accumulate(ranks[:-1], initial=0)]
    if gpus == 1:
        return ["cuda:0"] * workers
    used = min(gpus, workers)
    if not (prefill and others):
        return [f"cuda:{number % used}" for number in range(workers)]
    # prefill's: [0, first) · the others': [first, used)
    first = min(max(1, round(used * prefill / workers)), used - 1)
    numbers = [
        *(number % first for number in range(prefill)),
        *(first + number % (used - first) for number in range(others)),
    ]
    return [f"cuda:{number}" for number in numbers]
