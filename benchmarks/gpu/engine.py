"""Part "engine": decode steps and prompts of whole models with made-up weights, sampling included.

Beside each figure stands its floor, the bytes and the arithmetic that no engine gets around at the
rates that the device was measured to have, and transformers in turn with it. First of all the
engine is compared with its reference in float32: the same tokens.
"""

from __future__ import annotations

import re
import statistics
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from baton.engine.backends.gpu.backend import unsupported_format
from benchmarks.gpu.harness import BLOCK_SIZE, Driver, Limits, OurEngine, Transformers
from benchmarks.gpu.part import Case, Cells, Part, is_fatal, summary
from benchmarks.shapes import Shape

BATCHES, CONTEXT, STEPS = (1, 8, 64, 256), 512, 64
PROMPTS, CHUNK = (512, 2048, 8192), 2048
RIVAL_MOST, _RIVAL_STEPS = 64, 8  # sequences of transformers; its steps
_SPARE = 6 << 30  # bytes for activations, graphs, and what torch keeps
_NAMED = 8  # kernels of a step with rows of their own


@dataclass(frozen=True)
class Formats:
    """Of what weights, KV and everything else are made; bytes of an element of them."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    kv: torch.dtype = torch.bfloat16
    quantization: str = "none"

    @property
    def weight_bytes(self) -> int:
        """Of an element of a matrix."""
        return self.dtype.itemsize if self.quantization == "none" else 1


BF16, FP8 = Formats("bf16"), Formats("fp8", kv=torch.float8_e4m3fn, quantization="fp8")
FLOAT32 = Formats("f32", torch.float32, torch.float32)
SMALL = Shape("small", 1024, 6, 16, 4, 2816, 8192)  # quick in float32


def weight_bytes(shape: Shape, formats: Formats = BF16) -> int:
    """What a decode step reads of the weights: every matrix once, of the embedding a few rows."""
    matrices = shape.layers * shape.layer_matrices + shape.vocab * shape.hidden
    return matrices * formats.weight_bytes


def kv_bytes(shape: Shape, formats: Formats = BF16) -> int:
    """KV of one token over all layers; rows of eight bits have a scale of 4 bytes."""
    row = shape.head_size * formats.kv.itemsize + (4 if formats.kv.itemsize == 1 else 0)
    return 2 * shape.layers * shape.kv_heads * row


def prefill_flops(shape: Shape, tokens: int) -> float:
    """A whole prompt: matrices, causal attention, and the scores of the last token alone."""
    matrices = 2.0 * tokens * shape.layers * shape.layer_matrices
    attention = 4.0 * shape.layers * shape.heads * shape.head_size * tokens * (tokens + 1) / 2
    return matrices + attention + 2.0 * shape.vocab * shape.hidden


def run(part: Part) -> None:
    """Equality, then each shape in bf16 beside transformers, then in fp8."""
    part.attempt("engine against its reference", "float32, greedy", partial(equality, part))
    for formats in (BF16, FP8):
        for shape in part.job.models:
            part.attempt("decode", title_of(shape, formats), partial(_shape, part, shape, formats))
            part.free()


def title_of(shape: Shape, formats: Formats, size: str = "") -> str:
    """A row's name."""
    return f"{shape.name} {formats.name}" + (f", {size}" if size else "")


def equality(part: Part) -> Cells:
    """Tokens of some prompts, by kernels and by plain torch. Raises AssertionError."""
    sized, smoke = part.job.sized, part.job.smoke
    shape = part.job.models[-1] if smoke else SMALL
    lengths, new_tokens = sized(((1, 15, 16, 17, 300, 700), 32), ((1, 17, 300), 16), ((17,), 2))
    limits = Limits(8, 1024, 256)
    ours = _engine(part, shape, FLOAT32, 40 if smoke else 512)
    prompts = [
        torch.randint(
            shape.vocab, (length,), generator=torch.Generator().manual_seed(length)
        ).tolist()
        for length in lengths
    ]
    with ours.driver(limits, graphs=not smoke) as driver:
        found = driver.generate(prompts, new_tokens)
    with ours.reference(limits) as driver:
        wanted = driver.generate(prompts, new_tokens)
    assert found == wanted, f"other tokens: {found} instead of {wanted}"
    return {"prompts": len(prompts), "tokens": len(prompts) * new_tokens, "other tokens": 0}


def _engine(part: Part, shape: Shape, formats: Formats, blocks: int) -> OurEngine:
    form = (formats.dtype, formats.kv, formats.quantization)
    return OurEngine(shape, *form, part.device, blocks)


def _blocks(part: Part, batch: int) -> int:
    """For decoding, or for the longest prompt if that takes more."""
    sized = part.job.sized
    context = sized(CONTEXT, CONTEXT, 20) + 12 + sized(STEPS, STEPS // 2, 2)
    prompt = sized(max(PROMPTS), max(PROMPTS), 33) + 32
    return max((batch + 2) * -(-context // BLOCK_SIZE), -(-prompt // BLOCK_SIZE)) + 8


def _fitting(part: Part, shape: Shape, formats: Formats, beside: bool) -> list[int]:
    """Batch sizes whose KV fits beside the weights, and transformers' beside that."""
    wanted = list(part.job.sized(BATCHES, (1, 64), (2,)))
    if part.device.type != "cuda":
        return wanted
    room = torch.cuda.mem_get_info(part.device)[0] - _SPARE
    room -= shape.num_parameters * formats.weight_bytes
    if beside:
        theirs = RIVAL_MOST * (CONTEXT + 2 * STEPS)
        room -= 2 * shape.num_parameters + 2 * theirs * kv_bytes(shape)
    block = BLOCK_SIZE * kv_bytes(shape, formats)
    return [batch for batch in wanted if _blocks(part, batch) * block <= room]


def _shape(part: Part, shape: Shape, formats: Formats) -> None:
    """All of one shape in one format."""
    title, capability = title_of(shape, formats), None
    if part.device.type == "cuda":
        capability = torch.cuda.get_device_capability(part.device)
    note = partial(part.tell, "note", "decode")
    if part.late:
        return note(text=f"left out, because its time was over: {title}")
    if capability and formats == FP8 and (why := unsupported_format("fp8", capability)):
        return note(text=f"{title} is left out: {why}")
    beside = formats == BF16
    batches = _fitting(part, shape, formats, beside)
    if beside and not batches:
        batches, beside = _fitting(part, shape, formats, False), False
        note(text=f"{shape.name} without transformers: no memory is left for it")
    try:
        ours = _engine(part, shape, formats, _blocks(part, max(batches))) if batches else None
    except torch.OutOfMemoryError:
        ours = None
    if ours is None:
        return note(text=f"{title} is left out: it does not fit the GPU's memory")
    rival: Transformers | None = None
    if beside:
        try:
            rival = Transformers(shape, part.device)
        except Exception as error:  # whatever version of it is there
            note(text=f"{shape.name} without transformers: {summary(error)}")
    measuring = Measuring(part, shape, formats, rival)
    sized = part.job.sized
    limits = Limits(max(batches), sized(2048, 2048, 64), CHUNK, sized(8, 8, 1))
    with ours.driver(limits, graphs=True) as driver:
        part.measure("decode", measuring.decode_cases(driver, batches))
        if beside or formats == BF16:
            _profiles(
                part, driver, title, [b for b in sized((1, 64), (1, 64), (2,)) if b in batches]
            )
    longest = sized(max(PROMPTS) + 64, max(PROMPTS) + 64, 128)
    with ours.driver(Limits(8, longest, sized(CHUNK, CHUNK, 16)), graphs=False) as driver:
        part.measure("prefill", measuring.prefill_cases(driver))
    return None


@dataclass
class Measuring:
    """One shape in one format, and transformers beside it if it is there."""

    part: Part
    shape: Shape
    formats: Formats
    rival: Transformers | None

    def decode_cases(self, driver: Driver, batches: list[int]) -> Iterator[Case]:
        """One for each batch, then with sampling instead of the likeliest token."""
        for batch in batches:
            name = title_of(self.shape, self.formats, f"batch {batch}")
            yield name, partial(self.decode, driver, batch)
        if self.formats == BF16:
            batch = min(64, max(batches))
            name = title_of(self.shape, self.formats, f"batch {batch}, top-p")
            yield name, partial(self.sampled, driver, batch)

    def prefill_cases(self, driver: Driver) -> Iterator[Case]:
        """One for each prompt."""
        for tokens in self.part.job.sized(PROMPTS, PROMPTS[1:2], (20,)):
            name = title_of(self.shape, self.formats, f"{tokens} tokens")
            yield name, partial(self.prefill, driver, tokens)

    def _sizes(self) -> tuple[int, int]:
        """Context and steps."""
        sized = self.part.job.sized
        return sized(CONTEXT, CONTEXT, 20), sized(STEPS, STEPS // 2, 2)

    def decode(self, driver: Driver, batch: int) -> Cells:
        """Steps of one batch size; ours and theirs in turn."""
        context, steps = self._sizes()
        rival = self.rival if batch <= RIVAL_MOST else None
        rival_steps = self.part.job.sized(_RIVAL_STEPS, 4, 2)
        step_s, theirs = self._in_turn(
            "decode", batch,
            partial(driver.decode, batch, context, steps),
            partial(rival.decode, batch, context, rival_steps) if rival else None,
        )  # fmt: skip
        cells: Cells = {"ms a step": step_s * 1e3, "tokens/s": batch / step_s}
        if rate := self.part.job.copy_bytes_per_s:
            seen = batch * (context + steps // 2)  # in the middle of what was counted
            moved = weight_bytes(self.shape, self.formats)
            floor = (moved + seen * kv_bytes(self.shape, self.formats)) / rate
            cells |= {"floor ms": floor * 1e3, "of floor": floor / step_s}
        return cells | theirs

    def prefill(self, driver: Driver, tokens: int) -> Cells:
        """One prompt in chunks, to its first token."""
        if not self.part.job.smoke:
            driver.prefill(tokens)  # kernels are compiled for what is new in it
        ours_s, theirs = self._in_turn(
            "prefill", tokens,
            partial(driver.prefill, tokens),
            partial(self.rival.prefill, tokens) if self.rival else None,
        )  # fmt: skip
        cells: Cells = {"ms": ours_s * 1e3, "tokens/s": tokens / ours_s}
        if rate := self.part.job.matmul_flops:
            floor = prefill_flops(self.shape, tokens) / rate
            cells |= {"floor ms": floor * 1e3, "of matmul rate": floor / ours_s}
        return cells | theirs

    def sampled(self, driver: Driver, batch: int) -> Cells:
        """The same steps with sampling by top-p."""
        step_s = driver.decode(batch, *self._sizes(), temperature=0.8, top_p=0.95)
        return {"ms a step": step_s * 1e3, "tokens/s": batch / step_s}

    def _in_turn(
        self, table: str, tokens: int, ours: Callable[[], float],
        theirs: Callable[[], tuple[float, str]] | None,
    ) -> tuple[float, Cells]:  # fmt: skip
        """Our median seconds of some rounds; transformers', between ours until it fails."""
        our_s, their_s, cache = [], [], ""
        for _ in range(self.part.job.sized(3, 2, 1)):
            our_s.append(ours())
            if theirs is None:
                continue
            try:
                seconds, cache = theirs()
                their_s.append(seconds)
            except Exception as error:  # whatever version of it is there
                if is_fatal(error):
                    raise
                traceback.print_exc()  # to the part's log
                text = f"{self.shape.name}, {tokens}: transformers: {summary(error)}"
                self.part.tell("note", table, text=text)
                theirs = None
        self.part.free()  # its caches of one size are of no use for the next
        ours_s = statistics.median(our_s)
        if not their_s:
            return ours_s, {}
        rival_s = statistics.median(their_s)
        return ours_s, {
            "transformers tokens/s": tokens / rival_s, "x transformers": rival_s / ours_s,
            "its cache": cache,
        }  # fmt: skip


def _profiles(part: Part, driver: Driver, title: str, batches: list[int]) -> None:
    """Where a decode step goes on the device: kernels by time, as torch's profiler reports them."""
    steps, context = part.job.sized(16, 16, 2), part.job.sized(CONTEXT, CONTEXT, 20)
    for batch in batches:
        table = f"where a step goes, {title}, batch {batch}"
        if part.late:
            part.tell("note", table, text="left out, because its time was over")
        else:
            step = partial(driver.decode, batch, context, steps)
            part.attempt(
                table, "profile", partial(_profile, part, table, step, driver.all_steps(steps))
            )


def _profile(part: Part, table: str, step: Callable[[], float], steps: int) -> None:
    """step: decodes `steps` steps and gives a step's seconds; the profiler slows steps down."""
    step_s = step()
    on_gpu = part.device.type == "cuda"
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    # On a CPU the work is the engine's thread's, which is not this one.
    everywhere = None if on_gpu else _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[activity], experimental_config=everywhere) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize(part.device)
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == kind:
            times[short(event.name)] += (
                event.self_device_time_total if on_gpu else event.self_cpu_time_total
            )
            calls[short(event.name)] += 1
    if not times:  # as in a container without its rights
        part.tell("note", table, text="left out: torch's profiler reports no kernel on this device")
    for name, cells in step_table(times, calls, steps, step_s * 1e6).items():
        part.tell("row", table, name, cells)


def step_table(
    times: Counter[str], calls: Counter[str], steps: int, step_us: float
) -> dict[str, Cells]:
    """Rows of microseconds in `steps` steps, of which each takes `step_us`."""

    def row(us: float, count: float | None) -> Cells:
        return {"us a step": us / steps, "of step": us / steps / step_us, "calls": count}

    if not times:
        return {}
    named, total = times.most_common(_NAMED), sum(times.values())
    return {
        **{name: row(us, calls[name] / steps) for name, us in named},
        "other kernels": row(total - sum(us for _, us in named), None),
        "idle, or waiting": row(max(0.0, step_us * steps - total), None),
    }


def short(name: str) -> str:
    """A kernel's name without what templates and arguments add."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    plain = re.split(r"[<(]", name)[0].split("::")[-1].strip()
    return (plain or name)[:44]
