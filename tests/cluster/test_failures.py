"""Workers killed, stopped or drained, KV lost, pools full, deadlines, cancels: no token changes.

On simulated engines, which prove every block that they read. Workers that are stopped (SIGSTOP)
hang without exiting: sockets open, lease alive, no message. Bounds on gaps are loose, for a busy
machine; `docs/failures.md` has those of a quiet one.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from baton.cli import main as cli
from baton.client import AsyncClient, RetryPolicy
from baton.config import ClusterConfig, RouterLimits
from baton.errors import DeadlineExceeded, Overloaded, Unavailable
from baton.local import ports
from baton.local.span_store import is_complete
from baton.v1 import common_pb2
from tests.chaos import kv_faults
from tests.chaos.checks import load_of, stale_mappings
from tests.cluster.oracle import SIMULATED, Streams, all_blocks_free, check, start_again
from tests.waiting import WAIT_S, eventually

SILENCE_S = 2.0  # a busy machine is not silent for that long
KILLED_GAP_S, SILENT_GAP_S = 1.0, 2 * SILENCE_S  # docs/failures.md
RECOVERY_S = 2.0
STORM = 300
PORTS = {name: ports.free() for name in ("prefill-0", "decode-0")}
# Two of each role; some have fixed ports, and prompts take several chunks.
FOUR = {
    "engine": SIMULATED, "prefill": 2, "decode": 2, "limits": RouterLimits(silence_s=SILENCE_S),
    "extra_args": {"prefill": ["--chunk-tokens", "64"],
                   **{name: ["--port", str(port)] for name, port in PORTS.items()}},
}  # fmt: skip
TWO = {"engine": SIMULATED, "limits": RouterLimits(silence_s=SILENCE_S)}


@asynccontextmanager
async def stopped(cluster, name, how=signal.SIGSTOP):
    """The process is stopped within the block and always continued after it."""
    cluster.kill(name, how)
    try:
        yield
    finally:
        cluster.kill(name, signal.SIGCONT)


async def view(client, cluster, name):
    """A worker as the router sees it; empty when it does not."""
    pid = cluster.processes[name].pid
    workers = (await client.status())["workers"]
    return next((worker for worker in workers if worker["pid"] == pid), {})


async def seen_as(client, cluster, name, state):
    """Returns the worker's incarnation once the router sees it in that state."""

    async def look():
        return await view(client, cluster, name)

    worker = await eventually(look, lambda w: w.get("state") == state, f"{name}: {state}")
    return str(worker["incarnation"])


# First: on the cluster that tests before these have used.
NICE = ClusterConfig.prefill_nice
CORES = os.sched_getaffinity(0)
_NICE = 16  # of the fields behind the command's name in /proc/PID/stat


def threads(pid):
    """Cores and niceness of every thread of a process."""
    return [
        (
            frozenset(os.sched_getaffinity(int(task.name))),
            int((task / "stat").read_text().rpartition(")")[2].split()[_NICE]),
        )
        for task in Path(f"/proc/{pid}/task").iterdir()
    ]


async def test_only_engine_threads_are_pinned_and_only_prefill_is_nice(clusters):
    cluster, _ = await clusters()
    niceness = {name: [nice for _, nice in threads(p.pid)] for name, p in cluster.processes.items()}
    assert set(niceness["decode-0"]) == set(niceness["router"]) == {os.nice(0)}
    assert 1 <= niceness["prefill-0"].count(NICE) <= 1 + len(CORES)  # engine and compute threads
    for name in ("prefill-0", "decode-0"):
        pid = cluster.processes[name].pid
        assert os.sched_getaffinity(pid) == CORES, "the event loop is not pinned"
        pinned = {cpus for cpus, _ in threads(pid)} - {frozenset(CORES)}
        assert len(pinned) == (len(CORES) >= 2), "only the engine has cores of its own"


async def test_one_worker_of_each_role_killed_under_24_streams(clusters, simulated):
    """24 of 24 complete with the oracle's tokens, after a short pause."""
    cluster, client = await clusters(**FOUR)
    streams = Streams(client, simulated, simulated.mixed(24, new_tokens=250))
    running = await streams.start()
    cluster.kill("prefill-0")
    cluster.kill("decode-0")
    done = await running
    assert len(done) == 24 and any(one.route.attempts > 1 for one in done)
    streams.check_gap(KILLED_GAP_S)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_drained_worker_finishes_and_a_replacement_is_another_worker(
    clusters, simulated, victim
):
    """A drained worker's streams do not move. While etcd still lists a killed one, its successor
    serves at its address."""
    cluster, client = await clusters(**FOUR)
    # All are placed: a request that is on its way to a worker which begins to drain is moved.
    streams = Streams(client, simulated, simulated.mixed(8, new_tokens=250), share=1.0)
    running = await streams.start()
    cluster.kill(victim, signal.SIGTERM)
    assert {one.route.attempts for one in await running} == {1}
    assert await asyncio.wait_for(cluster.processes[victim].wait(), WAIT_S) == 0
    await cluster.start_again(victim)
    await cluster.wait_ready()
    await all_blocks_free(client)

    streams = Streams(client, simulated, streams.cases)
    running = await streams.start()
    before = {worker["incarnation"] for worker in (await client.status())["workers"]}
    await start_again(cluster, victim)
    await running
    await cluster.wait_ready()
    await Streams(client, simulated, streams.cases).run()
    successor = await view(client, cluster, victim)
    assert successor["address"].endswith(f":{PORTS[victim]}")
    assert successor["incarnation"] not in before


async def test_a_stopped_decode_worker_costs_no_token_and_gets_nothing_new(clusters, simulated):
    """24 of 24 streams go on elsewhere; once it continues it holds no block and is used again."""
    cluster, client = await clusters(**FOUR)
    case = simulated.case(100, 4000)
    streams = Streams(client, simulated, simulated.mixed(24, new_tokens=250))
    running = await streams.start()
    async with stopped(cluster, "decode-0"):
        incarnation = await seen_as(client, cluster, "decode-0", "SILENT")
        for number in range(6):
            done = await check(client, simulated, case, cache_salt=f"later-{number}")
            assert done.route.decode != incarnation, "it was suspected"
            assert done.route.attempts == 1
        assert any(one.route.attempts > 1 for one in await running), "no stream was hit"
        streams.check_gap(SILENT_GAP_S)
    assert await seen_as(client, cluster, "decode-0", "READY") == incarnation
    await all_blocks_free(client)
    salts = itertools.count()

    async def used_again():
        asked = (check(client, simulated, case, cache_salt=f"{next(salts)}") for _ in range(4))
        return any(one.route.decode == incarnation for one in await asyncio.gather(*asked))

    await eventually(used_again, bool, "it is not used again")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_prefill_worker_lost_in_the_middle_of_a_prompt_is_replaced(
    clusters, simulated, how
):
    """Its prompts are computed elsewhere; once it continues, it overwrites no other blocks."""
    cluster, client = await clusters(**FOUR)
    cases = [simulated.case(1700, 31 * n, ("greedy", "seeded")[n % 2]) for n in range(12)]

    async def computes():
        return bool((await view(client, cluster, "prefill-0")).get("queue_tokens"))

    asked = (check(client, simulated, case, cache_salt=how.name) for case in cases)
    running = asyncio.gather(*asked)
    await eventually(computes, bool, "prefill-0 got no prompt")
    lost = (await view(client, cluster, "prefill-0"))["incarnation"]
    async with stopped(cluster, "prefill-0", how):
        if how == signal.SIGSTOP:
            await seen_as(client, cluster, "prefill-0", "SILENT")
        done = await running
        moved = [one for one in done if one.route.attempts > 1]
        assert moved, "no stream was hit"
        assert lost not in {one.route.prefill for one in moved}
    if how == signal.SIGSTOP:
        await seen_as(client, cluster, "prefill-0", "READY")
        again = (check(client, simulated, case, cache_salt="again") for case in cases)
        await asyncio.gather(*again)


async def test_a_worker_or_router_that_stops_for_a_moment_moves_no_stream(clusters, simulated):
    """Silence is counted in ticks of the router's own loop: one that stops suspects no worker."""
    cluster, client = await clusters(**FOUR)
    for name, pause_s in (("decode-0", SILENCE_S / 3), ("router", 2 * SILENCE_S)):
        streams = Streams(client, simulated, simulated.mixed(4, new_tokens=250))
        running = await streams.start()
        async with stopped(cluster, name):
            await asyncio.sleep(pause_s)
        assert {one.route.attempts for one in await running} == {1}
        assert streams.largest_gap_s > pause_s / 2


async def test_a_decode_worker_outlives_its_prefill_workers(clusters, simulated):
    """The only prefill worker is replaced twice; decode is never restarted.

    A prefill worker unmaps the pool of a decode worker that died: it would keep that memory alive.
    """
    cluster, client = await clusters(**TWO)
    decode = cluster.processes["decode-0"].pid
    for number in range(2):
        await start_again(cluster, "prefill-0")
        await cluster.wait_ready()
        await check(client, simulated, simulated.case(100, 40 * number))
    await all_blocks_free(client)
    assert cluster.processes["decode-0"].pid == decode and cluster.processes["decode-0"].running

    stale = partial(stale_mappings, cluster)
    await eventually(stale, lambda found: not found, "in use")
    await start_again(cluster, "decode-0")
    await cluster.wait_ready()
    await eventually(stale, lambda found: not found, "still mapped")
    await check(client, simulated, simulated.case(100), cache_salt="mapped")


async def test_no_worker_of_a_role(clusters, simulated):
    """Each role serves alone, also what the other is lost with; without both requests wait."""
    limits = RouterLimits(silence_s=SILENCE_S, recovery_s=RECOVERY_S)
    cluster, _ = await clusters(**{**TWO, "limits": limits})

    async def until_state(client, role, alive, state):
        def holds(status):
            ready = {one["role"] for one in status["workers"] if one["state"] == "READY"}
            return (role in ready) is alive and status["router"]["state"] == state

        await eventually(client.status, holds, f"not {state}")

    async with AsyncClient(cluster.address, retry=RetryPolicy(max_attempts=1)) as client:
        streams = Streams(client, simulated, simulated.mixed(4))
        running = await streams.start()
        cluster.kill("prefill-0")
        await running
        await until_state(client, "prefill", False, "SERVING")
        done = await check(client, simulated, simulated.case(1000, 9))
        assert (done.route.prefill, done.route.decode[:8]) == (None, "decode-0")
        await start_again(cluster, "prefill-0")
        await until_state(client, "prefill", True, "SERVING")

        running = await streams.start()
        cluster.kill("decode-0")
        await running
        await until_state(client, "decode", False, "SERVING")
        done = await check(client, simulated, simulated.case(1000, 9))
        assert (done.route.prefill, done.route.decode[:9]) == (None, "prefill-0")
        cluster.kill("prefill-0")
        await until_state(client, "prefill", False, "NOT_SERVING")
        with pytest.raises(Unavailable, match=r"no (prefill )?worker is ready") as refused:
            await client.generate([5] * 40, max_tokens=4, timeout=WAIT_S)
        assert refused.value.retry_after_s > 0
        await start_again(cluster, "prefill-0")
        await start_again(cluster, "decode-0")
        await until_state(client, "decode", True, "SERVING")
        await check(client, simulated, simulated.case(64, 7))


async def test_roles_change_under_streams(clusters, simulated):
    """In both directions and to mixed; then the worker that changed last is killed."""
    cluster, client = await clusters(alone=True, **TWO)

    async def change(worker, role):
        argv = ["role", worker, role, "--target", cluster.address, "--timeout", str(WAIT_S)]
        assert await asyncio.to_thread(cli.main, argv) == 0
        name = (await view(client, cluster, worker))["incarnation"]
        await eventually(
            client.status,
            lambda status: {w["incarnation"]: w["role"] for w in status["workers"]}[name] == role,
            f"{worker} is no {role} worker",
        )

    streams = Streams(client, simulated, simulated.mixed(6, 300))
    for number, (prefill, decode) in enumerate(
        (("decode", "prefill"), ("mixed", "mixed"), ("prefill", "decode"))
    ):
        running = await streams.start()
        await change("prefill-0", prefill)
        await change("decode-0", decode)
        done = await check(client, simulated, simulated.case(600, 13 * number))
        if "mixed" not in (prefill, decode):
            places = (
                ("prefill-0", "decode-0") if prefill == "prefill" else ("decode-0", "prefill-0")
            )
            assert done.route.prefill.startswith(places[0])
            assert done.route.decode.startswith(places[1])
        await running
    running = await streams.start()
    await change("decode-0", "mixed")
    cluster.kill("decode-0")
    await running
    await start_again(cluster, "decode-0")
    await check(client, simulated, simulated.case(64, 7))
    await all_blocks_free(client)


async def test_a_deadline_is_kept_wherever_it_passes(clusters, simulated):
    """While queued, in the middle of prompts, transfers and streams: freed on both ends."""
    _, client = await clusters(**TWO)

    async def hasty(number, timeout_s):
        prompt = simulated.prompt(1000, 11 * number)
        with pytest.raises((DeadlineExceeded, Overloaded)):
            await client.generate(prompt, max_tokens=900, ignore_eos=True, timeout=timeout_s)

    for timeout_s in (0.05, 0.3, 0.8):
        await asyncio.gather(*(hasty(number, timeout_s) for number in range(12)))
        await all_blocks_free(client)
    await check(client, simulated, simulated.case(64, 7))


async def test_a_storm_of_cancels_leaves_the_cluster_serving(clusters, simulated):
    """One closes its stream; then hundreds at once, while queued, in prompts and in streams."""
    _, client = await clusters(**TWO)

    async def read(number, tokens=500):
        prompt = simulated.prompt(50 + number, number)
        async with client.stream(prompt, max_tokens=500, ignore_eos=True) as stream:
            async for _ in stream:
                if not (tokens := tokens - 1):
                    return

    await read(300, tokens=1)
    await all_blocks_free(client)
    storm = [asyncio.create_task(read(number)) for number in range(STORM)]
    await eventually(client.status, lambda s: s["router"]["running"] > STORM // 2, "no storm")
    for task in storm:
        task.cancel()
    await asyncio.gather(*storm, return_exceptions=True)
    await check(client, simulated, simulated.case(64, 7))
    await all_blocks_free(client)
    router = (await client.status())["router"]
    assert (router["queued"], router["running"]) == (0, 0)


SMALL = replace(SIMULATED, kv_cache_bytes=0, kv_blocks=66, max_context=1024)
DECODE = common_pb2.WORKER_ROLE_DECODE


async def load_of_only(cluster, role):
    """The load that the worker of a role reports."""
    (record,) = (one for one in cluster.membership.records.values() if one.role == role)
    return await load_of(record)


async def test_a_preempted_sequence_is_computed_again_and_never_sent_again(
    clusters, simulated, receiver
):
    """Ten streams outgrow the decode worker's pool; KV is handed over once for each."""
    cluster, client = await clusters(engine=SMALL)
    cases = [simulated.case(60, 70 * n, new_tokens=100) for n in range(10)]
    done = await asyncio.gather(*(check(client, simulated, case) for case in cases))
    await all_blocks_free(client)
    assert (await load_of_only(cluster, DECODE)).preemptions > 0
    for one in done:
        spans = await receiver.store.wait_for(one.trace_id, is_complete, WAIT_S)
        assert [span.name for span in spans].count("kv.transfer") == one.route.attempts


@pytest.mark.parametrize("transport", ["shm", "gloo"])
async def test_corrupted_or_lost_kv_is_detected_and_sent_again(
    clusters, simulated, tmp_path, transport
):
    """Every second transfer is changed, short or broken off on its way: tokens are the same."""
    control = tmp_path / "kv.json"
    _, client = await clusters(
        alone=True,
        engine=SIMULATED,
        transport=transport,
        programs={"prefill": [sys.executable, "-m", "tests.chaos.process"]},
        env={kv_faults.VARIABLE: str(control)},
    )
    for fault in ("corrupt", "lose", "fail"):
        control.write_text(json.dumps({"fault": fault, "every": 2}))
        await Streams(client, simulated, simulated.mixed(12, new_tokens=24)).run()
        control.unlink()
        assert fault in control.with_suffix(".done").read_text()
        await all_blocks_free(client)
    await check(client, simulated, simulated.case(90, 600, "seeded"))
    await all_blocks_free(client)


async def test_a_reservation_that_expires_is_made_elsewhere(clusters, simulated):
    """decode-0's reservation expires before the prompt in front is computed."""
    _, client = await clusters(
        alone=True,
        engine=SIMULATED,
        decode=2,
        transport="gloo",
        extra_args={"decode-0": ["--reservation-lease", "0.01"]},
    )
    cases = [simulated.case(1500, 17 * n) for n in range(6)]
    done = await asyncio.gather(*(check(client, simulated, case) for case in cases))
    assert any(one.route.attempts > 1 for one in done), "no reservation expired"
    await all_blocks_free(client)


async def test_what_a_full_decode_worker_has_no_room_for_runs_on_its_prefill_worker(
    clusters, simulated
):
    """Without waiting, and without a handoff: the prefill worker keeps the sequence."""
    _, client = await clusters(engine=SMALL)
    workers = (await client.status())["workers"]
    (prefill,) = (one["incarnation"] for one in workers if one["role"] == "prefill")
    async with client.stream(simulated.prompt(480, 9), max_tokens=540, ignore_eos=True) as stream:
        await anext(stream)
        done = await check(client, simulated, simulated.case(600, 1))
        assert done.route.decode == prefill
