"""Compiles kernels for GPUs that need not be here: `python -m baton.engine.ops.triton check`.

Triton and its ptxas make machine code for any architecture. A kernel that does not compile, or
needs more shared memory than a GPU has, is thus known before it runs on one. Launches of a kernel's
cases on meta tensors, with the configurations shipped for the architecture, take the same way as
real ones up to the compiler; results are kept in Triton's cache, so that a second check is quick.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.engine.ops.triton import tuning
from baton.engine.ops.triton.spec import KernelSpec, Key, text_of

# Bytes of shared memory that a program may have, by architecture (CUDA C++ Programming Guide,
# compute capabilities); and columns of a Blackwell multiprocessor's tensor memory.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_MEMORY_COLUMNS = 512

_COLUMNS = "{:<18} {:<22} {:>6} {:>9} {:>7} {:>6} {:>6}  {}  {}"


def check(
    specs: Sequence[KernelSpec],
    architectures: Sequence[int],
    say: Callable[[str], None],
    ptx: Path | None = None,
    most: int | None = None,
) -> tuple[int, list[str]]:
    """Compiles all cases and prints a table of them: how many, and complaints about what failed.

    ptx: a folder for the PTX of each, if it is wanted · most: so many cases of a kernel, the first
    and others at even distances. RuntimeError where kernels are interpreted. Triton keeps the
    driver that it is given here: this process can launch nothing afterwards.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted and do not compile")
    if "TRITON_CACHE_DIR" not in os.environ:
        triton.knobs.cache.dir = str(tuning.cache_folder() / "compiled")
    run, launched = JITFunction.run, list[tuple[str, CompiledKernel]]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append((self.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = compile_only
    say(_COLUMNS.format("kernel", "", "arch", "registers", "shared", "spill", "ms", "case", ""))
    work = [
        (spec, shape, architecture)
        for spec in specs
        for shape in spec.cases[:: -(-len(spec.cases) // (most or len(spec.cases)))]
        for architecture in architectures
        if architecture >= int(shape.get("least", 80))
    ]
    total, complaints = 0, []
    for spec, shape, architecture in work:
        case, target = text_of(shape), f"sm_{architecture}"
        for function, figures, complaint, text in _compiled(spec, shape, architecture, launched):
            say(_COLUMNS.format(spec.name, function, target, *figures, case, complaint).rstrip())
            total += 1
            if complaint:
                complaints.append(f"{spec.name} ({case}) for {target}: {complaint}")
            elif ptx:
                name = re.sub(r"\W+", "-", f"{spec.name} {case} {function} {target}")
                ptx.mkdir(parents=True, exist_ok=True)
                (ptx / f"{name}.ptx").write_text(text, encoding="utf-8")
    return total, complaints


def _compiled(
    spec: KernelSpec, shape: Key, architecture: int, launched: list[tuple[str, CompiledKernel]]
) -> Iterator[tuple[str, tuple[object, ...], str, str]]:
    """A case compiled for an architecture such as 90, each kernel that it launches: its function;
    registers, shared bytes, spilled bytes and ms; why it cannot run, or empty; and its PTX.
    """
    tuning.forget()
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: architecture,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        )
    )
    launched.clear()
    begin = time.perf_counter()
    try:
        spec.trial(shape, torch.device("meta")).run(None)
    except Exception as error:  # whatever a compiler raises, others are compiled all the same
        lines = str(error).strip().splitlines() or [""]
        yield "-", ("-", "-", "-", "-"), f"{type(error).__name__}: {lines[-1]}", ""
        return
    ms = f"{1e3 * (time.perf_counter() - begin):.0f}"
    for function, binary in launched:
        registers, spilled = _resources(binary.asm["cubin"])
        # Triton compiles what needs more columns to a trap, and says nothing.
        shared, columns = binary.metadata.shared, getattr(binary.metadata, "tmem_size", 0) or 0
        complaint = ""
        if shared > (most := SHARED_BYTES.get(architecture, shared)):
            complaint = f"needs {shared} bytes of shared memory, of {most}"
        elif columns > TENSOR_MEMORY_COLUMNS:
            complaint = f"needs {columns} columns of tensor memory, of {TENSOR_MEMORY_COLUMNS}"
        yield function, (registers, shared, spilled, ms), complaint, binary.asm["ptx"]


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as Triton's cuobjdump reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
    registers, stack, local = (
        max(map(int, re.findall(rf"\b{name}:(\d+)", usage)), default=0)
        for name in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local
