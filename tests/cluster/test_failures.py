"""Workers that die, drain or are cut off from etcd cost nobody a token."""

from __future__ import annotations

import asyncio
import signal

import pytest

from baton.client import AsyncClient, Completion
from baton.errors import BatonError
from tests.cluster.conftest import ClusterFactory
from tests.cluster.oracle import Case, Oracle, all_blocks_free, check
from tests.waiting import eventually


def mixed_cases(oracle: Oracle, count: int) -> list[Case]:
    """Prompts that need a handoff, of four lengths, greedy and seeded, long enough to be hit."""
    kinds = ("greedy", "seeded")
    cases = [Case(oracle.prompt(20 + 60 * (i // 2 % 4)), kinds[i % 2], 150) for i in range(count)]
    for case in cases:
        oracle.tokens(case)
    return cases


async def run_while(
    client: AsyncClient, oracle: Oracle, cases: list[Case], accident: asyncio.Event
) -> list[Completion]:
    """Streams all cases; sets `accident` once half of them have ten tokens."""
    started = 0

    async def one(number: int, case: Case) -> Completion:
        nonlocal started
        tokens = 0
        salt = f"{number % 5}"
        stream = client.stream(case.prompt, **case.options, cache_salt=salt, timeout=60.0)
        async with stream:
            async for _ in stream:
                tokens += 1
                started += tokens == 10
                if started >= len(cases) // 2:
                    accident.set()
        assert stream.completion.token_ids == oracle.tokens(case)
        return stream.completion

    return await asyncio.gather(*(one(number, case) for number, case in enumerate(cases)))


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_killed_worker_costs_no_token(
    own_cluster: ClusterFactory, oracle: Oracle, victim: str
) -> None:
    cluster = await own_cluster(prefill=2, decode=2, restart=False)
    cases = mixed_cases(oracle, 16)
    async with AsyncClient(cluster.address) as client:
        accident = asyncio.Event()
        streams = asyncio.ensure_future(run_while(client, oracle, cases, accident))
        await accident.wait()
        cluster.kill(victim)
        done = await streams
        if victim == "decode-0":
            assert any(one.route.attempts > 1 for one in done)
        for one in done:
            assert one.usage.completion_tokens == len(one.token_ids)
        await all_blocks_free(client)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_drained_worker_finishes_and_exits_0(
    own_cluster: ClusterFactory, oracle: Oracle, victim: str
) -> None:
    cluster = await own_cluster(prefill=2, decode=2, restart=False)
    cases = mixed_cases(oracle, 8)
    async with AsyncClient(cluster.address) as client:
        accident = asyncio.Event()
        streams = asyncio.ensure_future(run_while(client, oracle, cases, accident))
        await accident.wait()
        cluster.kill(victim, signal.SIGTERM)
        done = await streams
        assert {one.route.attempts for one in done} == {1}, "drain hands nothing over in time"
        assert await asyncio.wait_for(cluster.processes[victim].wait(), 20) == 0
        await all_blocks_free(client)


async def test_a_router_drains_and_exits_0(own_cluster: ClusterFactory, oracle: Oracle) -> None:
    cluster = await own_cluster(restart=False)
    case = Case(oracle.prompt(100), "greedy")
    oracle.tokens(case)
    async with AsyncClient(cluster.address) as client:
        accident = asyncio.Event()
        stream = asyncio.ensure_future(run_while(client, oracle, [case] * 3, accident))
        await accident.wait()
        cluster.kill("router", signal.SIGTERM)
        await stream
        assert await asyncio.wait_for(cluster.processes["router"].wait(), 20) == 0
        with pytest.raises(BatonError):
            await client.generate(case.prompt, max_tokens=4, timeout=1.0)


async def test_etcd_down_for_ten_seconds_goes_unnoticed(
    own_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """Streams before, during and after the outage; members again afterwards, and new ones join."""
    cluster = await own_cluster(restart=False)
    assert cluster.etcd is not None
    cases = mixed_cases(oracle, 4)
    async with AsyncClient(cluster.address) as client:
        for case in cases:
            await check(client, oracle, case, cache_salt="before")
        await cluster.etcd.kill()
        end = asyncio.get_running_loop().time() + 10
        rounds = 0
        while asyncio.get_running_loop().time() < end:
            done = await asyncio.gather(
                *(check(client, oracle, case, cache_salt=f"{rounds}") for case in cases)
            )
            assert {one.route.attempts for one in done} == {1}
            rounds += 1
        assert rounds > 1
        status = await client.status()
        assert not status["router"]["registry_connected"]
        await cluster.etcd.start()
        await eventually(
            client.status, lambda s: s["router"]["registry_connected"], "not reconnected", 15.0
        )
        before = {worker["incarnation"] for worker in status["workers"]}
        await cluster.add_worker("decode")
        after = await eventually(
            client.status,
            lambda s: sum(w["state"] == "READY" for w in s["workers"]) == 3,
            "the new worker is not a member",
            30.0,
        )
        assert before < {worker["incarnation"] for worker in after["workers"]}
        for case in cases:
            await check(client, oracle, case, cache_salt="after")
        await all_blocks_free(client)
