"""Membership in etcd: records under leases, followed by a list and a watch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.config import RegistryConfig
from baton.registry.etcd_client import EtcdClient
from baton.registry.etcd_registration import EtcdRegistration
from baton.registry.etcd_watch import EtcdWatch
from baton.registry.membership import Membership
from baton.v1.common_pb2 import WorkerRecord


class EtcdRegistry:
    """The seam's Registry over etcd; construction reads files and may raise ConfigError."""

    def __init__(self, config: RegistryConfig) -> None:
        self._config = config
        self._client = EtcdClient(config)

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> AsyncIterator[EtcdRegistration]:
        """Enters `record` until exit; see the seam."""
        registration = EtcdRegistration(self._client, self._config, record)
        await registration.start()
        try:
            yield registration
        finally:
            await registration.stop()

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Membership]:
        """Follows the members until exit; see the seam."""
        watch = EtcdWatch(self._client, self._config)
        await watch.start()
        try:
            yield watch.membership
        finally:
            await watch.stop()

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()
