"""Parts "machine", "kernels", "speed" and "tune": what the device can do at best, kernels against
their references, rates of kernels, and tuning. Shapes are those of an 8B model.

Trials, timing, compiling ahead and tuning are those of `python -m baton.engine.kernels.triton`.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from multiprocessing.pool import IMapIterator, Pool
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from baton.engine.backends.gpu.linear import GpuWeight, prepare
from baton.engine.kernels.torch.row_quantization import FP8
from baton.engine.kernels.triton import launch_configs, timing, tuning
from baton.engine.kernels.triton.check import Target, compile_target, compilers, results_until
from baton.engine.kernels.triton.row_quantization import QuantizedRows, quantize_rows
from baton.engine.kernels.triton.specs import Key, error_of, small, specs_in, text_of
from baton.engine.quantization.fp8 import Fp8BlockWeight
from baton.engine.quantization.int4 import Int4Weight
from baton.engine.quantization.linear_weight import DenseWeight, LinearWeight
from baton.engine.quantization.mxfp4 import Mxfp4Weight
from baton.worker import nvidia_smi
from benchmarks.gpu.part import Case, Cells, Part, is_fatal
from benchmarks.gpu.run import run_part

TABLE = "kernels against their references"
BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 4096, 16384)
PROMPTS = ((512, 0), (2048, 0), (8192, 0), (2048, 8192))  # tokens, tokens before them
_GROWING = ("rows", "batch", "context", "tokens", "blocks")  # sizes that correctness varies
_OF_MEMORY = 0.3  # share of free memory for a pool, and as much again for torch's K and V
TORCH_ATTENTION = {
    "of flash": SDPBackend.FLASH_ATTENTION, "of cuDNN": SDPBackend.CUDNN_ATTENTION
}  # fmt: skip
# Matrices of a layer, outputs x inputs: gate and up, down, q k v, o.
MATRICES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
FORMATS = ("bf16", "fp8", "int8", "int4", "fp8 in blocks", "AWQ", "MXFP4")
_QUANTIZATIONS = ("fp8", "int8", "int4")  # as `--quantization` names them
_EIGHT_BITS = ("fp8", "int8")  # formats whose rows are quantised, too
GROUPS = {"fp8 in blocks": 128, "AWQ": 128, "MXFP4": 32}  # inputs that share a scale
_PRODUCT_ROWS = (1, 4, 16, 64, 256, 2048)
_MOVED = 512 << 20  # bytes of the blocks to move
# Names of nvidia-smi; of the reasons first the name of drivers since 535.
_CLOCKS = {
    "SM MHz": "clocks.sm", "memory MHz": "clocks.mem", "degrees C": "temperature.gpu",
    "W": "power.draw",
}  # fmt: skip
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_REASON_BITS = {  # NVML's nvmlClocksEventReasons
    0x1: "idle", 0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown",
    0x10: "sync boost", 0x20: "thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip
_COMPILED = "kernels compiled"
_SMI_S = 10.0
_COMPILING, _SANITIZING = 0.4, 0.3  # shares of the time left
SANITIZER, _SANITIZER_S = "compute-sanitizer", 30.0  # seconds for the last launch
_BLOCKS = "kvtransfer.kernels.copy_and_checksum"
KernelCase: TypeAlias = tuple[str, str, Key]  # name of the row, kernel, shape


def specs() -> dict[str, Any]:
    """The specs of all kernels by name."""
    return {spec.name: spec for spec in specs_in([_BLOCKS])}


def machine(part: Part) -> None:
    """The device, its ceilings (a large copy, read and product), and its clocks meanwhile."""
    device, smoke, about = part.device, part.smoke, device_of(part)
    part.row("machine", "device", about)
    nbytes, size = (1 << 20, 64) if smoke else (1 << 30, 8192)
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    # Random: zeros take less power and allow a higher clock.
    left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device=device).unbind()
    if has_smi := "driver" in about:
        part.attempt("clocks", "before", partial(_clocks, part))
    # In a graph a copy may be a copy engine's, which is slower than torch's kernel.
    copy_s = timing.seconds([lambda: target.copy_(source)], device, captured=False)
    values = source.view(torch.float32)
    read_s = min(timing.seconds([read], device) for read in (values.sum, values.amax))
    product = torch.empty_like(left)
    matmul_s = timing.seconds([lambda: torch.mm(left, right, out=product)], device)
    eight = prepare(DenseWeight(right), False, "fp8" if part.has_fp8 else "int8")
    rows = _rows_for(eight, left)
    eight_s = timing.seconds([lambda: eight.apply(rows)], device)
    rates: Cells = {
        "copy GB/s": 2e-9 * nbytes / copy_s,
        "read GB/s": 1e-9 * nbytes / read_s,
        "matmul TFLOP/s": 2e-12 * size**3 / matmul_s,
        "8-bit TFLOP/s": 2e-12 * size**3 / eight_s,
    }
    part.row("ceilings", "measured", rates)
    if has_smi:
        for _ in range(part.sized(600, 1)):  # a second of work: nvidia-smi takes part of one
            torch.mm(left, right, out=product)
        part.attempt("clocks", "during products", partial(_clocks, part))


def device_of(part: Part) -> Cells:
    """The device, and versions of the software on it."""
    device = part.device
    about: Cells = {"name": f"{device} ({platform.machine()})"}
    if part.cuda:
        gpu = torch.cuda.get_device_properties(device)
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
        about = {
            "name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}",
            "memory": f"{gpu.total_memory / 2**30:.0f} GiB",
            "SMs": str(gpu.multi_processor_count), "L2": f"{gpu.L2_cache_size / 2**20:.0f} MiB",
            "CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl)),
        }  # fmt: skip
    if driver := _smi(part, "driver_version"):
        (about["driver"],) = driver
    else:
        part.note("clocks", "no nvidia-smi")
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {**about, **versions, "python": platform.python_version()}


def _smi(part: Part, *fields: str) -> list[str]:
    """Fields of nvidia-smi for the device; empty where they cannot be had."""
    gpu = torch.cuda.get_device_properties(part.device) if part.cuda else None
    return nvidia_smi.query(fields, _SMI_S, f"GPU-{gpu.uuid}" if gpu else "")


def _clocks(part: Part) -> Cells:
    """Clocks, temperature and power now, and the reasons that limit the clocks."""
    found = (_smi(part, *_CLOCKS.values(), reason) for reason in _REASONS)
    if (answer := next(filter(None, found), None)) is None:
        raise RuntimeError("nvidia-smi does not answer")
    *values, reasons = answer
    cells: Cells = {
        name: float(value) if value.replace(".", "", 1).isdigit() else value
        for name, value in zip(_CLOCKS, values, strict=True)
    }
    if reasons.startswith("0x"):
        active = [text for bit, text in _REASON_BITS.items() if int(reasons, 16) & bit]
        reasons = " and ".join(active) or "nothing"
    return {**cells, "held back by": reasons}


def _pool(part: Part) -> AbstractContextManager[Pool]:
    return compilers(part.sized(0, 1))


def _compiled(part: Part, launches: Sequence[tuple[str, Key]]) -> Cells:
    """Compiles launches ahead, within a share of the time. Raises ValueError if one fails."""
    began, complaints, done = time.monotonic(), list[str](), 0
    targets = [Target(*launch, part.capability, None, _BLOCKS) for launch in launches]
    with _pool(part) as pool:
        results = pool.imap_unordered(compile_target, targets)
        end = began + _COMPILING * part.left
        for done, complaint in enumerate(results_until(end, results), 1):
            complaints += [complaint] if complaint else []
            if done % 50 == 0 or done == len(targets):
                progress = f"{done} of {len(targets)}"
                part.send({"table": _COMPILED, "name": "at once", "progress": progress})
    if complaints:
        raise ValueError(f"{len(complaints)} of {done} fail: {'; '.join(complaints)}")
    return {"launches": len(targets), "compiled": done, "s": time.monotonic() - began}


def correctness(part: Part) -> None:
    """A row for each case of each kernel: its largest error over random sizes and inputs.

    All are compiled first. Then follow the first size of every case, small sizes of all under
    compute-sanitizer, the second size of every case, and so on while there is time.
    """
    cases = {
        f"{spec.name} {text_of(shape)}": (spec, shape)
        for spec in specs().values()
        for shape in spec.cases[: 1 if part.smoke else None]
        if _runs(part, shape)
    }
    launches = [(spec.name, sizes) for spec, shape in cases.values()
                for sizes in (shape, small(shape))]  # fmt: skip
    launches += [(kernel, shape) for _, found in _tables(part) for _, kernel, shape in found]
    launches = part.sized(launches, launches[-1:])
    part.attempt(_COMPILED, "at once", partial(_compiled, part, launches))
    found = Counter[bool]()
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.update([cache_hit])
    worst: dict[str, float] = {}
    failed: set[str] = set()

    def check(name: str, number: int) -> None:
        torch.manual_seed(number)
        error = _error(part, *cases[name], number)
        if not error <= 1:
            raise ValueError(f"size {number}: {error:.2f} times the error that rounding explains")
        worst[name] = max(error, worst.get(name, 0.0))

    def check_all(number: int) -> None:
        for name in cases:
            if name in failed or part.late:
                continue
            if not part.attempt(TABLE, name, partial(check, name, number)):
                failed.add(name)

    began = time.monotonic()
    try:
        check_all(0)
    finally:  # compute-sanitizer may find the reason of a failure
        cells: Cells = {"from the cache": found[True], "compiled": found[False]}
        part.row(_COMPILED, "first launches", {**cells, "s": time.monotonic() - began})
        _memcheck(part)
    for number in range(1, part.sized(12, 1)):
        check_all(number)
    for name, error in worst.items():
        part.row(TABLE, name, {"of allowed error": error})
    if left_out := [name for name in cases if name not in worst and name not in failed]:
        part.note(TABLE, f"left out, no time: {', '.join(left_out)}")


def _runs(part: Part, shape: Key) -> bool:
    """Whether the device has the capability that a case needs."""
    wanted = 89 if "fp8" in (shape.get("kv"), shape.get("to")) else int(shape.get("least", 80))
    return part.capability >= wanted


def _memcheck(part: Part) -> None:
    """Small cases of all kernels under compute-sanitizer, if it is installed: finds accesses
    outside of tensors, which results may not show."""
    folder = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=folder)
    if not tool:
        part.note(SANITIZER, f"it is neither on PATH nor in {folder}")
        return
    if part.late:
        part.note(SANITIZER, "left out, no time")
        return
    settings = {"device_name": part.device_name, "smoke": part.smoke,
                "seconds": _SANITIZING * part.left}  # fmt: skip
    with tempfile.NamedTemporaryFile() as log:
        # 99: its status if it found errors and the program itself succeeded.
        first = [tool, "--tool", "memcheck", "--error-exitcode", "99", "--log-file", log.name]
        function = f"{__name__}:{watched.__name__}"
        for message in run_part(SANITIZER, function, settings, _SANITIZER_S, first):
            if "error" in message:
                found = Path(log.name).read_text(errors="replace").splitlines()
                message["trace"] = [*message["trace"][-5:], *found[:30]]
            part.send(message)


def watched(part: Part) -> None:
    """The part that compute-sanitizer runs: a small launch of each case, one a kernel at first."""
    # Each tensor is a separate allocation: accesses behind its end are found only then.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    cases = [
        (spec, shape)
        for shapes in itertools.zip_longest(*(spec.cases for spec in specs().values()))
        for spec, shape in zip(specs().values(), shapes, strict=True)
        if shape and _runs(part, shape)
    ]
    done = 0

    def launch(spec: Any, shape: Key) -> None:
        spec.trial(small(shape), part.device).run(None)
        if part.cuda:
            torch.cuda.synchronize(part.device)

    for spec, shape in part.sized(cases, cases[:2]):
        if not part.late:
            name = f"{spec.name} {text_of(shape)}"
            done += part.attempt(SANITIZER, name, partial(launch, spec, shape))
    part.row(SANITIZER, "memcheck", {"cases": len(cases), "launched": done})


def _error(part: Part, spec: Any, shape: Key, number: int) -> float:
    """The error at a case's sizes for number 0, at larger ones after; tiny ones in a dry run."""
    sizes = dict(shape)
    times = random.Random(number).randint(2, 8)
    if number and spec.name != "skinny_matmul":  # takes few rows only
        for name in {*_GROWING} & {*sizes}:
            sizes[name] = int(sizes[name]) * times * (10 if name == "rows" else 1)
    if "ragged" in shape or spec.name == "move_blocks":
        sizes["ragged"] = number
    trial = spec.trial(small(sizes) if part.smoke else sizes, part.device)
    if part.cuda:
        # Memory allocated next holds NaN, which shows elements that a kernel does not write. The
        # allocator keeps separate pools for small and large tensors.
        for count in (1 << 14, 1 << 18, 1 << 20):
            torch.full((count,), torch.nan, device=part.device)
    return error_of(trial)


def speed(part: Part) -> None:
    """Rates of kernels and products; tables with targets first."""
    if not part.has_fp8:
        part.note("decode attention", "fp8 is left out: this GPU has none")
    for table, cases in _tables(part):
        part.measure(
            table,
            ((name, partial(_measured, part, kernel, shape)) for name, kernel, shape in cases),
        )
    part.measure("products", _products(part))


def _tables(part: Part) -> Iterator[tuple[str, Iterator[KernelCase]]]:
    """Name and launches of each table."""
    for table, cases in (
        ("prefill attention", _prefill_cases(part)),
        ("decode attention", _decode_cases(part, "bf16")),
        ("decode attention", _decode_cases(part, "fp8")),
        ("rows", _row_cases(part)),
        ("blocks", _block_cases(part)),
    ):
        yield table, (case for case in cases if _runs(part, case[2]))


def in_format(weight: LinearWeight, is_output: bool, name: str) -> LinearWeight:
    """A dense matrix as the GPU's model stores it in a format, one of FORMATS.

    Formats that only checkpoints have get made-up numbers, which do not change a product's time.
    """
    if not isinstance(weight, DenseWeight) or (is_output and name in GROUPS):
        return prepare(weight, is_output, "none")
    group = GROUPS.get(name, 0)
    if not group or weight.shape[1] % group:
        return prepare(weight, is_output, name if name in _QUANTIZATIONS else "none")
    (outputs, inputs), device = weight.shape, weight.tensor.device
    scales = torch.full((outputs, inputs // group), 2.0**-7, device=device)
    if name == "fp8 in blocks":
        return prepare(Fp8BlockWeight(weight.tensor.mul(64).to(FP8), scales), is_output, "none")
    pairs = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    if name == "MXFP4":
        return prepare(Mxfp4Weight(pairs, scales), is_output, "none")
    zeros = torch.randint(6, 10, scales.shape, dtype=torch.uint8, device=device)
    return prepare(Int4Weight(pairs, scales, zeros), is_output, "none")


def _products(part: Part) -> Iterator[Case]:
    """A row for each matrix of a layer and format, the largest first.

    Their kernels are compiled by other processes first.
    """
    work = [
        (part.device_name, name, shape, rows)
        for shape in part.sized(MATRICES, ((128, 128),))
        for name in FORMATS
        if part.has_fp8 or "fp8" not in name
        for rows in [part.sized(_PRODUCT_ROWS, (2,))]
    ]
    if part.cuda:
        end = time.monotonic() + _COMPILING * part.left
        with _pool(part) as pool:
            list(results_until(end, pool.imap_unordered(launched_once, work)))
    for _, name, shape, rows in work:
        yield f"{name}, {shape[0]} x {shape[1]}", partial(_product, part, name, shape, rows)


def launched_once(work: tuple[str, str, tuple[int, int], Sequence[int]]) -> None:
    """Launches a matrix's products, so that Triton's cache has them. Runs in a pool's process."""
    device_name, name, shape, rows = work
    options: Any = {"dtype": torch.bfloat16, "device": device_name}
    weight = _random_weight(name, shape, torch.device(device_name))
    for count in rows:
        with suppress(Exception):  # the measurement reports it
            weight.apply(_rows_for(weight, torch.randn(count, shape[1], **options)))


def _product(part: Part, name: str, shape: tuple[int, int], rows: Sequence[int]) -> Cells:
    """Microseconds for each number of rows, and the share of the floor in them."""
    weights = timing.rotated(
        lambda: _random_weight(name, shape, part.device), lambda one: one.num_bytes, part.device
    )
    cells = Cells()
    for count in rows:
        x = torch.randn(count, shape[1], dtype=torch.bfloat16, device=part.device)
        x = _rows_for(weights[0], x)
        seconds = timing.seconds([partial(one.apply, x) for one in weights], part.device)
        moved = weights[0].num_bytes + 2 * count * sum(shape)
        cells[f"{count} rows: us"] = seconds * 1e6
        if floor := part.floor_s(moved, 2.0 * count * shape[0] * shape[1], name in _EIGHT_BITS):
            cells[f"of floor, {count}"] = floor / seconds
    return cells


def _random_weight(name: str, shape: tuple[int, int], device: torch.device) -> LinearWeight:
    return in_format(
        DenseWeight(torch.randn(shape, dtype=torch.bfloat16, device=device)), False, name
    )


def _rows_for(weight: LinearWeight, x: Tensor) -> Any:
    """Rows as a weight's product takes them: quantised if it can."""
    dtype = weight.rows_dtype(x.shape[1]) if isinstance(weight, GpuWeight) else None
    return x if dtype is None else QuantizedRows(*quantize_rows(x, dtype), x.dtype)


def decode_name(kv: str, batch: int, context: int) -> str:
    """Name of a row."""
    return f"{kv}, batch {batch}, context {context}"


def prefill_name(tokens: int, prefix: int) -> str:
    """Name of a row."""
    return f"{tokens} tokens" + (f" behind {prefix}" if prefix else "")


def _prefill_cases(part: Part) -> Iterator[KernelCase]:
    for tokens, prefix in part.sized(PROMPTS, ((8, 0), (8, 8))):
        shape: Key = {**_heads(part), "batch": 1, "context": prefix, "tokens": tokens}
        yield prefill_name(tokens, prefix), "prefill_attention", shape


def _decode_cases(part: Part, kv: str) -> Iterator[KernelCase]:
    heads = _heads(part)
    room = _OF_MEMORY * torch.cuda.mem_get_info(part.device)[0] if part.cuda else 1 << 24
    for batch in part.sized(BATCHES, (2,)):
        for context in part.sized(CONTEXTS, (16,)):
            if batch * context * 32 * int(heads["head_size"]) <= room:
                shape: Key = {**heads, "kv": kv, "batch": batch, "context": context}
                yield decode_name(kv, batch, context), "decode_attention", shape


def _row_cases(part: Part) -> Iterator[KernelCase]:
    """Kernels that only move bytes, for a decode step and for a chunk."""
    shapes: dict[str, Key] = {
        "add_rms_norm": {"size": part.sized(4096, 64)},
        "act_mul": {"size": part.sized(14336, 64)},
        "rope_and_write": {"heads": part.sized(32, 8), "kv_heads": 8},
        "quantize_rows": {"size": part.sized(4096, 64), "to": "fp8"},
    }
    for rows in part.sized((64, 8192), (2,)):
        for name, shape in shapes.items():
            yield f"{name}, {rows} rows", name, {**shape, "rows": rows}


def _block_cases(part: Part) -> Iterator[KernelCase]:
    """Blocks of an 8B model, in random order."""
    layers = part.sized(32, 1)
    pool: Key = {"dtype": "bfloat16", "layers": layers, "kv_heads": 8, "row": 128}
    count = part.sized(_MOVED // (layers << 16), 3)
    for use in ("gather", "scatter", "copy", "checksum"):
        yield f"{use} blocks", "move_blocks", {**pool, "use": use, "blocks": count}


def tune(part: Part) -> None:
    """Tunes as `python -m baton.engine.kernels.triton tune` does, for this user: a first shape of
    each kernel, then a second and so on. Engine and cluster run with the result.

    Shapes that were measured before are skipped.
    """
    tuned = [spec for spec in specs().values() if spec.configs]
    work = [
        (spec, shape)
        for shapes in itertools.zip_longest(*(spec.shapes for spec in tuned))
        for spec, shape in zip(tuned, shapes, strict=True)
        if shape and _runs(part, shape)
    ]
    if part.smoke:
        work = [(spec, small(shape)) for spec, shape in work if spec.name == "add_rms_norm"][:1]
    with tempfile.TemporaryDirectory() as folder, _pool(part) as pool:
        name = torch.cuda.get_device_name(part.device) if part.cuda else ""
        file = launch_configs.user_file(name) if part.cuda else Path(folder, "measured.json")
        known = launch_configs.read(file).kernels if file.is_file() else {}
        keys = [spec.trial(shape, torch.device("meta")).key for spec, shape in work]
        work = [
            one for one, key in zip(work, keys, strict=True)
            if all(when != key for when, _ in known.get(one[0].name, ()))
        ]  # fmt: skip
        cases = [
            (f"{spec.name} {text_of(shape)}", partial(_tuned, part, spec, shape, compiled, file))
            for spec, shape, compiled in tuning.with_candidates(work, part.device, pool)
        ]
        part.measure("tuned", cases)
        if file.is_file() and part.json:
            target = Path(part.json).with_suffix(f".sm_{part.capability}.json")
            shipped = launch_configs.shipped_for(part.capability)
            launch_configs.write(target, _merged(shipped, file))
            part.note("tuned", f"with the shipped configurations in {target}")


def _tuned(
    part: Part, spec: Any, shape: Key, compiled: IMapIterator[str] | None, file: Path
) -> Cells:
    """Tunes a shape. Raises RuntimeError where no candidate ran, and as `tuning.tune_shape`."""
    end = time.monotonic() + part.left
    one = tuning.tune_shape(spec, shape, part.device, file, end, compiled=compiled)
    if one is None:
        raise RuntimeError("none of its candidates ran in the time left")
    before, after = one.seconds_before, one.seconds
    return {"us before": before * 1e6, "us": after * 1e6, "x faster": before / after,
            "configuration": text_of(one.config)}  # fmt: skip


def _merged(shipped: Path, measured: Path) -> launch_configs.Configs:
    """Measured configurations, then shipped ones, as a file to ship. It is not marked as measured:
    that would exclude shapes far from all measured ones."""
    first, then = launch_configs.read(measured).kernels, launch_configs.read(shipped).kernels
    return launch_configs.Configs(
        False, {name: [*first.get(name, ()), *entries] for name, entries in then.items()}
    )


def _heads(part: Part) -> dict[str, int | str]:
    return {"head_size": 16, "group": 1} if part.smoke else {"head_size": 128, "group": 4}


def _measured(part: Part, kernel: str, shape: Key) -> Cells:
    """A launch's rate; of attention over bfloat16 beside torch's."""
    trials = timing.trials_of(specs()[kernel], shape, part.device)
    trial = trials[0]
    # Numbers of blocks come from pinned memory, which a graph cannot hold.
    captured = kernel != "move_blocks"
    seconds = timing.seconds(timing.launches_of(trials), part.device, captured=captured)
    cells: Cells = {"us": seconds * 1e6}
    if trial.flops:
        cells["TFLOP/s"] = trial.flops / seconds / 1e12
        if part.matmul_flops:
            cells["of matmul rate"] = trial.flops / seconds / part.matmul_flops
    else:
        cells |= part.of_copy(trial.moved_bytes, seconds)
    is_compared = kernel.endswith("attention") and shape.get("kv") != "fp8"
    return cells | _torch_attention(part, seconds, shape) if is_compared else cells


def _torch_attention(part: Part, ours_s: float, shape: Key) -> Cells:
    """Time of torch's attention kernels on contiguous inputs, as a share of ours; None for a kernel
    that does not support the shape, or lacks memory. (Torch's own choice depends on its version and
    on the GPU.)

    For prompts its K and V are repeated for every query head, as its fastest kernels need them
    after a prefix.
    """
    tokens = int(shape.get("tokens", 0))
    rows, total, heads = tokens or 1, int(shape["context"]) + tokens, 8 * int(shape["group"])
    kv_heads = heads if tokens else 8
    cells: Cells = dict.fromkeys(TORCH_ATTENTION)

    def inputs() -> list[Tensor]:
        return [
            torch.randn(
                (int(shape["batch"]), count, length, int(shape["head_size"])),
                dtype=torch.bfloat16, device=part.device,
            )
            for count, length in ((heads, rows), (kv_heads, total), (kv_heads, total))
        ]  # fmt: skip

    try:
        made = timing.rotated(
            inputs, lambda one: 0 if tokens else one[1].nbytes + one[2].nbytes, part.device
        )
        options: dict[str, Any] = {"is_causal": rows == total, "enable_gqa": heads != kv_heads}
        kernels = TORCH_ATTENTION
        if 1 < rows < total:  # cuDNN's kernel takes this mask as a tensor only
            options = {"attn_mask": causal_lower_right(rows, total)}
            kernels = {"of flash": SDPBackend.FLASH_ATTENTION}
        attend: Any = partial(F.scaled_dot_product_attention, **options)
        launches = [partial(attend, *one) for one in made]
        for name, kernel in kernels.items():
            with sdpa_kernel(kernel):
                cells[name] = timing.seconds(launches, part.device) / ours_s
    except Exception as error:  # depends on torch's version
        if is_fatal(error):
            raise
    return cells
