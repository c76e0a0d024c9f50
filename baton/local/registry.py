"""Where a local cluster's members are kept: an etcd of its own, kept running, or another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

from baton.config import ClusterConfig
from baton.errors import ConfigError
from baton.local.etcd import EmbeddedEtcd
from baton.registry.etcd import EtcdRegistry
from baton.registry.interface import Membership


class LocalRegistry:
    """From `start` to `close`: `address` is etcd's, `etcd` the embedded one if it is ours."""

    def __init__(self, config: ClusterConfig, say: Callable[[str], None]) -> None:
        self.etcd: EmbeddedEtcd | None = None
        self.address = ""
        self.membership: Membership
        self._config = config
        self._say = say
        self._stack = AsyncExitStack()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when etcd answers and the members are known; `close` it also when this fails."""
        if self._config.etcd is None:
            begin = time.monotonic()
            self.etcd = await self._stack.enter_async_context(EmbeddedEtcd())
            self.address = self.etcd.address
            self._say(f"etcd ready in {time.monotonic() - begin:.1f} s ({self.address})")
            self._stack.push_async_callback(self._let_go)
            self._keep(self.etcd)
        else:
            self.address = self._config.etcd
        registry = EtcdRegistry(self._config.registry(self.address))
        self._stack.push_async_callback(registry.close)
        self.membership = await self._stack.enter_async_context(registry.watch())

    async def close(self) -> None:
        """Ends all that was started. Safe to repeat."""
        await self._stack.aclose()

    async def restart_etcd(self) -> None:
        """Restarts the embedded etcd with its data. Raises ConfigError when it is not ours."""
        if self.etcd is None:
            raise ConfigError(f"etcd at {self.address} was not started here")
        await self._let_go()
        await self.etcd.stop()
        await self.etcd.start()
        self._keep(self.etcd)

    def _keep(self, etcd: EmbeddedEtcd) -> None:
        if self._config.restart:
            keeping = etcd.keep_running(self._say)
            self._keeping = asyncio.create_task(keeping, name="keeper of etcd")

    async def _let_go(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
