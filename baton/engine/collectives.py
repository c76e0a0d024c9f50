"""Sums and gathers over the ranks of a tensor-parallel model, through torch.distributed.

Ranks that share one host's memory have others, inside the native step (`ops/native/src/ranks.h`).
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from baton.engine.runner import RunnerFailed
from baton.engine.shard import Shard


class Collectives:
    """Of one rank alone: everything is here. `seconds`: that all of them took so far."""

    seconds = 0.0

    def sum(self, x: Tensor) -> Tensor:
        """x `[rows, columns]` of every rank added up, on all of them: the same bits."""
        return x

    def gather(self, part: Tensor, columns: int) -> Tensor:
        """Columns `[rows, its own]` of every rank side by side, `[rows, columns]`, on the first.

        Rank r has those from `r * columns / ranks` on; the others get what they gave.
        """
        return part


ALONE = Collectives()


class GlooCollectives(Collectives):
    """Between processes on CPUs, over TCP: float32 sums in the order of ranks, as in one process.

    All parts go to all ranks and each adds them up: for two ranks as many bytes as an all-reduce
    takes, for N ranks N / 2 times as many.
    """

    def __init__(self, shard: Shard, store_fd: int, timeout_s: float) -> None:
        """store_fd: a memfd that all ranks have, in which they tell their addresses."""
        self._shard, self._timeout = shard, timedelta(seconds=timeout_s)
        self._store_fd = store_fd
        self._group: Any = None

    def join(self) -> None:
        """Returns when all ranks have. Raises RunnerFailed."""
        rank, count = self._shard.rank, self._shard.count
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        loopback = distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        options._devices, options._timeout, options._threads = [loopback], self._timeout, 1
        try:
            path = f"/proc/self/fd/{self._store_fd}"
            store = distributed.FileStore(path, count)  # type: ignore[attr-defined]
            store.set_timeout(self._timeout)
            self._group = distributed.ProcessGroupGloo(store, rank, count, options)
        except RuntimeError as error:
            raise RunnerFailed(
                f"the ranks of this worker do not find each other: {error}"
            ) from error

    def close(self) -> None:
        """Fails what others wait for."""
        if self._group is not None:
            self._group.abort()

    def sum(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self._shard.count, *x.shape)
        self._wait(self._group._allgather_base, parts.flatten(0, 1), x.contiguous())
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def gather(self, part: Tensor, columns: int) -> Tensor:
        ranks = range(self._shard.count)
        widths = [
            columns * (rank + 1) // len(ranks) - columns * rank // len(ranks) for rank in ranks
        ]
        padded = part.new_empty(len(part), max(widths))
        padded[:, : part.shape[1]] = part
        parts = [torch.empty_like(padded) for _ in ranks] if self._shard.rank == 0 else []
        options = distributed_c10d.GatherOptions()
        self._wait(self._group.gather, [parts] if parts else [], [padded], options)
        if not parts:
            return part
        return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], dim=1)

    def _wait(self, call: Any, *arguments: Any) -> None:
        """Raises RunnerFailed when a rank has ended, or does not come in time."""
        began = time.perf_counter()
        try:
            call(*arguments).wait(self._timeout)
        except RuntimeError as error:
            raise RunnerFailed(f"a rank of this worker has ended or hangs: {error}") from error
        self.seconds += time.perf_counter() - began
