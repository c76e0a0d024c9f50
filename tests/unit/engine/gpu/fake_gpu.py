"""A GPU's figures beside a CPU that computes, in this process and in those of other ranks."""

import tests.interpreted  # noqa: F401, I001  (before a rank's process imports a kernel)

import torch

from baton.engine.backends.gpu import cuda_graphs
from baton.engine.backends.gpu.device import Gpu

GIB = 1 << 30
FEW_ROWS = 4, (8, 16)  # sequences and rows of chunks in captured steps


class FakeGpu(Gpu):
    """One of 8 GiB, of which 1 is others'; on each further rank's, 1 more is."""

    name = "cuda:0 Card"

    def __init__(self, capability=(9, 0), peak=GIB, others=GIB):
        super().__init__(torch.device("cpu"))
        self.used, self.held = 0, 0
        self._capability, self._peak, self._others = capability, peak, others

    def of_rank(self, rank):
        return type(self)(self._capability, self._peak, self._others + rank * GIB)

    @property
    def capability(self):
        return self._capability

    def use(self):
        self.used += 1

    def free_and_total(self):
        return 8 * GIB - self._others - self.held, 8 * GIB

    def allocated(self):
        return self.held

    def reset_peak(self):
        return 0

    def peak(self):
        return self._peak


class FewRowsGpu(FakeGpu):
    """On each rank chunks of captured steps are as small as those of the fixture `few_rows`."""

    def use(self):
        super().use()
        cuda_graphs.MAX_CHUNKS, cuda_graphs.CHUNK_SIZES = FEW_ROWS


class UnmeasuredGpu(FakeGpu):
    """For what is decided without running a step: profile runs take the interpreter long."""

    def peak_of(self, step):
        return self._peak
