"""What broke in other serving systems, each as a test; `docs/failures.md` has the table."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baton import rpc
from baton.config import ClusterConfig
from baton.local.cluster import LocalCluster
from baton.local.span_store import is_complete
from baton.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.chaos import kv_faults
from tests.cluster.oracle import SIMULATED, Streams, all_blocks_free, check
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PACKAGES = ("router", "prefill_worker", "decode_worker", "kvtransfer", "baton")
UNSAFE = re.compile(
    r"^\s*(import|from)\s+(pickle|cloudpickle|dill|marshal|shelve|joblib)\b"
    r"|_object_list\(|(send|recv)_object\(|\btorch\.load\(",
    re.MULTILINE,
)
SMALL = replace(SIMULATED, kv_cache_bytes=0, kv_blocks=66, max_context=1024)
DECODE, PREFILL = common_pb2.WORKER_ROLE_DECODE, common_pb2.WORKER_ROLE_PREFILL


async def load_of(cluster: LocalCluster, role: common_pb2.WorkerRole) -> worker_pb2.Load:
    """The load that the worker of a role reports."""
    (record,) = (one for one in cluster.membership.records.values() if one.role == role)
    async with rpc.channel(record.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return (await stub.Describe(worker_pb2.DescribeRequest(), timeout=10.0)).load


async def test_a_preempted_sequence_is_computed_again_and_never_sent_again(
    clusters, simulated, receiver
):
    """Ten streams outgrow the decode worker's pool; KV is handed over once for each."""
    cluster, client = await clusters(engine=SMALL)
    cases = [simulated.case(60, 70 * n, new_tokens=100) for n in range(10)]
    done = await asyncio.gather(*(check(client, simulated, case) for case in cases))
    await all_blocks_free(client)
    assert (await load_of(cluster, DECODE)).preemptions > 0
    for one in done:
        spans = await receiver.store.wait_for(one.trace_id, is_complete, 20.0)
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


async def test_a_full_decode_worker_costs_no_prefill(clusters, simulated):
    """Blocks are reserved before a prompt is computed; one without them waits at the router."""
    cluster, client = await clusters(engine=SMALL)
    waiting = simulated.case(600, 1)
    await check(client, simulated, simulated.case(40))
    first = simulated.prompt(480, 9)
    async with client.stream(first, max_tokens=540, ignore_eos=True) as stream:
        await anext(stream)
        steps = (await load_of(cluster, PREFILL)).steps
        asked = asyncio.ensure_future(check(client, simulated, waiting))
        await eventually(client.status, lambda s: s["router"]["queued"] == 1, "not queued")
        for _ in range(3):
            await anext(stream)
        load = await load_of(cluster, PREFILL)
        assert (load.steps, load.queue_tokens) == (steps, 0)
        assert not asked.done()
    await asked  # leaving the block gave the other stream's room up


def test_nothing_that_runs_code_is_read_from_the_network_or_a_checkpoint():
    """No pickle: protobuf, JSON and safetensors only."""
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = [(path, UNSAFE.search(path.read_text(encoding="utf-8"))) for path in modules]
    assert found and not [line for line in found if line[1]]


NICE = ClusterConfig.prefill_nice
CORES = os.sched_getaffinity(0)
_NICE = 16  # of the fields behind the command's name in /proc/PID/stat


def threads(pid: int) -> list[tuple[frozenset[int], int]]:
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
