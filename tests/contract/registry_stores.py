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
    """An etcd process; a registry that is `wired` reaches it over a wire of its own."""

    async def open(self, ttl_s):
        self._ttl_s = ttl_s
        self._etcd = EmbeddedEtcd()
        self._wires: dict[int, Wire] = {}
        self._registries: list[EtcdRegistry] = []
        await self._etcd.start()

    async def registry(self, *, wired=False):
        address, wire = self._etcd.address, None
        if wired:
            wire = Wire(address)
            address = await wire.open()
        registry = EtcdRegistry(RegistryConfig(etcd=address, lease_ttl_s=self._ttl_s))
        if wire:
            self._wires[id(registry)] = wire
        self._registries.append(registry)
        return registry

    async def cut(self, registry):
        await self._wires[id(registry)].cut()

    async def reconnect(self, registry):
        await self._wires[id(registry)].open()

    async def stop(self):
        await self._etcd.kill()

    async def start(self):
        await self._etcd.start()

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
            await wire.cut()
        await self._etcd.close()


class Wire:
    """A TCP relay in front of a server, so that a test can cut one client off."""

    def __init__(self, upstream):
        self._upstream = split_address(upstream)
        self._port = 0
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()

    async def open(self):
        """Listens, always on the same port; returns host:port."""
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return f"127.0.0.1:{self._port}"

    async def cut(self):
        """Breaks every connection and refuses new ones."""
        if self._server:
            self._server.close()
            self._server = None
        for relay in self._relays:
            relay.cancel()
        if self._relays:
            await asyncio.wait(set(self._relays))

    async def _relay(self, reader, writer):
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        writers = [writer]
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
            writers.append(up_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, up_writer))
                both.create_task(_pump(up_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass  # either end went, or the wire was cut: both ends are closed below
        finally:
            self._relays.discard(task)
            for end in writers:
                end.transport.abort()


async def _pump(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError("the other end closed")


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
