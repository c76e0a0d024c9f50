"""Membership's one seam: workers register, routers watch. Two implementations pass one suite.

`baton.registry.etcd` is the real one; `baton.registry.memory` is its twin for tests. Neither knows
what a worker does, nor how a router chooses.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from baton.registry.membership import Membership
from baton.v1.common_pb2 import WorkerRecord


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
