"""Compiles kernels for GPUs that need not be here: `python -m baton.engine.kernels.triton check`.

Triton and its ptxas make machine code for any architecture. A kernel that does not compile, or
needs more shared memory than a GPU has, is thus known before it runs on one. Launches of a kernel's
cases on meta tensors, with the configurations shipped for the architecture, take the same way as
real ones up to the compiler; results are kept in Triton's cache, so that a second check is quick.

The launches of models as they are served are held to BUDGETS besides: what their machine code says
of their speed may get better, not worse.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.engine.kernels.triton import sass, tuning
from baton.engine.kernels.triton.kernel_spec import KernelSpec, Key, text_of

# Bytes of shared memory that a program may have, by architecture (CUDA C++ Programming Guide,
# compute capabilities); and columns of a Blackwell multiprocessor's tensor memory.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_MEMORY_COLUMNS = 512

LEAST_ROWS = 16  # that Triton multiplies at once

BUDGETS = Path(__file__).with_name("budgets.json")

Launched: TypeAlias = list[tuple[str, CompiledKernel, int]]  # function, binary, programs

_COLUMNS = (
    "{function:<22} {target:>6} {registers:>9} {shared:>7} {spill:>6} {programs:>8} {rounds:>6} "
    "{a_weight:>8} {products:>9} {loads:>11} {ms:>6}  {case}"
)
_FEW = 1.0, 1.5  # rounds between which most of the GPU waits for the programs of the second one


@dataclass(frozen=True)
class Compiled:
    """A kernel as it was compiled for one launch.

    rounds: its programs by those that run at once · a_weight: instructions of a thread in the loop
    that multiplies, for each weight that it multiplies by · products: of tensor cores there, by
    name · loads: there, by bytes of a thread. Without such a loop they are empty.
    """

    function: str
    target: str
    case: str
    registers: int
    shared: int
    spill: int
    programs: int
    rounds: float
    a_weight: float
    products: Counter[str]
    loads: Counter[int]
    ms: float
    ptx: str
    complaint: str = ""

    def line(self) -> str:
        """As the table has it."""
        loads = " ".join(f"{size or 'bulk'}:{n}" for size, n in sorted(self.loads.items()))
        return _COLUMNS.format(**{
            **vars(self), "rounds": f"{self.rounds:.2f}", "ms": f"{self.ms:.0f}", "loads": loads,
            "a_weight": f"{self.a_weight:.2f}" if self.a_weight else "-",
            "products": " ".join(self.products) or "-",
        })  # fmt: skip


def check(
    specs: Sequence[KernelSpec],
    architectures: Sequence[int],
    say: Callable[[str], None],
    ptx: Path | None = None,
    most: int | None = None,
    served: bool = False,
) -> tuple[int, list[str]]:
    """Compiles all cases and prints a table of them: how many, and complaints about what failed.

    ptx: a folder for the PTX of each, if it is wanted · most: so many cases of a kernel, the first
    and others at even distances · served: the shapes of models as they are served instead, which
    are held to their budgets. RuntimeError where kernels are interpreted. Triton keeps the driver
    that it is given here: this process can launch nothing afterwards.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted and do not compile")
    if "TRITON_CACHE_DIR" not in os.environ:
        triton.knobs.cache.dir = str(tuning.cache_folder() / "compiled")
    run, launched = JITFunction.run, Launched()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binary = run(self, *args, grid=grid, warmup=True, **kwargs)
        sizes = grid(kwargs) if callable(grid) else grid
        launched.append((self.__name__, binary, math.prod(sizes)))

    JITFunction.run = compile_only
    names = ("function", "target", "registers", "shared", "spill", "programs", "rounds", "products",
             "loads", "ms", "case")  # fmt: skip
    say(f"{'kernel':<18} " + _COLUMNS.format(a_weight="a weight", **{name: name for name in names}))
    work = [
        (spec, shape, architecture)
        for spec in specs
        for cases in [list(spec.shapes if served else spec.cases)]
        for shape in cases[:: -(-len(cases) // (most or len(cases) or 1)) or 1]
        for architecture in architectures
        if architecture >= int(shape.get("least", 80))
    ]
    budgets = json.loads(BUDGETS.read_text(encoding="utf-8")) if served else {}
    total, complaints = 0, []
    for spec, shape, architecture in work:
        case, target = text_of(shape), f"sm_{architecture}"
        try:
            every = list(_compiled(spec, shape, architecture, launched))
        except Exception as error:  # whatever a compiler raises, others are compiled all the same
            lines = str(error).strip().splitlines() or [""]
            complaint = f"{type(error).__name__}: {lines[-1]}"
            say(f"{spec.name:<18} - {target} {case} {complaint}")
            complaints.append(f"{spec.name} ({case}) for {target}: {complaint}")
            total += 1
            continue
        for one in every:
            total += 1
            found = [one.complaint] if one.complaint else []
            if served:
                found += over_budget(one, shape, budgets.get(target, {}).get(one.function, ()))
            say(" ".join([f"{spec.name:<18}", one.line(), *found]))
            if found:
                complaints.append(f"{spec.name} ({case}) for {target}: {'; '.join(found)}")
            if ptx and not found:
                name = re.sub(r"\W+", "-", f"{spec.name} {case} {one.function} {target}")
                ptx.mkdir(parents=True, exist_ok=True)
                (ptx / f"{name}.ptx").write_text(one.ptx, encoding="utf-8")
    return total, complaints


def over_budget(
    one: Compiled, shape: Key, budgets: Sequence[tuple[Key, Mapping[str, Any]]]
) -> list[str]:
    """What of a launch is worse than the first budget for shapes like it allows.

    a_weight, spill: at most · products: of that kind · loads: of so many bytes, but for so many
    `narrow` ones, as of scales · rounds: one at most, or many, unless `second_round` is true.
    """
    for when, budget in budgets:
        if any(shape.get(name) != value for name, value in when.items()):
            continue
        found = [
            f"{name} is {getattr(one, name):.2f}, at most {budget[name]} was wanted"
            for name in ("a_weight", "spill")
            if getattr(one, name) > budget.get(name, math.inf)
        ]
        if (kind := budget.get("products", "")) and kind not in one.products:
            found.append(f"no {kind} in its loop")
        width, most = budget.get("loads", 0), budget.get("narrow", 0)
        narrow = sum(count for size, count in one.loads.items() if 0 < size < width)
        if narrow > most:
            found.append(f"{narrow} loads of less than {width} bytes, at most {most} was wanted")
        if _FEW[0] < one.rounds < _FEW[1] and not budget.get("second_round"):
            found.append(f"{one.rounds:.2f} rounds: most of a GPU waits in the second")
        return found
    return []


def _compiled(
    spec: KernelSpec, shape: Key, architecture: int, launched: Launched
) -> Iterator[Compiled]:
    """A case compiled for an architecture such as 90: each kernel that it launches."""
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
    trial = spec.trial(shape, torch.device("meta"))
    trial.run(None)
    ms = 1e3 * (time.perf_counter() - begin)
    for function, binary, programs in launched:
        cubin, metadata = binary.asm["cubin"], binary.metadata
        used, shared, warps = sass.resources(cubin), metadata.shared, metadata.num_warps
        # Triton compiles what needs more columns to a trap, and says nothing.
        columns, complaint = getattr(metadata, "tmem_size", 0) or 0, ""
        if shared > (most := SHARED_BYTES.get(architecture, shared)):
            complaint = f"needs {shared} bytes of shared memory, of {most}"
        elif columns > TENSOR_MEMORY_COLUMNS:
            complaint = f"needs {columns} columns of tensor memory, of {TENSOR_MEMORY_COLUMNS}"
        processor = sass.PROCESSORS.get(architecture, sass.PROCESSORS[90])
        places = processor.places(used.registers, shared, warps)
        loop = sass.NO_LOOP
        if "mma" in binary.asm["ptx"]:
            loop = max(sass.loops(cubin), key=lambda one: one.multiplied, default=loop)
        rows = max(int(getattr(trial, "key", {}).get("rows", 0)), LEAST_ROWS)  # of a tile
        a_weight = 32 * loop.instructions * rows / loop.multiplied if loop.multiplied else 0.0
        yield Compiled(
            function, f"sm_{architecture}", text_of(shape), used.registers, shared, used.spilled,
            programs, programs / places if places else math.inf, a_weight, loop.products,
            loop.loads if loop.multiplied else Counter(), ms, binary.asm["ptx"], complaint,
        )  # fmt: skip
