"""Planners over a real etcd: one leads, one acts, the next one goes on."""

import asyncio
import contextlib
import dataclasses
import math

import pytest
from opentelemetry.trace import NoOpTracer

from baton.config import PlannerConfig, RegistryConfig
from baton.config.planner import PlanConfig
from baton.errors import Stale
from baton.local.etcd_process import EmbeddedEtcd
from baton.net.server import bind
from baton.planner.main import Planner
from baton.planner.scaling_policy import State
from baton.registry import EtcdRegistry
from baton.registry.election import Election, LedKey
from baton.registry.etcd_client import EtcdClient
from baton.telemetry.metrics.prometheus import Recorder
from baton.v1 import fleet_pb2, worker_pb2, worker_pb2_grpc
from tests.unit.planner import test_observer as observed
from tests.waiting import WAIT_S, eventually

ROLES = {"prefill": observed.PREFILL, "decode": observed.DECODE}


@pytest.fixture(scope="module")
def etcd_address():
    """Of one etcd for all tests here, each with a cluster name of its own."""
    with asyncio.Runner() as runner:
        etcd = EmbeddedEtcd()
        runner.run(etcd.__aenter__())
        yield etcd.address
        runner.run(etcd.__aexit__(None, None, None))


@pytest.fixture
def config(etcd_address, request):
    """With a lease that no pause of a busy machine outlasts."""
    registry = RegistryConfig(etcd=etcd_address, cluster=request.node.name[:60], lease_ttl_s=60)
    return PlannerConfig(registry=registry)


def with_lease(config, seconds):
    return dataclasses.replace(
        config, registry=dataclasses.replace(config.registry, lease_ttl_s=seconds)
    )


@pytest.fixture
async def client(config):
    client = EtcdClient(config.registry)
    yield client
    await client.close()


async def until(holds):
    async def look():
        return holds()

    await eventually(look, bool, "it did not happen")


@contextlib.asynccontextmanager
async def standing(config, name):
    """A candidate with a registry of its own."""
    registry = EtcdRegistry(config.registry)
    try:
        async with registry.stand(name) as (election, key):
            yield election, key
    finally:
        await registry.close()


@contextlib.asynccontextmanager
async def crashing(client, config, name):
    """A candidate that does not resign at its end."""
    prefix = config.registry.planner_prefix
    election = Election(client, prefix + "leader", config.registry.lease_ttl_s, name)
    running = asyncio.create_task(election.run())
    try:
        yield election, LedKey(client, prefix + "plan", election)
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_one_leads_and_another_follows_at_once_when_it_resigns(config):
    async with contextlib.AsyncExitStack() as stack:
        async with standing(config, "first") as (first, _):
            await until(lambda: first.left_s)
            second, _ = await stack.enter_async_context(standing(config, "second"))
            await asyncio.sleep(1.0)  # it tries twice
            assert first.left_s and not second.left_s
        await until(lambda: second.left_s)


async def test_when_the_leader_dies_another_leads_and_never_both(config, client):
    """One that lives renews its lease."""
    both = []
    async with contextlib.AsyncExitStack() as life:
        first_config = with_lease(config, 2)
        first, _ = await life.enter_async_context(crashing(client, first_config, "first"))
        await until(lambda: first.left_s)
        until_s = first._until
        await until(lambda: first._until > until_s)
        async with standing(config, "second") as (second, _):

            async def watch():
                while not second.left_s:
                    await asyncio.sleep(0.01)
                    both.append(bool(first.left_s and second.left_s))

            watching = asyncio.create_task(watch())
            await life.aclose()
            await watching
    assert len(both) > 10 and not any(both)


async def test_a_leader_that_does_not_know_that_it_is_none_writes_in_vain(config, client):
    """As one that was stopped between looking at its lease and writing."""
    async with crashing(client, with_lease(config, 2), "first") as (first, plan):
        await until(lambda: first.left_s)
        await plan.read()
        first._until = math.inf  # also on a busy machine
        await plan.write(b"1")
        first._until = 0.0
    async with standing(config, "second") as (second, taken_over):
        await until(lambda: second.left_s)
        assert await taken_over.read() == b"1"
        with pytest.raises(Stale):
            await plan.write(b"its lease has ended")
        await taken_over.write(b"2")
        first._until = math.inf
        with pytest.raises(Stale):
            await plan.write(b"it thinks it leads")
        assert await taken_over.read() == b"2"
        await taken_over.write(b"3")


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that may refuse its new role."""

    def __init__(self):
        self.roles, self.refuses = [], False

    async def SetRole(self, request, context):
        if self.refuses:
            raise Stale("it is draining")
        self.roles.append(request.role)
        return worker_pb2.SetRoleResponse(registered=True)


class Cluster:
    """One router and four workers, which all are at one address.

    1,000 requests a second of 75 prompt tokens to compute, for which four prefill workers do.
    """

    def __init__(self, address):
        self.address, self.began = address, asyncio.get_running_loop().time()
        self.roles = {"p-0": "prefill", "d-0": "decode", "d-1": "decode", "d-2": "decode"}
        self.looks, self.away = 0, False

    async def statuses(self):
        self.looks += 1
        if self.away:
            return {"r": None}
        requests = int(1000 * (asyncio.get_running_loop().time() - self.began))
        load = {"prefill_tokens_per_s": 2e4, "step_ms": 1.0}
        record = {"address": self.address, "max_batch": 64, "model": "m", "blocks_total": 0}
        workers = [
            observed.worker(name, ROLES[role], load=load, **record)
            for name, role in self.roles.items()
        ]
        return {"r": observed.status(observed.router("r", requests, of=("m", "")), workers)}


@pytest.fixture
async def worker():
    servicer = Worker()
    server, servicer.address = bind("127.0.0.1", 0)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    await server.start()
    yield servicer
    await server.stop(0)


class TwoRouters(Cluster):
    """Another router, at `o`, serves another model."""

    routers = ("r", "o")

    async def statuses(self):
        traffic = [fleet_pb2.ModelTraffic(model="other")]
        other = fleet_pb2.RouterStatus(incarnation="other", traffic=traffic)
        both = {**await super().statuses(), "o": fleet_pb2.GetStatusResponse(router=other)}
        return {address: both[address] for address in self.routers}


@contextlib.asynccontextmanager
async def planning(config, name, cluster, **plan):
    """A planner that looks ten times a second."""
    plan = PlanConfig(**{"interval_s": 0.1, "window_s": 1.0, "cooldown_s": 1.0, **plan})
    config = dataclasses.replace(config, plan=plan, incarnation=name)
    recorder = Recorder("planner", {})
    async with standing(config, name) as (election, key):
        planner = Planner(config, election, key, NoOpTracer(), recorder)
        planner.recorder = recorder
        task = asyncio.create_task(planner.run(cluster))
        try:
            yield planner, election
        finally:
            task.cancel()
            await asyncio.wait([task])


def flips(planner, result):
    labels = f'after="prefill",before="decode",result="{result}"'
    return labels in planner.recorder.render()[1].decode()


async def test_a_dry_run_publishes_and_changes_no_role(config, worker):
    cluster = Cluster(worker.address)
    async with planning(config, "dry", cluster) as (planner, _):
        await until(lambda: flips(planner, "dry_run"))
    assert not worker.roles
    assert not planner.published.plan.applied


async def test_the_leader_changes_roles_and_the_others_answer_with_its_plan(config, worker):
    cluster = Cluster(worker.address)
    async with planning(config, "first", cluster, apply=True) as (first, leading):
        await until(lambda: worker.roles)
        assert set(worker.roles) == {observed.PREFILL}
        await until(lambda: flips(first, "done"))
        async with planning(config, "second", cluster, apply=True) as (second, following):
            await until(lambda: second.published.plan.flipped_ms)
            assert second.published.plan.planner == "first" and not following.left_s
    assert not leading.left_s


async def test_a_worker_that_refuses_is_reported_and_tried_again(config, worker):
    worker.refuses = True
    cluster = Cluster(worker.address)
    async with planning(config, "only", cluster, apply=True) as (planner, _):
        await until(lambda: flips(planner, "failed"))
        worker.refuses = False
        await until(lambda: worker.roles)
    assert flips(planner, "done")


async def test_while_routers_are_away_the_leader_goes_on_and_changes_no_role(config, worker):
    """Also one that has fallen due meanwhile, by what routers said before."""
    cluster = Cluster(worker.address)
    plan = {"interval_s": 0.2, "window_s": 10.0, "apply": True}  # hold_s: two looks
    async with planning(config, "only", cluster, **plan) as (planner, _):
        await until(lambda: "not yet" in planner.published.plan.explanation)
        cluster.away = True
        looks = cluster.looks
        await until(lambda: cluster.looks > looks + 4)
        assert "no router answers" in planner.published.plan.explanation
        assert not worker.roles
        cluster.away = False
        await until(lambda: worker.roles)


async def test_a_model_whose_only_router_is_silent_keeps_its_plan(config):
    """Also under a new leader; it loses it when all routers answer and none serves it."""
    cluster = TwoRouters("127.0.0.1:1")
    config = dataclasses.replace(config, plan=PlanConfig(interval_s=60.0, min_decode=6))
    needs = []

    @contextlib.asynccontextmanager
    async def leading(name):
        async with standing(config, name) as (election, key):
            planner = Planner(config, election, key, NoOpTracer(), Recorder("planner", {}))
            await until(lambda: election.left_s)

            async def look():
                await planner._lead(planner._seen(await cluster.statuses()))
                needs.append(planner._states.get(("m", ""), State()).needs)
                roles = planner.published.plan.roles
                return {one.role: one.wanted for one in roles if one.model == "m"}

            yield look

    async with leading("first") as look:
        await look()
        known = await look()
        assert known["decode"] == 6
        cluster.away = True
        assert await look() == known
        cluster.away = False
        assert await look() == known
        assert needs[-1][0] == needs[1][0], "the window goes on"
        cluster.away = True
    async with leading("second") as look:
        assert await look() == await look() == known
        cluster.routers = ["o"]
        assert await look() == {}


async def test_while_etcd_is_away_nothing_is_changed(config, worker):
    """A leader that cannot confirm its lease acts no more; it leads again when etcd is back."""
    async with EmbeddedEtcd() as etcd:
        registry = dataclasses.replace(config.registry, etcd=etcd.address, lease_ttl_s=2)
        config = dataclasses.replace(config, registry=registry)
        cluster = Cluster(worker.address)
        async with planning(config, "only", cluster, apply=True, cooldown_s=0.0) as (_, election):
            await until(lambda: worker.roles)
            await etcd.kill()
            await until(lambda: not election.left_s)
            changed, looks = len(worker.roles), cluster.looks
            await until(lambda: cluster.looks > looks + 2)
            assert len(worker.roles) == changed
            await etcd.start()
            async with asyncio.timeout(WAIT_S):
                await until(lambda: len(worker.roles) > changed)
