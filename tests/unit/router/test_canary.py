"""Canaries: what the statistics say of equal and of worse versions, and the routes that follow."""

import asyncio
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry import trace

from baton.errors import InternalError, InvalidRequest, Unavailable
from baton.v1 import route_pb2
from baton.v1.route_pb2 import Canary, ModelRoute, RouteTarget
from router import canary as canary_module
from router.canary import (
    PROMOTED,
    ROLLED_BACK,
    STEPPED,
    Canaries,
    VersionStats,
    _Step,
    advanced,
    fisher_greater,
    look,
    rank_greater,
    shared,
)
from router.telemetry.stats import OK, RequestOutcome

OLD = RouteTarget(model="chat", version="v1", weight=1.0)
NEW = RouteTarget(model="chat", version="v2", weight=1.0)


def stats(ended=100, errors=0, ttft_s=(), tpot_s=()):
    made = VersionStats(ended, errors)
    made.ttft_s.extend(ttft_s)
    made.tpot_s.extend(tpot_s)
    return made


def settings(**fields):
    values = {"steps": (10.0, 50.0, 100.0), "step_s": 60.0, "min_requests": 50, "max_slowdown": 1.2}
    return Canary(target=NEW, before=[OLD], state=route_pb2.CANARY_STATE_RUNNING, **values | fields)


def route(**fields):
    made = settings(**fields)
    targets = shared([OLD], NEW, made.steps[made.step])
    return ModelRoute(name="chat", targets=targets, canary=made, changed_ms=1)


@pytest.mark.parametrize(
    "table", [(0, 10, 0, 90), (3, 20, 1, 180), (9, 9, 2, 70), (5, 50, 60, 500)]
)
def test_the_exact_test_is_fishers(table):
    errors, ended, others, others_ended = table
    failed, total = errors + others, ended + others_ended
    ways = [
        math.comb(ended, count) * math.comb(others_ended, failed - count)
        for count in range(errors, min(failed, ended) + 1)
        if failed - count <= others_ended
    ]
    assert fisher_greater(*table) == pytest.approx(sum(ways) / math.comb(total, failed))


@pytest.mark.parametrize("shift", [0.0, 0.2, 0.4, -0.5])
def test_the_rank_test_is_that_of_all_permutations(shift):
    dice = np.random.default_rng(3)
    ours = np.round(dice.normal(shift, 1, 40), 1)  # with ties
    theirs = np.round(dice.normal(0, 1, 120), 1)
    every = np.concatenate((ours, theirs))

    def above(values):
        pairs = values[:40, None] - values[None, 40:]
        return (pairs > 0).sum() + (pairs == 0).sum() / 2

    seen = [above(dice.permutation(every)) >= above(every) for _ in range(4000)]
    assert rank_greater(ours, theirs) == pytest.approx(np.mean(seen), abs=0.03)
    assert rank_greater([1.0] * 20, [1.0] * 20) == 1.0


def test_equal_versions_are_seldom_rolled_back_however_often_it_looks():
    dice, rolled_back = random.Random(7), 0
    for _ in range(100):
        step = _Step(1)
        for _ in range(600):
            for one in (step.new, step.old, step.old):
                one.ended += 1
                one.errors += dice.random() < 0.05
                one.ttft_s.append(dice.lognormvariate(0, 0.5))
                one.tpot_s.append(dice.lognormvariate(0, 0.5))
            if decision := look(settings(max_slowdown=1.0), step, age_s=0.0):
                assert decision.kind == ROLLED_BACK
                rolled_back += 1
                break
    assert rolled_back <= 0.05 * 100


@pytest.mark.parametrize(
    ("worse", "why"),
    [
        ({"errors": 12}, "more errors"),
        ({"ttft_s": (1.5, 2.5)}, "slower TTFT"),
        ({"tpot_s": (0.015, 0.025)}, "slower TPOT"),
        ({"ttft_s": (1.05, 1.15)}, ""),  # surely slower, but by less than is allowed
        ({"ttft_s": (0.1, 0.9)}, ""),
        ({}, ""),
    ],
)
def test_what_is_worse_goes_back_and_what_is_not_goes_on(worse, why):
    dice = random.Random(5)

    def version(ended, errors=0, ttft_s=(0.9, 1.1), tpot_s=(0.009, 0.011)):
        values = [[dice.uniform(*low_high) for _ in range(ended)] for low_high in (ttft_s, tpot_s)]
        return stats(ended, errors, *values)

    step = _Step(1, version(60, **worse), version(540))
    decision = look(settings(), step, age_s=61.0)
    assert decision.kind == (ROLLED_BACK if why else STEPPED)
    assert decision.reason.startswith(
        why or "no worse: errors 0 of 60, before 0 of 540; median TTFT"
    )


def test_nothing_is_compared_before_there_is_enough():
    step = _Step(1, stats(49, errors=49), stats(1000))
    assert look(settings(), step, age_s=1000.0) is None
    step.new.ended = step.new.errors = 50
    assert look(settings(), step, age_s=0.0).kind == ROLLED_BACK
    step = _Step(1, stats(50), stats(1000))
    assert look(settings(), step, age_s=1.0) is None
    assert (step.looks, step.next_look) == (1, 100)
    step.new.ended = step.new.errors = 99
    assert look(settings(), step, age_s=1.0) is None, "it looks again at twice as many"
    assert look(settings(), step, age_s=61.0).kind == ROLLED_BACK, "and before the step ends"


def test_a_step_raises_the_share_and_the_last_one_takes_all():
    now = route()
    assert [one.weight for one in now.targets] == [90.0, 10.0]
    for weights, kind in (([50.0, 50.0], STEPPED), ([100.0], STEPPED), ([100.0], PROMOTED)):
        before = now
        now = advanced(before, canary_module.Decision(kind, "no worse"))
        assert [one.weight for one in now.targets] == weights
        assert now.changed_ms > before.changed_ms
    assert now.canary.state == route_pb2.CANARY_STATE_PROMOTED
    back = advanced(route(step=1), canary_module.Decision(ROLLED_BACK, "more errors"))
    assert list(back.targets) == [OLD]
    assert (back.canary.state, back.canary.reason) == (
        route_pb2.CANARY_STATE_ROLLED_BACK,
        "more errors",
    )


def test_shares_of_what_was_before_keep_their_proportions():
    before = [RouteTarget(model="a", version="1", weight=3.0), RouteTarget(model="b", weight=1.0)]
    found = shared(before, NEW, 20.0)
    assert [one.weight for one in found] == [60.0, 20.0, 20.0]
    assert not found[1].HasField("version")


class Table:
    """A route table of one router, or of two that share what is stored."""

    def __init__(self, stored):
        self.stored, self.routes, self.failures = stored, dict(stored), 1

    async def write(self, name, route):
        if self.failures:
            self.failures -= 1
            raise Unavailable("etcd is away")
        if self.stored.get(name) is not self.routes.get(name):
            return False
        for kept in (self.stored, self.routes):
            kept.pop(name, None)
            kept.update({name: route} if route else {})
        return True

    async def refresh(self):
        self.routes = dict(self.stored)


class World:
    def __init__(self, stored, ready=True):
        self.table, self.ready, self.events, self.counts = Table(stored), ready, [], []
        models = SimpleNamespace(is_ready=lambda target: self.ready)
        self.canaries = Canaries(
            models, self.table, trace.NoOpTracer(), 0.05,
            lambda kind, text: self.events.append(text),
            lambda route, kind: self.counts.append((route, kind)),
        )  # fmt: skip

    def end(self, version, error=None, status=OK, route="chat"):
        labels = {"gen_ai.request.model": "chat", "baton.model.version": version}
        record = SimpleNamespace(route=route, labels=labels, in_batch=False, state=None)
        self.canaries.ended(record, RequestOutcome("INTERNAL" if error else status, error))

    async def until(self, good):
        following = asyncio.create_task(self.canaries.follow())
        async with asyncio.timeout(60):
            while not good():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    @property
    def state(self):
        return self.table.stored["chat"].canary.state


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(canary_module, "_LOOK_S", 0.01)


async def test_a_failing_version_is_rolled_back_once_by_two_routers():
    stored = {"chat": route(step_s=1e6)}
    worlds = [World(stored), World(stored)]
    for world in worlds:
        for _ in range(60):
            world.end("v2", InternalError("x"))
            world.end("v1")
            world.end("v2", InvalidRequest("x"))  # the caller's own
            world.end("v2", status="CANCELLED")
            world.end("v2", InternalError("x"), route="another")
    step = worlds[0].canaries._step(stored["chat"])
    assert (step.new.ended, step.new.errors, step.old.ended) == (60, 60, 60)
    before = stored["chat"]
    await worlds[1].until(lambda: worlds[1].counts)
    await worlds[0].until(lambda: worlds[0].table.routes["chat"] is not before)
    assert worlds[1].state == route_pb2.CANARY_STATE_ROLLED_BACK
    assert worlds[1].counts == [("chat", ROLLED_BACK)] and not worlds[0].counts
    assert "chat@v2 rolled back: more errors" in worlds[1].events[0]


async def test_a_version_without_workers_is_rolled_back():
    world = World({"chat": route(step_s=1e6)}, ready=False)
    await world.until(lambda: world.counts)
    assert world.state == route_pb2.CANARY_STATE_ROLLED_BACK
    assert "no usable workers" in world.table.stored["chat"].canary.reason


async def test_a_good_version_is_promoted_step_by_step():
    world = World({"chat": route(step_s=0.001, min_requests=5)})
    for kind in (STEPPED, STEPPED, PROMOTED):
        done = len(world.counts)
        for _ in range(10):
            world.end("v2")
            world.end("v1")
        await asyncio.sleep(0.002)  # the step's time
        await world.until(lambda done=done: len(world.counts) > done)
        assert world.counts[-1] == ("chat", kind)
    assert world.state == route_pb2.CANARY_STATE_PROMOTED
