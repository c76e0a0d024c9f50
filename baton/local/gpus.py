"""Shares this machine's GPUs out to workers: the two roles keep apart as long as there are two."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.local import cpus
from baton.local.cpus import Share

# One of them is there where NVIDIA's driver is; without it torch need not be asked.
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_COUNT = "import torch; print(torch.cuda.device_count())"
_COUNT_TIMEOUT_S = 60.0

# A worker on a GPU computes little on its cores: it launches kernels, and sorts out what comes.
_MOST_THREADS = 4


def count() -> int:
    """How many GPUs torch sees in processes like the workers. Blocks for seconds if any are here.

    Asked in a process of its own: this one has no use for torch.
    """
    if not any(file.exists() for file in _DRIVER_FILES):
        return 0
    command = [sys.executable, "-c", _COUNT]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=_COUNT_TIMEOUT_S, check=True
        )
        return int(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0  # whoever was told to use a GPU says why there is none


def devices(engine: EngineConfig, prefill: int, decode: int, gpus: int) -> list[str]:
    """Each worker's device, prefill workers' first; empty strings where no GPU is used.

    `gpus` is how many there are; a device with a number is for everybody.
    Raises ConfigError when a GPU is asked for and there is none.
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
    return [f"cuda:{number}" for number in assign(prefill, decode, gpus)]


def assign(prefill: int, decode: int, gpus: int) -> list[int]:
    """A GPU's number for each prefill worker, then for each decode worker.

    From two GPUs on, each role has some to itself, as many as its part of the workers, and its
    workers take turns on them; so with enough GPUs everybody has one of his own.
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


def share_out(
    engine: EngineConfig, names: Sequence[str], prefill: int, gpus: int, say: Callable[[str], None]
) -> list[Share]:
    """What each worker gets of GPUs and cores; who is where is told. `prefill` names come first.

    Without a GPU to be used it is `cpus.share_out` alone.
    """
    chosen = devices(engine, prefill, len(names) - prefill, gpus)
    if not any(chosen):
        return cpus.share_out(len(names), engine.threads, say)
    cores = len(cpus.available())
    threads = engine.threads or min(_MOST_THREADS, max(1, cores // len(names)))
    each = Counter(chosen)
    places = ", ".join(f"{name} on {device}" for name, device in zip(names, chosen, strict=True))
    say(f"GPUs: {places}")
    if most := max(each.values()) - 1:
        part = engine.gpu_memory / (most + 1)
        say(
            f"workers of one GPU divide --gpu-memory {engine.gpu_memory:g}: down to {part:.3g} each"
        )
    return [Share((), threads, device, engine.gpu_memory / each[device]) for device in chosen]
