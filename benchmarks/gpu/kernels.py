"""Parts "machine", "kernels" and "speed": the device at its best, each kernel as its reference, and
what kernels move and compute each second. Shapes are an 8B model's."""

from __future__ import annotations

import itertools
import platform
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from baton.engine.backends.gpu.linear import eight_bits, prepare
from baton.engine.ops.triton.rows import EightBitRows, quantize_rows
from baton.engine.ops.triton.spec import Key, error_of, small, specs_in, text_of
from baton.engine.weights.weight import DenseWeight, Weight
from benchmarks.gpu.part import Case, Cells, Part, is_fatal, summary

TABLE = "kernels against their references"
BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 4096, 16384)
PROMPTS = ((512, 0), (2048, 0), (8192, 0), (2048, 8192))  # tokens, tokens before them
_GROWING = ("rows", "batch", "context", "tokens", "blocks")  # sizes that vary from check to check
_OF_MEMORY = 0.3  # of what is free: for a pool, and as much for torch's K and V
TORCH_ATTENTION = {
    "of flash": SDPBackend.FLASH_ATTENTION, "of cuDNN": SDPBackend.CUDNN_ATTENTION
}  # fmt: skip
_MOVED = 512 << 20  # bytes of blocks
# As nvidia-smi names them; the reasons first as drivers do since they are "events".
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
KernelCase: TypeAlias = tuple[str, str, Key]  # a row, its kernel, and the shape


def specs() -> dict[str, Any]:
    """Every kernel's, by its name."""
    return {spec.name: spec for spec in specs_in(["kvtransfer.kernels.blocks"])}


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of some calls on the device with a cold L2 cache; of one on a CPU."""
    if device.type == "cuda":
        return float(triton.testing.do_bench(call, return_mode="median")) / 1e3
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def machine(part: Part) -> None:
    """The device, then a large copy, read and product: its ceilings, and its clocks meanwhile."""
    device, smoke = part.device, part.smoke
    versions = {"torch": torch.__version__, "triton": triton.__version__,
                "python": platform.python_version()}  # fmt: skip
    about = {"name": f"{device} ({platform.machine()})"}
    if part.cuda:
        gpu = torch.cuda.get_device_properties(device)
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
        about = {
            "name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}",
            "memory": f"{gpu.total_memory / 2**30:.0f} GiB",
            "SMs": str(gpu.multi_processor_count), "L2": f"{gpu.L2_cache_size / 2**20:.0f} MiB",
            "CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl)),
        }  # fmt: skip
    try:
        (about["driver"],) = _smi(part, "driver_version")
    except (OSError, subprocess.SubprocessError) as error:
        part.note("clocks", f"no nvidia-smi: {summary(error)}")
    part.row("machine", "device", {**about, **versions})
    nbytes, size = (1 << 20, 64) if smoke else (1 << 30, 8192)
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    # Zeros would take less power, and so a higher clock.
    left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device=device).unbind()
    if has_smi := "driver" in about:
        part.attempt("clocks", "before", partial(_clocks, part))
    copy_s = seconds(lambda: target.copy_(source), device)
    values = source.view(torch.float32)
    read_s = min(seconds(read, device) for read in (values.sum, values.amax))
    product = torch.empty_like(left)
    matmul_s = seconds(lambda: torch.mm(left, right, out=product), device)
    rates: Cells = {
        "copy GB/s": 2e-9 * nbytes / copy_s,
        "read GB/s": 1e-9 * nbytes / read_s,
        "matmul TFLOP/s": 2e-12 * size**3 / matmul_s,
    }
    part.row("ceilings", "measured", rates)
    if has_smi:
        for _ in range(part.sized(600, 1)):  # a second: nvidia-smi takes a good part of one
            torch.mm(left, right, out=product)
        part.attempt("clocks", "during products", partial(_clocks, part))


def _smi(part: Part, *fields: str) -> list[str]:
    """The device's, of nvidia-smi, which numbers devices otherwise than torch may. Raises OSError
    or SubprocessError."""
    which = []
    if part.cuda:
        which = [f"--id=GPU-{torch.cuda.get_device_properties(part.device).uuid}"]
    found = subprocess.run(
        ["nvidia-smi", *which, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=10, check=True,
    ).stdout  # fmt: skip
    return [value.strip() for value in found.split("\n")[0].split(",")]


def _clocks(part: Part) -> Cells:
    """Clocks, temperature and power now, and what holds the clocks back."""
    try:
        *values, reasons = _smi(part, *_CLOCKS.values(), _REASONS[0])
    except subprocess.CalledProcessError:  # a driver that has the other name
        *values, reasons = _smi(part, *_CLOCKS.values(), _REASONS[1])
    cells: Cells = {
        name: float(value) if value.replace(".", "", 1).isdigit() else value
        for name, value in zip(_CLOCKS, values, strict=True)
    }
    if reasons.startswith("0x"):
        active = [text for bit, text in _REASON_BITS.items() if int(reasons, 16) & bit]
        reasons = " and ".join(active) or "nothing"
    return {**cells, "held back by": reasons}


def correctness(part: Part) -> None:
    """A row for each case of each kernel: its largest error over random sizes and fresh numbers.

    A first size of every case, then a second one, and so on while there is time.
    """
    cases = {
        f"{spec.name} {text_of(shape)}": (spec, shape)
        for spec in specs().values()
        for shape in spec.cases[: 1 if part.smoke else None]
        if part.has_fp8 or "fp8" not in (shape.get("kv"), shape.get("to"))
    }
    worst: dict[str, float] = {}
    failed: set[str] = set()

    def check(name: str, number: int) -> None:
        torch.manual_seed(number)
        error = _error(part, *cases[name], number)
        if not error <= 1:
            raise ValueError(f"size {number}: {error:.2f} times the error that rounding explains")
        worst[name] = max(error, worst.get(name, 0.0))

    for number, name in itertools.product(range(part.sized(12, 1)), cases):
        if name in failed or part.late:
            continue
        if not part.attempt(TABLE, name, partial(check, name, number)):
            failed.add(name)
    for name, error in worst.items():
        part.row(TABLE, name, {"of allowed error": error})
    if left_out := [name for name in cases if name not in worst and name not in failed]:
        part.note(TABLE, f"left out, no time: {', '.join(left_out)}")


def _error(part: Part, spec: Any, shape: Key, number: int) -> float:
    """At the case's own sizes first, then at larger ones; at tiny ones in a dry run."""
    sizes = dict(shape)
    times = random.Random(number).randint(2, 8)
    if number and spec.name != "int8_matmul":  # whose rows are few
        for name in {*_GROWING} & {*sizes}:
            sizes[name] = int(sizes[name]) * times * (10 if name == "rows" else 1)
    if "ragged" in shape or spec.name == "move_blocks":
        sizes["ragged"] = number
    trial = spec.trial(small(sizes) if part.smoke else sizes, part.device)
    if part.cuda:
        # What is allocated next holds NaN, so that places that a kernel leaves out show. Of all
        # sizes: the allocator keeps small and large pieces apart.
        for count in (1 << 14, 1 << 18, 1 << 20):
            torch.full((count,), torch.nan, device=part.device)
    return error_of(trial)


def speed(part: Part) -> None:
    """What has targets goes first; memory is given back between tables."""
    if not part.has_fp8:
        part.note("decode attention", "fp8 is left out: this GPU has none")
    for table, cases in (
        ("prefill attention", _prefill_cases(part)),
        ("decode attention", _decode_cases(part, "bf16")),
        ("decode attention", _decode_cases(part, "fp8")),
        ("rows", _row_cases(part)),
        ("blocks", _block_cases(part)),
    ):
        part.measure(
            table,
            (
                (name, partial(_measured, part, kernel, shape))
                for name, kernel, shape in cases
                if part.has_fp8 or "fp8" not in shape.values()
            ),
        )
    part.measure("products", _products(part))


def _products(part: Part) -> Iterator[Case]:
    """The product before the gate, a layer's largest, in each format, of a decode step's rows.

    If fewer rows than 16 take longer than 16, it pays to pad them.
    """
    shape = part.sized((28672, 4096), (32, 32))
    dense = DenseWeight(torch.randn(shape, dtype=torch.bfloat16, device=part.device))
    for kind in ("none", "int8", "int4", *(["fp8"] if part.has_fp8 else [])):
        weight = prepare(dense, False, kind)
        for rows in part.sized((1, 2, 4, 8, 16, 64), (2,)):
            name = "bf16" if kind == "none" else kind
            yield f"{name}, {rows} rows", partial(_product, part, weight, rows)


def _product(part: Part, weight: Weight, rows: int) -> Cells:
    """Its rate, on rows of eight bits where it takes those."""
    x: Any = torch.randn(rows, weight.shape[1], dtype=torch.bfloat16, device=part.device)
    if dtype := eight_bits(weight):
        x = EightBitRows(*quantize_rows(x, dtype), x.dtype)
    took = seconds(partial(weight.apply, x), part.device)
    return {"us": took * 1e6, **part.of_copy(weight.num_bytes, took)}


def decode_name(kv: str, batch: int, context: int) -> str:
    """A row's name."""
    return f"{kv}, batch {batch}, context {context}"


def prefill_name(tokens: int, prefix: int) -> str:
    """A row's name."""
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


def _heads(part: Part) -> dict[str, int | str]:
    return {"head_size": 16, "group": 1} if part.smoke else {"head_size": 128, "group": 4}


def _measured(part: Part, kernel: str, shape: Key) -> Cells:
    """A launch's rate; of attention in bfloat16 beside torch's."""
    trial = specs()[kernel].trial(shape, part.device)
    took = seconds(partial(trial.run, None), part.device)
    cells: Cells = {"us": took * 1e6}
    if trial.flops:
        cells["TFLOP/s"] = trial.flops / took / 1e12
        if part.matmul_flops:
            cells["of matmul rate"] = trial.flops / took / part.matmul_flops
    else:
        cells |= part.of_copy(trial.moved_bytes, took)
    is_compared = kernel.endswith("attention") and shape.get("kv") != "fp8"
    return cells | _torch_attention(part, took, shape) if is_compared else cells


def _torch_attention(part: Part, ours_s: float, shape: Key) -> Cells:
    """What torch's attention takes of our time by each of its kernels, on contiguous inputs; None
    for one that cannot, or not in the memory. (Which one torch takes itself depends on its version
    and on the GPU.)

    For prompts it has K and V of every query head, which its fastest kernels want behind a prefix.
    """
    tokens = int(shape.get("tokens", 0))
    rows, total, heads = tokens or 1, int(shape["context"]) + tokens, 8 * int(shape["group"])
    kv_heads = heads if tokens else 8
    cells: Cells = dict.fromkeys(TORCH_ATTENTION)
    try:
        q, k, v = (
            torch.randn(
                (int(shape["batch"]), count, length, int(shape["head_size"])),
                dtype=torch.bfloat16, device=part.device,
            )
            for count, length in ((heads, rows), (kv_heads, total), (kv_heads, total))
        )  # fmt: skip
        options: dict[str, Any] = {"is_causal": rows == total, "enable_gqa": heads != kv_heads}
        kernels = TORCH_ATTENTION
        if 1 < rows < total:  # cuDNN's would be given the mask as a tensor
            options = {"attn_mask": causal_lower_right(rows, total)}
            kernels = {"of flash": SDPBackend.FLASH_ATTENTION}
        attend = partial(F.scaled_dot_product_attention, q, k, v, **options)
        for name, kernel in kernels.items():
            with sdpa_kernel(kernel):
                cells[name] = seconds(attend, part.device) / ours_s
    except Exception as error:  # whatever version of it is there
        if is_fatal(error):
            raise
    return cells
