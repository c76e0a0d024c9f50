"""The registry over a real etcd that stops, goes silent, loses data or holds rubbish.

The one in memory, which other tests use, keeps the simple part.
"""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal

import pytest

from baton.config import RegistryConfig, split_address
from baton.errors import InvalidRequest, Unavailable
from baton.local.etcd_process import EmbeddedEtcd
from baton.registry import EtcdRegistry, etcd_client, etcd_registry
from baton.registry.etcd_client import EtcdClient
from baton.v1 import etcd_pb2
from baton.v1.common_pb2 import RankHost, WorkerRecord, WorkerRole, WorkerState
from tests.memory_registry import MemoryRegistry
from tests.proxy import Proxy
from tests.waiting import WAIT_S, eventually

READY = WorkerState.WORKER_STATE_READY
DRAINING = WorkerState.WORKER_STATE_DRAINING


class InMemory:
    down = "cannot be reached"

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

    def __init__(self, etcd, stack):
        self._etcd, self._stack = etcd, stack
        self._wires: dict[EtcdRegistry, Proxy] = {}
        self.config = RegistryConfig(etcd=etcd.address, lease_ttl_s=5)  # longer than tests run
        self.client = EtcdClient(self.config)
        stack.push_async_callback(self.client.close)
        self.down = f"cannot be reached at {etcd.address}.*start it or correct --etcd"
        self.stop, self.start = etcd.kill, etcd.start

    async def registry(self, *, wired=False, **settings):
        if wired:
            wire = Proxy(split_address(self._etcd.address)[1])
            settings["etcd"] = (await self._stack.enter_async_context(wire)).address
        registry = EtcdRegistry(dataclasses.replace(self.config, **settings))
        self._stack.push_async_callback(registry.close)
        if wired:
            self._wires[registry] = wire
        return registry

    def ttl(self, seconds):
        self.config = dataclasses.replace(self.config, lease_ttl_s=seconds)

    def signal(self, number):
        os.kill(self._etcd.pid, number)

    async def cut(self, registry):
        await self._wires[registry].__aexit__()

    async def reconnect(self, registry):
        await self._wires[registry].__aenter__()

    async def wipe(self):
        await asyncio.to_thread(shutil.rmtree, self._etcd.home / "data")

    async def compact(self):
        revision = (await self.client.range("/")).header.revision
        request = etcd_pb2.CompactionRequest(revision=revision, physical=True)
        await self.client._call(lambda at: at.kv.Compact, request)


@pytest.fixture
async def etcd():
    async with EmbeddedEtcd() as etcd, contextlib.AsyncExitStack() as stack:
        yield RealEtcd(etcd, stack)


@pytest.fixture(params=["memory", "etcd"])
def store(request):
    return InMemory() if request.param == "memory" else request.getfixturevalue("etcd")


async def until(membership, holds):
    """Waits for a snapshot of which `holds` is true."""
    async with asyncio.timeout(WAIT_S), contextlib.aclosing(membership.changes()) as changes:
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


@contextlib.asynccontextmanager
async def names_of(membership):
    """All sets of members that a watch has while this lasts."""
    seen = []

    async def collect():
        async for snapshot in membership.changes():
            seen.append(set(snapshot))

    collecting = asyncio.create_task(collect())
    yield seen
    collecting.cancel()
    await asyncio.wait([collecting])


def worker(name, role=WorkerRole.WORKER_ROLE_DECODE, state=READY):
    return WorkerRecord(incarnation=name, role=role, address="127.0.0.1:7001", state=state)


async def test_a_connection_that_has_fallen_silent_is_left_for_another_one(monkeypatch):
    """By a member whose renewals wait on it, and by a watch."""
    limits = {"grpc.http2.ping_timeout_ms": 2**31 - 1, **dict(etcd_client.OPTIONS)}
    limits["grpc.keepalive_time_ms"] = 500
    monkeypatch.setattr(etcd_client, "OPTIONS", [*limits.items()])
    async with (
        EmbeddedEtcd(args=["--grpc-keepalive-min-time", "100ms"]) as process,
        Proxy(split_address(process.address)[1]) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        etcd = RealEtcd(process, stack)
        behind, beside = await etcd.registry(etcd=proxy.address), await etcd.registry()
        async with (
            beside.watch() as seen,
            behind.watch() as members,
            behind.register(worker("p1")),
        ):
            await until_names(members, "p1")
            await until_names(seen, "p1")
            for connection in tuple(proxy._connections):  # others work
                proxy.hold(connection.caller)
            async with beside.register(worker("d1")):
                await until_names(members, "p1", "d1")
                await until(seen, lambda _: not seen.missing)
                assert seen.records.keys() == {"p1", "d1"}


async def test_all_routers_of_a_cluster_get_the_same_ticket_key(store):
    """Also those that start at once, before there is one."""
    registries = [await store.registry() for _ in range(6)]
    keys = await asyncio.gather(*(registry.ticket_key() for registry in registries[:5]))
    assert {*keys, await registries[5].ticket_key()} == {keys[0]}
    assert len(keys[0]) == 32


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
    assert not membership.connected and [now async for now in membership.changes()] == []
    for record in (WorkerRecord(incarnation="x"), worker(""), worker("a/b")):
        with pytest.raises(InvalidRequest):  # it needs a role and an incarnation
            await registry.register(record).__aenter__()


async def test_a_member_cut_off_expires_with_its_lease_and_returns(etcd):
    """One that leaves while it is cut off is left to its lease."""
    etcd.ttl(1)
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
        await registration.update(worker("d1", state=DRAINING))
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
        with pytest.raises(Unavailable, match=store.down):
            async with entry:
                pass


async def test_members_of_a_wiped_store_register_again_and_are_not_missed_meanwhile(etcd):
    etcd.ttl(2)
    registry, gone = await etcd.registry(), await etcd.registry(wired=True)
    async with (
        registry.register(worker("d1")) as registration,
        gone.register(worker("gone")),
        registry.watch() as membership,
        names_of(membership) as seen,
    ):
        await until_names(membership, "d1", "gone")
        await etcd.stop()
        await etcd.cut(gone)
        await etcd.wipe()
        await etcd.start()
        await until_connected(membership, True)
        # Grace: twice the lease's time, for the one that will not come back.
        await until_names(membership, "d1")
        await registration.update(worker("d1", state=DRAINING))
        await until(membership, lambda now: now["d1"].state == DRAINING)
    assert all("d1" in names for names in seen)


async def test_what_happened_while_the_watch_was_cut_counts_at_once(etcd):
    """By grace alone the departure would take twice the lease's time."""
    etcd.ttl(int(WAIT_S))
    far, near = await etcd.registry(wired=True), await etcd.registry()
    async with near.register(worker("d1")) as registration, far.watch() as membership:
        async with near.register(worker("d2")):
            await until_names(membership, "d1", "d2")
            await etcd.cut(far)
            await until_connected(membership, False)
        await registration.update(worker("d1", state=DRAINING))
        async with near.register(worker("d3")):
            assert set(membership.records) == {"d1", "d2"}
            await etcd.reconnect(far)
            async with asyncio.timeout(WAIT_S):
                now = await until_names(membership, "d1", "d3")
            assert now["d1"].state == DRAINING


async def test_compaction_while_the_watch_was_cut_means_listing_again(etcd):
    etcd.ttl(1)
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


async def test_a_registration_can_be_read_and_leaves_nothing_behind(etcd):
    """Through a list of endpoints, of which the first is dead."""
    registry = await etcd.registry(etcd=f"127.0.0.1:1,{etcd.config.etcd}", cluster="blue")
    before = asyncio.all_tasks()
    async with registry.register(worker("d1")), registry.watch() as members:
        assert set(members.records) == {"d1"}
        (kv,) = (await etcd.client.range("/baton")).kvs
    assert asyncio.all_tasks() == before
    assert not (await etcd.client.range("/baton")).kvs
    assert kv.key == b"/baton/v1/blue/workers/d1"
    assert kv.lease != 0
    assert b'"state": "WORKER_STATE_READY"' in kv.value
    assert b"\n" not in kv.value


async def test_other_clusters_and_rubbish_are_passed_over(etcd, caplog):
    client, prefix = etcd.client, etcd.config.workers_prefix
    lease, _ = await client.grant(60)
    await client.put(prefix + "before", b"{", lease)
    async with (await etcd.registry()).watch() as members:
        assert not members.records
        await client.put(prefix + "during", b"\xff", lease)
        await client.put(prefix + "alias", b'{"incarnation": "other"}', lease)
        for name, role in {"r0": "0", "r77": "77", "rj": '"WORKER_ROLE_JUGGLER"'}.items():
            value = f'{{"incarnation": "{name}", "role": {role}}}'
            await client.put(prefix + name, value.encode(), lease)
        newer = b'{"incarnation": "n1", "role": "WORKER_ROLE_DECODE", "colour": "red"}'
        await client.put("/baton/v1/default2/workers/n1", newer, lease)
        await client.put(prefix + "n1", newer, lease)
        await until_names(members, "n1")
    for name in ("before", "during", "alias", "r0", "r77", "rj"):
        assert f"workers/{name}' " in caplog.text


async def test_what_others_do_to_a_record_is_undone_while_its_lease_lives(etcd, caplog):
    etcd.ttl(3)
    client, registry = etcd.client, await etcd.registry()
    key, record = f"{etcd.config.workers_prefix}d1", worker("d1")
    async with registry.register(record) as registration, registry.watch() as members:
        before, _ = await client.get(key)
        other, _ = await client.grant(60)
        await client.put(key, before.value, other)
        await client.revoke(other)  # deletes the key, and the worker's lease lives
        await eventually(lambda: client.get(key), lambda found: found[0], "it stays away")
        await until(members, lambda now: now.get("d1") == record)
        other, _ = await client.grant(60)
        await client.put(key, b"rubbish", other)
        is_back = lambda found: found[0].value == before.value  # noqa: E731
        await eventually(lambda: client.get(key), is_back, "it stays")
        assert registration.connected
    assert "was deleted" in caplog.text and "was changed" in caplog.text


async def test_renewals_share_a_stream_and_ask_no_more_than_one_member_of_etcd(
    etcd, monkeypatch, caplog
):
    """Of 1,000 workers these are most of etcd's work. A member that is behind is not believed."""
    etcd.ttl(2)
    registry, get, behind = await etcd.registry(), EtcdClient.get, 3
    opened, renewed, read = 0, 0, []
    async with registry.register(worker("d1")) as registration:
        endpoint = registry._client._endpoint()
        open_stream, renew = endpoint.lease.LeaseKeepAlive, endpoint.renew

        def counted(*args, **options):
            nonlocal opened
            opened += 1
            return open_stream(*args, **options)

        async def noted(*args, **options):
            nonlocal renewed
            renewed += 1
            return await renew(*args, **options)

        async def late(client, key):
            nonlocal behind
            read.append(await get(client, key))
            behind -= 1
            return (None, 1) if behind >= 0 else read[-1]

        monkeypatch.setattr(endpoint.lease, "LeaseKeepAlive", counted)
        monkeypatch.setattr(endpoint, "renew", noted)
        monkeypatch.setattr(EtcdClient, "get", late)
        await eventually(lambda: asyncio.sleep(0, len(read)), lambda n: n > 3, "no round")
        assert opened <= 1 < renewed and registration.connected
        assert "by another process" not in caplog.text
        await etcd.stop()
        await etcd.start()
        rounds = renewed
        renewals = lambda: asyncio.sleep(0, renewed)  # noqa: E731
        await eventually(renewals, lambda n: n > rounds + 1, "no round")
        assert registration.connected


async def test_a_bug_in_one_round_does_not_end_a_registration(etcd, monkeypatch, caplog):
    """The worker would serve on, and no router find it."""
    etcd.ttl(1)
    registry, keep_alive, broken = await etcd.registry(), EtcdClient.keep_alive, asyncio.Event()

    async def breaks_once(client, lease):
        if not broken.is_set():
            broken.set()
            raise ValueError("a bug")
        return await keep_alive(client, lease)

    monkeypatch.setattr(EtcdClient, "keep_alive", breaks_once)
    async with registry.register(worker("d1")) as registration, registry.watch() as membership:
        async with asyncio.timeout(WAIT_S):
            await broken.wait()
        await asyncio.sleep(2)  # its lease would have ended
        await until_names(membership, "d1")
        assert registration.connected
    assert "cannot be kept alive for now: a bug" in caplog.text and "Traceback" in caplog.text


async def test_a_silent_etcd_is_an_outage_and_no_loss(etcd, monkeypatch):
    """SIGSTOP: connections stay open and nothing answers."""
    etcd.ttl(30)
    monkeypatch.setattr(etcd_client, "CALL_S", 0.5)
    monkeypatch.setattr(etcd_client, "QUIET_S", 0.5)
    registry, record = await etcd.registry(), worker("d1")
    async with registry.register(record) as registration, registry.watch() as members:
        etcd.signal(signal.SIGSTOP)
        try:
            await until_connected(members, False)
            assert set(members.records) == {"d1"}
            await registration.update(record)
            assert not registration.connected
        finally:
            etcd.signal(signal.SIGCONT)
        await until_connected(members, True)
        assert set(members.records) == {"d1"}


async def test_a_store_that_was_paused_for_longer_than_leases_live_loses_no_member(
    etcd, monkeypatch, caplog
):
    """On waking it ends all leases at once and says so on the watch, which is still open.

    Members are at different moments of their renewals. The time-outs are in the proportion of the
    usual ones, and the pauses lie between the lease's end and beyond the watch's own time-out.
    """
    etcd.ttl(2)
    monkeypatch.setattr(etcd_client, "CALL_S", 0.8)
    monkeypatch.setattr(etcd_client, "QUIET_S", 2.0)
    monkeypatch.setattr(etcd_registry, "GRACE_TTLS", 30)  # however busy the machine is
    registry, other = await etcd.registry(), await etcd.registry()
    names = {f"d{number}" for number in range(16)}
    async with contextlib.AsyncExitStack() as stack:
        for name in sorted(names):
            await stack.enter_async_context(registry.register(worker(name)))
            await asyncio.sleep(0.05)
        membership = await stack.enter_async_context(other.watch())
        seen = await stack.enter_async_context(names_of(membership))
        for pause_s in (2.1, 3.2):
            etcd.signal(signal.SIGSTOP)
            await asyncio.sleep(pause_s)
            etcd.signal(signal.SIGCONT)
            await asyncio.sleep(2.0)  # each has renewed its lease, or taken a new one
            await until(membership, lambda _: membership.connected and not membership.missing)
    assert "is gone; registering again" in caplog.text, "no lease has ended: the pauses were short"
    assert all(snapshot == names for snapshot in seen)


async def test_a_member_whose_lease_ended_while_it_was_late_is_missing_until_it_is_back(
    etcd, monkeypatch
):
    """Cut off for longer than its lease lives; one that does not come back is dropped."""
    etcd.ttl(2)
    monkeypatch.setattr(etcd_registry, "GRACE_TTLS", 30)
    far, near = await etcd.registry(wired=True), await etcd.registry()
    async with near.watch() as patient, far.register(worker("d1")):
        await until_names(patient, "d1")
        monkeypatch.setattr(etcd_registry, "GRACE_TTLS", 1)
        async with near.watch() as hasty:
            await etcd.cut(far)
            await until(patient, lambda _: patient.missing == {"d1"})
            assert set(patient.records) == {"d1"}
            await until_names(hasty)
            await etcd.reconnect(far)
            await until_names(hasty, "d1")
        await until(patient, lambda _: not patient.missing)
        assert set(patient.records) == {"d1"}


async def test_leaving_during_an_outage_is_bounded(etcd, caplog):
    registry = await etcd.registry()
    async with asyncio.timeout(WAIT_S):
        async with registry.register(worker("d1")):
            await etcd.stop()
    assert "left to its lease's end" in caplog.text


async def test_hosts_of_one_workers_ranks_are_found_by_its_name_until_they_leave(etcd, caplog):
    registry, other = await etcd.registry(), await etcd.registry()
    hosts = [
        RankHost(worker="big", node_rank=node, addresses=["h:1"], secret=bytes([node]))
        for node in (1, 2)
    ]
    bigger = RankHost(worker="bigger", node_rank=3, addresses=["h:2"])
    async with registry.announce(hosts[0]), registry.announce(bigger):
        async with registry.announce(hosts[1]):
            assert await other.rank_hosts("big") == {1: hosts[0], 2: hosts[1]}
        lease, _ = await etcd.client.grant(5)
        await etcd.client.put("/baton/v1/default/ranks/big/7", b"rubbish", lease)
        assert await other.rank_hosts("big") == {1: hosts[0]}
        assert "does not hold a host with ranks" in caplog.text
        await etcd.stop()
        assert await other.rank_hosts("big") == {}
        assert "no ranks of other hosts are found" in caplog.text
        await etcd.start()
