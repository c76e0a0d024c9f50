"""Compiles kernels for GPUs that need not be here: `python -m baton.engine.ops.triton check`.

Triton and its ptxas make machine code for any architecture. A kernel that does not compile, or asks
for more shared memory than a GPU has, is thus known before it meets one.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from baton.engine.ops import triton as kernels
from baton.engine.ops.triton.spec import CompileCase, KernelSpec

ARCHITECTURES = (80, 90, 100)

# Bytes of shared memory that a program may have (CUDA C++ Programming Guide, compute capabilities).
TENSOR_MEMORY_COLUMNS = 512  # of a Blackwell multiprocessor
_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

_COLUMNS = "{:<20} {:<32} {:>6} {:>9} {:>7} {:>6} {:>6}  {}"


@dataclass(frozen=True)
class Compiled:
    """What came of a case for an architecture.

    registers: of a thread · shared: bytes of a program · spilled: bytes of a thread's local memory,
    for what found no register; registers and spilled are None where cuobjdump is missing ·
    complaint: why it is of no use, or nothing.
    """

    kernel: str
    case: str
    architecture: int
    ms: float
    registers: int | None = None
    shared: int = 0
    spilled: int | None = None
    ptx: str = ""
    complaint: str = ""


def specs_in(names: Iterable[str]) -> list[KernelSpec]:
    """The specs of this package's modules and of further ones, by their names.

    ImportError, or ValueError if a further one has none.
    """
    own = [f"{kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]
    found = []
    for name in own:
        if not name.endswith("__main__"):
            found += _specs_of(importlib.import_module(name))
    for name in names:
        specs = _specs_of(importlib.import_module(name))
        if not specs:
            raise ValueError(f"{name} has neither SPEC nor SPECS")
        found += specs
    return found


def _specs_of(module: ModuleType) -> list[KernelSpec]:
    return [*filter(None, [getattr(module, "SPEC", None)]), *getattr(module, "SPECS", ())]


def spread(cases: Sequence[CompileCase], most: int) -> list[CompileCase]:
    """Up to so many of the cases, the first and others at even distances."""
    count = min(len(cases), most)
    return [cases[index * len(cases) // count] for index in range(count)]


def check(
    specs: Sequence[KernelSpec],
    architectures: Sequence[int],
    say: Callable[[str], None],
    ptx: Path | None = None,
) -> list[Compiled]:
    """Compiles all cases afresh and prints a table of them; what failed has a complaint.

    ptx: a folder for the PTX of each, if it is wanted. RuntimeError where kernels are interpreted.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted and do not compile")
    say(_COLUMNS.format("kernel", "case", "arch", "registers", "shared", "spill", "ms", ""))
    results = []
    with tempfile.TemporaryDirectory(prefix="baton-kernels-") as folder:
        kept, triton.knobs.cache.dir = triton.knobs.cache.dir, folder
        try:
            for spec in specs:
                for case in spec.cases:
                    for architecture in architectures:
                        if architecture >= case.least:
                            result = compiled(spec.name, case, architecture, Path(folder))
                            results.append(result)
                            say(_row(result))
                            if ptx:
                                _keep(result, ptx)
        finally:
            triton.knobs.cache.dir = kept
    return results


def compiled(kernel: str, case: CompileCase, architecture: int, folder: Path) -> Compiled:
    """A case compiled for an architecture such as 90; folder takes what is inspected."""
    begin = time.perf_counter()
    try:
        binary = _compile(case, architecture)
    except Exception as error:  # whatever a compiler raises, others are compiled all the same
        ms = 1e3 * (time.perf_counter() - begin)
        reason = str(error).strip().splitlines() or [""]
        complaint = f"{type(error).__name__}: {reason[-1]}"
        return Compiled(kernel, case.name, architecture, ms, complaint=complaint)
    ms = 1e3 * (time.perf_counter() - begin)
    registers, spilled = _resources(binary.asm["cubin"], folder)
    shared, most = binary.metadata.shared, _SHARED_BYTES.get(architecture)
    complaint = (
        f"needs {shared} bytes of shared memory, of {most}" if most and shared > most else ""
    )
    # Triton compiles what needs more to a trap, and says nothing.
    columns = getattr(binary.metadata, "tmem_size", 0) or 0
    if columns > TENSOR_MEMORY_COLUMNS:
        complaint = f"needs {columns} columns of tensor memory, of {TENSOR_MEMORY_COLUMNS}"
    return Compiled(
        kernel,
        case.name,
        architecture,
        ms,
        registers,
        shared,
        spilled,
        binary.asm["ptx"],
        complaint,
    )


def _compile(case: CompileCase, architecture: int) -> CompiledKernel:
    names = case.fn.arg_names
    if missing := set(names) ^ (set(case.types) | set(case.constexprs)):
        raise TypeError(f"arguments named wrongly or not at all: {', '.join(sorted(missing))}")
    aligned = [name for name, kind in case.types.items() if kind[0] == "*"] + list(case.aligned)
    source = ASTSource(
        fn=case.fn,
        signature={name: case.types.get(name, "constexpr") for name in names},
        constexprs=dict(case.constexprs),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )


def _resources(cubin: bytes, folder: Path) -> tuple[int | None, int | None]:
    """Registers and spilled bytes of a thread, as cuobjdump tells them."""
    file = folder / "inspected.cubin"
    file.write_bytes(cubin)
    try:
        told = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None, None
    found = [re.findall(rf"\b{name}:(\d+)", told) for name in ("REG", "STACK", "LOCAL")]
    registers, stack, local = (max(map(int, numbers), default=0) for numbers in found)
    return registers, stack + local


def _row(result: Compiled) -> str:
    registers, spilled = (
        "-" if number is None else str(number) for number in (result.registers, result.spilled)
    )
    return _COLUMNS.format(
        result.kernel,
        result.case,
        f"sm_{result.architecture}",
        registers,
        result.shared,
        spilled,
        f"{result.ms:.0f}",
        result.complaint,
    ).rstrip()


def _keep(result: Compiled, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", f"{result.kernel} {result.case} sm_{result.architecture}")
    (folder / f"{name}.ptx").write_text(result.ptx, encoding="utf-8")
