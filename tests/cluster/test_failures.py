"""Workers killed, drained or replaced, etcd down, KV lost or corrupted: no token changes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from baton.client import AsyncClient
from baton.config import EngineConfig
from baton.engine.ops.native import library
from baton.errors import BatonError, DeadlineExceeded, Overloaded
from baton.local import ports
from tests.chaos import kv_faults
from tests.cluster.conftest import ENGINE, USED_PORTS, ClusterFactory
from tests.cluster.etcd_members import EtcdMembers
from tests.cluster.oracle import Case, Oracle, all_blocks_free, check
from tests.cluster.streams import Streams, mixed_cases
from tests.waiting import eventually

KILLED_GAP_S = 1.0  # docs/failures.md
PROMPTNESS_S = 3.0


async def test_one_worker_of_each_role_killed_under_24_streams(
    repaired_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """24 of 24 complete with the oracle's tokens, after a short pause."""
    cluster = await repaired_cluster(prefill=2, decode=2)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, mixed_cases(oracle, 24))
        running = await streams.start()
        cluster.kill("prefill-0")
        cluster.kill("decode-0")
        done = await running
        assert len(done) == 24 and any(one.route.attempts > 1 for one in done)
        streams.check_gap(KILLED_GAP_S)
        await all_blocks_free(client)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(
            replace(ENGINE, dtype="bfloat16", quantization="int8", kv_dtype="int8"),
            marks=pytest.mark.skipif(library.load() is None, reason="no native library here"),
            id="int8",  # native kernels give a row the same bits beside any other rows
        ),
        pytest.param(replace(ENGINE, speculate=4), id="speculation"),
    ],
)
async def test_a_killed_decode_worker_changes_no_token(
    own_cluster: ClusterFactory, engine: EngineConfig
) -> None:
    """At low precision and with speculation, too: the streams resume on the other worker."""
    cluster = await own_cluster(decode=2, restart=False, engine=engine)
    with Oracle(replace(engine, speculate=0)) as oracle:
        async with AsyncClient(cluster.address) as client:
            streams = Streams(client, oracle, mixed_cases(oracle, 16))
            running = await streams.start()
            cluster.kill("decode-0")
            done = await running
            assert any(one.route.attempts > 1 for one in done)
            await all_blocks_free(client)


@pytest.fixture(scope="module")
def fixed_ports() -> dict[str, int]:
    """Ports of the workers that are replaced."""
    return {name: ports.free() for name in ("prefill-0", "decode-0")}


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_replacement_at_the_same_address_is_another_worker(
    repaired_cluster: ClusterFactory, oracle: Oracle, fixed_ports: dict[str, int], victim: str
) -> None:
    """While etcd still lists the dead one, its successor serves at its address."""
    extra_args = {name: ["--port", str(port)] for name, port in fixed_ports.items()}
    cluster = await repaired_cluster(prefill=2, decode=2, extra_args=extra_args)
    cases = mixed_cases(oracle, 8)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, cases)
        running = await streams.start()
        before = {w["incarnation"] for w in (await client.status())["workers"]}
        cluster.kill(victim)
        await cluster.processes[victim].wait()
        await cluster.start_again(victim)
        await running
        await cluster.wait_ready()
        await asyncio.gather(*(check(client, oracle, c, cache_salt=f"{c}") for c in cases))
        workers = (await client.status())["workers"]
        successor = [w for w in workers if w["pid"] == cluster.processes[victim].pid]
        assert successor[0]["address"].endswith(f":{fixed_ports[victim]}")
        assert successor[0]["incarnation"] not in before
        await all_blocks_free(client)


@pytest.fixture
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The control file of KV faults: one for all tests, so that they share clusters."""
    folder = tmp_path_factory.getbasetemp() / "kv-faults"
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    return folder / "kv.json"


def set_fault(control: Path, fault: str) -> None:
    """From now on every second transfer is faulty."""
    control.write_text(json.dumps({"fault": fault, "every": 2}))


def end_faults(control: Path) -> str:
    """No more faults; those that were done, a line each."""
    control.unlink()
    return control.with_suffix(".done").read_text()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("fault", ["corrupt", "lose", "fail"])
async def test_corrupted_or_lost_kv_is_detected_and_sent_again(
    cluster_factory: ClusterFactory, oracle: Oracle, control: Path, fault: str, transport: str
) -> None:
    """Every second transfer is changed, short or broken off on its way: tokens are the same."""
    cluster = await cluster_factory(
        transport=transport,
        restart=False,
        programs={"prefill": [sys.executable, "-m", "tests.chaos.process"]},
        env={kv_faults.VARIABLE: str(control)},
    )
    set_fault(control, fault)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, mixed_cases(oracle, 12, new_tokens=24))
        await streams.run()
        assert end_faults(control).count(fault) >= 1
        await all_blocks_free(client)
        await check(client, oracle, Case(oracle.prompt(90, start=600), "seeded"))
        await all_blocks_free(client)


async def test_a_reservation_that_expires_is_made_elsewhere(
    own_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """decode-0's reservation expires before the prompt in front is computed."""
    cluster = await own_cluster(
        prefill=1,
        decode=2,
        restart=False,
        transport="gloo",
        extra_args={"decode-0": ["--reservation-lease", "0.01"]},
    )
    cases = [Case(oracle.prompt(1500, start=17 * n), "greedy") for n in range(6)]
    for case in cases:
        oracle.tokens(case)
    async with AsyncClient(cluster.address) as client:
        done = await asyncio.gather(*(check(client, oracle, case) for case in cases))
        assert any(one.route.attempts > 1 for one in done), "no reservation expired"
        await all_blocks_free(client)


@pytest.mark.parametrize("timeout_s", [0.05, 0.3, 0.8])
async def test_a_deadline_is_kept_wherever_it_passes(
    cluster_factory: ClusterFactory, oracle: Oracle, timeout_s: float
) -> None:
    """While queued, in the middle of prompts, transfers and streams: freed on both ends."""
    cluster = await cluster_factory()
    clock = asyncio.get_running_loop().time

    async def hasty(client: AsyncClient, number: int) -> float:
        began_s = clock()
        prompt = oracle.prompt(1000, start=11 * number)
        with pytest.raises((DeadlineExceeded, Overloaded)):
            await client.generate(prompt, max_tokens=900, ignore_eos=True, timeout=timeout_s)
        return clock() - began_s

    async with AsyncClient(cluster.address) as client:
        lasted_s = await asyncio.gather(*(hasty(client, number) for number in range(12)))
        assert max(lasted_s) < timeout_s + PROMPTNESS_S
        await all_blocks_free(client)
        await check(client, oracle, Case(oracle.prompt(64, start=7), "greedy"))


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_drained_worker_finishes_and_exits_0(
    repaired_cluster: ClusterFactory, oracle: Oracle, victim: str
) -> None:
    cluster = await repaired_cluster(prefill=2, decode=2)
    cases = mixed_cases(oracle, 8)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, cases)
        running = await streams.start()
        cluster.kill(victim, signal.SIGTERM)
        done = await running
        assert {one.route.attempts for one in done} == {1}, "a drained worker's stream moved"
        assert await asyncio.wait_for(cluster.processes[victim].wait(), 20) == 0
        await all_blocks_free(client)


async def test_a_router_drains_and_exits_0(
    repaired_cluster: ClusterFactory, oracle: Oracle
) -> None:
    cluster = await repaired_cluster()
    case = Case(oracle.prompt(100), "greedy")
    oracle.tokens(case)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, [case] * 3)
        running = await streams.start()
        cluster.kill("router", signal.SIGTERM)
        await running
        assert await asyncio.wait_for(cluster.processes["router"].wait(), 20) == 0
        with pytest.raises(BatonError):
            await client.generate(case.prompt, max_tokens=4, timeout=1.0)


async def test_etcd_down_for_ten_seconds_fails_no_request(
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


@pytest_asyncio.fixture(loop_scope="session")
async def etcd_members() -> AsyncIterator[EtcdMembers]:
    async with EtcdMembers() as members:
        USED_PORTS.update(members.peer_ports)
        yield members


@pytest.mark.parametrize("victim", ["leader", "follower"])
async def test_one_of_three_etcd_members_killed_under_streams(
    etcd_members: EtcdMembers, own_cluster: ClusterFactory, oracle: Oracle, victim: str
) -> None:
    """Streams are not disturbed, a new worker joins, and the router's registry is connected."""
    cluster = await own_cluster(restart=False, etcd=etcd_members.addresses)
    leader = await etcd_members.leader()
    killed = next(m for m in etcd_members.members if (m is leader) == (victim == "leader"))
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, mixed_cases(oracle, 4))
        running = await streams.start()
        await killed.kill()
        assert {one.route.attempts for one in await running} == {1}
        await cluster.add_worker("decode")
        status = await eventually(
            client.status,
            lambda s: sum(w["state"] == "READY" for w in s["workers"]) == 3,
            "the new worker is not a member",
            30.0,
        )
        assert status["router"]["registry_connected"]
        await killed.start()
        await asyncio.gather(*(check(client, oracle, c, cache_salt="after") for c in streams.cases))
        await all_blocks_free(client)
