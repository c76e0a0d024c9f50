"""Processes may be restarted, and some killed, while requests run: no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from baton.client import AsyncClient
from baton.local.cluster import LocalCluster
from tests.cluster.command import running
from tests.cluster.conftest import ClusterFactory
from tests.cluster.oracle import Case, Oracle, all_blocks_free, check
from tests.waiting import eventually

DRAIN_S = 30.0  # enough for what runs here, on a machine that is busy with other things


class SteadyLoad:
    """Requests without a pause, each compared with the oracle. The first failure ends its task."""

    def __init__(self, clients: list[AsyncClient], oracle: Oracle) -> None:
        self.done = 0
        self._clients = clients
        self._oracle = oracle
        self._numbers = itertools.count()
        self._stopping = False
        self._cases = [Case(oracle.prompt(20 + 30 * (i % 3)), kind) for i, kind in
                       enumerate(("greedy", "seeded") * 3)]  # fmt: skip
        for case in self._cases:
            oracle.tokens(case)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Two requests at a time at each client; whatever failed is raised at the end."""
        callers = [asyncio.create_task(self._caller(client)) for client in self._clients * 2]
        try:
            await self.goes_on()
            yield
            await self.goes_on()
        finally:
            self._stopping = True
            await asyncio.gather(*callers)

    async def goes_on(self) -> None:
        """Returns when some more requests have ended."""

        enough = self.done + 6

        async def done() -> int:
            return self.done

        await eventually(done, lambda now: now >= enough, "too few requests ended", 60.0)

    async def _caller(self, client: AsyncClient) -> None:
        while not self._stopping:
            number = next(self._numbers)
            case = self._cases[number % len(self._cases)]
            await check(client, self._oracle, case, cache_salt=f"{number % 7}")
            self.done += 1


@contextlib.asynccontextmanager
async def clients_of(cluster: LocalCluster) -> AsyncIterator[list[AsyncClient]]:
    """A client for each router: that one first, the others when it is away."""
    first, second = cluster.addresses
    async with AsyncClient([first, second]) as one, AsyncClient([second, first]) as other:
        yield [one, other]


async def test_a_rolling_restart_under_load_fails_no_request(
    own_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """Every router and worker of a 2P2D cluster is restarted in turn; no request fails."""
    cluster = await own_cluster(routers=2, prefill=2, decode=2, drain_s=DRAIN_S)
    before = {name: process.pid for name, process in cluster.processes.items()}
    async with clients_of(cluster) as clients:
        load = SteadyLoad(clients, oracle)
        async with load.running():
            assert await cluster.rolling_restart() == dict.fromkeys(before, 0)
        assert len(before) == 6
        assert not set(before.values()) & {p.pid for p in cluster.processes.values()}
        for client in clients:
            await all_blocks_free(client)


async def test_etcd_restarts_under_load(repaired_cluster: ClusterFactory, oracle: Oracle) -> None:
    cluster = await repaired_cluster(routers=2)
    members = set(cluster.membership.records)
    async with clients_of(cluster) as clients:
        async with SteadyLoad(clients, oracle).running():
            assert cluster.etcd is not None
            await cluster.etcd.stop()
            await cluster.etcd.start()
        for client in clients:
            status = await eventually(
                client.status, lambda s: s["router"]["registry_connected"], "not connected", 30.0
            )
            assert {worker["incarnation"] for worker in status["workers"]} == members


async def test_streams_resume_after_the_only_router_is_restarted(
    repaired_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """It is started again at its address, and the stream goes on there, token for token."""
    cluster = await repaired_cluster(restart=True)
    case = Case(oracle.prompt(30), "seeded", 400)
    expected = oracle.tokens(case)
    async with AsyncClient(cluster.address) as client:
        stream = client.stream(case.prompt, **case.options, timeout=90.0)
        await anext(stream)
        cluster.kill("router")
        async for _ in stream:
            pass
        assert stream.completion.token_ids == expected


async def test_one_of_two_routers_killed(repaired_cluster: ClusterFactory, oracle: Oracle) -> None:
    """Its streams go on at the other router, token for token, and whatever is new goes there."""
    cluster = await repaired_cluster(routers=2)
    case = Case(oracle.prompt(30), "seeded", 400)
    oracle.tokens(case)
    async with clients_of(cluster) as clients:
        lives = asyncio.create_task(check(clients[1], oracle, case))
        stream = clients[0].stream(case.prompt, **case.options, timeout=90.0)
        await anext(stream)
        cluster.kill("router-0")
        async for _ in stream:
            pass
        assert stream.completion.token_ids == oracle.tokens(case)
        await lives
        short = Case(oracle.prompt(30), "seeded")
        for client in clients:
            await asyncio.gather(*(check(client, oracle, short) for _ in range(3)))
            await all_blocks_free(client)


async def test_streams_resume_after_the_only_decode_worker_is_restarted(
    repaired_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """Streams wait for its restart and go on where they were."""
    cluster = await repaired_cluster(restart=True)
    cases = [Case(oracle.prompt(30 + i), kind, 300) for i, kind in enumerate(("greedy", "seeded"))]
    for case in cases:
        oracle.tokens(case)
    async with AsyncClient(cluster.targets) as client:
        streams = [client.stream(case.prompt, **case.options, timeout=90.0) for case in cases]
        for stream in streams:
            await anext(stream)
        cluster.kill("decode-0")
        for stream, case in zip(streams, cases, strict=True):
            async for _ in stream:
                pass
            assert stream.completion.token_ids == oracle.tokens(case)
            assert stream.completion.route.attempts > 1
        assert cluster.processes["decode-0"].starts == 2
        await all_blocks_free(client)


async def test_up_restarts_everything_on_sighup(tmp_path: Path) -> None:
    """One process after the other, each logged; then the cluster stops as usual."""
    argv = ("up", "--routers", "2", "--port", "0", "--dtype", "float32", "--kv-cache", "64MiB")
    async with running(*argv, env={"TMPDIR": str(tmp_path)}) as up:
        ready = await up.says("ready: ")
        target = ready.split()[1].rstrip(",")
        assert re.fullmatch(r"127\.0\.0\.1:\d+,127\.0\.0\.1:\d+", target)
        before = set(psutil.Process(up.process.pid).children())
        up.process.send_signal(signal.SIGHUP)
        names = ("router-0", "router-1", "prefill-0", "decode-0")
        await up.says(f"SIGHUP: restarting {', '.join(names)}, one after the other")
        for name in names:
            await up.says(f"{name} restarting…")
            await up.says(f"{name} serving after" if "router" in name else f"{name} ready in")
        await up.says("all processes have been restarted")
        after = set(psutil.Process(up.process.pid).children())
        assert len(after) == len(before) == 5
        assert len(after & before) == 1, "etcd alone stays"
        async with AsyncClient(target) as client:
            assert (await client.generate("def f(", max_tokens=2)).usage.completion_tokens == 2
        assert await up.end(signal.SIGTERM) == 0
    assert not [process for process in before | after if process.is_running()]
