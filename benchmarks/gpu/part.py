"""One part of the run, as a process: `python -m benchmarks.gpu.part JOB`.

What it finds goes to its output, an event a line in JSON. A part that fails leaves the others a
working GPU.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TextIO, TypeAlias, TypeVar

import torch

from benchmarks.shapes import GPU_SHAPES, Shape

Cell: TypeAlias = float | int | str | None
Cells: TypeAlias = dict[str, Cell]
Case: TypeAlias = tuple[str, Callable[[], Cells]]
T = TypeVar("T")

# Module and function: each is imported in its own process alone, and may lack what it needs.
PARTS = {
    "machine": ("kernels", "machine"),
    "kernels": ("kernels", "correctness"),
    "speed": ("kernels", "speed"),
    "engine": ("engine", "run"),
    "cluster": ("cluster", "run"),
}

# As CUDA's runtime API documents them: "the process must be terminated and relaunched". All other
# errors, as of a launch that was refused or a product that cuBLAS does not have, pass.
_FATAL = (
    "illegal memory access", "illegal instruction", "misaligned address", "address space",
    "invalid program counter", "hardware stack error", "device-side assert", "launch failure",
    "the launch timed out", "uncorrectable",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """kind: "row" of a table, "failed", "note", or "doing", which is shown and not kept."""

    kind: str
    table: str
    name: str = ""
    cells: Cells = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class Job:
    """One part's work. It begins nothing new once `seconds` have passed since it was made.

    smoke: tiny sizes on the CPU, kernels interpreted, figures without a meaning · copy_bytes_per_s,
    matmul_flops: what the device was measured to do at best, copies counting bytes read and
    written; 0 before that.
    """

    part: str
    device: str
    seconds: float
    shapes: tuple[str, ...] = ("8B", "1B")
    smoke: bool = False
    quick: bool = False
    copy_bytes_per_s: float = 0.0
    matmul_flops: float = 0.0

    @cached_property
    def end(self) -> float:
        """When nothing new begins, as `time.monotonic` counts."""
        return time.monotonic() + self.seconds

    @property
    def models(self) -> list[Shape]:
        """The shapes of its models."""
        return [GPU_SHAPES[name] for name in (("smoke",) if self.smoke else self.shapes)]

    def sized(self, full: T, quick: T, smoke: T) -> T:
        """The value that fits this run."""
        return smoke if self.smoke else quick if self.quick else full


class NoGpu(Exception):
    """There is nothing to measure on."""


class Part:
    """What a part measures with, and writes its events to."""

    def __init__(self, job: Job, out: TextIO) -> None:
        self.job, self._out, self.failures = job, out, 0
        self.device = torch.device(job.device)
        _ = job.end  # begins now
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                version = torch.__version__
                raise NoGpu(f"torch {version} sees no GPU here; --smoke is a dry run without one")
            torch.cuda.set_device(self.device)

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self.job.end

    @property
    def has_fp8(self) -> bool:
        """Whether kernels can read float8_e4m3fn; Triton's interpreter can."""
        cuda = self.device.type == "cuda"
        return not cuda or torch.cuda.get_device_capability(self.device) >= (8, 9)

    def tell(
        self, kind: str, table: str, name: str = "", cells: Cells | None = None, text: str = ""
    ) -> None:
        """Writes an event."""
        self.failures += kind == "failed"
        self._out.write(json.dumps(asdict(Event(kind, table, name, cells or {}, text))) + "\n")
        self._out.flush()

    def attempt(self, table: str, name: str, measure: Callable[[], Cells | None]) -> None:
        """The row that `measure` gives, if any, or its failure.

        Raises what leaves the device unusable: everything after it would fail for that reason.
        """
        self.tell("doing", table, name)
        try:
            if (cells := measure()) is not None:
                self.tell("row", table, name, cells)
        except Exception as error:
            if is_fatal(error):
                raise
            traceback.print_exc()  # to the part's log
            self.tell("failed", table, name, text=summary(error))

    def measure(self, table: str, cases: Iterable[Case]) -> None:
        """Attempts cases in their order while there is time; a note names those left out."""
        left_out = []
        for name, measure in cases:
            if self.late:
                left_out.append(name)
            else:
                self.attempt(table, name, measure)
        if left_out:
            text = f"left out, because its time was over: {', '.join(left_out)}"
            self.tell("note", table, text=text)

    def of_copy(self, moved_bytes: float, seconds: float) -> Cells:
        """A rate, also as a share of the copy's."""
        cells: Cells = {"GB/s": moved_bytes / seconds / 1e9}
        if self.job.copy_bytes_per_s:
            cells["of copy rate"] = moved_bytes / seconds / self.job.copy_bytes_per_s
        return cells

    def free(self) -> None:
        """Gives memory that nothing refers to back to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def is_fatal(error: Exception) -> bool:
    """Whether CUDA refuses every further call of this process after an error of torch or Triton."""
    text = str(error)
    return "CUDA" in text and any(words in text for words in _FATAL)


def summary(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def run(job: Job, out: TextIO) -> int:
    """Runs a part; 1 if anything failed. What it does not catch itself is its last event."""
    part: Part | None = None
    try:
        module, function = PARTS[job.part]
        part = Part(job, out)
        getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(part)
    except Exception as error:
        traceback.print_exc()
        failed = Event("failed", job.part, "the whole part", text=summary(error))
        out.write(json.dumps(asdict(failed)) + "\n")
        return 1
    return int(part.failures > 0)


def main() -> int:
    """The job is one argument, in JSON."""
    # Libraries print: what they write must not get between the events.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        return run(Job(**json.loads(sys.argv[1])), out)


if __name__ == "__main__":
    sys.exit(main())
