"""What the twin adds to the contract: its own clock."""

import pytest

from baton.registry.memory import MemoryRegistry, MemoryStore
from baton.v1.common_pb2 import WorkerRecord, WorkerRole

RECORD = WorkerRecord(incarnation="d1", role=WorkerRole.WORKER_ROLE_DECODE)


@pytest.fixture
async def twin():
    """(a store, a registry with one registration, the members that another registry sees)."""
    store = MemoryStore(ttl_s=5)
    far = MemoryRegistry(store)
    async with far.register(RECORD), MemoryRegistry(store).watch() as members:
        yield store, far, members


def ends_after(store, members, seconds):
    store.advance(seconds - 0.1)
    assert set(members.records) == {"d1"}
    store.advance(0.2)
    assert not members.records


async def test_leases_end_exactly_when_their_time_is_up(twin):
    store, far, members = twin
    store.advance(100)
    assert set(members.records) == {"d1"}
    far.cut()
    ends_after(store, members, 5)
    far.reconnect()
    assert set(members.records) == {"d1"}


async def test_a_restart_gives_leases_their_full_time_again_and_a_second_one_the_grace(twin):
    store, far, members = twin
    far.cut()
    store.stop()
    store.advance(60)
    store.start()
    ends_after(store, members, 5)
    far.reconnect()
    far.cut()
    store.stop()
    store.wipe()
    store.start()
    store.advance(9)
    store.stop()
    store.advance(60)
    store.start()
    ends_after(store, members, 10)
