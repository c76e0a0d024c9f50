"""What each part of the run measures with; a part is a process of its own, started by `run.py`.

Its messages: a row of a table, `{"table", "name", "cells"}`; a `note` on a table; an `error` with
its traceback; `progress` of a row to come; and what it is `doing`, in case it ends there.
"""

from __future__ import annotations

import gc
import importlib
import json
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch

from baton.cuda import compute_capability
from benchmarks.child import messages
from benchmarks.shapes import GPU_SHAPES, Shape

Cells: TypeAlias = dict[str, float | int | str | None]
Case: TypeAlias = tuple[str, Callable[[], Cells | None]]
T = TypeVar("T")

# As CUDA's runtime API documents them: "the process must be terminated and relaunched". All other
# errors, as of a launch that was refused or a product that cuBLAS does not have, pass.
_FATAL = (
    "illegal memory access", "illegal instruction", "misaligned address", "address space",
    "invalid program counter", "hardware stack error", "device-side assert", "launch failure",
    "the launch timed out", "uncorrectable",
)  # fmt: skip


@dataclass
class Part:
    """One part's work, which begins nothing new after `seconds`.

    smoke: tiny sizes on the CPU, kernels interpreted, figures without a meaning · copy_bytes_per_s,
    matmul_flops, eight_bit_flops: what the device was measured to do at best, copies counting bytes
    read and written; 0 before that · step_ms: of decode steps that were measured, by title · json:
    where figures go, if anywhere · send: takes messages.
    """

    send: Callable[[dict[str, Any]], object]
    device_name: str
    seconds: float
    shapes: Sequence[str] = ("8B", "1B")
    smoke: bool = False
    copy_bytes_per_s: float = 0.0
    matmul_flops: float = 0.0
    eight_bit_flops: float = 0.0
    step_ms: Mapping[str, float] = field(default_factory=dict)
    json: str = ""

    def __post_init__(self) -> None:
        """Raises RuntimeError where there is no GPU to measure on."""
        self.device, self._end = torch.device(self.device_name), time.monotonic() + self.seconds
        if self.cuda:
            if not torch.cuda.is_available():
                version = torch.__version__
                raise RuntimeError(
                    f"torch {version} sees no GPU here; --smoke is a dry run without one"
                )
            torch.cuda.set_device(self.device)

    @property
    def cuda(self) -> bool:
        """Whether this is no dry run on a CPU."""
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds until its time is over."""
        return max(0.0, self._end - time.monotonic())

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return not self.left

    @property
    def capability(self) -> int:
        """The device's compute capability, as 90 for 9.0; 90 in a dry run."""
        return compute_capability(self.device)

    @cached_property
    def has_fp8(self) -> bool:
        """Whether kernels can read float8_e4m3fn; Triton's interpreter can."""
        return self.capability >= 89

    @property
    def models(self) -> list[Shape]:
        """The shapes of its models."""
        return [GPU_SHAPES[name] for name in (("smoke",) if self.smoke else self.shapes)]

    def sized(self, full: T, smoke: T) -> T:
        """The value that fits this run."""
        return smoke if self.smoke else full

    def row(self, table: str, name: str, cells: Cells) -> None:
        """A row of a table."""
        self.send({"table": table, "name": name, "cells": cells})

    def note(self, table: str, text: str) -> None:
        """What a reader of a table should know."""
        self.send({"table": table, "note": text})

    def attempt(self, table: str, name: str, measure: Callable[[], Cells | None]) -> bool:
        """Sends the row that `measure` gives, if any, or its failure; whether it succeeded.

        Raises what leaves the device unusable: everything after it would fail for that reason.
        """
        self.send({"table": table, "name": name, "doing": True})
        try:
            if (cells := measure()) is not None:
                self.row(table, name, cells)
        except Exception as error:
            if is_fatal(error):
                raise
            self.send({"table": table, "name": name, **failure(error)})
            return False
        return True

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
        if self.copy_bytes_per_s:
            cells["of copy rate"] = moved_bytes / seconds / self.copy_bytes_per_s
        return cells

    def floor_s(self, moved_bytes: float, flops: float, eight_bits: bool = False) -> float:
        """Seconds that bytes take to move, or arithmetic takes if that is longer, at the measured
        rates; 0 before those are known."""
        rate = self.eight_bit_flops if eight_bits else self.matmul_flops
        if not (rate and self.copy_bytes_per_s):
            return 0.0
        return max(moved_bytes / self.copy_bytes_per_s, flops / rate)

    def free(self) -> None:
        """Gives memory that nothing refers to back to the device."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def is_fatal(error: Exception) -> bool:
    """Whether CUDA refuses every further call of this process after an error of torch or Triton."""
    text = str(error)
    return "CUDA" in text and any(words in text for words in _FATAL)


def summary(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def failure(error: Exception) -> dict[str, Any]:
    """An error as part of a message."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {"error": summary(error), "trace": lines[-15:]}


def main() -> None:
    """A part's process: the function "module:name" of the command line, with its settings."""
    function, settings = sys.argv[1], json.loads(sys.argv[2])
    send = messages()
    try:
        if settings["smoke"]:  # kernels are interpreted, as in tests
            importlib.import_module("tests.interpreted")
        pkgutil.resolve_name(function)(Part(send, **settings))
    except Exception as error:
        send({"table": "", "name": "the whole part", **failure(error)})


if __name__ == "__main__":
    main()
