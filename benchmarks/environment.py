"""The machine, where the other engines are installed, and the options of all benchmarks."""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import checkpoint
from benchmarks.shapes import SHAPES

PAGE = "docs/comparison.md"
T = TypeVar("T")


def say(line: str) -> None:
    """How a long run goes."""
    print(line, file=sys.stderr, flush=True)


class Missing(Exception):
    """An engine that is not installed."""


@dataclass(frozen=True)
class Rivals:
    """A virtual environment with the others' packages, and a build of llama.cpp if there is one."""

    venv: Path | None = None
    llama_cpp: Path | None = None  # the directory with libllama.so and llama-server

    @property
    def python(self) -> str:
        """Its interpreter; ours without such an environment, where imports then show what lacks."""
        return str(self.venv / "bin" / "python") if self.venv else sys.executable

    @property
    def preload(self) -> str:
        """What vLLM's manual wants in LD_PRELOAD on a CPU, as far as it is installed."""
        found = [*map(str, self.venv.glob("lib/libiomp5.so"))] if self.venv else []
        tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
        return ":".join([*found, tcmalloc] if tcmalloc else found)

    def need(self, module: str) -> None:
        """Raises Missing where the interpreter does not have a module."""
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        if subprocess.run([self.python, "-c", code], check=False).returncode:
            which = "" if self.venv else " (--rivals names no environment)"
            raise Missing(f"no module {module}{which}; {PAGE} tells how to install it")


def cores() -> tuple[int, ...]:
    """Those this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def machine(cpus: Sequence[int], threads: int) -> dict[str, Any]:
    """Processor, cores, and how busy the machine was before: no result means much without it."""
    names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "processor": names[0] if names else platform.machine(),
        "system": platform.platform(),
        "cpus": list(cpus),
        "threads": threads,
        "load_before": round(os.getloadavg()[0], 2),
    }


def rotated(names: Sequence[T], round_: int) -> list[T]:
    """Who begins changes with each round: a machine that slows down favours none."""
    began = round_ % max(1, len(names))
    return [*names[began:], *names[:began]]


def write(file: Path | None, report: dict[str, Any]) -> None:
    """The report as JSON, where `--json` names a file."""
    if file:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of both comparisons."""
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="M", help="default: M")
    add("--rivals", type=_directory, metavar="VENV", help="virtual environment with the others")
    add("--llama-cpp", type=_directory, metavar="DIR", help="with libllama and llama-server")
    add("--cache", type=Path, default=checkpoint.default_cache(), metavar="DIR", help="of models")
    add("--cpus", type=_cpus, default=cores()[:2], metavar="N,N", help="default: the first two")
    add("--json", type=Path, metavar="FILE", help="write all results there")


def names(known: Container[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes some of `known`, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is not known")
        return found

    return parse


def _directory(text: str) -> Path | None:
    """None of an empty text, so that a Makefile may pass a variable that is not set."""
    path = Path(text).expanduser().absolute()
    if text and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    return path if text else None


def _cpus(text: str) -> tuple[int, ...]:
    cpus = tuple(sorted({int(part) for part in text.split(",")}))
    if missing := set(cpus) - set(cores()):
        raise argparse.ArgumentTypeError(f"core {min(missing)} is not for this process")
    return cpus
