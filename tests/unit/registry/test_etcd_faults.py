"""What a real etcd can do to a registry beyond the contract: go silent, fail over, hold rubbish."""

import asyncio
import os
import signal
import socket

import pytest

from baton.config import RegistryConfig
from baton.errors import Unavailable
from baton.registry import etcd_client
from baton.registry.etcd_client import EtcdClient
from tests.waiting import eventually

from .conftest import RECORD, opened, until


def closed_address():
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def test_a_registration_can_be_read_and_leaves_nothing_behind(etcd):
    """Through a list of endpoints, of which the first is dead."""
    config = RegistryConfig(etcd=f"{closed_address()},{etcd.address}", cluster="blue")
    client, before = EtcdClient(config), asyncio.all_tasks()
    async with opened(config) as registry:
        async with registry.register(RECORD) as registration, registry.watch() as members:
            assert set(members.records) == {"d1"}
            assert registration.connected
            (kv,) = (await client.range("/baton")).kvs
        assert asyncio.all_tasks() == before
        assert not (await client.range("/baton")).kvs
    await client.close()
    assert kv.key == b"/baton/v1/blue/workers/decode/d1"
    assert kv.lease != 0
    assert b'"state": "WORKER_STATE_READY"' in kv.value
    assert b"\n" not in kv.value


async def test_other_clusters_and_rubbish_are_passed_over(etcd, caplog):
    config = RegistryConfig(etcd=etcd.address)
    client = EtcdClient(config)
    lease, _ = await client.grant(60)
    prefix = config.workers_prefix
    await client.put(prefix + "decode/before", b"{", lease)
    async with opened(config) as registry, registry.watch() as members:
        assert not members.records
        await client.put(prefix + "decode/during", b"\xff", lease)
        await client.put(prefix + "decode/alias", b'{"incarnation": "other"}', lease)
        for name, role in {"r0": "0", "r77": "77", "rj": '"WORKER_ROLE_JUGGLER"'}.items():
            value = f'{{"incarnation": "{name}", "role": {role}}}'
            await client.put(f"{prefix}decode/{name}", value.encode(), lease)
        newer = b'{"incarnation": "n1", "role": "WORKER_ROLE_DECODE", "colour": "red"}'
        await client.put("/baton/v1/default2/workers/decode/n1", newer, lease)
        await client.put(prefix + "decode/n1", newer, lease)
        await until(members, lambda now: "n1" in now)
        assert set(members.records) == {"n1"}
    await client.close()
    for name in ("before", "during", "alias", "r0", "r77", "rj"):
        assert f"decode/{name}" in caplog.text


async def test_what_others_do_to_a_record_is_undone_while_its_lease_lives(etcd, caplog):
    config = RegistryConfig(etcd=etcd.address, lease_ttl_s=3)
    client = EtcdClient(config)
    async with (
        opened(config) as registry,
        registry.register(RECORD) as registration,
        registry.watch() as members,
    ):
        key = f"{config.workers_prefix}decode/d1"
        before = await client.get(key)
        other, _ = await client.grant(60)
        await client.put(key, before.value, other)
        await client.revoke(other)  # deletes the key, and the worker's lease lives
        await eventually(lambda: client.get(key), lambda kv: kv is not None, "it stays away")
        await until(members, lambda now: now.get("d1") == RECORD)
        other, _ = await client.grant(60)
        await client.put(key, b"rubbish", other)
        await eventually(lambda: client.get(key), lambda kv: kv.value == before.value, "it stays")
        assert registration.connected
    await client.close()
    assert "was deleted" in caplog.text and "was changed" in caplog.text


async def test_no_endpoint_at_all_is_an_error_with_names_and_fix(monkeypatch):
    monkeypatch.setattr(etcd_client, "START_S", 0.3)
    names = f"{closed_address()},{closed_address()}"
    async with opened(RegistryConfig(etcd=names)) as registry:
        with pytest.raises(Unavailable, match=f"{names}.*start it or correct --etcd"):
            async with registry.watch():
                pass


async def test_a_silent_etcd_is_an_outage_and_no_loss(etcd, monkeypatch):
    """SIGSTOP: connections stay open and nothing answers."""
    monkeypatch.setattr(etcd_client, "CALL_S", 0.5)
    monkeypatch.setattr(etcd_client, "QUIET_S", 0.5)
    config = RegistryConfig(etcd=etcd.address, lease_ttl_s=30)
    async with (
        opened(config) as registry,
        registry.register(RECORD) as registration,
        registry.watch() as members,
    ):
        os.kill(etcd.pid, signal.SIGSTOP)
        try:
            await until(members, lambda _: not members.connected)
            assert set(members.records) == {"d1"}
            await registration.update(RECORD)
            assert not registration.connected
        finally:
            os.kill(etcd.pid, signal.SIGCONT)
        await until(members, lambda _: members.connected)
        assert set(members.records) == {"d1"}


async def test_leaving_during_an_outage_is_bounded(etcd, caplog):
    async with opened(RegistryConfig(etcd=etcd.address)) as registry:
        async with asyncio.timeout(5):
            async with registry.register(RECORD):
                await etcd.kill()
    assert "left to its lease's end" in caplog.text
