"""Which endpoint of etcd a call asks."""

import asyncio

from baton.config import RegistryConfig
from baton.errors import Unavailable
from baton.registry.etcd_client import EtcdClient


async def test_calls_that_fail_at_once_on_a_dead_endpoint_all_go_to_the_next(monkeypatch):
    client, both, asked = EtcdClient(RegistryConfig(etcd="dead:1, alive:2")), asyncio.Barrier(2), []

    async def attempt(pick, request):
        name = client._endpoint().name
        asked.append(name)
        if name == "dead:1":
            await both.wait()
            raise Unavailable(name)
        return name

    monkeypatch.setattr(client, "_attempt", attempt)
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*(client._call(None, None) for _ in range(2)))
    assert answers == ["alive:2"] * 2 and asked == ["dead:1"] * 2 + ["alive:2"] * 2
    await client.close()
