"""An etcd cluster of three members on this machine, any of which can be killed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx

from baton.local import ports
from baton.local.etcd import EmbeddedEtcd

NUM_MEMBERS = 3


class EtcdMembers:
    """Started with `async with`; `addresses` is what `--etcd` takes."""

    async def __aenter__(self) -> EtcdMembers:
        first = ports.consecutive("127.0.0.1", 0, NUM_MEMBERS)
        self.peer_ports = first
        peers = {f"etcd-{i}": f"http://127.0.0.1:{port}" for i, port in enumerate(first)}
        cluster = ",".join(f"{name}={url}" for name, url in peers.items())
        self.members = [
            EmbeddedEtcd(
                args=(
                    *("--name", name, "--initial-cluster", cluster),
                    *("--listen-peer-urls", url, "--initial-advertise-peer-urls", url),
                )
            )
            for name, url in peers.items()
        ]
        self._stack = AsyncExitStack()
        try:
            for member in self.members:
                self._stack.push_async_callback(member.close)
            # None answers before a majority runs.
            await asyncio.gather(*(member.start() for member in self.members))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @property
    def addresses(self) -> str:
        return ",".join(member.address for member in self.members)

    async def leader(self) -> EmbeddedEtcd:
        """The member that leads now."""
        async with httpx.AsyncClient(timeout=10.0) as client:
            for member in self.members:
                url = f"http://{member.address}/v3/maintenance/status"
                status = (await client.post(url, json={})).raise_for_status().json()
                if status["header"]["member_id"] == status["leader"]:
                    return member
        raise AssertionError("no member leads")
