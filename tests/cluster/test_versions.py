"""Processes of two versions side by side, as during an upgrade: docs/upgrade.md."""

import asyncio
import sys

import pytest

from baton.client import AsyncClient, RetryPolicy
from baton.config import RouterLimits
from baton.errors import Unavailable
from baton.net import rpc
from baton.v1 import (
    common_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    handoff_pb2,
    inference_pb2,
    inference_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.cluster.oracle import SIMULATED, all_blocks_free, check
from tests.cluster.other_version import changed
from tests.waiting import WAIT_S, eventually

PROGRAM = (sys.executable, "-m", "tests.cluster.other_version")
SERVICES = [
    service
    for module in (inference_pb2, fleet_pb2, handoff_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
MESSAGES = {
    message.name
    for service in SERVICES
    for method in service.methods
    for message in (method.input_type, method.output_type)
} | {"RouterMessage", "WorkerMessage"}
OF_CLIENTS = {
    "GenerateRequest", "TokenizeRequest", "ListModelsRequest", "GetStatusRequest", "ExplainRequest",
    "SetRoleRequest",
}  # fmt: skip
# `baton` itself never calls the first two; adapters are not loaded here.
UNUSED = {
    f"{method}{kind}"
    for method in (
        "Drain", "Describe", "LoadFleetAdapter", "UnloadFleetAdapter", "LoadAdapter",
        "UnloadAdapter",
    )
    for kind in ("Request", "Response")
}  # fmt: skip


async def test_newer_and_older_processes_serve_together(clusters, simulated):
    """Unknown fields and missing optional ones are tolerated in every message that is sent.

    A worker whose KV layout is of another version is never paired, and the error names it.
    """
    kinds = {
        "router-0": "newer", "router-1": "older", "prefill-0": "newer", "prefill-1": "older",
        "decode-0": "older", "decode-1": "newer", "decode-2": "incompatible",
    }  # fmt: skip
    cluster, _ = await clusters(
        alone=True, engine=SIMULATED, routers=2, prefill=2, decode=3, trace_sample=0.0,
        limits=RouterLimits(trace_slow_s=0.001, recovery_s=1.0),
        programs={name: [*PROGRAM, kind] for name, kind in kinds.items()},
    )  # fmt: skip
    pids = {cluster.processes[name].pid: name for name in kinds}
    names = {key: pids[record.pid] for key, record in cluster.membership.records.items()}
    pairs = set()
    for address in cluster.addresses:
        async with AsyncClient(address, retry=RetryPolicy(max_attempts=1)) as client:
            for number in range(4):
                cases = [simulated.case(100 + 20 * n, 7 * n) for n in range(8)]
                salt = f"{address}-{number}"
                done = await asyncio.gather(
                    *(check(client, simulated, case, cache_salt=salt) for case in cases)
                )
                assert {one.route.attempts for one in done} == {1}
                pairs |= {(names[str(o.route.prefill)], names[o.route.decode]) for o in done}
            async with client.stream([5] * 700, max_tokens=900, ignore_eos=True) as stream:
                await anext(stream)  # it is cancelled then
            for text in ("def f(", [{"role": "user", "content": "Hi"}]):
                ids = await client.tokenize(text)
                assert (await client.generate(text, max_tokens=2)).usage.prompt_tokens == len(ids)
            assert [model.name for model in await client.models()] == ["demo"]
            await all_blocks_free(client)
    assert pairs == {(f"prefill-{p}", f"decode-{d}") for p in (0, 1) for d in (0, 1)}

    await check_clients_of_another_version(cluster.address, simulated, names)
    await change_role(cluster, names, "decode-0")
    await change_role(cluster, names, "decode-1")
    lines = {line for process in cluster.processes.values() for line in process.log}
    assert {f"sends {name}" for name in MESSAGES - OF_CLIENTS - UNUSED} <= lines

    for name in ("decode-0", "decode-1"):
        cluster.kill(name)
        await cluster.processes[name].wait()
    async with AsyncClient(cluster.address, retry=RetryPolicy(max_attempts=1)) as client:
        with pytest.raises(Unavailable, match="layout_version: 1 != 2"):
            await client.generate(simulated.prompt(100), max_tokens=4, timeout=WAIT_S)


async def change_role(cluster, names, name):
    """A client of a newer version has the worker take the role mixed; its routers learn of it."""
    (record,) = (one for key, one in cluster.membership.records.items() if names[key] == name)
    request = worker_pb2.SetRoleRequest(role=common_pb2.WORKER_ROLE_MIXED)
    async with rpc.channel(record.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        await stub.SetRole(changed(request, "newer"), timeout=WAIT_S)
    for address in cluster.addresses:
        async with AsyncClient(address) as client:
            await eventually(
                client.status,
                lambda status: (
                    (record.incarnation, "mixed")
                    in {(one["incarnation"], one["role"]) for one in status["workers"]}
                ),
                f"{name} is not mixed",
            )


async def check_clients_of_another_version(address, simulated, names):
    """Tokens are the oracle's; Explain names the version that keeps a worker from being paired."""
    case = simulated.case(100, 50)
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=case.prompt),
        sampling=common_pb2.SamplingParams(
            temperature=0, max_tokens=case.new_tokens, ignore_eos=True
        ),
        priority=common_pb2.PRIORITY_LOW,
    )
    for kind in ("newer", "older"):
        tokens: list[int] = []
        async with rpc.channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async for response in stub.Generate(changed(request, kind), timeout=WAIT_S):
                tokens += response.delta.token_ids
            explain = changed(fleet_pb2.ExplainRequest(request=request), kind)
            answer = await fleet_pb2_grpc.FleetServiceStub(channel).Explain(explain, timeout=WAIT_S)
        assert tuple(tokens) == simulated.tokens(case)
        assert len(answer.candidates) == 6
        for one in answer.candidates:
            assert ("layout_version" in one.refused) == (names[one.decode] == "decode-2"), one
