"""The registry's contract, the same for the store in memory and for a real etcd."""

import asyncio
import contextlib

import pytest

from baton.errors import InvalidRequest, Unavailable
from baton.v1.common_pb2 import WorkerRecord, WorkerRole, WorkerState

from .registry_stores import InMemory, RealEtcd, until, until_connected, until_names

READY = WorkerState.WORKER_STATE_READY
DRAINING = WorkerState.WORKER_STATE_DRAINING


@pytest.fixture(params=[InMemory, RealEtcd], ids=["memory", "etcd"])
async def store(request):
    store = request.param()
    await store.open(ttl_s=getattr(request.function, "ttl_s", 5))
    yield store
    await store.close()


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
async def test_a_member_cut_off_expires_with_its_lease_and_returns(store):
    """One that leaves while it is cut off is left to its lease."""
    far, near = await store.registry(wired=True), await store.registry()
    async with near.watch() as membership:
        async with far.register(worker("d1")):
            await until_names(membership, "d1")
            await store.cut(far)
            await store.elapse(1.5)
            await until_names(membership)
            assert membership.connected
            await store.reconnect(far)
            await until_names(membership, "d1")
            await store.cut(far)
        await store.elapse(1.5)
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
async def test_members_of_a_wiped_store_register_again_and_are_not_missed_meanwhile(store):
    registry, gone = await store.registry(), await store.registry(wired=True)
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
        await store.stop()
        await store.cut(gone)
        await store.wipe()
        await store.start()
        await until_connected(membership, True)
        # Grace: twice the lease's time, for the one that will not come back.
        await store.elapse(2)
        await store.elapse(2)
        await until_names(membership, "d1")
        await registration.update(worker("d1", state=DRAINING))
        await until(membership, lambda now: now["d1"].state == DRAINING)
    await collecting
    assert all("d1" in names for names in seen)


async def test_what_happened_while_the_watch_was_cut_counts_at_once(store):
    """TTL 5 s: by grace alone the departure would take 10 s."""
    far, near = await store.registry(wired=True), await store.registry()
    staying = worker("d1")
    async with near.register(staying) as registration, far.watch() as membership:
        async with near.register(worker("d2")):
            await until_names(membership, "d1", "d2")
            await store.cut(far)
            await until_connected(membership, False)
        await registration.update(in_state(staying, DRAINING))
        async with near.register(worker("d3")):
            assert set(membership.records) == {"d1", "d2"}
            await store.reconnect(far)
            async with asyncio.timeout(5):
                now = await until_names(membership, "d1", "d3")
            assert now["d1"].state == DRAINING


@ttl(1)
async def test_compaction_while_the_watch_was_cut_means_listing_again(store):
    far, near = await store.registry(wired=True), await store.registry()
    async with near.register(worker("d1")), far.watch() as membership:
        async with near.register(worker("d2")):
            await until_names(membership, "d1", "d2")
            await store.cut(far)
            await until_connected(membership, False)
        async with near.register(worker("d3")):
            await store.compact()
            await store.reconnect(far)
            # Nothing tells that d2 left, so it stays for the grace of two leases.
            await until_names(membership, "d1", "d2", "d3")
            await store.elapse(2)
            await until_names(membership, "d1", "d3")
