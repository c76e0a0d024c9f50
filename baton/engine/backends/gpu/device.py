"""The one place that tells a GPU what to do and when: its stream, its events, its pinned memory.

All work of an engine goes through one lane, in order: nothing begins before what was put on the
lane earlier has ended. So kernels that follow each other need no waiting; only the host, and others
who touch the same memory, wait, for marks on the lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Work = Callable[[], object]  # whose result nobody needs


class Mark(Protocol):
    """A place on a lane."""

    def wait(self) -> None:
        """Returns when all that lies before has ended. Raises what it failed with."""


class Lane(Protocol):
    """Work for one device, in order. Used by the engine thread only."""

    device: torch.device

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeroed host memory `[count]` that copies to and from the device need not wait for."""

    def upload(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device. On the lane only, and not while it is captured."""

    def put(self, work: Work) -> None:
        """Puts work at the end of the lane. It may run later: what it reads must stay as it is."""

    def call(self, work: Callable[[], T]) -> T:
        """Puts work at the end whose result the host needs; the work itself waits where it must."""

    def mark(self) -> Mark:
        """The end of the lane as it is now."""

    def capture(self, work: Work) -> Work:
        """What does the same as `work` with one launch, each time, on the same memory."""

    def bytes_free(self) -> int:
        """Memory that nobody has taken yet; 0 where it is not known."""


def lane_of(device: torch.device) -> Lane:
    """A new lane for a device."""
    return CudaLane(device) if device.type == "cuda" else HostLane()


class HostLane:
    """A CPU's: all is done when it is put there, and nothing is captured."""

    device = torch.device("cpu")

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Plain memory."""
        return torch.zeros(count, dtype=dtype)

    def upload(self, tensor: Tensor) -> Tensor:
        """It is there."""
        return tensor

    def put(self, work: Work) -> None:
        """Does it."""
        work()

    def call(self, work: Callable[[], T]) -> T:
        """Does it."""
        return work()

    def mark(self) -> Mark:
        """One that needs no waiting."""
        return _Past()

    def capture(self, work: Work) -> Work:
        """The work itself."""
        return work

    def bytes_free(self) -> int:
        """Not known."""
        return 0


class _Past:
    def wait(self) -> None:
        pass


class CudaLane:
    """A CUDA stream of its own.

    Not the default stream: that one cannot be captured, and others' streams would wait for it.
    Host threads wait by spinning, which is over tens of microseconds sooner than sleeping is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # What was loaded on other streams is there before this one reads it.
        torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device)
        self._graph_memory = torch.cuda.graph_pool_handle()

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Page-locked memory."""
        return torch.zeros(count, dtype=dtype, pin_memory=True)

    def upload(self, tensor: Tensor) -> Tensor:
        """Copied from page-locked memory: a copy of other memory waits for the whole lane."""
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def put(self, work: Work) -> None:
        """Launches it on the stream."""
        with torch.cuda.stream(self._stream):
            work()

    def call(self, work: Callable[[], T]) -> T:
        """Launches it on the stream; what it copies to the host it waits for."""
        with torch.cuda.stream(self._stream):
            return work()

    def mark(self) -> Mark:
        """An event."""
        return _Event(self._stream)

    def capture(self, work: Work) -> Work:
        """A CUDA graph; all of a lane's share their memory, as one at a time runs.

        Other threads may use the GPU meanwhile. The work has to have run before: a first run may
        compile, and allocate what graphs must not.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph,
            pool=self._graph_memory,
            stream=self._stream,
            capture_error_mode="thread_local",
        ):
            work()
        return graph.replay

    def bytes_free(self) -> int:
        """As the driver says, for all processes on the GPU; what torch only keeps is free."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


class _Event:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()
