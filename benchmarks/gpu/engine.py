"""Part "engine": decode steps and prompts of whole models with made-up weights, sampling included.

Beside each figure stands its floor, from what the device was measured to do, and transformers in
turn with it. First of all the engine is held against its reference in float32: the same tokens.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.gpu import floors
from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.device import device_of, free
from benchmarks.gpu.driving import Driver, Limits
from benchmarks.gpu.job import (
    Case,
    Cell,
    Doing,
    Event,
    Failed,
    Job,
    Note,
    Row,
    attempt,
    guarded,
    in_time,
    is_fatal,
    told,
)
from benchmarks.gpu.our_engine import BF16, FLOAT32, FP8, Formats, OurEngine
from benchmarks.gpu.rival import Rival
from benchmarks.gpu.sizes import (
    CHUNK,
    CONTEXT,
    PROMPTS,
    RIVAL_MOST,
    STEPS,
    batches_of,
    blocks,
    unsupported,
)
from benchmarks.gpu.step_parts import Untold, parts_of
from benchmarks.gpu.targets import DECODE, OF_FLOOR, OF_MATMUL, OF_RIVAL, PREFILL
from benchmarks.shapes import Shape

EQUAL = "engine against its reference"
_RIVAL_STEPS = 8
_PROFILED, _PROFILED_STEPS = (1, 64), 16
_DECODE_CONTEXT = 2048  # of tables, as wide as short sequences have them


def run(job: Job) -> Iterator[Event]:
    """Equality, then each shape in bf16 beside transformers, then in fp8."""
    yield Doing(EQUAL, "float32, greedy")
    yield attempt(EQUAL, "float32, greedy", lambda: equality(job))
    for formats in (BF16, FP8):
        for shape in job.models:
            title = f"{shape.name} {formats.name}"
            yield from guarded(DECODE, title, partial(_shape, job, shape, formats))
            free(job)


def decode_name(shape: Shape, formats: Formats, batch: int) -> str:
    """A row's name."""
    return f"{shape.name} {formats.name}, batch {batch}"


def prefill_name(shape: Shape, formats: Formats, tokens: int) -> str:
    """A row's name."""
    return f"{shape.name} {formats.name}, {tokens} tokens"


def equality(job: Job) -> dict[str, Cell]:
    """Tokens of some prompts, by kernels and by plain torch. Raises AssertionError."""
    device = device_of(job)
    shape = job.models[-1] if job.smoke else SMALL
    lengths, new_tokens = job.sized(((1, 15, 16, 17, 300, 700), 32), ((1, 17, 300), 16), ((17,), 2))
    limits = Limits(8, 1024, 256)
    ours = OurEngine(shape, FLOAT32, device, 512 if not job.smoke else 40, graphs=not job.smoke)
    prompts = [
        torch.randint(
            shape.vocab, (length,), generator=torch.Generator().manual_seed(length)
        ).tolist()
        for length in lengths
    ]
    with ours.driver(limits) as driver:
        found = driver.generate(prompts, new_tokens)
    with ours.reference(limits) as driver:
        wanted = driver.generate(prompts, new_tokens)
    assert found == wanted, f"other tokens: {found} instead of {wanted}"
    return {"prompts": len(prompts), "tokens": len(prompts) * new_tokens, "other tokens": 0}


SMALL = Shape(
    "small", "nothing real: quick in float32", "LlamaForCausalLM", 1024, 6, 16, 4, 2816, 8192
)


@dataclass
class _Measuring:
    """One shape in one format, and transformers beside it, if it is.

    troubles: what transformers failed with, in words; it takes nothing from our own figures.
    """

    job: Job
    shape: Shape
    formats: Formats
    ours: OurEngine
    rival: Rival | None
    troubles: list[str] = field(default_factory=list)

    def decode_cases(self, driver: Driver, batches: list[int]) -> Iterator[Case]:
        """One for each batch."""
        for batch in batches:
            name = decode_name(self.shape, self.formats, batch)
            yield name, partial(self.decode, driver, batch)

    def prefill_cases(self, driver: Driver, prompts: list[int]) -> Iterator[Case]:
        """One for each prompt."""
        for tokens in prompts:
            name = prefill_name(self.shape, self.formats, tokens)
            yield name, partial(self.prefill, driver, tokens)

    def decode(self, driver: Driver, batch: int) -> dict[str, Cell]:
        """Steps of one batch size; ours and theirs in turn."""
        job, steps = self.job, self.job.sized(STEPS, STEPS // 2, 2)
        context = job.sized(CONTEXT, CONTEXT, 20)
        rival = self.rival if batch <= RIVAL_MOST else None
        ours, theirs, cache = self._in_turn(
            partial(driver.decode, batch, context, steps),
            partial(rival.decode, batch, context, job.sized(_RIVAL_STEPS, 4, 2)) if rival else None,
            f"batch {batch}",
        )
        step_s = statistics.median(ours)
        cells: dict[str, Cell] = {"ms a step": step_s * 1e3, "tokens/s": batch / step_s}
        if job.ceilings:
            middle = context + steps // 2  # of what was counted
            floor = floors.decode_step_s(
                self.shape, batch, middle, job.ceilings, self.formats.storage
            )
            cells |= {"floor ms": floor * 1e3, OF_FLOOR: floor / step_s}
        return cells | _beside(step_s, theirs, batch, cache)

    def prefill(self, driver: Driver, tokens: int) -> dict[str, Cell]:
        """One prompt in chunks, to its first token."""
        job = self.job
        if not job.smoke:
            driver.prefill(tokens)  # kernels are compiled for what is new in it
        ours, theirs, cache = self._in_turn(
            partial(driver.prefill, tokens),
            partial(self.rival.prefill, tokens) if self.rival else None,
            f"{tokens} tokens",
        )
        ours_s = statistics.median(ours)
        cells: dict[str, Cell] = {"ms": ours_s * 1e3, "tokens/s": tokens / ours_s}
        if job.ceilings:
            floor = floors.prefill_s(self.shape, tokens, job.ceilings)
            cells |= {"floor ms": floor * 1e3, OF_MATMUL: floor / ours_s}
        return cells | _beside(ours_s, theirs, tokens, cache)

    def _in_turn(
        self, ours: Callable[[], float], theirs: Callable[[], tuple[float, str]] | None, size: str
    ) -> tuple[list[float], list[float], str]:
        """Our seconds of some rounds, theirs between them until they fail, and their cache."""
        found: tuple[list[float], list[float]] = ([], [])
        cache = ""
        for _ in range(self.job.sized(3, 2, 1)):
            found[0].append(ours())
            if theirs is None:
                continue
            try:
                seconds, cache = theirs()
            except Exception as error:  # whatever version of it is there
                if is_fatal(error):
                    raise
                traceback.print_exc()  # to the part's log
                self.troubles.append(f"{self.shape.name}, {size}: transformers: {told(error)}")
                theirs = None
            else:
                found[1].append(seconds)
        free(self.job)  # their caches of one size are of no use for the next
        return *found, cache

    def told(self, table: str) -> Iterator[Event]:
        """Notes of their troubles, each once."""
        yield from (Note(table, text) for text in self.troubles)
        self.troubles.clear()

    def sampled(self, driver: Driver, batch: int) -> dict[str, Cell]:
        """The same steps with a draw instead of the likeliest token."""
        job = self.job
        context, steps = job.sized(CONTEXT, CONTEXT, 20), job.sized(STEPS, STEPS // 2, 2)
        step_s = driver.decode(batch, context, steps, temperature=0.8, top_p=0.95)
        return {"ms a step": step_s * 1e3, "tokens/s": batch / step_s}


def _beside(ours_s: float, theirs: list[float], tokens: int, cache: str) -> dict[str, Cell]:
    """Transformers' rate, of so many tokens each time, and how many times as fast we are."""
    if not theirs:
        return {}
    rival_s = statistics.median(theirs)
    return {
        "transformers tokens/s": tokens / rival_s, OF_RIVAL: rival_s / ours_s, "its cache": cache,
    }  # fmt: skip


def _shape(job: Job, shape: Shape, formats: Formats) -> Iterator[Event]:
    """All of one shape in one format."""
    if job.left_s <= 0:
        yield Note(DECODE, f"left out, because its time was over: {shape.name} {formats.name}")
        return
    device, title = device_of(job), f"{shape.name} {formats.name}"
    if why := unsupported(formats, device):
        yield Note(DECODE, f"{title} is left out: {why}")
        return
    beside = formats == BF16
    batches = batches_of(job, shape, formats, device, beside=beside)
    if beside and not batches:
        batches, beside = batches_of(job, shape, formats, device, beside=False), False
        yield Note(DECODE, f"{shape.name} without transformers: no memory is left for it")
    if not batches:
        yield Note(DECODE, f"{title} is left out: it does not fit the GPU's memory")
        return
    yield Doing(DECODE, f"{title}: weights" + (", and transformers" if beside else ""))
    try:
        ours = OurEngine(shape, formats, device, blocks(job, max(batches)), graphs=True)
    except torch.OutOfMemoryError:
        yield Note(DECODE, f"{title} is left out: it does not fit the GPU's memory")
        return
    rival: Rival | None = None
    if beside:
        try:
            rival = Rival(shape, device, clock_of(device))
        except Exception as error:  # whatever version of it is there
            yield Note(DECODE, f"{shape.name} without transformers: {told(error)}")
    yield from _measured(_Measuring(job, shape, formats, ours, rival), batches)


def _measured(measuring: _Measuring, batches: list[int]) -> Iterator[Event]:
    job, ours = measuring.job, measuring.ours
    context = job.sized(_DECODE_CONTEXT, _DECODE_CONTEXT, 64)
    limits = Limits(max(batches), context, CHUNK, job.sized(8, 8, 1))
    yield Doing(DECODE, f"{ours.shape.name} {ours.formats.name}: graphs, and kernels that are new")
    with ours.driver(limits) as driver:
        yield from in_time(job, DECODE, list(measuring.decode_cases(driver, batches)))
        yield from measuring.told(DECODE)
        if ours.formats == BF16:
            drawn = min(64, max(batches))
            name = f"{decode_name(ours.shape, ours.formats, drawn)}, top-p"
            yield from in_time(job, DECODE, [(name, partial(measuring.sampled, driver, drawn))])
            yield from _profiles(
                job,
                driver,
                ours,
                [b for b in job.sized(_PROFILED, _PROFILED, (2,)) if b in batches],
            )
    prompts = list(job.sized(PROMPTS, PROMPTS[1:2], (20,)))
    chunk = job.sized(CHUNK, CHUNK, 16)
    limits = Limits(8, job.sized(max(PROMPTS) + 64, max(PROMPTS) + 64, 128), chunk)
    with ours.driver(limits, graphs=False) as driver:
        yield from in_time(job, PREFILL, list(measuring.prefill_cases(driver, prompts)))
        yield from measuring.told(PREFILL)


def _profiles(job: Job, driver: Driver, ours: OurEngine, batches: list[int]) -> Iterator[Event]:
    """Kernels of a step."""
    steps, context = job.sized(_PROFILED_STEPS, _PROFILED_STEPS, 2), job.sized(CONTEXT, CONTEXT, 20)
    for batch in batches:
        title = f"where a step goes, {decode_name(ours.shape, ours.formats, batch)}"
        if job.left_s <= 0:
            yield Note(title, "left out, because its time was over")
            continue
        yield Doing(title, "profile")
        try:
            parts = parts_of(
                partial(driver.decode, batch, context, steps),
                driver.all_steps(steps), device_of(job),
            )  # fmt: skip
        except Untold as error:
            yield Note(title, f"left out: {error}")
            continue
        except Exception as error:
            if is_fatal(error):
                raise
            traceback.print_exc()  # to the part's log
            yield Failed(title, "profile", told(error))
            continue
        for name, cells in parts:
            yield Row(title, name, cells)
