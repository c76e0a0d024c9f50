"""Time of a launch on its device: the median over replays of a CUDA graph.

A graph holds the launch many times, on alternating tensors, so that the L2 cache does not hold what
a model's step reads from memory. Time that Python and Triton spend on a launch is not included; a
short kernel timed from the host would show the host's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import torch

from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Trial

Launch: TypeAlias = Callable[[], object]
T = TypeVar("T")

_LAUNCHES = (20, 100)  # of a graph: minimum, maximum
_GRAPH_S, _REPLAYS_S = 3e-3, 25e-3  # duration aimed at: of a graph, and of all its replays
_REPLAYS = (3, 20)  # minimum, maximum
_MOST_COPIES = 16


def rotated(make: Callable[[], T], nbytes: Callable[[T], int], device: torch.device) -> Sequence[T]:
    """What `make` makes; on a GPU as many as are together twice as large as its L2 cache."""
    made = [make()]
    if device.type == "cuda" and (size := nbytes(made[0])):
        wanted = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        made += [make() for _ in range(min(-(-wanted // size), _MOST_COPIES) - 1)]
    return made


def trials_of(spec: KernelSpec, shape: Key, device: torch.device) -> Sequence[Trial]:
    """Trials of one shape on as many tensors as `rotated` makes."""
    return rotated(lambda: spec.trial(shape, device), lambda trial: trial.moved_bytes, device)


def launches_of(trials: Sequence[Trial], config: Config | None = None) -> list[Launch]:
    """Their launches; config None: with the configuration in effect."""
    return [partial(trial.run, config) for trial in trials]


def seconds(launches: Sequence[Launch], device: torch.device, *, captured: bool = True) -> float:
    """Median seconds of a launch on the GPU; on a CPU the seconds of one call.

    launches: the same launch on different tensors, which must not wait for the device · captured:
    False for launches that a graph cannot hold, such as copies from reused pinned memory; they are
    queued one by one, and the host has to be faster than the device.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        launches[0]()
        return time.perf_counter() - began
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for launch in launches:  # kernels are compiled and loaded by now
            launch()
        once = _elapsed(launches[0], 1)
        count = min(max(round(_GRAPH_S / once), _LAUNCHES[0]), _LAUNCHES[1])
        turns = [*launches] * -(-count // len(launches))

        def every() -> None:
            for launch in turns:
                launch()

        again = _graph_of(every).replay if captured else every
        replays = round(_REPLAYS_S / _elapsed(again, 1))
        elapsed = _elapsed(again, min(max(replays, _REPLAYS[0]), _REPLAYS[1]))
    torch.cuda.current_stream(device).wait_stream(stream)
    return elapsed / len(turns)


def _graph_of(launch: Launch) -> torch.cuda.CUDAGraph:
    """A graph of what `launch` launches on the current stream."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        launch()
    finally:
        graph.capture_end()
    return graph


def _elapsed(launch: Launch, times: int) -> float:
    """Median seconds on the device over a number of calls."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for begin, end in pairs:
        begin.record()
        launch()
        end.record()
    pairs[-1][1].synchronize()
    return statistics.median(float(begin.elapsed_time(end)) for begin, end in pairs) / 1e3
