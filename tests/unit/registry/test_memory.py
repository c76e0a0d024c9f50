"""What the twin adds to the contract: its own clock."""

from baton.registry.memory import MemoryRegistry, MemoryStore
from baton.v1.common_pb2 import WorkerRecord, WorkerRole

RECORD = WorkerRecord(incarnation="d1", role=WorkerRole.WORKER_ROLE_DECODE)


async def test_leases_end_exactly_when_their_time_is_up():
    store = MemoryStore(ttl_s=5)
    far, near = MemoryRegistry(store), MemoryRegistry(store)
    async with far.register(RECORD), near.watch() as members:
        store.advance(100)
        assert set(members.records) == {"d1"}
        far.cut()
        store.advance(4.9)
        assert set(members.records) == {"d1"}
        store.advance(0.2)
        assert not members.records
        far.reconnect()
        assert set(members.records) == {"d1"}


async def test_a_restarted_store_gives_every_lease_its_full_time_again():
    store = MemoryStore(ttl_s=5)
    far, near = MemoryRegistry(store), MemoryRegistry(store)
    async with far.register(RECORD), near.watch() as members:
        far.cut()
        store.stop()
        store.advance(60)
        store.start()
        store.advance(4.9)
        assert set(members.records) == {"d1"}
        store.advance(0.2)
        assert not members.records


async def test_a_second_outage_within_the_grace_begins_it_anew():
    store = MemoryStore(ttl_s=5)
    far, near = MemoryRegistry(store), MemoryRegistry(store)
    async with far.register(RECORD), near.watch() as members:
        far.cut()
        store.stop()
        store.wipe()
        store.start()
        store.advance(9)
        store.stop()
        store.advance(60)
        store.start()
        store.advance(9.9)
        assert set(members.records) == {"d1"}
        store.advance(0.2)
        assert not members.records
