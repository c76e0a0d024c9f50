"""Workers that die, drain or are replaced, etcd gone, KV lost or spoilt: none costs a token."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import AsyncClient
from baton.engine.ops.native import library
from baton.errors import BatonError, DeadlineExceeded, Overloaded
from baton.local import ports
from tests.chaos import kv
from tests.cluster.conftest import ENGINE, ClusterFactory
from tests.cluster.oracle import Case, Oracle, all_blocks_free, check
from tests.cluster.streams import Streams, mixed_cases
from tests.waiting import eventually

LOOSE_GAP_S = 15.0
PROMPTNESS_S = 10.0


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_killed_worker_costs_no_token(
    own_cluster: ClusterFactory, oracle: Oracle, victim: str
) -> None:
    cluster = await own_cluster(prefill=2, decode=2, restart=False)
    cases = mixed_cases(oracle, 16)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, cases)
        running = asyncio.ensure_future(streams.run())
        await streams.midway.wait()
        cluster.kill(victim)
        done = await running
        if victim == "decode-0":
            assert any(one.route.attempts > 1 for one in done)
        await all_blocks_free(client)


async def test_one_worker_of_each_role_killed_under_24_streams(
    own_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """24 of 24 complete with the oracle's tokens; the gap is loose for a busy machine."""
    cluster = await own_cluster(prefill=2, decode=2, restart=False)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, mixed_cases(oracle, 24))
        running = asyncio.ensure_future(streams.run())
        await streams.midway.wait()
        cluster.kill("prefill-0")
        cluster.kill("decode-0")
        done = await running
        assert len(done) == 24 and any(one.route.attempts > 1 for one in done)
        assert streams.largest_gap_s < LOOSE_GAP_S
        await all_blocks_free(client)


@pytest.mark.skipif(library.load() is None, reason="no native library can be built here")
async def test_low_precision_streams_go_on_elsewhere_with_the_same_tokens(
    own_cluster: ClusterFactory,
) -> None:
    """Native kernels give a row the same bits recomputed on another worker, beside others."""
    engine = replace(ENGINE, dtype="bfloat16", quantization="int8", kv_dtype="int8")
    cluster = await own_cluster(prefill=2, decode=2, restart=False, engine=engine)
    with Oracle(engine) as oracle:
        async with AsyncClient(cluster.address) as client:
            streams = Streams(client, oracle, mixed_cases(oracle, 16))
            running = asyncio.ensure_future(streams.run())
            await streams.midway.wait()
            cluster.kill("decode-0")
            done = await running
            assert any(one.route.attempts > 1 for one in done)
            await all_blocks_free(client)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_replacement_at_the_same_address_is_another_worker(
    own_cluster: ClusterFactory, oracle: Oracle, victim: str
) -> None:
    """While etcd still lists the dead one, its successor answers there; nobody takes it for it."""
    port = ["--port", str(ports.free())]
    cluster = await own_cluster(prefill=2, decode=2, restart=False, extra_args={victim: port})
    cases = mixed_cases(oracle, 8)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, cases)
        running = asyncio.ensure_future(streams.run())
        await streams.midway.wait()
        before = {w["incarnation"] for w in (await client.status())["workers"]}
        cluster.kill(victim)
        await cluster.processes[victim].wait()
        await cluster.start_again(victim)
        await running
        await cluster.wait_ready()
        await asyncio.gather(*(check(client, oracle, c, cache_salt=f"{c}") for c in cases))
        workers = (await client.status())["workers"]
        successor = [w for w in workers if w["pid"] == cluster.processes[victim].pid]
        assert successor[0]["address"].endswith(f":{port[1]}")
        assert successor[0]["incarnation"] not in before
        await all_blocks_free(client)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("fault", ["corrupt", "lose", "fail"])
async def test_kv_that_arrives_wrong_is_noticed_and_made_good(
    own_cluster: ClusterFactory, oracle: Oracle, tmp_path: Path, fault: str, transport: str
) -> None:
    """Every second transfer is changed, short or broken off on its way: tokens are the same."""
    control = tmp_path / "kv.json"
    cluster = await own_cluster(
        transport=transport,
        restart=False,
        programs={"prefill": [sys.executable, "-m", "tests.chaos.process"]},
        env={kv.VARIABLE: str(control)},
    )
    control.write_text(json.dumps({"fault": fault, "every": 2}))
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, mixed_cases(oracle, 12, new_tokens=24))
        await streams.run()
        assert control.with_suffix(".done").read_text().count(fault) >= 1
        control.unlink()
        await all_blocks_free(client)
        await check(client, oracle, Case(oracle.prompt(90, start=600), "seeded"))
        await all_blocks_free(client)


async def test_a_reservation_that_expires_is_made_elsewhere(
    own_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """decode-0 forgets a reservation before the prompt in front is computed."""
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
    own_cluster: ClusterFactory, oracle: Oracle, timeout_s: float
) -> None:
    """In the wait queue, in prompts, in transfers and in streams: freed on both ends."""
    cluster = await own_cluster(restart=False)
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
    own_cluster: ClusterFactory, oracle: Oracle, victim: str
) -> None:
    cluster = await own_cluster(prefill=2, decode=2, restart=False)
    cases = mixed_cases(oracle, 8)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, cases)
        running = asyncio.ensure_future(streams.run())
        await streams.midway.wait()
        cluster.kill(victim, signal.SIGTERM)
        done = await running
        assert {one.route.attempts for one in done} == {1}, "drain hands nothing over in time"
        assert await asyncio.wait_for(cluster.processes[victim].wait(), 20) == 0
        await all_blocks_free(client)


async def test_a_router_drains_and_exits_0(own_cluster: ClusterFactory, oracle: Oracle) -> None:
    cluster = await own_cluster(restart=False)
    case = Case(oracle.prompt(100), "greedy")
    oracle.tokens(case)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, [case] * 3)
        running = asyncio.ensure_future(streams.run())
        await streams.midway.wait()
        cluster.kill("router", signal.SIGTERM)
        await running
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
