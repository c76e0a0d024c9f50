"""The stores that the registry contract runs over, under one set of verbs."""

from __future__ import annotations

import asyncio
import contextlib
import shutil

from baton.config import RegistryConfig, split_address
from baton.local.etcd import EmbeddedEtcd
from baton.registry.etcd import EtcdRegistry
from baton.registry.etcd_client import EtcdClient
from baton.registry.memory import MemoryRegistry, MemoryStore
from tests.proxy import Proxy

PATIENCE_S = 12.0


class InMemory:
    """The twin: happens at once; time passes only in `elapse`."""

    async def open(self, ttl_s):
        self._store = MemoryStore(ttl_s)

    async def registry(self, *, wired=False):
        return MemoryRegistry(self._store)

    async def cut(self, registry):
        registry.cut()

    async def reconnect(self, registry):
        registry.reconnect()

    def __getattr__(self, verb):
        """`stop`, `start`, `wipe` and `compact` are the store's own."""

        async def call():
            getattr(self._store, verb)()

        return call

    async def elapse(self, seconds):
        self._store.advance(seconds)

    async def close(self):
        pass


class RealEtcd:
    """An etcd process; a registry that is `wired` reaches it through a proxy of its own."""

    async def open(self, ttl_s):
        self._ttl_s = ttl_s
        self._etcd = EmbeddedEtcd()
        self._wires: dict[EtcdRegistry, Proxy] = {}
        self._registries: list[EtcdRegistry] = []
        await self._etcd.start()
        self.stop, self.start = self._etcd.kill, self._etcd.start

    async def registry(self, *, wired=False):
        address, wire = self._etcd.address, None
        if wired:
            wire = Proxy(split_address(address)[1])
            address = (await wire.__aenter__()).address
        registry = EtcdRegistry(RegistryConfig(etcd=address, lease_ttl_s=self._ttl_s))
        if wire:
            self._wires[registry] = wire
        self._registries.append(registry)
        return registry

    async def cut(self, registry):
        await self._wires[registry].__aexit__()

    async def reconnect(self, registry):
        await self._wires[registry].__aenter__()

    async def wipe(self):
        await asyncio.to_thread(shutil.rmtree, self._etcd.home / "data")

    async def compact(self):
        client = EtcdClient(RegistryConfig(etcd=self._etcd.address))
        await client.compact((await client.range("/")).header.revision)
        await client.close()

    async def elapse(self, seconds):
        """Time passes by itself; tests wait for what it brings."""

    async def close(self):
        for registry in self._registries:
            await registry.close()
        for wire in self._wires.values():
            await wire.__aexit__()
        await self._etcd.close()


async def until(membership, holds):
    """Waits for a snapshot of which `holds` is true."""
    async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(membership.changes()) as changes:
        async for snapshot in changes:
            if holds(snapshot):
                return snapshot
    raise AssertionError("the watch ended")


async def until_names(membership, *names):
    """Waits until exactly these are members."""
    return await until(membership, lambda snapshot: snapshot.keys() == set(names))


async def until_connected(membership, connected):
    """Waits until the watch has, or has not, the store."""
    await until(membership, lambda _: membership.connected is connected)
