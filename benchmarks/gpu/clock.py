"""How long the device takes for a call: the one place where GPU and CPU differ in taking time.

On a GPU calls are captured into a CUDA graph, as the engine's steps are, so that it is the kernels
that are timed and not Python; what cannot be captured is launched one by one. Times are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Calls = Sequence[Callable[[], object]]
"""The same work over different memory, so that no cache holds what a call reads."""

_ABOUT_S = 0.2  # of measuring
_FEWEST, _MOST = 5, 60  # replays


class Clock(Protocol):
    """Takes times on one device."""

    def seconds(self, calls: Calls, *, graph: bool = True) -> float:
        """Median seconds of one of the calls, after each ran once. `graph`: capture them."""

    def synchronize(self) -> None:
        """Returns when the device has done all that it was given."""


class HostClock:
    """A CPU: calls return when they are done."""

    def seconds(self, calls: Calls, *, graph: bool = True) -> float:
        """See `Clock`; each call runs but once: what it takes means nothing."""
        times = []
        for call in calls:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class CudaClock:
    """CUDA events on one device's own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, calls: Calls, *, graph: bool = True) -> float:
        """See `Clock`."""
        for call in calls:  # compiles, and chooses configurations
            call()
        self.synchronize()
        once = _captured(calls) if graph else None
        replay = once or (lambda: [call() for call in calls])
        first = self._timed(replay)
        count = max(_FEWEST, min(_MOST, int(_ABOUT_S / max(first, 1e-6))))
        return statistics.median(self._timed(replay) for _ in range(count)) / len(calls)

    def synchronize(self) -> None:
        """See `Clock`."""
        torch.cuda.synchronize(self._device)

    def _timed(self, call: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _captured(calls: Calls) -> Callable[[], object] | None:
    """Replays all calls as one graph; None where one of them cannot be captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:
        torch.cuda.set_stream(stream)  # a capture that failed leaves its own
        torch.cuda.synchronize()  # raises if it was the work that failed
        return None
    return graph.replay


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def rotations(bytes_of_one: int, device: torch.device, at_most: int = 64) -> int:
    """How many copies of a call's inputs are needed for none to be left in the L2 cache."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(at_most, -(-4 * cache // max(1, bytes_of_one))))
