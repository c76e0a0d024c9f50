"""What an engine asks of a GPU: its stream, events and pinned memory, and its facts and sizes.

All work of an engine goes through one stream, in order: nothing begins before what was put there
earlier has ended. So kernels that follow each other need no waiting; only the host, and others that
touch the same memory, wait for events.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from baton.cuda import CudaDriver

T = TypeVar("T")
Work = Callable[[], object]  # whose result is not used
Waiting = Callable[[], AbstractContextManager[None]]


class Stream:
    """Work for one device, in order. Used by the engine thread only.

    This one is a CPU's: work is done when it is put there, and nothing is captured.
    """

    device = torch.device("cpu")

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeroed host memory `[count]` that copies to and from the device need not wait for."""
        return torch.zeros(count, dtype=dtype)

    def put(self, work: Work) -> None:
        """Appends work. It may run later: what it reads must stay as it is."""
        work()

    def call(self, work: Callable[[], T]) -> T:
        """Appends work whose result the host needs; the work itself waits where it must."""
        return work()

    def record_event(self) -> Any:
        """The end of the stream as it is now: `synchronize` of it raises what work before failed
        with.
        """
        return torch.cpu.Event()

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What does the same as `work` with one launch, each time, on the same memory.

        What it gives is valid until something else that was captured runs.
        """
        return work


@dataclass(frozen=True)
class _Event:
    _event: torch.cuda.Event
    _waiting: Waiting

    def synchronize(self) -> None:
        with self._waiting():
            self._event.synchronize()


class CudaStream(Stream):
    """A CUDA stream of its own.

    Not the default stream: that one cannot be captured, and others' streams would wait for it.
    Host threads wait by spinning, which is over tens of microseconds sooner than sleeping is.
    """

    def __init__(self, device: torch.device, waiting: Waiting = nullcontext) -> None:
        """waiting: what each of the host's waits is to be within."""
        self.device, self._waiting = device, waiting
        # What was loaded on other streams is there before this one reads it.
        torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device)
        self._graph_memory = torch.cuda.graph_pool_handle()

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=True)

    def put(self, work: Work) -> None:
        self.call(work)

    def call(self, work: Callable[[], T]) -> T:
        with torch.cuda.stream(self._stream):
            return work()

    def record_event(self) -> Any:
        event = torch.cuda.Event()
        event.record(self._stream)
        return _Event(event, self._waiting)

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A CUDA graph; all of a stream's share their memory, as one at a time runs.

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
            result = work()
        kept = _unowned(result)

        def replay() -> Tensor:
            graph.replay()
            return kept

        return replay


def _unowned(tensor: Tensor) -> Tensor:
    """A view of a tensor in a graph's memory, which others may then share with it."""
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = CudaDriver().view(tensor.data_ptr(), extent * tensor.element_size())
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def new_stream(device: torch.device, waiting: Waiting = nullcontext) -> Stream:
    """One of a device; a CPU's, which has nothing to wait for, stands for a GPU's in tests."""
    return CudaStream(device, waiting) if device.type == "cuda" else Stream()


class Gpu:
    """One GPU, `device` with its number: its kind and its memory. Sizes are bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Its number and its maker's name, as "cuda:0 NVIDIA H100"."""
        return f"{self.device} {torch.cuda.get_device_name(self.device)}"

    def of_rank(self, rank: int) -> Gpu:
        """The GPU of another rank, where the first one computes on this: the next, and so on."""
        return Gpu(torch.device("cuda", (self.device.index or 0) + rank))

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, major and minor."""
        return torch.cuda.get_device_capability(self.device)

    def use(self) -> None:
        """Makes it the calling thread's GPU; CUDA keeps that for each thread, and starts at 0."""
        torch.cuda.set_device(self.device)

    def free_and_total(self) -> tuple[int, int]:
        """Free memory and all there is; torch first gives back what it only keeps."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)

    def allocated(self) -> int:
        """What this process's tensors hold."""
        return torch.cuda.memory_allocated(self.device)

    def peak_of(self, run: Callable[[], object]) -> int:
        """The most that `run` takes at a time beside what is held now."""
        before = self.reset_peak()
        run()
        return self.peak() - before

    def reset_peak(self) -> int:
        """What is held now, from which on a peak counts.

        Counted in whole segments of torch's allocator, fragmentation included.
        """
        self.free_and_total()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_reserved(self.device)

    def peak(self) -> int:
        """The most that was held at a time since `reset_peak`, once what runs has ended."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)
