"""A GPU as the engine uses it: its stream, events and pinned memory, its properties and memory.

All work of an engine goes through one stream, in order: work begins when everything queued before
it has ended. Kernels that follow each other therefore need no waiting; only the host, and others
that touch the same memory, wait for events.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Work = Callable[[], object]  # whose result is not used
Waiting = Callable[[], AbstractContextManager[None]]


class Stream:
    """Work for one device, in order. Used by the engine thread only.

    This class is a CPU's: work is done at once. cuda, graph_pool: torch's stream, and the memory of
    its graphs; None on a CPU.
    """

    device = torch.device("cpu")
    cuda: torch.cuda.Stream | None = None
    graph_pool: Any = None

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeroed host memory `[count]` for copies to and from the device that do not block."""
        return torch.zeros(count, dtype=dtype)

    def put(self, work: Work) -> None:
        """Queues work. It may run later: its inputs must not be changed until then."""
        work()

    def call(self, work: Callable[[], T]) -> T:
        """Queues work and returns its result; the work itself waits where it has to."""
        return work()

    def record_event(self) -> Any:
        """An event after all queued work; its `synchronize` raises the errors of that work."""
        return torch.cpu.Event()


@dataclass(frozen=True)
class _Event:
    _event: torch.cuda.Event
    _waiting: Waiting

    def synchronize(self) -> None:
        with self._waiting():
            self._event.synchronize()


class CudaStream(Stream):
    """A CUDA stream of the engine's.

    Not the default stream, which cannot be captured, and which other streams would wait for. Host
    threads wait by spinning, which ends tens of microseconds sooner than sleeping does.
    """

    cuda: torch.cuda.Stream

    def __init__(self, device: torch.device, waiting: Waiting = nullcontext) -> None:
        """waiting: makes a context manager that each wait of the host runs in."""
        self.device, self._waiting = device, waiting
        torch.cuda.synchronize(device)  # weights were loaded on other streams
        self.cuda = torch.cuda.Stream(device)
        self.graph_pool = torch.cuda.graph_pool_handle()

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=True)

    def put(self, work: Work) -> None:
        self.call(work)

    def call(self, work: Callable[[], T]) -> T:
        with torch.cuda.stream(self.cuda):
            return work()

    def record_event(self) -> Any:
        event = torch.cuda.Event()
        event.record(self.cuda)
        return _Event(event, self._waiting)


def new_stream(device: torch.device, waiting: Waiting = nullcontext) -> Stream:
    """A stream of a GPU; for a CPU one that works at once, which tests use."""
    return CudaStream(device, waiting) if device.type == "cuda" else Stream()


class Gpu:
    """Properties and memory of one GPU; `device` has its number, sizes are bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Its number and product name, such as "cuda:0 NVIDIA H100"."""
        return f"{self.device} {torch.cuda.get_device_name(self.device)}"

    def of_rank(self, rank: int) -> Gpu:
        """The GPU of another rank: `rank` numbers after this one, which is the first rank's."""
        return Gpu(torch.device("cuda", (self.device.index or 0) + rank))

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, major and minor."""
        return torch.cuda.get_device_capability(self.device)

    def use(self) -> None:
        """Makes it the calling thread's current GPU, which is 0 in a new thread."""
        torch.cuda.set_device(self.device)

    def free_and_total(self) -> tuple[int, int]:
        """Free and total memory, after torch has released its unused cache."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)

    def allocated(self) -> int:
        """Memory of this process's tensors."""
        return torch.cuda.memory_allocated(self.device)

    def peak_of(self, run: Callable[[], object]) -> int:
        """Peak memory of `run`, less the memory in use before it."""
        before = self.reset_peak()
        run()
        return self.peak() - before

    def reset_peak(self) -> int:
        """Begins to record the peak, and returns the memory in use now.

        Counted in whole segments of torch's allocator, which includes fragmentation.
        """
        self.free_and_total()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_reserved(self.device)

    def peak(self) -> int:
        """The peak since `reset_peak`, once queued work has ended."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)
