"""Routers, workers and etcd restarted or killed while requests run: none is lost, no token changes.

On simulated engines.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import signal
from functools import partial

import httpx
import pytest
import pytest_asyncio

from baton.client import AsyncClient, RetryPolicy
from baton.config import RouterLimits
from baton.errors import BatonError, Overloaded
from tests.chaos.checks import busy_workers
from tests.cluster.oracle import SIMULATED, Streams, all_blocks_free, check
from tests.etcd_members import etcd_members, leader_of
from tests.waiting import WAIT_S, eventually

DRAIN_S = WAIT_S
LEASE_S, OUTAGE_S = 1, 3.0
PAUSES_S = (2.1, 3.2)  # longer than etcd's shortest leases, shorter than a watch's time
ALL = {"engine": SIMULATED, "routers": 2, "restart": True, "drain_s": DRAIN_S}
LEASES = {role: ["--lease-ttl", f"{LEASE_S}"] for role in ("prefill", "decode")}


@contextlib.asynccontextmanager
async def again_and_again(calls, count):
    """Repeats each of `calls`; `count` of them complete before the block, and as many after it."""
    ended: asyncio.Queue[None] = asyncio.Queue()
    stopping = asyncio.Event()

    async def repeat(call):
        while not stopping.is_set():
            await call()
            ended.put_nowait(None)

    async with asyncio.TaskGroup() as callers:
        for call in calls:
            callers.create_task(repeat(call))
        for _ in range(count):
            await ended.get()
        yield
        while not ended.empty():
            ended.get_nowait()
        for _ in range(count):
            await ended.get()
        stopping.set()


def steady_load(clients, oracle, cases):
    """Two requests at a time at each client, each compared, before, while and after the block."""

    async def call(client, numbers):
        number = next(numbers)
        await check(client, oracle, cases[number % len(cases)], cache_salt=f"{number % 7}")

    calls = [
        partial(call, client, itertools.count(number, 5))
        for number, client in enumerate([*clients, *clients])
    ]
    return again_and_again(calls, 6)


async def members(client, ready=2):
    """All workers, once the router reaches etcd and so many are READY."""

    def complete(status):
        states = [worker["state"] for worker in status["workers"]]
        return status["router"]["registry_connected"] and states.count("READY") == ready

    status = await eventually(client.status, complete, "members are missing")
    return {worker["incarnation"] for worker in status["workers"]}


@contextlib.asynccontextmanager
async def clients_of(cluster):
    """A client for each router: that one first, the others when it is away."""
    first, second = cluster.addresses
    async with AsyncClient([first, second]) as one, AsyncClient([second, first]) as other:
        one._preferred = other._preferred = 0  # else they begin at any
        yield [one, other]


async def test_a_rolling_restart_under_load_fails_no_request(clusters, simulated):
    """Every router and worker of a 2P2D cluster is restarted in turn; no request fails."""
    cluster, _ = await clusters(alone=True, prefill=2, decode=2, **ALL)
    before = {name: process.pid for name, process in cluster.processes.items()}
    async with clients_of(cluster) as clients:
        async with steady_load(clients, simulated, simulated.mixed(8, new_tokens=24)):
            assert await cluster.rolling_restart() == dict.fromkeys(before, 0)
        assert len(before) == 6
        assert not set(before.values()) & {p.pid for p in cluster.processes.values()}
        for client in clients:
            await all_blocks_free(client)


async def test_a_rolling_restart_under_http_clients_that_never_retry(clusters, simulated):
    """With one router and one worker of each role, whose drain is shorter than a stream.

    Some clients keep their connections, some make one for each request, some read long streams.
    """
    cluster, _ = await clusters(
        alone=True, engine=SIMULATED, restart=True, drain_s=1.0, metrics_port=0
    )
    before = {name: process.pid for name, process in cluster.processes.items()}
    url = f"http://{cluster.http_addresses[0]}/v1/completions"
    long, short = simulated.case(30, 0, "seeded", 700), simulated.case(30, 0, "seeded")

    async def ask(client, case, stream):
        body = {"prompt": list(case.prompt), "stream": stream, **case.options}
        response = await client.post(url, json=body)
        assert response.status_code == 200, response.text
        text = response.json()["choices"][0]["text"] if not stream else "".join(
            json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            for line in response.text.splitlines() if line.startswith("data: {")
        )  # fmt: skip
        assert text == expected[case]

    async def ask_once(case, stream):
        async with httpx.AsyncClient(timeout=WAIT_S, verify=False) as client:
            await ask(client, case, stream)

    expected = {case: simulated.text(simulated.tokens(case)) for case in (long, short)}
    calls = []
    async with contextlib.AsyncExitStack() as stack:
        for case, stream in ((short, True), (short, False), (long, True)):
            kept = httpx.AsyncClient(timeout=WAIT_S, verify=False)
            await stack.enter_async_context(kept)
            calls += [partial(ask, kept, case, stream), partial(ask_once, case, stream)]
        async with again_and_again(calls, 10):
            assert await cluster.rolling_restart() == dict.fromkeys(before, 0)
    assert not set(before.values()) & {p.pid for p in cluster.processes.values()}
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        for address in cluster.metrics.values():
            assert (await client.get(f"http://{address}/metrics")).status_code == 200


async def test_etcd_restarts_and_one_of_two_routers_is_killed(clusters, simulated):
    """A killed router's streams go on at the other one, and whatever is new goes there."""
    cluster, _ = await clusters(**ALL)
    before = set(cluster.membership.records)
    case = simulated.case(30, 0, "seeded", 400)
    async with clients_of(cluster) as clients:
        async with steady_load(clients, simulated, simulated.mixed(8, new_tokens=24)):
            assert cluster.etcd is not None
            await cluster.etcd.stop()
            await cluster.etcd.start()
        for client in clients:
            assert await members(client) == before

        lives = asyncio.create_task(check(clients[1], simulated, case))
        stream = clients[0].stream(case.prompt, **case.options, timeout=WAIT_S)
        await anext(stream)
        cluster.kill("router-0")
        async for _ in stream:
            pass
        assert stream.completion.token_ids == simulated.tokens(case)
        await lives
        short = simulated.case(30, 0, "seeded")
        for client in clients:
            await asyncio.gather(*(check(client, simulated, short) for _ in range(3)))


async def of_each_process(cluster, stack, **options):
    """A client of each process of the only router, by the process's name."""
    found = {}
    while len(found) < cluster.config.router_processes:
        client = await stack.enter_async_context(AsyncClient(cluster.address, **options))
        status = await client.status()
        assert len(status["siblings"]) == cluster.config.router_processes - 1
        found.setdefault(status["router"]["incarnation"][: len("router-0")], client)
    return found


async def test_processes_of_one_router_share_its_port_and_limits_and_one_is_killed(
    clusters, simulated, tmp_path
):
    """Streams go on at the other one; the dead one is started again, and its leases are free."""
    tenants = tmp_path / "tenants.toml"
    keys = f"keys = ['sha256:{hashlib.sha256(b'k').hexdigest()}']"
    tenants.write_text(f"[tenants.a]\n{keys}\nmax_running = 6\n[admin]\n{keys}")
    cluster, _ = await clusters(
        alone=True, engine=SIMULATED, restart=True, router_processes=2, metrics_port=0,
        limits=RouterLimits(tenants_file=tenants),
    )  # fmt: skip
    case = simulated.case(30, 0, "seeded", 400)
    once = {"api_key": "k", "retry": RetryPolicy(1)}
    async with contextlib.AsyncExitStack() as stack:
        each = await of_each_process(cluster, stack, api_key="k")
        assert sorted(each) == ["router-0", "router-1"]
        streams = [one.stream(case.prompt, **case.options) for one in each.values() for _ in "123"]
        for stream in streams:
            await anext(stream)
        for one in (await of_each_process(cluster, stack, **once)).values():
            with pytest.raises(Overloaded, match="6 requests of this tenant run already"):
                await one.generate(case.prompt, max_tokens=1)

        cluster.kill("router-0")
        for stream in streams:
            async for _ in stream:
                pass
            assert stream.completion.token_ids == simulated.tokens(case)
        await cluster.wait_ready(timeout_s=WAIT_S)
        assert [cluster.processes[name].starts for name in sorted(each)] == [2, 1]

        each = await of_each_process(cluster, stack, **once)
        checks = (check(one, simulated, case) for one in each.values() for _ in "123")
        await asyncio.gather(*checks)
        await all_blocks_free(each["router-0"])
    headers = {"authorization": "Bearer k"}
    async with httpx.AsyncClient(timeout=WAIT_S, headers=headers) as http:
        page = await http.get(f"http://{cluster.http_addresses[0]}/metrics")
        assert page.status_code == 400 and "--metrics-port" in page.text
        for name in each:
            page = await http.get(f"http://{cluster.metrics[name]}/metrics")
            assert f'service_instance_id="{name}-' in page.text


@pytest.mark.parametrize("victim", ["router", "decode-0"])
async def test_streams_resume_after_the_only_router_or_decode_worker_is_restarted(
    clusters, simulated, victim
):
    """Streams wait for its restart and go on where they were."""
    cluster, client = await clusters(engine=SIMULATED, restart=True)
    cases = [simulated.case(30, i, kind, 400) for i, kind in enumerate(("greedy", "seeded"))]
    streams = [client.stream(case.prompt, **case.options, timeout=WAIT_S) for case in cases]
    for stream in streams:
        await anext(stream)
    starts = cluster.processes[victim].starts
    cluster.kill(victim)
    for stream, case in zip(streams, cases, strict=True):
        async for _ in stream:
            pass
        assert stream.completion.token_ids == simulated.tokens(case)
        assert victim == "router" or stream.completion.route.attempts > 1
    assert cluster.processes[victim].starts == starts + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_router_drains_and_exits_0(clusters, simulated, number):
    """Its streams complete; what is new is refused, over HTTP with 503 and Retry-After."""
    cluster, client = await clusters(alone=True, engine=SIMULATED, drain_s=WAIT_S)
    case = simulated.case(100, new_tokens=400)
    url = f"http://{cluster.http_addresses[0]}"
    body = {"prompt": list(case.prompt), "max_tokens": 4}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        streams = Streams(client, simulated, [case] * 3)
        running = await streams.start()
        cluster.kill("router", number)
        ready = lambda: http.get(f"{url}/ready")  # noqa: E731
        await eventually(ready, lambda response: response.status_code == 503, "not draining")
        refused = await http.post(f"{url}/v1/completions", json=body)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        await running
        assert await asyncio.wait_for(cluster.processes["router"].wait(), WAIT_S) == 0
        with pytest.raises(BatonError):
            await client.generate(case.prompt, max_tokens=4, timeout=1.0)


async def test_blocks_are_freed_without_new_work(clusters, simulated):
    """The only router dies under load: no message, no new work, and the workers clean up alone."""
    cluster, client = await clusters(engine=SIMULATED)
    streams = Streams(client, simulated, simulated.mixed(6, new_tokens=400))
    running = await streams.start()
    cluster.kill("router")
    running.cancel()  # it would go on until its deadlines
    await asyncio.gather(running, return_exceptions=True)

    busy = partial(busy_workers, cluster)
    await eventually(busy, lambda found: not found, "blocks are still held")


async def test_etcd_down_for_three_leases_fails_no_request(clusters, simulated):
    """Streams before, during and after the outage; members again afterwards, and new ones join."""
    cluster, client = await clusters(alone=True, engine=SIMULATED, extra_args=LEASES)
    assert cluster.etcd is not None
    cases = simulated.mixed(4)
    before = await members(client)
    await cluster.etcd.kill()
    end_s = asyncio.get_running_loop().time() + OUTAGE_S * LEASE_S
    while asyncio.get_running_loop().time() < end_s:
        done = await Streams(client, simulated, cases).run()
        assert {one.route.attempts for one in done} == {1}

    def alone(status):
        return not status["router"]["registry_connected"]

    await eventually(client.status, alone, "the router has noticed nothing")
    await cluster.etcd.start()
    assert await members(client) == before
    await cluster.add_worker("decode")
    assert before < await members(client, ready=3)
    await Streams(client, simulated, cases).run()
    await all_blocks_free(client)


async def test_etcd_paused_for_longer_than_leases_live_disturbs_no_stream(clusters, simulated):
    """On waking it ends all leases at once, and says so to watches that are still open.

    Nor does a worker that is late to renew its lease, while its router waits for it.
    """
    patient = {"router": ["--silence", "60", "--lease-ttl", "30"]}  # also on a busy machine
    cluster, client = await clusters(alone=True, engine=SIMULATED, extra_args=LEASES | patient)
    assert cluster.etcd is not None
    before, clock = await members(client), asyncio.get_running_loop().time

    async def lost():
        return sum("registering again" in line for p in workers for line in p.log)

    async def pause(pid, pause_s):
        running = await Streams(client, simulated, simulated.mixed(4, new_tokens=250)).start()
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(pause_s)
        finally:
            os.kill(pid, signal.SIGCONT)
        end_s, done = clock() + LEASE_S, []
        while clock() < end_s:
            done += await Streams(client, simulated, simulated.mixed(4)).run()
        assert {one.route.attempts for one in [*done, *await running]} == {1}

    workers = [process for process in cluster.processes.values() if process.role != "router"]
    for pid, pauses in ((cluster.etcd.pid, PAUSES_S), (workers[-1].pid, PAUSES_S[-1:])):
        known = await lost()
        for pause_s in pauses:
            await pause(pid, pause_s)
        await eventually(lost, lambda found: found > known, "no lease has ended")  # noqa: B023
        assert await members(client) == before
    await all_blocks_free(client)


@pytest_asyncio.fixture(loop_scope="session")
async def etcds():
    """Members of one etcd."""
    async with etcd_members() as members:
        yield members


async def test_members_of_a_cluster_of_etcd_killed_under_streams(etcds, clusters, simulated):
    """First a follower, then the leader: streams are not disturbed, and a new worker joins."""
    addresses = ",".join(member.address for member in etcds)
    cluster, client = await clusters(alone=True, engine=SIMULATED, etcd=addresses)
    for victim in ("follower", "leader"):
        leader = await leader_of(etcds)
        killed = next(m for m in etcds if (m is leader) == (victim == "leader"))
        streams = Streams(client, simulated, simulated.mixed(4))
        running = await streams.start()
        await killed.kill()
        assert {one.route.attempts for one in await running} == {1}
        if victim == "leader":
            await cluster.add_worker("decode")
            await members(client, ready=3)
        await killed.start()
        await Streams(client, simulated, streams.cases).run()
    await all_blocks_free(client)
