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

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from baton.engine.ops.triton.attention_specs import decode_trial, prefill_trial, random_pool
from baton.engine.ops.triton.check import specs_in
from baton.engine.ops.triton.spec import KernelSpec, Key, Trial, relative_error, text_of
from benchmarks.gpu.part import Case, Cells, Part, is_fatal
from kvtransfer.kernels import blocks, reference
from kvtransfer.pool import KvPool, Slots

TABLE = "kernels against their references"
BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 4096, 16384)
PROMPTS = ((512, 0), (2048, 0), (8192, 0), (2048, 8192))  # tokens, tokens before them
_SIZES = ("rows", "batch", "context", "tokens")
_SMOKE = {"rows": 3, "size": 300, "batch": 2, "context": 40, "tokens": 8, "heads": 2, "kv_heads": 1}
_OF_MEMORY = 0.3  # of what is free: for a pool, and as much for SDPA's K and V
_MOVED = 512 << 20  # bytes of blocks


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of some calls on the device with a cold L2 cache; of one on a CPU."""
    if device.type == "cuda":
        return float(triton.testing.do_bench(call, return_mode="median")) / 1e3
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def machine(part: Part) -> None:
    """The device, then a large copy and a large product: its ceilings."""
    device, smoke = part.device, part.job.smoke
    versions = {"torch": torch.__version__, "triton": triton.__version__,
                "python": platform.python_version()}  # fmt: skip
    if device.type != "cuda":
        about = {"name": f"{device} ({platform.machine()})"}
    else:
        told = torch.cuda.get_device_properties(device)
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
        about = {
            "name": told.name, "capability": f"{told.major}.{told.minor}",
            "memory": f"{told.total_memory / 2**30:.0f} GiB",
            "SMs": str(told.multi_processor_count), "L2": f"{told.L2_cache_size / 2**20:.0f} MiB",
            "driver": _driver(), "CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl)),
        }  # fmt: skip
    part.tell("row", "machine", "device", {**about, **versions})
    nbytes, size = (1 << 20, 64) if smoke else (1 << 30, 8192)
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    copy_s = seconds(lambda: target.copy_(source), device)
    # Zeros would take less power, and so a higher clock.
    left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device=device).unbind()
    matmul_s = seconds(lambda: left @ right, device)
    ceilings = {"copy GB/s": 2e-9 * nbytes / copy_s, "matmul TFLOP/s": 2e-12 * size**3 / matmul_s}
    part.tell("row", "ceilings", "measured", dict(ceilings))


def _driver() -> str:
    """As nvidia-smi reports it: torch does not."""
    try:
        return subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout.split("\n")[0].strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"


class Wrong(Exception):
    """A result is further from its reference than rounding explains."""


def correctness(part: Part) -> None:
    """A row for each case of each kernel: its largest error over random sizes and fresh numbers.

    A first size of every case, then a second one, and so on while there is time.
    """
    cases: dict[str, Callable[[int], float]] = {}
    for spec in specs_in(()):
        for shape, _ in spec.cases[: 1 if part.job.smoke else None]:
            if part.has_fp8 or "fp8" not in (shape.get("kv"), shape.get("to")):
                cases[f"{spec.name} {text_of(shape)}"] = partial(_error, part, spec, shape)
    for use in ("gather", "scatter", "copy", "checksum"):
        cases[f"{use} blocks"] = partial(_blocks_error, part, use)
    worst: dict[str, float] = {}
    failed: set[str] = set()

    def check(name: str, number: int) -> None:
        failed.add(name)  # until it is known not to have
        torch.manual_seed(number)
        error = cases[name](number)
        if not error <= 1:
            raise Wrong(f"size {number}: {error:.2f} times the error that rounding explains")
        failed.discard(name)
        worst[name] = max(error, worst.get(name, 0.0))

    for number, name in itertools.product(range(part.job.sized(12, 4, 1)), cases):
        if name not in failed and not part.late:
            part.attempt(TABLE, name, partial(check, name, number))
    for name, error in worst.items():
        part.tell("row", TABLE, name, {"of allowed error": error})
    if left_out := [name for name in cases if name not in worst and name not in failed]:
        part.tell("note", TABLE, text=f"left out, no time: {', '.join(left_out)}")


def _error(part: Part, spec: KernelSpec, shape: Key, number: int) -> float:
    """At the case's own sizes first, then at larger ones; at tiny ones in a dry run."""
    times = 1 if number == 0 else random.Random(number).randint(2, 8)
    each = {"rows": 1 if times == 1 else 10 * times}
    sizes = {name: int(shape[name]) * each.get(name, times) for name in _SIZES if name in shape}
    if spec.name == "int8_matmul":
        sizes = {}  # its rows are few
    if part.job.smoke:
        sizes = {name: size for name, size in _SMOKE.items() if name in shape}
    ragged = {"ragged": number} if "ragged" in shape else {}
    trial = spec.trial({**shape, **sizes, **ragged}, part.device)
    if part.device.type == "cuda":
        # What is allocated next holds NaN, so that places that a kernel leaves out show. Of all
        # sizes: the allocator keeps small and large pieces apart.
        for count in (1 << 14, 1 << 18, 1 << 20):
            torch.full((count,), torch.nan, device=part.device)
    return trial.error()


def _blocks_error(part: Part, use: str, number: int) -> float:
    """Bytes and their sum by the kernel and by its reference, which are equal to the bit."""
    dice, device, sized = random.Random(number), part.device, part.job.sized
    dtype = dice.choice((torch.bfloat16, torch.float32, torch.int8))
    head_size, block_size = (
        dice.choice((16, 64, 128)),
        dice.choice(sized((8, 16, 64), (16,), (16,))),
    )
    num_blocks, layers = sized((200, 5), (60, 3), (6, 2))
    pools = [
        random_pool(num_blocks, layers, 2, head_size, dtype, device, block_size) for _ in range(2)
    ]
    count = dice.randint(1, num_blocks)
    tokens = (count - 1) * block_size + dice.randint(1, block_size)
    local, remote = (Slots(tuple(dice.sample(range(num_blocks), count)), tokens) for _ in range(2))
    first_word, found = dice.randrange(1 << 40), []
    for kernel in (blocks, reference):
        source, target = (KvPool(pool.clone()) for pool in pools)
        sums = torch.zeros(1, dtype=torch.int64, device=device)
        staging = torch.full((source.nbytes(local),), 0xFF, dtype=torch.uint8, device=device)
        if use == "gather":
            kernel.gather(source, local, staging, sums, first_word)
        elif use == "scatter":
            data = source.gather(local, staging)
            kernel.scatter(data, target, remote, sums, first_word)
        elif use == "copy":
            kernel.copy(source, local, target, remote, sums, first_word)
        else:
            kernel.checksum(source, local, sums, first_word)
        found.append((staging, source.blocks, target.blocks, sums))
    return max(relative_error(a, b, 0.0) for a, b in zip(*found, strict=True))


def speed(part: Part) -> None:
    """What has targets goes first; memory is given back between tables."""
    if not part.has_fp8:
        part.tell("note", "decode attention", text="fp8 is left out: this GPU has none")
    for table, cases in (
        ("prefill attention", _prefill_cases(part)),
        ("decode attention", _decode_cases(part, "bf16")),
        ("decode attention", _decode_cases(part, "fp8")),
        ("rows", _row_cases(part)),
        ("blocks", _block_cases(part)),
    ):
        part.measure(table, cases)
        part.free()


def decode_name(kv: str, batch: int, context: int) -> str:
    """A row's name."""
    return f"{kv}, batch {batch}, context {context}"


def prefill_name(tokens: int, prefix: int) -> str:
    """A row's name."""
    return f"{tokens} tokens" + (f" behind {prefix}" if prefix else "")


def _heads(part: Part) -> dict[str, int | str]:
    return {"head_size": 16, "group": 1} if part.job.smoke else {"head_size": 128, "group": 4}


def _measured(part: Part, trial: Trial, sdpa: Callable[[], tuple[Tensor, ...]] | None) -> Cells:
    """A launch's rate; and SDPA's on contiguous inputs of the same sizes."""
    took = seconds(partial(trial.run, None), part.device)
    cells: Cells = {"us": took * 1e6}
    if trial.flops:
        cells["TFLOP/s"] = trial.flops / took / 1e12
        if part.job.matmul_flops:
            cells["of matmul rate"] = trial.flops / took / part.job.matmul_flops
    else:
        cells |= part.of_copy(trial.moved_bytes, took)
    return cells if sdpa is None else cells | _sdpa(part, took, sdpa)


def _sdpa(part: Part, ours_s: float, inputs: Callable[[], tuple[Tensor, ...]]) -> Cells:
    """Its share and which of its kernels it takes; None where it cannot, or not in the memory."""
    try:
        q, k, v = inputs()
        rows, total = q.shape[2], k.shape[2]
        gqa = q.shape[1] != k.shape[1]
        if 1 < rows < total:
            bias, kind = causal_lower_right(rows, total), None  # which chooses for itself
            theirs_s = seconds(
                lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias), part.device
            )
        else:
            causal = rows == total
            kind = SDPBackend(
                torch._fused_sdp_choice(q, k, v, is_causal=causal, enable_gqa=gqa)
            ).name.lower()  # fmt: skip
            theirs_s = seconds(
                lambda: F.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=gqa
                ), part.device,
            )  # fmt: skip
    except Exception as error:  # whatever version of it is there
        if is_fatal(error):
            raise
        return {"of SDPA": None, "SDPA by": None}
    return {"of SDPA": theirs_s / ours_s, "SDPA by": kind}


def _prefill_cases(part: Part) -> Iterator[Case]:
    """SDPA has K and V of every query head, which its fastest kernels want behind a prefix."""
    heads = _heads(part)
    shape = (1, 8 * int(heads["group"]), 0, int(heads["head_size"]))

    def measure(tokens: int, prefix: int) -> Cells:
        sizes: Key = {**heads, "batch": 1, "context": prefix, "tokens": tokens}

        def inputs() -> tuple[Tensor, ...]:
            lengths = (tokens, tokens + prefix, tokens + prefix)
            return tuple(_drawn(part, (*shape[:2], length, shape[3])) for length in lengths)

        return _measured(part, prefill_trial(sizes, part.device), inputs)

    for tokens, prefix in part.job.sized(PROMPTS, PROMPTS[1:2], ((24, 0), (16, 32))):
        yield prefill_name(tokens, prefix), partial(measure, tokens, prefix)


def _decode_cases(part: Part, kv: str) -> Iterator[Case]:
    heads = _heads(part)
    group, size = int(heads["group"]), int(heads["head_size"])
    cuda = part.device.type == "cuda"
    room = _OF_MEMORY * torch.cuda.mem_get_info(part.device)[0] if cuda else 1 << 24

    def measure(batch: int, context: int) -> Cells:
        def inputs() -> tuple[Tensor, ...]:
            kv_shape = (batch, 8, context, size)
            q = _drawn(part, (batch, 8 * group, 1, size))
            return q, _drawn(part, kv_shape), _drawn(part, kv_shape)

        sizes: Key = {**heads, "kv": kv, "batch": batch, "context": context}
        trial = decode_trial(sizes, part.device)
        return _measured(part, trial, inputs if kv == "bf16" else None)

    for batch in part.job.sized(BATCHES, (1, 64), (1, 3)):
        for context in part.job.sized(CONTEXTS, (4096,), (32,)):
            if batch * context * 32 * size <= room and (kv != "fp8" or part.has_fp8):
                yield decode_name(kv, batch, context), partial(measure, batch, context)


def _drawn(part: Part, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=part.device)


def _row_cases(part: Part) -> Iterator[Case]:
    """Kernels that only move bytes, for a decode step and for a chunk."""
    specs = {spec.name: spec for spec in specs_in(())}
    small = part.job.smoke
    shapes: dict[str, dict[str, int | str]] = {
        "add_rms_norm": {"size": 64 if small else 4096},
        "silu_mul": {"size": 64 if small else 14336},
        "rope_and_write": {"heads": 32, "kv_heads": 8},
        "quantize_rows": {"size": 64 if small else 4096, "to": "fp8"},
    }
    for rows in part.job.sized((64, 8192), (8192,), (5,)):
        for name, shape in shapes.items():
            if name != "quantize_rows" or part.has_fp8:
                sized = {**shape, "rows": rows}
                yield f"{name}, {rows} rows", partial(_row, part, specs[name], sized)


def _row(part: Part, spec: KernelSpec, shape: Key) -> Cells:
    return _measured(part, spec.trial(shape, part.device), None)


def _block_cases(part: Part) -> Iterator[Case]:
    """Blocks of an 8B model, in random order."""
    device, layers = part.device, part.job.sized(32, 32, 1)
    count = part.job.sized(_MOVED // (layers << 16), _MOVED // (layers << 16), 3)
    source, target = (
        KvPool(random_pool(count + 8, layers, 8, 128, torch.bfloat16, device)) for _ in range(2)
    )
    dice = random.Random(0)
    local, remote = (
        Slots(tuple(dice.sample(range(count + 8), count)), 16 * count) for _ in range(2)
    )
    staging = torch.empty(source.nbytes(local), dtype=torch.uint8, device=device)
    sums = torch.zeros(1, dtype=torch.int64, device=device)
    calls: dict[str, tuple[Callable[[], object], int]] = {  # and how often bytes are touched
        "gather": (lambda: blocks.gather(source, local, staging, sums, 0), 2),
        "scatter": (lambda: blocks.scatter(staging, target, remote, sums, 0), 2),
        "copy": (lambda: blocks.copy(source, local, target, remote, sums, 0), 2),
        "sum": (lambda: blocks.checksum(source, local, sums, 0), 1),
    }

    def measure(call: Callable[[], object], times: int) -> Cells:
        took = seconds(call, device)
        return {"us": took * 1e6, **part.of_copy(times * source.nbytes(local), took)}

    for name, (call, times) in calls.items():
        yield f"{name} blocks", partial(measure, call, times)
