"""How long a launch takes on its device: the median of replays of a CUDA graph.

A graph holds the launch many times, on tensors that take turns, so that the L2 cache does not keep
what a step of a model reads from memory. What Python and Triton need for a launch is not in it: a
short kernel that is timed from the host shows the host's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch

Launch: TypeAlias = Callable[[], object]
T = TypeVar("T")

_LAUNCHES = (20, 100)  # in a graph: at least, and at most
_GRAPH_S, _REPLAYS_S = 3e-3, 25e-3  # what a graph is to take, and all its replays
_REPLAYS = (3, 20)
_MOST_COPIES = 16


def rotated(make: Callable[[], T], nbytes: Callable[[T], int], device: torch.device) -> Sequence[T]:
    """One made thing, and on a GPU further ones, until all are twice as large as its L2 cache."""
    made = [make()]
    if device.type == "cuda" and (size := nbytes(made[0])):
        wanted = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        made += [make() for _ in range(min(-(-wanted // size), _MOST_COPIES) - 1)]
    return made


def seconds(launches: Sequence[Launch], device: torch.device, *, captured: bool = True) -> float:
    """Median seconds of a launch on the GPU; on a CPU those of one call.

    launches: the same one on different tensors, which take turns. They must not wait for the device
    · captured: False for what a graph cannot hold, such as copies from pinned memory that is used
    again; its launches are queued, and have to be shorter than what they start.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        launches[0]()
        return time.perf_counter() - began
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for launch in launches:  # what is compiled or loaded is there now
            launch()
        once = _elapsed(launches[0], 1)
        count = min(max(round(_GRAPH_S / once), _LAUNCHES[0]), _LAUNCHES[1])
        turns = [*launches] * -(-count // len(launches))

        def every() -> None:
            for launch in turns:
                launch()

        again = _graph_of(every).replay if captured else every
        took = _elapsed(again, 1)
        replays = min(max(round(_REPLAYS_S / took), _REPLAYS[0]), _REPLAYS[1])
        took = _elapsed(again, replays)
    torch.cuda.current_stream(device).wait_stream(stream)
    return took / len(turns)


def _graph_of(launch: Launch) -> torch.cuda.CUDAGraph:
    """What it launches on the current stream."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        launch()
    finally:
        graph.capture_end()
    return graph


def _elapsed(launch: Launch, times: int) -> float:
    """Median seconds between the events around each."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for begin, end in pairs:
        begin.record()
        launch()
        end.record()
    pairs[-1][1].synchronize()
    return statistics.median(float(begin.elapsed_time(end)) for begin, end in pairs) / 1e3
