"""What a GPU tells of itself: its kind, its memory, and how much of it a computation takes."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Gpu:
    """One GPU, `device` with its number. Sizes are bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Its number and its maker's name, as "cuda:0 NVIDIA H100"."""
        return f"{self.device} {torch.cuda.get_device_name(self.device)}"

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, major and minor."""
        return torch.cuda.get_device_capability(self.device)

    def use(self) -> None:
        """Makes it the calling thread's GPU; CUDA keeps that for each thread, and starts at 0."""
        torch.cuda.set_device(self.device)

    def free_and_total(self) -> tuple[int, int]:
        """What nobody holds, and all there is; torch first gives back what it only keeps."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)

    def allocated(self) -> int:
        """What this process's tensors hold."""
        return torch.cuda.memory_allocated(self.device)

    def peak_of(self, run: Callable[[], object]) -> int:
        """The most that `run` takes at a time beside what is held now.

        Counted in whole segments as torch's allocator takes them, so with what fragments.
        """
        self.free_and_total()
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device) - before
