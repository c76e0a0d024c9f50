"""Compiles kernels without a GPU: `python -m baton.engine.kernels.triton check`.

Triton and its ptxas make machine code for any architecture, which shows kernels that do not compile
or need more shared memory than a GPU has. A kernel's cases are launched on meta tensors, with the
configurations shipped for the architecture, and take the same path as real launches up to the
compiler. Results are kept in Triton's cache, so a second check is quick.

Launches of served models are also compared with BUDGETS: properties of their machine code that
determine their speed must not get worse.

`compilers` and `compile_target` compile launches ahead in other processes: by itself Triton
compiles on one core, when a kernel is first launched.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.pool import IMapIterator, Pool
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.engine.kernels.triton import launch_configs, sass
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, specs_in, text_of

# Shared memory of a program in bytes, by architecture (CUDA C++ Programming Guide, compute
# capabilities); columns of a Blackwell multiprocessor's tensor memory.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_MEMORY_COLUMNS = 512

LEAST_ROWS = 16  # of a product in Triton

BUDGETS = Path(__file__).with_name("budgets.json")

T = TypeVar("T")
Launched: TypeAlias = list[tuple[str, CompiledKernel, int]]  # function, binary, programs

_COLUMNS = (
    "{function:<22} {target:>6} {registers:>9} {shared:>7} {spill:>6} {programs:>8} {rounds:>6} "
    "{a_weight:>8} {products:>9} {loads:>11} {ms:>6}  {case}"
)
_FEW = 1.0, 1.5  # between these numbers of rounds most of the GPU is idle in the second one


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one launch.

    rounds: programs divided by those that run at once · a_weight: instructions a weight of a thread
    in the loop with the products · products: tensor core instructions in that loop by name · loads:
    its loads by bytes of a thread. The last three are empty without such a loop.
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
        """A line of the table."""
        loads = " ".join(f"{size or 'bulk'}:{n}" for size, n in sorted(self.loads.items()))
        return _COLUMNS.format(**{
            **vars(self), "rounds": f"{self.rounds:.2f}", "ms": f"{self.ms:.0f}", "loads": loads,
            "a_weight": f"{self.a_weight:.2f}" if self.a_weight else "-",
            "products": " ".join(self.products) or "-",
        })  # fmt: skip


def check(
    specs: Sequence[KernelSpec], architectures: Sequence[int], say: Callable[[str], None],
    ptx: Path | None = None, most: int | None = None, served: bool = False,
) -> tuple[int, list[str]]:  # fmt: skip
    """Compiles all cases and prints a table: the number of launches, and complaints about failures.

    ptx: a folder for the PTX of each launch · most: maximum number of cases of a kernel, evenly
    chosen · served: compile the shapes of served models, and compare them with their budgets.

    Raises RuntimeError where kernels are interpreted. Triton keeps the driver set here: this
    process cannot launch kernels afterwards.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted and do not compile")
    if "TRITON_CACHE_DIR" not in os.environ:
        triton.knobs.cache.dir = str(launch_configs.cache_folder() / "compiled")
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
        except Exception as error:  # the other launches are compiled all the same
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
    """Properties of a launch that are worse than in the first budget that matches its shape.

    Of a budget: a_weight, spill: maxima · products: required kind · loads: minimum width in bytes,
    except for `narrow` of them, such as scales · second_round: allow slightly more than one round.
    """
    for when, budget in budgets:
        if any(shape.get(name) != value for name, value in when.items()):
            continue
        found = [
            f"{name} is {getattr(one, name):.2f}, more than {budget[name]}"
            for name in ("a_weight", "spill")
            if getattr(one, name) > budget.get(name, math.inf)
        ]
        if (kind := budget.get("products", "")) and kind not in one.products:
            found.append(f"no {kind} in its loop")
        width, most = budget.get("loads", 0), budget.get("narrow", 0)
        narrow = sum(count for size, count in one.loads.items() if 0 < size < width)
        if narrow > most:
            found.append(f"{narrow} loads of less than {width} bytes, more than {most}")
        if _FEW[0] < one.rounds < _FEW[1] and not budget.get("second_round"):
            found.append(f"{one.rounds:.2f} rounds: most of a GPU is idle in the second")
        return found
    return []


def _compiled(
    spec: KernelSpec, shape: Key, architecture: int, launched: Launched
) -> Iterator[Compiled]:
    """Compiles a case for an architecture such as 90: each kernel that it launches."""
    launch_configs.forget()
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
        # A kernel that needs more columns compiles to a trap, without an error.
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


class Target(NamedTuple):
    """A launch to compile. capability: such as 90 · module: of the spec, if not one of ours."""

    kernel: str
    shape: Key
    capability: int
    config: Config | None = None
    module: str = ""


@contextmanager
def compilers(count: int = 0) -> Iterator[Pool]:
    """Processes for `compile_target`: one a core, or `count`. They are killed at the end."""
    # Where launches look, which is not where `check` keeps what it compiles.
    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)
    with multiprocessing.get_context("spawn").Pool(count or len(os.sched_getaffinity(0))) as pool:
        yield pool


def compile_target(target: Target) -> str:
    """Compiles a launch and its launcher; why it does not compile, or nothing."""
    modules = [target.module] if target.module else []
    spec = next(one for one in specs_in(modules) if one.name == target.kernel)
    run = JITFunction.run

    def trial(shape: Key, device: torch.device) -> Any:
        return SimpleNamespace(run=lambda _: spec.trial(shape, device).run(target.config))

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        binary = run(self, *args, **kwargs)
        if hasattr(nvidia, "make_launcher"):  # before Triton 3.7: in C, one for each signature
            with suppress(Exception):  # without a C compiler or CUDA's library no launch will work
                nvidia.CudaLauncher(binary.src, binary.metadata)
        return binary

    JITFunction.run = compiled
    try:
        one = KernelSpec(target.kernel, trial, [target.shape])
        _, complaints = check([one], [target.capability], lambda line: None)
    finally:
        JITFunction.run = run  # `check` replaces it, too
    return complaints[0] if complaints else ""


def results_until(end: float, results: IMapIterator[T]) -> Iterator[T]:
    """Results of a pool's `imap` that come before `end`, by time.monotonic()."""
    with suppress(StopIteration, multiprocessing.TimeoutError):
        while True:
            yield results.next(max(0.0, end - time.monotonic()))
