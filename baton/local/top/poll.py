"""Asks routers for their status again and again, and keeps what they said in the last seconds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from baton import rpc
from baton.errors import BatonError
from baton.v1 import fleet_pb2, fleet_pb2_grpc

_WINDOW_S = 5.0  # rates over less jump, over more lag behind
_LEAST_SAMPLES = 3  # that a window holds, however long the interval
_LEAST_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Sample:
    """What a router said, and when (time.monotonic)."""

    at: float
    status: fleet_pb2.GetStatusResponse


@dataclass(frozen=True)
class Watched:
    """One router as it is known now."""

    address: str
    first: Sample | None = None  # the oldest one that rates are reckoned from
    last: Sample | None = None
    failure: str = ""  # why it does not answer now; empty when it does


class Poller:
    """Follows one router. `told` is called after each answer and each failure to get one."""

    def __init__(self, address: str, interval_s: float, told: Callable[[], None]) -> None:
        self.address = address
        self.asked = 0  # how often, with whatever answer
        self._interval_s = interval_s
        self._told = told
        self._samples: deque[Sample] = deque()
        self._failure = ""

    @property
    def watched(self) -> Watched:
        """The router as it is known now."""
        first, last = (self._samples[0], self._samples[-1]) if self._samples else (None, None)
        return Watched(self.address, first, last, self._failure)

    async def run(self) -> None:
        """Asks every interval until cancelled, whatever the answers."""
        async with rpc.channel(self.address) as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            while True:
                asked = time.monotonic()
                await self._ask(stub)
                self.asked += 1
                self._told()
                await asyncio.sleep(asked + self._interval_s - time.monotonic())

    async def _ask(self, stub: fleet_pb2_grpc.FleetServiceStub) -> None:
        timeout_s = max(_LEAST_TIMEOUT_S, self._interval_s)
        try:
            with rpc.translated():
                status = await stub.GetStatus(fleet_pb2.GetStatusRequest(), timeout=timeout_s)
        except BatonError as error:
            self._failure = str(error) or type(error).__name__
            return
        self._failure = ""
        self.take(Sample(time.monotonic(), status))

    def take(self, sample: Sample) -> None:
        """Adds an answer and forgets those that are too old, or of another process."""
        samples = self._samples
        if samples and _process(samples[-1]) != _process(sample):
            samples.clear()
        samples.append(sample)
        while len(samples) > _LEAST_SAMPLES and sample.at - samples[1].at >= _WINDOW_S:
            samples.popleft()


@contextlib.asynccontextmanager
async def polling(
    addresses: Sequence[str], interval_s: float, told: Callable[[], None]
) -> AsyncIterator[Sequence[Poller]]:
    """Pollers of all addresses, which run until the block is left."""
    pollers = [Poller(address, interval_s, told) for address in addresses]
    tasks = [asyncio.create_task(poller.run(), name=poller.address) for poller in pollers]
    try:
        yield pollers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _process(sample: Sample) -> str:
    return sample.status.router.incarnation
