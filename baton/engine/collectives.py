"""What the ranks of a tensor-parallel model tell each other, through torch.distributed.

Ranks that share one host's memory do so inside the native step (`ops/native/src/ranks.h`).
"""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from baton.cuda import NCCL_ENVIRONMENT
from baton.engine.runner import RunnerFailed
from baton.engine.shard import Shard
from baton.rendezvous import Rendezvous


class Collectives:
    """Of one rank alone: everything is here. `seconds`: that the host waited for them so far."""

    seconds = 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        """x `[rows, columns]` of every rank added up, on all of them: the same bits.

        x may be overwritten.
        """
        return x

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """x of that rank, on all of them."""

    def gather(self, part: Tensor, columns: int) -> Tensor:
        """Columns `[rows, its own]` of every rank side by side, `[rows, columns]`, on the first.

        Rank r has those from `r * columns / ranks` on; the others get what they gave.
        """
        return part


SINGLE_RANK = Collectives()
_JOIN_S, _CLOSE_S = 60.0, 5.0  # of NCCL
Options = TypeVar("Options")


class GroupCollectives(Collectives):
    """Between processes that a store brings together. host: of this rank, for the others."""

    def __init__(self, shard: Shard, store: Rendezvous, host: str, timeout_s: float) -> None:
        self._shard, self._timeout = shard, timedelta(seconds=timeout_s)
        self._store, self._host = store, host
        self._group: Any = None

    @abstractmethod
    def _build(self) -> Any:
        """The process group. Raises RuntimeError."""

    def join(self, device: torch.device) -> None:
        """Returns when all ranks have, and have proven that they belong there. Raises RunnerFailed.

        device: the one that this rank computes on.
        """
        try:
            self._store.set_timeout(self._timeout)
            self._group = self._build()
            for rank in range(self._shard.count):
                expected = self._store.hello(rank)
                own = rank == self._shard.rank
                hello = (expected if own else torch.zeros_like(expected)).to(device)
                self.broadcast(hello, rank)
                if not hello.cpu().equal(expected):
                    raise RuntimeError(f"who came as rank {rank} does not belong there")
        except RuntimeError as error:
            raise RunnerFailed(
                f"the ranks of this worker do not find each other: {error}"
            ) from error

    def close(self) -> None:
        """Fails what others wait for."""
        if self._group is not None:
            self._group.abort()

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        options = _ordered(distributed_c10d.BroadcastOptions())
        options.rootRank = root
        self._wait(self._group.broadcast, [x], options)

    def gather(self, part: Tensor, columns: int) -> Tensor:
        ranks = range(self._shard.count)
        widths = [
            columns * (rank + 1) // len(ranks) - columns * rank // len(ranks) for rank in ranks
        ]
        padded = part.new_empty(len(part), max(widths))
        padded[:, : part.shape[1]] = part
        parts = [torch.empty_like(padded) for _ in ranks] if self._shard.rank == 0 else []
        options = _ordered(distributed_c10d.GatherOptions())
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


class GlooCollectives(GroupCollectives):
    """Between processes on CPUs, over TCP: float32 sums in the order of ranks, as in one process.

    All parts go to all ranks and each adds them up: for two ranks as many bytes as an all-reduce
    takes, for N ranks N / 2 times as many.
    """

    def _build(self) -> Any:
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        device = distributed.ProcessGroupGloo.create_device(hostname=self._host)
        options._devices, options._timeout, options._threads = [device], self._timeout, 1
        rank, count = self._shard.rank, self._shard.count
        return distributed.ProcessGroupGloo(self._store, rank, count, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self._shard.count, *x.shape)
        self._wait(self._group._allgather_base, parts.flatten(0, 1), x.contiguous())
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)


class NcclCollectives(GroupCollectives):
    """Between GPUs, on the stream that computes: the host waits for nothing, graphs hold them.

    Sums are NCCL's all-reduce, whose order of addition is its own. What a rank that ended or hangs
    leaves on the stream ends when the group is closed, by any thread.

    The communicator is a blocking one: non-blocking ones were seen to hang at random
    (https://github.com/pytorch/pytorch/pull/154055).
    """

    def __init__(self, shard: Shard, store: Rendezvous, host: str, timeout_s: float) -> None:
        super().__init__(shard, store, host, timeout_s)
        os.environ.update(NCCL_ENVIRONMENT)

    def join(self, device: torch.device) -> None:
        joined = Future[None]()

        def join() -> None:
            try:
                super(NcclCollectives, self).join(device)
                joined.set_result(None)
            except BaseException as error:
                joined.set_exception(error)

        # Nothing ends it if another rank never comes: then a thread of this process waits for ever.
        threading.Thread(target=join, name="nccl-join", daemon=True).start()
        try:
            joined.result(_JOIN_S)
        except TimeoutError:
            raise RunnerFailed(
                f"the ranks of this worker do not find each other in {_JOIN_S:.0f} s"
            ) from None

    def close(self) -> None:
        """Ends what kernels wait for; NCCL itself ends when no captured graph holds it any more."""
        ending = threading.Thread(target=super().close, name="nccl-abort", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)

    def _build(self) -> Any:
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = self._timeout  # torch's watchdog does nothing then
        rank, count = self._shard.rank, self._shard.count
        return distributed.ProcessGroupNCCL(self._store, rank, count, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.contiguous()
        self._wait(self._group.allreduce, [total], _ordered(distributed_c10d.AllreduceOptions()))
        return total

    def _wait(self, call: Any, *arguments: Any) -> None:
        try:
            work = call(*arguments)
            if work is not None:  # as in torch before 2.8, which has streams of its own for these
                work.wait()
        except RuntimeError as error:
            raise RunnerFailed(f"a rank of this worker has ended or hangs: {error}") from error


def _ordered(options: Options) -> Options:
    """For a call that takes its turn on the current stream."""
    options.asyncOp = False  # type: ignore[attr-defined]
    return options
