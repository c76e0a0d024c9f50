"""An etcd cluster of three members on this machine, any of which can be killed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import httpx

from baton.local import ports
from baton.local.etcd_process import EmbeddedEtcd
from tests.waiting import WAIT_S, eventually


@contextlib.asynccontextmanager
async def etcd_members() -> AsyncIterator[Sequence[EmbeddedEtcd]]:
    """The members, each of which can be killed and started again."""
    while True:
        peer_ports = ports.consecutive("127.0.0.1", 0, 3)
        peers = {f"etcd-{i}": f"http://127.0.0.1:{port}" for i, port in enumerate(peer_ports)}
        initial = ",".join(f"{name}={url}" for name, url in peers.items())
        async with contextlib.AsyncExitStack() as stack:
            members = []
            for name, url in peers.items():
                urls = ("--listen-peer-urls", url, "--initial-advertise-peer-urls", url)
                args = ("--name", name, *urls, "--initial-cluster", initial)
                members.append(EmbeddedEtcd(args=args))
                stack.push_async_callback(members[-1].close)
            starts = [member.start() for member in members]  # none answers before a majority
            failed = [one for one in await asyncio.gather(*starts, return_exceptions=True) if one]
            if any("address already in use" in str(one) for one in failed):
                continue  # another test's process has taken one of the ports
            assert not failed
            yield members
            await asyncio.gather(*(one.kill() for one in members))  # one alone looks for a majority
            return


async def leader_of(members: Sequence[EmbeddedEtcd]) -> EmbeddedEtcd:
    """The member that leads, all of which must run; waits for an election."""

    async def leaders() -> list[EmbeddedEtcd]:
        found = []
        for member in members:
            url = f"http://{member.address}/v3/maintenance/status"
            status = (await client.post(url, json={})).raise_for_status().json()
            if status["header"]["member_id"] == status.get("leader"):
                found.append(member)
        return found

    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        return (await eventually(leaders, bool, "a member of etcd leads"))[0]
