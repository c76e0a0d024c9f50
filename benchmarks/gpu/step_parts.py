"""Where a decode step goes on the device: kernels by time, as torch's profiler tells them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.job import Cell

_NAMED = 8  # kernels of their own rows
_WIDTH = 44


class Untold(Exception):
    """The profiler cannot be had here, as in a container without its rights."""


def parts_of(
    run: Callable[[], float], steps: int, device: torch.device
) -> list[tuple[str, dict[str, Cell]]]:
    """(kernel, cells) by their time, then what is left of the step.

    run: decodes `steps` steps and gives a step's seconds; it is called twice, the first time
    without the profiler, which slows steps down. Raises Untold.
    """
    step_s = run()
    on_gpu = device.type == "cuda"
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    # On a CPU only the engine's thread has anything to tell, which is not this one.
    everywhere = None if on_gpu else _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[activity], experimental_config=everywhere) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == kind:
            times[short(event.name)] += (
                event.self_device_time_total if on_gpu else event.self_cpu_time_total
            )
            calls[short(event.name)] += 1
    if not times:
        raise Untold("torch's profiler tells of no kernel on this device")
    return table(times, calls, steps, step_s * 1e6)


def table(
    times: Counter[str], calls: Counter[str], steps: int, step_us: float
) -> list[tuple[str, dict[str, Cell]]]:
    """Rows of microseconds in `steps` steps, of which each takes `step_us`."""

    def row(us: float, count: float | None) -> dict[str, Cell]:
        return {"us a step": us / steps, "of step": us / steps / step_us, "calls": count}

    named = times.most_common(_NAMED)
    rows = [(name, row(us, calls[name] / steps)) for name, us in named]
    total = sum(times.values())
    rows.append(("other kernels", row(total - sum(us for _, us in named), None)))
    rows.append(("idle, or waiting", row(max(0.0, step_us * steps - total), None)))
    return rows


def short(name: str) -> str:
    """A kernel's name without what templates and arguments add."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    plain = re.split(r"[<(]", name)[0].split("::")[-1].strip()
    return (plain or name)[:_WIDTH]
