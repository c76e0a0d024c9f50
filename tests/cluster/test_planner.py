"""Planners as processes beside a cluster of simulated engines that is loaded with prompts."""

import asyncio
import contextlib
import signal
from dataclasses import replace

from baton.local import ports
from baton.net import rpc
from baton.v1 import externalscaler_pb2, externalscaler_pb2_grpc
from tests.cluster.oracle import SIMULATED, all_blocks_free, check
from tests.processes import baton_running
from tests.waiting import WAIT_S, eventually

SLOW = replace(SIMULATED, simulate="2000,4")  # prompt tokens a second
CALLERS = 6


@contextlib.asynccontextmanager
async def prompts(client, oracle):
    """More prompts than one worker can compute, each compared, and never one twice."""
    case, stopping = oracle.case(700, new_tokens=8), asyncio.Event()

    async def call(caller):
        number = 0
        while not stopping.is_set():
            await check(client, oracle, case, cache_salt=f"{caller}-{number}")
            number += 1

    async with asyncio.TaskGroup() as callers:
        for caller in range(CALLERS):
            callers.create_task(call(caller))
        yield
        stopping.set()


async def test_roles_follow_the_load_and_a_planner_that_dies_is_followed(clusters, simulated):
    """No token changes; KEDA gets the plan from the second planner when the first is killed."""
    cluster, client = await clusters(engine=SLOW, prefill=1, decode=3, alone=True)
    port = ports.free()
    options = "--apply --interval 0.5 --window 3 --cooldown 2 --slo ttft=1,tpot=0.1 --lease-ttl 2"
    at = ("--target", cluster.address, "--etcd", cluster.etcd_address)
    command = ("planner", *at, *options.split())
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(baton_running(*command, "--port", "0", env={}))
        await first.says(" leads")
        second = await stack.enter_async_context(
            baton_running(*command, "--port", f"{port}", env={})
        )
        await second.says("planner-")
        async with prompts(client, simulated):
            line = await first.says(" from decode to prefill")

            async def roles():
                return {w["incarnation"]: w["role"] for w in (await client.status())["workers"]}

            def flipped(roles):
                return any(name in line and role == "prefill" for name, role in roles.items())

            seen = await eventually(roles, flipped, "the worker has not got its role")
            assert "decode" in seen.values()
            await first.end(signal.SIGKILL)
            await second.says(" leads")
        channel = await stack.enter_async_context(rpc.channel(f"127.0.0.1:{port}"))
        keda = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        reference = externalscaler_pb2.ScaledObjectRef(scalerMetadata={"role": "prefill"})
        asked = externalscaler_pb2.GetMetricsRequest(
            scaledObjectRef=reference, metricName="baton-wanted-prefill"
        )
        (value,) = (await keda.GetMetrics(asked, timeout=WAIT_S)).metricValues
        assert value.metricValue >= 1
        assert await second.end(signal.SIGHUP) == 0, "as of a closed terminal"
    await all_blocks_free(client)
