"""How fast attention is: decode against the copy's rate, prefill against SDPA and the product's.

Shapes are an 8B model's: 32 heads of 128 over 8 KV heads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from baton.engine.ops.triton.decode_attention import decode_attention
from baton.engine.ops.triton.prefill_attention import plan_tiles, prefill_attention
from benchmarks.gpu import floors, paged
from benchmarks.gpu.clock import Calls, Clock, clock_of, rotations
from benchmarks.gpu.device import device_of, has_fp8
from benchmarks.gpu.job import Case, Cell, Event, Job, Note, in_time, is_fatal
from benchmarks.gpu.paged import Geometry, name_of
from benchmarks.gpu.targets import DECODE_ATTENTION, OF_COPY, OF_MATMUL, OF_SDPA, PREFILL_ATTENTION
from benchmarks.shapes import GPU_SHAPES, Shape

BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 4096, 16384)
PROMPTS = ((512, 0), (2048, 0), (8192, 0), (2048, 8192))  # tokens, tokens before them
_BLOCK = 16
_OF_MEMORY = 0.6  # of what is free: for a pool


def decode_name(kv: torch.dtype, batch: int, context: int) -> str:
    """A row's name."""
    return f"{name_of(kv)}, batch {batch}, context {context}"


def prefill_name(tokens: int, prefix: int) -> str:
    """A row's name."""
    return f"{tokens} tokens" + (f" behind {prefix}" if prefix else "")


def _shape(job: Job) -> Shape:
    return GPU_SHAPES["smoke" if job.smoke else "8B"]


def _geometry(job: Job, kv: torch.dtype) -> Geometry:
    shape = _shape(job)
    return Geometry(shape.heads, shape.kv_heads, shape.head_size, _BLOCK, torch.bfloat16, kv)


@dataclass(frozen=True)
class Decoding:
    """Decode attention over one pool, which all sizes share."""

    job: Job
    device: torch.device
    clock: Clock
    geometry: Geometry
    pool: Tensor

    def cases(self, sizes: list[tuple[int, int]]) -> Iterator[Case]:
        """One for each (batch, context)."""
        for batch, context in sizes:
            name = decode_name(self.geometry.kv_dtype, batch, context)
            yield name, self._case(batch, context)

    def _case(self, batch: int, context: int) -> Callable[[], Mapping[str, Cell]]:
        return lambda: self.measure(batch, context)

    def measure(self, batch: int, context: int) -> dict[str, Cell]:
        """Rate over what has to be read; SDPA's on KV of the same size that is contiguous."""
        g = self.geometry
        moved = batch * context * g.token_bytes
        calls = self._calls(batch, context, moved)
        seconds = self.clock.seconds(calls)
        cells: dict[str, Cell] = {"us": seconds * 1e6, "GB/s": moved / seconds / 1e9}
        if self.job.ceilings:
            cells[OF_COPY] = moved / seconds / self.job.ceilings.copy_bytes_per_s
        if g.kv_dtype == g.dtype:
            calls, kind = self._sdpa_calls(batch, context, moved)
            sdpa_s = _others(self.clock, calls)
            cells |= {OF_SDPA: sdpa_s / seconds if sdpa_s else None, "SDPA by": kind}
        return cells

    def _rotations(self, batch: int, context: int, moved: int) -> int:
        blocks = batch * (context // _BLOCK)
        there = (len(self.pool) - 1) // blocks
        return max(1, min(there, rotations(moved, self.device)))

    def _calls(self, batch: int, context: int, moved: int) -> Calls:
        """Calls over different blocks, in random order."""
        g, each = self.geometry, context // _BLOCK
        count = self._rotations(batch, context, moved)
        order = 1 + torch.randperm(len(self.pool) - 1, device=self.device)[: count * batch * each]
        tables = order.to(torch.int32).view(count, batch, each)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=self.device)
        qs = [self._queries(batch) for _ in range(count)]

        def call(at: int) -> Callable[[], object]:
            table = tables[at]
            return lambda: decode_attention(qs[at], self.pool, 0, table, lengths, g.scale, None)

        return [call(at) for at in range(count)]

    def _sdpa_calls(self, batch: int, context: int, moved: int) -> tuple[Calls, str | None]:
        """The pool's memory, taken for contiguous K and V; and which kernel it is."""
        g = self.geometry
        size = batch * g.kv_heads * context * g.head_size
        flat = self.pool.view(-1)
        count = self._rotations(batch, context, moved)
        views = [
            tuple(
                flat[(2 * at + part) * size : (2 * at + part + 1) * size].view(
                    batch, g.kv_heads, context, g.head_size
                )
                for part in range(2)
            )
            for at in range(count)
        ]
        qs = [self._queries(batch).unsqueeze(2) for _ in range(count)]

        def call(at: int) -> Callable[[], object]:
            k, v = views[at]
            return lambda: F.scaled_dot_product_attention(qs[at], k, v, enable_gqa=True)

        kind = _kernel_of_sdpa(qs[0], *views[0], causal=False)
        return [call(at) for at in range(count)], kind

    def _queries(self, batch: int) -> Tensor:
        g = self.geometry
        return torch.randn(batch, g.heads, g.head_size, dtype=g.dtype, device=self.device)


def prefill_events(job: Job) -> Iterator[Event]:
    """One row for each prompt."""
    yield from in_time(job, PREFILL_ATTENTION, list(prefill_cases(job, clock_of(device_of(job)))))


def decode_events(job: Job, kv: torch.dtype = torch.bfloat16) -> Iterator[Event]:
    """One row for each batch and context; the pool is given back at the end."""
    measuring, sizes = decoding(job, clock_of(device_of(job)), kv)
    yield from in_time(job, DECODE_ATTENTION, list(measuring.cases(sizes)))


def fp8_events(job: Job) -> Iterator[Event]:
    """The same over KV in fp8."""
    if has_fp8(device_of(job)):
        yield from decode_events(job, torch.float8_e4m3fn)
    else:
        yield Note(DECODE_ATTENTION, "fp8 is left out: this GPU has none")


def decoding(job: Job, clock: Clock, kv: torch.dtype) -> tuple[Decoding, list[tuple[int, int]]]:
    """A pool that holds the largest size that fits, and the sizes that do."""
    device = device_of(job)
    g = _geometry(job, kv)
    batches = job.sized(BATCHES, (1, 64), (1, 3))
    contexts = job.sized(CONTEXTS, (4096,), (32,))
    room = _room(job, device)
    sizes = [
        (batch, context)
        for batch in batches
        for context in contexts
        if batch * context * g.token_bytes <= room
    ]
    tokens = max(batch * context for batch, context in sizes)
    pool = paged.random_pool(g, tokens // _BLOCK + 1, 1, device)
    return Decoding(job, device, clock, g, pool), sizes


def _room(job: Job, device: torch.device) -> float:
    if device.type != "cuda":
        return 1 << 24
    return _OF_MEMORY * torch.cuda.mem_get_info(device)[0]


def prefill_cases(job: Job, clock: Clock) -> Iterator[Case]:
    """One for each prompt."""
    for tokens, prefix in job.sized(PROMPTS, PROMPTS[1:2], ((24, 0), (16, 32))):
        yield prefill_name(tokens, prefix), _prefill_case(job, clock, tokens, prefix)


def _prefill_case(
    job: Job, clock: Clock, tokens: int, prefix: int
) -> Callable[[], Mapping[str, Cell]]:
    return lambda: prefill(job, clock, tokens, prefix)


def prefill(job: Job, clock: Clock, tokens: int, prefix: int) -> dict[str, Cell]:
    """The rate of one sequence's chunk behind its prefix; SDPA's on contiguous inputs."""
    device, g = device_of(job), _geometry(job, torch.bfloat16)
    flops = floors.attention_flops(_shape(job), tokens, prefix)
    total = tokens + prefix
    sequences = paged.scattered([total] * 2, _BLOCK, device, random.Random(0))
    pool = paged.random_pool(g, sequences.num_blocks, 1, device)
    contexts, counts = (
        torch.tensor([n], dtype=torch.int32, device=device) for n in (prefix, tokens)
    )
    tiles = plan_tiles(counts, tokens, g.heads // g.kv_heads)
    q = torch.randn(2, tokens, g.heads, g.head_size, dtype=g.dtype, device=device)

    def call(at: int) -> Callable[[], object]:
        table = sequences.tables[at : at + 1]
        return lambda: prefill_attention(
            q[at], pool, 0, table, contexts, counts, tiles, g.scale, None
        )

    seconds = clock.seconds([call(0), call(1)])
    cells: dict[str, Cell] = {"us": seconds * 1e6, "TFLOP/s": flops / seconds / 1e12}
    if job.ceilings:
        cells[OF_MATMUL] = flops / seconds / job.ceilings.matmul_flops
    sdpa, kind = _sdpa_prefill(g, tokens, total, device)
    sdpa_s = _others(clock, sdpa)
    return cells | {OF_SDPA: sdpa_s / seconds if sdpa_s else None, "SDPA by": kind}


def _others(clock: Clock, calls: Calls) -> float | None:
    """Seconds of what is not ours; None where it cannot do it, or not in the memory that is left.

    Raises what leaves the device unusable.
    """
    try:
        return clock.seconds(calls)
    except Exception as error:  # whatever version of it is there
        if is_fatal(error):
            raise
        return None


def _kernel_of_sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> str | None:
    """Which of its kernels SDPA takes: "flash", "cudnn", "efficient", "math"; None: not known."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return None
    gqa = q.shape[1] != k.shape[1]
    kind = SDPBackend(choose(q, k, v, is_causal=causal, enable_gqa=gqa))
    return str(kind.name).lower().removesuffix("_attention")


def _sdpa_prefill(
    g: Geometry, tokens: int, total: int, device: torch.device
) -> tuple[Calls, str | None]:
    """With K and V of every query head, which its fastest kernels want behind a prefix."""
    q = torch.randn(2, 1, g.heads, tokens, g.head_size, dtype=g.dtype, device=device)
    k, v = (
        torch.randn(2, 1, g.heads, total, g.head_size, dtype=g.dtype, device=device)
        for _ in range(2)
    )

    def call(at: int) -> Callable[[], object]:
        if tokens == total:
            return lambda: F.scaled_dot_product_attention(q[at], k[at], v[at], is_causal=True)
        bias = causal_lower_right(tokens, total)
        return lambda: F.scaled_dot_product_attention(q[at], k[at], v[at], attn_mask=bias)

    # Behind a prefix the bias chooses for itself.
    kind = _kernel_of_sdpa(q[0], k[0], v[0], causal=True) if tokens == total else None
    return [call(0), call(1)], kind
