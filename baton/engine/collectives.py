"""Collectives of the ranks of a tensor-parallel model, over torch.distributed.

Ranks that share memory exchange within the native step instead (`kernels/native/src/ranks.h`).
"""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from baton.cuda import NCCL_ENVIRONMENT
from baton.engine.runner import RunnerFailed
from baton.rendezvous import Rendezvous, gloo_group, nccl_group


class Collectives:
    """The collectives of a single rank, which do nothing.

    seconds: total time that the host has waited for collectives.
    """

    seconds = 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x `[rows, columns]`, with equal bits on all ranks.

        May overwrite x.
        """
        return x

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """Writes the x of rank `root` into every rank's x."""

    def gather(self, part: Tensor, columns: int) -> Tensor:
        """The columns of every rank side by side, `[rows, columns]`, on the first rank.

        part: columns from `columns * rank // ranks` on, which other ranks get back.
        """
        return part


SINGLE_RANK = Collectives()
JOIN_TIMEOUT_S = 60.0  # for all ranks to build their group
_CLOSE_S = 5.0  # for NCCL to end
Options = TypeVar("Options")


class RankOf(Protocol):
    """The number of a rank, and how many ranks there are."""

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...


class GroupCollectives(Collectives):
    """Between the processes of a group, which meet at a store.

    host: this rank's address, for the others · timeout_s: limit for one collective.
    """

    def __init__(self, shard: RankOf, store: Rendezvous, host: str, timeout_s: float) -> None:
        self._shard, self._store, self._host = shard, store, host
        self._timeout = timedelta(seconds=JOIN_TIMEOUT_S)  # of what is waited for now
        self._step_timeout = timedelta(seconds=timeout_s)
        self._group: Any = None

    @abstractmethod
    def _build(self) -> Any:
        """The process group. Raises RuntimeError."""

    def join(self, device: torch.device) -> None:
        """Builds the group; every rank proves that it has the store's secret.

        device: this rank's. Raises RunnerFailed.
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
                    raise RuntimeError(f"the process that came as rank {rank} is not one of them")
            self._timeout = self._step_timeout
        except RuntimeError as error:
            raise RunnerFailed(
                f"the ranks of this worker do not find each other: {error}"
            ) from error

    def close(self) -> None:
        """Ends the group: collectives that other ranks wait for fail."""
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
        """Waits for a collective. Raises RunnerFailed when a rank has ended or is too late."""
        began = time.perf_counter()
        try:
            call(*arguments).wait(self._timeout)
        except RuntimeError as error:
            raise RunnerFailed(f"a rank of this worker has ended or hangs: {error}") from error
        self.seconds += time.perf_counter() - began


class GlooCollectives(GroupCollectives):
    """Between processes on CPUs, over TCP. Sums are in float32 in the order of ranks.

    All parts go to all ranks, which each add them up, so that all have equal bits: for N ranks
    N / 2 times the bytes of an all-reduce.
    """

    def _build(self) -> Any:
        shard, seconds = self._shard, self._timeout.total_seconds()
        return gloo_group(self._store, shard.rank, shard.count, self._host, seconds)

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self._shard.count, *x.shape)
        self._wait(self._group._allgather_base, parts.flatten(0, 1), x.contiguous())
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)


class NcclCollectives(GroupCollectives):
    """Between GPUs, on the stream that computes: the host does not wait, graphs capture them.

    A collective that waits for a rank which has ended or hangs ends when the group is closed, by
    any thread. The communicator is a blocking one: non-blocking ones were seen to hang at random
    (https://github.com/pytorch/pytorch/pull/154055).
    """

    def __init__(self, shard: RankOf, store: Rendezvous, host: str, timeout_s: float) -> None:
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

        # Nothing ends this if another rank never comes, so that it is left to a daemon thread.
        threading.Thread(target=join, name="nccl-join", daemon=True).start()
        try:
            joined.result(JOIN_TIMEOUT_S)
        except TimeoutError:
            raise RunnerFailed(
                f"the ranks of this worker do not find each other in {JOIN_TIMEOUT_S:.0f} s"
            ) from None

    def close(self) -> None:
        """Ends what kernels wait for; NCCL itself ends when no captured graph uses it."""
        ending = threading.Thread(target=super().close, name="nccl-abort", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)

    def _build(self) -> Any:
        shard, seconds = self._shard, self._timeout.total_seconds()
        return nccl_group(self._store, shard.rank, shard.count, seconds)

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
    """These options, for a call that is ordered on the current stream."""
    options.asyncOp = False  # type: ignore[attr-defined]
    return options
