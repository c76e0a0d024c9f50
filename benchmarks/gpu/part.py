"""What each part of the run measures with; each is a process of its own, started by `run.py`."""

from __future__ import annotations

import gc
import os
import pkgutil
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch

from benchmarks.shapes import GPU_SHAPES, Shape

Cell: TypeAlias = float | int | str | None
Cells: TypeAlias = dict[str, Cell]
Case: TypeAlias = tuple[str, Callable[[], Cells | None]]
T = TypeVar("T")

# As CUDA's runtime API documents them: "the process must be terminated and relaunched". All other
# errors, as of a launch that was refused or a product that cuBLAS does not have, pass.
_FATAL = (
    "illegal memory access", "illegal instruction", "misaligned address", "address space",
    "invalid program counter", "hardware stack error", "device-side assert", "launch failure",
    "the launch timed out", "uncorrectable",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """kind: "row" of a table, "failed", "note", or "doing", which is not kept."""

    kind: str
    table: str
    name: str = ""
    cells: Cells = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class Job:
    """One part's work: `function`, as "module:name", begins nothing new after `seconds`.

    smoke: tiny sizes on the CPU, kernels interpreted, figures without a meaning · copy_bytes_per_s,
    matmul_flops: what the device was measured to do at best, copies counting bytes read and
    written; 0 before that.
    """

    part: str
    function: str
    device: str
    seconds: float
    shapes: tuple[str, ...] = ("8B", "1B")
    smoke: bool = False
    copy_bytes_per_s: float = 0.0
    matmul_flops: float = 0.0

    @property
    def models(self) -> list[Shape]:
        """The shapes of its models."""
        return [GPU_SHAPES[name] for name in (("smoke",) if self.smoke else self.shapes)]

    def sized(self, full: T, smoke: T) -> T:
        """The value that fits this run."""
        return smoke if self.smoke else full


class Part:
    """What a part measures with, and where it sends its events."""

    def __init__(self, job: Job, send: Callable[[Event], object]) -> None:
        """Raises RuntimeError where there is no GPU to measure on."""
        self.job, self._send = job, send
        self.device, self._end = torch.device(job.device), time.monotonic() + job.seconds
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                version = torch.__version__
                raise RuntimeError(
                    f"torch {version} sees no GPU here; --smoke is a dry run without one"
                )
            torch.cuda.set_device(self.device)

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self._end

    @property
    def has_fp8(self) -> bool:
        """Whether kernels can read float8_e4m3fn; Triton's interpreter can."""
        cuda = self.device.type == "cuda"
        return not cuda or torch.cuda.get_device_capability(self.device) >= (8, 9)

    def row(self, table: str, name: str, cells: Cells) -> None:
        """A row of a table."""
        self._send(Event("row", table, name, cells))

    def note(self, table: str, text: str) -> None:
        """What a reader of a table should know."""
        self._send(Event("note", table, text=text))

    def attempt(self, table: str, name: str, measure: Callable[[], Cells | None]) -> None:
        """The row that `measure` gives, if any, or its failure.

        Raises what leaves the device unusable: everything after it would fail for that reason.
        """
        self._send(Event("doing", table, name))
        try:
            if (cells := measure()) is not None:
                self.row(table, name, cells)
        except Exception as error:
            if is_fatal(error):
                raise
            traceback.print_exc()  # to the part's log
            self._send(Event("failed", table, name, text=summary(error)))

    def measure(self, table: str, cases: Iterable[Case]) -> None:
        """Attempts cases in their order while there is time; a note names those left out."""
        left_out = []
        for name, measure in cases:
            if self.late:
                left_out.append(name)
            else:
                self.attempt(table, name, measure)
        if left_out:
            self.note(table, f"left out, because its time was over: {', '.join(left_out)}")
        self.free()

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


def work(job: Job, log: Path, events: Connection) -> None:
    """A part's process, in a group of its own. What libraries print goes to the log."""
    os.setpgid(0, 0)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        pkgutil.resolve_name(job.function)(Part(job, events.send))
    except Exception as error:
        traceback.print_exc()
        events.send(Event("failed", job.part, "the whole part", text=summary(error)))
