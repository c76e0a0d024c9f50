"""Compiles kernels for GPUs that need not be here: `python -m baton.engine.ops.triton check`.

Triton and its ptxas make machine code for any architecture. A kernel that does not compile, or
needs more shared memory than a GPU has, is thus known before it runs on one. Launches of a kernel's
cases on meta tensors take the same way as real ones up to the compiler, which then compiles what a
worker would launch; results are kept in Triton's cache, so that a second check is quick.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.engine.ops import triton as kernels
from baton.engine.ops.triton.tuning import cache_folder

ARCHITECTURES = (80, 90, 100)

# Bytes of shared memory that a program may have (CUDA C++ Programming Guide, compute capabilities).
_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_MEMORY_COLUMNS = 512  # of a Blackwell multiprocessor

_COLUMNS = "{:<18} {:<22} {:>6} {:>9} {:>7} {:>6} {:>6}  {}  {}"


Launch: TypeAlias = Callable[[torch.device], object]
"""Launches a kernel on tensors that it makes on a device."""


class Compilable(Protocol):
    """A kernel's name and its cases."""

    @property
    def name(self) -> str:
        """Of the kernel."""

    @property
    def launches(self) -> Mapping[str, tuple[int, Launch]]:
        """By the case's name, with the compute capability that it needs, 80 for sm_80."""


@dataclass(frozen=True)
class Compiled:
    """What came of a case for an architecture.

    function: of the kernel · registers: of a thread · shared: bytes of a program · spilled: bytes
    of a thread's local memory, for what found no register; registers and spilled are None where
    cuobjdump is missing · complaint: why it cannot run, or empty.
    """

    kernel: str
    case: str
    architecture: int
    ms: float
    function: str = "-"
    registers: int | None = None
    shared: int = 0
    spilled: int | None = None
    ptx: str = ""
    complaint: str = ""

    def __str__(self) -> str:
        registers, spilled = (
            "-" if number is None else str(number) for number in (self.registers, self.spilled)
        )
        return _COLUMNS.format(
            self.kernel, self.function, f"sm_{self.architecture}", registers,
            self.shared, spilled, f"{self.ms:.0f}", self.case, self.complaint,
        ).rstrip()  # fmt: skip


def specs_in(names: Iterable[str]) -> list[Any]:
    """The specs of this package's modules and of further ones, by their names.

    ImportError, or ValueError if a further one has none.
    """
    own = [f"{kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]
    found = []
    for name in [*(name for name in own if not name.endswith("__main__")), *names]:
        module = importlib.import_module(name)
        specs = [*filter(None, [getattr(module, "SPEC", None)]), *getattr(module, "SPECS", ())]
        if not specs and name not in own:
            raise ValueError(f"{name} has neither SPEC nor SPECS")
        found += specs
    return found


def check(
    specs: Sequence[Compilable],
    architectures: Sequence[int],
    say: Callable[[str], None],
    ptx: Path | None = None,
    most: int | None = None,
) -> list[Compiled]:
    """Compiles all cases and prints a table of them; what failed has a complaint.

    ptx: a folder for the PTX of each, if it is wanted · most: so many cases of a kernel, the first
    and others at even distances. RuntimeError where kernels are interpreted.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted and do not compile")
    say(_COLUMNS.format("kernel", "", "arch", "registers", "shared", "spill", "ms", "case", ""))
    results = []
    for spec in specs:
        cases = list(spec.launches.items())
        count = min(len(cases), most or len(cases))
        for name, (least, launch) in (cases[at * len(cases) // count] for at in range(count)):
            for architecture in (one for one in architectures if one >= least):
                for result in compiled(spec.name, name, launch, architecture):
                    results.append(result)
                    say(str(result))
                    if ptx:
                        _keep(result, ptx)
    return results


def compiled(kernel: str, case: str, launch: Launch, architecture: int) -> list[Compiled]:
    """A case compiled for an architecture such as 90: a result for each kernel that it launches."""
    begin = time.perf_counter()
    try:
        with _compiling_only(architecture) as launched:
            launch(torch.device("meta"))
    except Exception as error:  # whatever a compiler raises, others are compiled all the same
        ms = 1e3 * (time.perf_counter() - begin)
        lines = str(error).strip().splitlines() or [""]
        complaint = f"{type(error).__name__}: {lines[-1]}"
        return [Compiled(kernel, case, architecture, ms, complaint=complaint)]
    ms = 1e3 * (time.perf_counter() - begin)
    results = []
    for function, binary in launched:
        registers, spilled = _resources(binary.asm["cubin"])
        shared, most = binary.metadata.shared, _SHARED_BYTES.get(architecture)
        complaint = ""
        if most and shared > most:
            complaint = f"needs {shared} bytes of shared memory, of {most}"
        # Triton compiles what needs more to a trap, and says nothing.
        columns = getattr(binary.metadata, "tmem_size", 0) or 0
        if columns > TENSOR_MEMORY_COLUMNS:
            complaint = f"needs {columns} columns of tensor memory, of {TENSOR_MEMORY_COLUMNS}"
        results.append(
            Compiled(
                kernel, case, architecture, ms, function, registers, shared, spilled,
                binary.asm["ptx"], complaint,
            )
        )  # fmt: skip
        ms = 0.0
    return results


@contextmanager
def _compiling_only(architecture: int) -> Iterator[list[tuple[str, CompiledKernel]]]:
    """Has launches compile for an architecture and end there; gives (function, binary) of each.

    Triton keeps the driver that it is given here: this process can launch nothing afterwards.
    """
    launched: list[tuple[str, CompiledKernel]] = []
    run, cache = JITFunction.run, triton.knobs.cache.dir

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append((self.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    if "TRITON_CACHE_DIR" not in os.environ:
        triton.knobs.cache.dir = str(cache_folder() / "compiled")
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: architecture,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        )
    )
    JITFunction.run = compile_only
    try:
        yield launched
    finally:
        JITFunction.run = run
        triton.knobs.cache.dir = cache


def _resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers and spilled bytes of a thread, as cuobjdump reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            usage = subprocess.run(
                [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
                capture_output=True, text=True, check=True, timeout=60,
            ).stdout  # fmt: skip
        except (OSError, RuntimeError, subprocess.SubprocessError):
            return None, None
    found = [re.findall(rf"\b{name}:(\d+)", usage) for name in ("REG", "STACK", "LOCAL")]
    registers, stack, local = (max(map(int, numbers), default=0) for numbers in found)
    return registers, stack + local


def _keep(result: Compiled, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{result.kernel} {result.case} {result.function} sm_{result.architecture}"
    name = re.sub(r"\W+", "-", name)
    (folder / f"{name}.ptx").write_text(result.ptx, encoding="utf-8")
