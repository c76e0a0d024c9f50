"""Part "steps": kernels of decode steps and prompts, by torch's profiler.

`of span` is the share of a step's time on the device in which a kernel runs; in the rest the device
waits for the host or the next launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine import CHUNK, CONTEXT, Formats, OurEngine, measured, title_of
from benchmarks.gpu.part import Case, Cells, Part
from benchmarks.shapes import Shape

_BATCHES, _PROMPT = (1, 64), 512
_WARM_UP, _STEPS = 4, 12
_ROWS = 12  # of a table of kernels


class Launched(NamedTuple):
    """A kernel or copy on the device; start and duration in microseconds."""

    began: float
    took: float
    name: str


def run(part: Part) -> None:
    """Profiles decode steps and a prompt of each model that the part "engine" measures."""
    models = measured(part)
    for shape, formats in part.sized(models, models[:1]):
        if part.has_fp8 or "fp8" not in formats.name:
            part.measure("steps", _cases(part, shape, formats))


def _cases(part: Part, shape: Shape, formats: Formats) -> Iterator[Case]:
    """Cases of one engine, which is built for the first one."""
    batches, context = part.sized((_BATCHES, CONTEXT), ((2,), 15))
    prompt, chunk = part.sized((_PROMPT, CHUNK), (5, 8))
    blocks = (max(batches) + 2) * -(-(context + 64) // 16) + 64
    ours = OurEngine(shape, formats, part.device, blocks)
    limits = (max(batches), part.sized(2048, 64), chunk)
    with closing(ours.driver(*limits, graphs=not part.smoke)) as driver:
        steps = part.sized((_WARM_UP, _STEPS), (1, 1))
        for batch in batches:
            decode = partial(driver.decode, [context] * batch, *steps)
            title = title_of(shape, formats, f"batch {batch}")
            yield title, partial(_profiled, part, title, decode, shape, sum(steps) + 1)
        title = title_of(shape, formats, f"{prompt} tokens")
        yield title, partial(_profiled, part, title, partial(driver.prefill, prompt), shape, 1)


def _profiled(
    part: Part, title: str, call: Callable[[], object], shape: Shape, steps: int
) -> Cells:
    """Sends a table with a row for each kernel; returns a row of the totals."""
    found = launched_in(call, part.cuda)
    by_name = defaultdict[str, list[float]](list)
    for one in found:
        by_name[one.name].append(one.took)
    busy = sum(one.took for one in found)
    span = max(one.began + one.took for one in found) - found[0].began
    for name, took in sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:_ROWS]:
        share, count = sum(took) / busy, len(took) / steps
        cells: Cells = {"of busy": share, "a step": count, "us": sum(took) / len(took)}
        part.row(f"kernels of {title}", name[:80], cells)
    return {
        "span ms": span / steps / 1e3, "busy ms": busy / steps / 1e3, "of span": busy / span,
        "launches": len(found) / steps, "a layer": len(found) / steps / shape.layers,
    }  # fmt: skip


def launched_in(call: Callable[[], object], on_gpu: bool = True) -> list[Launched]:
    """Kernels that the second of two calls launches, in order; on a CPU torch's operations."""
    activity, device = ProfilerActivity.CUDA, DeviceType.CUDA
    if not on_gpu:
        activity, device = ProfilerActivity.CPU, DeviceType.CPU
    call()
    # On a CPU they run in the engine's thread.
    config = None if on_gpu else _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[activity], experimental_config=config) as found:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    return sorted(
        Launched(event.time_range.start, event.time_range.elapsed_us(), event.name)
        for event in found.events() or ()
        if event.device_type == device
    )
