"""Measures configurations on the GPU that is here: `python -m baton.engine.ops.triton tune`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from baton.engine.ops.triton import tuning
from baton.engine.ops.triton.spec import Config, KernelSpec, Key, Trial
from baton.engine.ops.triton.tuning import Configs, Entry

Measure = Callable[[Callable[[], object]], float]
"""Milliseconds that a launch takes."""


@dataclass(frozen=True)
class Best:
    """The fastest of a kernel's candidates for a shape; ms and bytes of one launch."""

    kernel: str
    key: Key
    config: Config
    ms: float
    moved_bytes: int
    tried: int
    failed: int

    def __str__(self) -> str:
        shape = " ".join(f"{name}={value}" for name, value in self.key.items())
        rate = f" {self.moved_bytes / self.ms / 1e6:.0f} GB/s" if self.moved_bytes else ""
        tried = (
            f"{self.tried} tried, {self.failed} failed" if self.failed else f"{self.tried} tried"
        )
        return f"{self.kernel} {shape}: {self.config}  {self.ms:.4f} ms{rate} ({tried})"


def median_ms(run: Callable[[], object]) -> float:
    """The median of some launches with a cold L2 cache, on the GPU."""
    return float(triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median"))


def best_of(
    spec: KernelSpec, shape: Key, device: torch.device, measure: Measure, end: float
) -> Best | None:
    """Tries candidates until `time.monotonic` says end; None if none ran."""
    trial = spec.inputs(shape, device)
    timed: list[tuple[float, Config]] = []
    failed = 0
    for config in spec.candidates(trial.key):
        if time.monotonic() >= end:
            break
        try:
            timed.append((measure(_launch_of(trial, config)), config))
        except (triton.OutOfResources, triton.CompilationError, RuntimeError):
            failed += 1  # too large for this GPU: another candidate will do
    if not timed:
        return None
    ms, config = min(timed, key=lambda pair: pair[0])
    tried = len(timed) + failed
    return Best(spec.name, trial.key, config, ms, trial.moved_bytes, tried, failed)


def _launch_of(trial: Trial, config: Config) -> Callable[[], object]:
    return lambda: trial.run(config)


def tune(
    work: Sequence[tuple[KernelSpec, Key]],
    device: torch.device,
    file: Path,
    seconds: float,
    measure: Measure = median_ms,
) -> Iterator[Best]:
    """Finds the best configuration of each kernel and shape, and keeps each in file as it is found.

    Stops after so many seconds, whatever is left.
    """
    end = time.monotonic() + seconds
    for spec, shape in work:
        if time.monotonic() >= end:
            return
        if best := best_of(spec, shape, device, measure, end):
            keep(file, best)
            yield best


def keep(file: Path, best: Best) -> None:
    """Puts a result into the user's file, in place of what was there for its shape."""
    known = tuning.read(file).kernels if file.is_file() else {}
    others = [entry for entry in known.get(best.kernel, ()) if entry.when != dict(best.key)]
    entries = (*others, Entry(dict(best.key), best.config))
    kernels = {**known, best.kernel: entries}
    tuning.write(file, Configs(str(file), measured=True, kernels=kernels))
    tuning.forget()
