"""A registry of workers: they register, and routers watch the members.

Two implementations pass one suite: `baton.registry.etcd`, and `baton.registry.memory` for tests.
Neither knows what a worker does, nor how a router chooses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from types import MappingProxyType
from typing import Protocol

from baton.v1.common_pb2 import WorkerRecord


class Membership:
    """What a watcher sees: the newest snapshot of all members, by incarnation, for any reader.

    A slow reader misses intermediate snapshots, never the newest one, so nothing queues up. One
    writer calls `publish`; readers use the rest.
    """

    def __init__(self) -> None:
        self._records: Mapping[str, WorkerRecord] = MappingProxyType({})
        self._connected = False
        self._version = 0
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def records(self) -> Mapping[str, WorkerRecord]:
        """A snapshot that never changes, by incarnation; during an outage the last one known."""
        return self._records

    @property
    def connected(self) -> bool:
        """False while the store cannot be reached and `records` may be out of date."""
        return self._connected

    async def find(self, incarnation: str, timeout_s: float) -> WorkerRecord | None:
        """A member's record, or None; a member that is not known yet has `timeout_s` to come."""
        try:
            async with asyncio.timeout(timeout_s), aclosing(self.changes()) as changes:
                async for records in changes:
                    if incarnation in records:
                        return records[incarnation]
        except TimeoutError:
            pass
        return None

    async def changes(self) -> AsyncGenerator[Mapping[str, WorkerRecord], None]:
        """Yields `records` now and whenever they or `connected` change; ends with the watch."""
        seen = -1
        while not self._closed:
            if seen == self._version:
                await self._changed.wait()
                continue
            seen = self._version
            yield self._records

    def publish(self, records: Mapping[str, WorkerRecord], *, connected: bool) -> None:
        """Makes a copy of `records` the newest snapshot; readers wake only if something changed."""
        if connected == self._connected and records == self._records:
            return
        if records != self._records:
            self._records = MappingProxyType(dict(records))
        self._connected = connected
        self._version += 1
        self._wake()

    def close(self) -> None:
        """Ends every reader's `changes`."""
        self._closed = True
        self._connected = False
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Registration(Protocol):
    """One worker's entry. It outlives outages: whatever the store loses is written again."""

    @property
    def connected(self) -> bool:
        """Whether the store answered the last time it was asked."""
        ...

    async def update(self, record: WorkerRecord) -> None:
        """Replaces the record; incarnation and role stay, or InvalidRequest is raised.

        Returns when the store has it or turned out to be out of reach; then it is written as soon
        as the store is back, and `connected` is False meanwhile. An outage raises nothing.
        """
        ...


class Registry(Protocol):
    """Where members are kept."""

    def register(self, record: WorkerRecord) -> AbstractAsyncContextManager[Registration]:
        """Enters `record` under a lease that is kept alive until exit; exit removes it at once.

        Entering raises Unavailable when the store cannot be reached, ConfigError when it refuses.
        """
        ...

    def watch(self) -> AbstractAsyncContextManager[Membership]:
        """Lists the members, then follows them until exit. Entering raises as `register` does."""
        ...

    async def close(self) -> None:
        """Closes the connections; registrations and watches must have been left before."""
        ...
