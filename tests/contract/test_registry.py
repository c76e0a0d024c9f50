"""The registry's contract over a real etcd; the one in memory keeps its simple part."""

import asyncio
import contextlib
import shutil

import pytest

from baton.config import RegistryConfig, split_address
from baton.errors import InvalidRequest, Unavailable
from baton.local.etcd import EmbeddedEtcd
from baton.registry import EtcdRegistry
from baton.registry.etcd_client import EtcdClient
from baton.v1 import etcd_pb2
from baton.v1.common_pb2 import WorkerRecord, WorkerRole, WorkerState
from tests.memory_registry import MemoryRegistry
from tests.proxy import Proxy

READY = WorkerState.WORKER_STATE_READY
DRAINING = WorkerState.WORKER_STATE_DRAINING


class InMemory:
    def __init__(self):
        self._registry = MemoryRegistry()

    async def registry(self):
        return self._registry

    async def stop(self):
        self._registry.stop()

    async def start(self):
        self._registry.start()


class RealEtcd:
    """An etcd process; a registry that is `wired` reaches it through a proxy of its own."""

    def __init__(self, etcd, ttl_s, stack):
        self._etcd, self._ttl_s, self._stack = etcd, ttl_s, stack
        self._wires: dict[EtcdRegistry, Proxy] = {}
        self.stop, self.start = etcd.kill, etcd.start

    async def registry(self, *, wired=False):
        address = self._etcd.address
        if wired:
            wire = await self._stack.enter_async_context(Proxy(split_address(address)[1]))
            address = wire.address
        registry = EtcdRegistry(RegistryConfig(etcd=address, lease_ttl_s=self._ttl_s))
        self._stack.push_async_callback(registry.close)
        if wired:
            self._wires[registry] = wire
        return registry

    async def cut(self, registry):
        await self._wires[registry].__aexit__()

    async def reconnect(self, registry):
        await self._wires[registry].__aenter__()

    async def wipe(self):
        await asyncio.to_thread(shutil.rmtree, self._etcd.home / "data")

    async def compact(self):
        client = EtcdClient(RegistryConfig(etcd=self._etcd.address))
        revision = (await client.range("/")).header.revision
        request = etcd_pb2.CompactionRequest(revision=revision, physical=True)
        await client._call(lambda at: at.kv.Compact, request)
        await client.close()


@pytest.fixture
async def etcd(request):
    async with EmbeddedEtcd() as etcd, contextlib.AsyncExitStack() as stack:
        yield RealEtcd(etcd, getattr(request.function, "ttl_s", 5), stack)


@pytest.fixture(params=["memory", "etcd"])
def store(request):
    return InMemory() if request.param == "memory" else request.getfixturevalue("etcd")


async def until(membership, holds):
    """Waits for a snapshot of which `holds` is true."""
    async with asyncio.timeout(12), contextlib.aclosing(membership.changes()) as changes:
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


def ttl(seconds):
    """Marks a test whose leases live for `seconds`; others have 5 s, longer than they run."""

    def mark(test):
        test.ttl_s = seconds
        return test

    return mark


def worker(name, role=WorkerRole.WORKER_ROLE_DECODE, state=READY):
    return WorkerRecord(incarnation=name, role=role, address="127.0.0.1:7001", state=state)


def in_state(record, state):
    changed = WorkerRecord()
    changed.CopyFrom(record)
    changed.state = state
    return changed


async def test_lists_members_and_follows_changes(store):
    """Two watchers in two processes see the same; a snapshot never changes."""
    registry, other = await store.registry(), await store.registry()
    first = worker("d1", state=WorkerState.WORKER_STATE_STARTING)
    async with registry.watch() as membership, other.watch() as there:
        empty = membership.records
        async with registry.register(first) as registration:
            assert registration.connected
            assert await until_names(membership, "d1") == {"d1": first}
            await until_names(there, "d1")
            second = worker("p1", WorkerRole.WORKER_ROLE_PREFILL)
            async with registry.register(second):
                assert await until_names(membership, "d1", "p1") == {"d1": first, "p1": second}
            assert await until_names(membership, "d1") == {"d1": first}
            for state in (READY, DRAINING):
                first.state = state
                assert membership.records["d1"].state != state  # the caller's record is its own
                await registration.update(first)
                await until(membership, lambda now, s=state: now["d1"].state == s)
            with pytest.raises(InvalidRequest):
                await registration.update(worker("d2"))
        assert membership.connected
        assert dict(empty) == {}
        with pytest.raises(TypeError):
            empty["d2"] = worker("d2")


async def test_a_record_needs_a_role_and_an_incarnation(store):
    registry = await store.registry()
    for record in (WorkerRecord(incarnation="x"), worker(""), worker("a/b")):
        with pytest.raises(InvalidRequest):
            async with registry.register(record):
                pass


async def test_readers_of_one_watch_get_the_newest_and_end_with_it(store):
    registry = await store.registry()
    async with registry.watch() as membership, contextlib.AsyncExitStack() as members:
        readers = [asyncio.create_task(until_names(membership, "d1", "d2")) for _ in range(2)]
        for name in ("d1", "d2"):
            await members.enter_async_context(registry.register(worker(name)))
        for reader in readers:
            assert set(await reader) == {"d1", "d2"}
        await members.aclose()
        await until_names(membership)
        changes = membership.changes()
        assert dict(await anext(changes)) == {}
        end = asyncio.create_task(anext(changes, None))
    assert await end is None
    assert not membership.connected


@ttl(1)
async def test_a_member_cut_off_expires_with_its_lease_and_returns(etcd):
    """One that leaves while it is cut off is left to its lease."""
    far, near = await etcd.registry(wired=True), await etcd.registry()
    async with near.watch() as membership:
        async with far.register(worker("d1")):
            await until_names(membership, "d1")
            await etcd.cut(far)
            await until_names(membership)
            assert membership.connected
            await etcd.reconnect(far)
            await until_names(membership, "d1")
            await etcd.cut(far)
        await until_names(membership)


async def test_an_outage_keeps_the_last_known_members_and_loses_no_update(store):
    registry = await store.registry()
    record = worker("d1")
    async with registry.register(record) as registration, registry.watch() as membership:
        await store.stop()
        await until_connected(membership, False)
        assert dict(membership.records) == {"d1": record}
        await registration.update(in_state(record, DRAINING))
        assert not registration.connected
        assert membership.records["d1"].state == READY

        await store.start()
        await until_connected(membership, True)
        assert set(membership.records) == {"d1"}
        await until(membership, lambda now: now["d1"].state == DRAINING)
        assert registration.connected
        async with registry.register(worker("d2")):
            await until_names(membership, "d1", "d2")
        await until_names(membership, "d1")


async def test_the_store_down_at_the_start_is_said_clearly(store, monkeypatch):
    monkeypatch.setattr("baton.registry.etcd_client.START_S", 0.5)
    registry = await store.registry()
    await store.stop()
    for entry in (registry.watch(), registry.register(worker("d1"))):
        with pytest.raises(Unavailable, match="cannot be reached"):
            async with entry:
                pass


@ttl(2)
async def test_members_of_a_wiped_store_register_again_and_are_not_missed_meanwhile(etcd):
    registry, gone = await etcd.registry(), await etcd.registry(wired=True)
    seen = []

    async def collect(membership):
        async for snapshot in membership.changes():
            seen.append(set(snapshot))

    async with (
        registry.register(worker("d1")) as registration,
        gone.register(worker("gone")),
        registry.watch() as membership,
    ):
        await until_names(membership, "d1", "gone")
        collecting = asyncio.create_task(collect(membership))
        await etcd.stop()
        await etcd.cut(gone)
        await etcd.wipe()
        await etcd.start()
        await until_connected(membership, True)
        # Grace: twice the lease's time, for the one that will not come back.
        await until_names(membership, "d1")
        await registration.update(worker("d1", state=DRAINING))
        await until(membership, lambda now: now["d1"].state == DRAINING)
    await collecting
    assert all("d1" in names for names in seen)


async def test_what_happened_while_the_watch_was_cut_counts_at_once(etcd):
    """TTL 5 s: by grace alone the departure would take 10 s."""
    far, near = await etcd.registry(wired=True), await etcd.registry()
    staying = worker("d1")
    async with near.register(staying) as registration, far.watch() as membership:
        async with near.register(worker("d2")):
            await until_names(membership, "d1", "d2")
            await etcd.cut(far)
            await until_connected(membership, False)
        await registration.update(in_state(staying, DRAINING))
        async with near.register(worker("d3")):
            assert set(membership.records) == {"d1", "d2"}
            await etcd.reconnect(far)
            async with asyncio.timeout(5):
                now = await until_names(membership, "d1", "d3")
            assert now["d1"].state == DRAINING


@ttl(1)
async def test_compaction_while_the_watch_was_cut_means_listing_again(etcd):
    far, near = await etcd.registry(wired=True), await etcd.registry()
    async with near.register(worker("d1")), far.watch() as membership:
        async with near.register(worker("d2")):
            await until_names(membership, "d1", "d2")
            await etcd.cut(far)
            await until_connected(membership, False)
        async with near.register(worker("d3")):
            await etcd.compact()
            await etcd.reconnect(far)
            # Nothing tells that d2 left, so it stays for the grace of two leases.
            await until_names(membership, "d1", "d2", "d3")
            await until_names(membership, "d1", "d3")
