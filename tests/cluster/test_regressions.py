"""What broke in other serving systems, each as a test; `docs/failures.md` has the table."""

from __future__ import annotations

import ast
import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import rpc
from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import is_complete
from baton.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.chaos.checks import stale_mappings
from tests.cluster.conftest import ClusterFactory
from tests.cluster.oracle import Case, Oracle, all_blocks_free, check
from tests.cluster.streams import Streams, mixed_cases
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PACKAGES = ("router", "prefill_worker", "decode_worker", "kvtransfer", "baton")
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = ("_object_list", "send_object", "recv_object", "torch.load")
SMALL = EngineConfig(dtype="float32", kv_blocks=66, max_context=1024)
STORM = 300


async def loads(cluster: LocalCluster, role: common_pb2.WorkerRole) -> list[worker_pb2.Load]:
    """The load that each worker of a role reports."""
    found = []
    running = {process.pid for process in cluster.processes.values()}
    for record in cluster.membership.records.values():
        if record.role == role and record.pid in running:
            async with rpc.channel(record.address) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                answer = await stub.Describe(worker_pb2.DescribeRequest(), timeout=10.0)
                found.append(answer.load)
    return found


async def test_one_id_names_a_handoff_at_both_ends(
    cluster_factory: ClusterFactory, oracle: Oracle, traces: OtlpReceiver
) -> None:
    """The router assigns it: with two ids, each end would wait for the other until its deadline."""
    cluster = await cluster_factory(otlp=traces.address)
    async with AsyncClient(cluster.address) as client:
        done = await check(client, oracle, Case(oracle.prompt(80), "greedy"))
    services = {"baton-router", "baton-prefill", "baton-decode"}
    spans = await traces.store.wait_for(
        done.trace_id, lambda spans: is_complete(spans, services), 10.0
    )
    ids = {span.name: span.attributes.get("baton.handoff_id") for span in spans}
    named = {name: handoff for name, handoff in ids.items() if handoff}
    assert "kv.transfer" in named
    assert set(named.values()) == {f"{done.request_id}-1"}


async def test_a_preempted_sequence_is_computed_again_and_never_sent_again(
    cluster_factory: ClusterFactory, oracle: Oracle, traces: OtlpReceiver
) -> None:
    """Ten streams outgrow the decode worker's pool; KV is handed over once for each."""
    cluster = await cluster_factory(engine=SMALL, otlp=traces.address)
    async with AsyncClient(cluster.address) as client:
        cases = [Case(oracle.prompt(60, start=70 * n), "greedy", 100) for n in range(10)]
        done = await asyncio.gather(*(check(client, oracle, case) for case in cases))
        await all_blocks_free(client)
    assert (await loads(cluster, common_pb2.WORKER_ROLE_DECODE))[0].preemptions > 0
    for one in done:
        spans = await traces.store.wait_for(one.trace_id, is_complete, 20.0)
        assert [span.name for span in spans].count("kv.transfer") == one.route.attempts


async def test_a_full_decode_worker_costs_no_prefill(
    cluster_factory: ClusterFactory, oracle: Oracle, traces: OtlpReceiver
) -> None:
    """Blocks are reserved before a prompt is computed; one without them waits at the router."""
    cluster = await cluster_factory(engine=SMALL, otlp=traces.address)
    waiting = Case(oracle.prompt(600, start=1), "greedy")
    async with AsyncClient(cluster.address) as client:
        await check(client, oracle, Case(oracle.prompt(40), "greedy"))
        async with client.stream(
            oracle.prompt(480, start=9), max_tokens=540, ignore_eos=True
        ) as stream:
            await anext(stream)
            steps = (await loads(cluster, common_pb2.WORKER_ROLE_PREFILL))[0].steps
            asked = asyncio.ensure_future(check(client, oracle, waiting))
            await eventually(client.status, lambda s: s["router"]["queued"] == 1, "not queued")
            for _ in range(3):
                await anext(stream)
            load = (await loads(cluster, common_pb2.WORKER_ROLE_PREFILL))[0]
            assert (load.steps, load.queue_tokens) == (steps, 0)
            assert not asked.done()
        await asked  # leaving the block gave the other stream's room up
        await all_blocks_free(client)


async def test_workers_whose_caches_differ_are_not_paired(
    own_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """A decode worker with other blocks than the prefill workers' gets no handoff."""
    cluster = await own_cluster(
        prefill=1, decode=2, restart=False, extra_args={"decode-1": ["--block-size", "32"]}
    )
    async with AsyncClient(cluster.address) as client:
        done = await Streams(client, oracle, mixed_cases(oracle, 8, new_tokens=24)).run()
        workers = (await client.status())["workers"]
        odd = [w for w in workers if w["pid"] == cluster.processes["decode-1"].pid]
        assert odd[0]["incarnation"] not in {one.route.decode for one in done if one.route.prefill}
        await all_blocks_free(client)


async def test_a_decode_worker_outlives_its_prefill_workers(
    repaired_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """The only prefill worker is killed and replaced three times; decode is never restarted."""
    cluster = await repaired_cluster()
    decode = cluster.processes["decode-0"].pid
    async with AsyncClient(cluster.address) as client:
        for number in range(3):
            case = Case(oracle.prompt(100, start=40 * number), "greedy")
            oracle.tokens(case)
            cluster.kill("prefill-0")
            await cluster.processes["prefill-0"].wait()
            await cluster.start_again("prefill-0")
            await cluster.wait_ready()
            await check(client, oracle, case)
        await all_blocks_free(client)
    assert cluster.processes["decode-0"].pid == decode
    assert cluster.processes["decode-0"].running


async def test_a_prefill_worker_unmaps_a_dead_decode_workers_pool(
    repaired_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """It had mapped the pool to write into it, and would keep that memory alive."""
    cluster = await repaired_cluster()
    case = Case(oracle.prompt(100), "greedy")

    async def kept() -> list[str]:
        return await stale_mappings(cluster)

    async with AsyncClient(cluster.address) as client:
        for _ in range(2):
            await check(client, oracle, case)
            assert not await kept()
            cluster.kill("decode-0")
            await cluster.processes["decode-0"].wait()
            await cluster.start_again("decode-0")
            await cluster.wait_ready()
            await eventually(kept, lambda found: not found, "still mapped")


async def test_blocks_are_freed_without_new_work(
    repaired_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """The only router dies under load: no message, no new work, and the workers clean up alone."""
    cluster = await repaired_cluster()
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, mixed_cases(oracle, 6))
        running = await streams.start()
        cluster.kill("router")
        running.cancel()  # it would go on until its deadlines
        await asyncio.gather(running, return_exceptions=True)

    async def held() -> int:
        both = (common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE)
        all_loads = [load for role in both for load in await loads(cluster, role)]
        return sum(load.blocks_held + load.blocks_quarantined for load in all_loads)

    await eventually(held, lambda count: count == 0, "blocks are still held", 30.0)


async def test_a_storm_of_cancels_leaves_the_cluster_serving(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    """Hundreds are cancelled at once, while queued, in prompts and in streams."""
    cluster = await cluster_factory()
    after = Case(oracle.prompt(64, start=7), "greedy")
    oracle.tokens(after)
    async with AsyncClient(cluster.address) as client:

        async def read(number: int) -> None:
            prompt = oracle.prompt(50 + number, start=number)
            async with client.stream(prompt, max_tokens=500, ignore_eos=True) as stream:
                async for _ in stream:
                    pass

        storm = [asyncio.create_task(read(number)) for number in range(STORM)]
        await eventually(client.status, lambda s: s["router"]["running"] > STORM // 2, "no storm")
        for task in storm:
            task.cancel()
        await asyncio.gather(*storm, return_exceptions=True)
        await check(client, oracle, after)
        await all_blocks_free(client)
        status = await client.status()
        assert (status["router"]["queued"], status["router"]["running"]) == (0, 0)


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_that_runs_code_is_read_from_the_network_or_a_checkpoint(package: str) -> None:
    """No pickle: protobuf, JSON and safetensors only."""
    found = [
        f"{path.name}:{line}"
        for path in (ROOT / package).rglob("*.py")
        for line in _unsafe_lines(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


def _unsafe_lines(module: ast.Module) -> Iterator[int]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Call):
            names = UNSAFE_MODULES if ast.unparse(node.func).endswith(UNSAFE_CALLS) else set()
        else:
            continue
        if names & UNSAFE_MODULES:
            yield node.lineno


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


async def test_only_engine_threads_are_pinned_and_only_prefill_is_nice(
    cluster_factory: ClusterFactory,
) -> None:
    cluster = await cluster_factory()
    niceness = {name: [nice for _, nice in threads(p.pid)] for name, p in cluster.processes.items()}
    assert NICE in niceness["prefill-0"]
    assert set(niceness["decode-0"]) == set(niceness["router"]) == {os.nice(0)}
    assert niceness["prefill-0"].count(NICE) <= 1 + len(CORES)  # the engine and its compute threads
    for name in ("prefill-0", "decode-0"):
        pid = cluster.processes[name].pid
        assert os.sched_getaffinity(pid) == CORES, "the event loop is not pinned"
        pinned = {cpus for cpus, _ in threads(pid)} - {frozenset(CORES)}
        assert len(pinned) == (len(CORES) >= 2), "only the engine has cores of its own"
