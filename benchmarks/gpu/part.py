"""A part of `make gpu`: a process, started by `run.py`, that measures and sends messages.

Messages: a row of a table, `{"table", "name", "cells"}`; a `note` on a table; an `error` with its
traceback; `progress` of a row; and `doing`, which names the present row in case the process dies.
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

# Errors after which, by CUDA's documentation, "the process must be terminated and relaunched".
# After others, such as a refused launch or an unsupported cuBLAS product, the part goes on.
_FATAL = (
    "illegal memory access", "illegal instruction", "misaligned address", "address space",
    "invalid program counter", "hardware stack error", "device-side assert", "launch failure",
    "the launch timed out", "uncorrectable",
)  # fmt: skip


@dataclass
class Part:
    """State and helpers of a part, which begins no new row after `seconds`.

    send: sends a message · smoke: dry run on the CPU with tiny sizes and interpreted kernels ·
    copy_bytes_per_s, matmul_flops, eight_bit_flops: measured ceilings of the device, copies
    counting bytes read and written; 0 before they are measured · step_ms: duration of measured
    decode steps by title · json: file for the figures, or empty.
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
        """Raises RuntimeError if there is no GPU."""
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
        """Whether it runs on a GPU; if not, it is a dry run."""
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return max(0.0, self._end - time.monotonic())

    @property
    def late(self) -> bool:
        """Whether no time is left."""
        return not self.left

    @property
    def capability(self) -> int:
        """The device's compute capability, as 90 for 9.0; 90 in a dry run."""
        return compute_capability(self.device)

    @cached_property
    def has_fp8(self) -> bool:
        """Whether the device supports float8_e4m3fn, as Triton's interpreter does."""
        return self.capability >= 89

    @property
    def models(self) -> list[Shape]:
        """Shapes of the models to measure."""
        return [GPU_SHAPES[name] for name in (("smoke",) if self.smoke else self.shapes)]

    def sized(self, full: T, smoke: T) -> T:
        """`smoke` in a dry run, else `full`."""
        return smoke if self.smoke else full

    def row(self, table: str, name: str, cells: Cells) -> None:
        self.send({"table": table, "name": name, "cells": cells})

    def note(self, table: str, text: str) -> None:
        self.send({"table": table, "note": text})

    def attempt(self, table: str, name: str, measure: Callable[[], Cells | None]) -> bool:
        """Sends the row that `measure` returns, if any, or its failure; returns whether it
        succeeded.

        Raises errors that leave the device unusable, since everything after them would fail.
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
        """Attempts cases in order while time is left; a note names the others."""
        left_out = []
        for name, measure in cases:
            if self.late:
                left_out.append(name)
            else:
                self.attempt(table, name, measure)
        if left_out:
            self.note(table, f"left out, no time: {', '.join(left_out)}")
        self.free()

    def of_copy(self, moved_bytes: float, seconds: float) -> Cells:
        """A rate, also as a share of the copy rate."""
        cells: Cells = {"GB/s": moved_bytes / seconds / 1e9}
        if self.copy_bytes_per_s:
            cells["of copy rate"] = moved_bytes / seconds / self.copy_bytes_per_s
        return cells

    def floor_s(self, moved_bytes: float, flops: float, eight_bits: bool = False) -> float:
        """Minimum seconds to move the bytes, or to compute if that takes longer, at the measured
        ceilings; 0 before these are measured."""
        rate = self.eight_bit_flops if eight_bits else self.matmul_flops
        if not (rate and self.copy_bytes_per_s):
            return 0.0
        return max(moved_bytes / self.copy_bytes_per_s, flops / rate)

    def free(self) -> None:
        """Returns unreferenced memory to the GPU."""
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()


def is_fatal(error: Exception) -> bool:
    """Whether CUDA refuses all further calls of this process after this error."""
    text = str(error)
    return "CUDA" in text and any(words in text for words in _FATAL)


def summary(error: BaseException) -> str:
    """One line of text for an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def failure(error: Exception) -> dict[str, Any]:
    """Fields of a message for an error."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {"error": summary(error), "trace": lines[-15:]}


def main() -> None:
    """Runs the function "module:name" of the command line with the part's settings."""
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
