"""Which version of which model a request's name stands for."""

import asyncio
import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest

from baton.config import ModelSource
from baton.errors import ConfigError, ModelNotFound, Unavailable
from baton.registry import Membership
from baton.v1 import common_pb2
from baton.v1.route_pb2 import ModelRoute, RouteTarget
from router.models import Models, ModelVersion, describe_targets, pick_target, resumed_name

READY, STARTING = common_pb2.WORKER_STATE_READY, common_pb2.WORKER_STATE_STARTING


class FakeFleet:
    """Ready while its membership has a worker that is."""

    def __init__(self, membership):
        self.membership, self.listeners = membership, []

    @property
    def registry_connected(self):
        return self.membership.connected

    async def follow(self):
        async for _ in self.membership.changes():
            for listener in self.listeners:
                listener()

    def adapters(self):
        records = self.membership.records.values()
        return {one.name: one.identity for record in records for one in record.adapters}

    def snapshot(self):
        ready = any(one.state == READY for one in self.membership.records.values())
        return SimpleNamespace(why_not_ready="" if ready else "no worker", workers=())


def new_version(name, version, admission, membership):
    fleet = FakeFleet(membership)
    return ModelVersion(name, version, admission, membership, fleet, None, None)


def text(name, fingerprint="f"):
    return SimpleNamespace(name=name, tokenizer=SimpleNamespace(fingerprint=fingerprint))


class World:
    """Models named by `--model` values, with the workers of a registry."""

    def __init__(self, *sources, aliases=()):
        self.routes = {}
        parsed = [ModelSource.parse(source) for source in sources]
        # A directory's name is its tokenizer's fingerprint.
        texts = [(source, text(source.path, source.path)) for source in parsed]
        self.models = Models(texts, new_version, aliases, lambda: self.routes)
        self.registry, self.records = Membership(), {}

    def worker(self, model, version="", state=READY, fingerprint="a"):
        """Registers one; returns what takes it out again."""
        name = f"w{len(self.records)}"
        self.records[name] = common_pb2.WorkerRecord(
            incarnation=name, model=model, version=version, state=state,
            text_fingerprint=fingerprint,
        )  # fmt: skip
        self.publish()
        return name

    def publish(self):
        self.registry.publish(self.records, connected=True)
        self.models._apply(self.registry.records, self.registry)

    def leave(self, name):
        del self.records[name]
        self.publish()

    def route(self, name, *targets):
        self.routes[name] = ModelRoute(name=name, targets=[target(*one) for one in targets])

    def resolved(self, model="", key="k"):
        return str(self.models.resolve(model, key).version)


def target(model, version=None, weight=1.0):
    return RouteTarget(model=model, version=version, weight=weight)


def test_a_name_is_a_model_an_alias_a_route_or_a_version():
    world = World("chat=a", "code=b", aliases=("gpt-4", "coder=code"))
    world.worker("chat", "v2")
    world.worker("chat", "v10")
    assert world.resolved() == world.resolved("chat") == world.resolved("gpt-4") == "chat@v2"
    assert world.resolved("chat@v10") == "chat@v10"
    assert world.resolved("code") == world.resolved("coder") == world.resolved("code@") == "code"
    world.route("fast", ("chat", "v10"))
    world.route("best", ("chat",))
    assert world.resolved("fast") == "chat@v10"
    assert world.resolved("best") == "chat@v2"
    world.route("chat", ("chat", "v10"))
    assert world.resolved("chat") == world.resolved("best") == world.resolved("gpt-4") == "chat@v10"
    assert world.resolved("chat@v2") == "chat@v2"
    names = dict(world.models.listed())
    assert names == {
        "chat": "chat@v10", "code": "code", "gpt-4": "chat", "coder": "code", "best": "chat",
        "fast": "chat@v10", "chat@v2": "chat@v2", "chat@v10": "chat@v10",
    }  # fmt: skip


def test_an_unknown_name_is_answered_with_those_that_are_known():
    world = World("tiny=a")
    for name in ("other", "m" * 100_000, "tiny2@", "other@v1"):
        with pytest.raises(
            ModelNotFound, match=f"{name[:5]}.* is not served here; 'tiny' is"
        ) as no:
            world.models.resolve(name, "k")
        assert len(str(no.value)) < 300
    with pytest.raises(Unavailable, match="tiny has no workers now"):
        world.models.resolve("tiny@v1", "k")  # a stream may go on there when they are back
    world.worker("tiny", "v1")
    with pytest.raises(ModelNotFound, match="'tiny@v7' is not served here; 'tiny', 'tiny@v1' are"):
        world.models.resolve("tiny@v7", "k")


def test_routes_that_name_each_other_end():
    world = World("chat=a")
    world.route("x", ("y",))
    world.route("y", ("x",))
    with pytest.raises(ModelNotFound):
        world.models.resolve("x", "k")
    world.route("z", ("elsewhere", "v1"))
    with pytest.raises(Unavailable, match="no --model elsewhere"):
        world.models.resolve("z", "k")


@pytest.mark.parametrize("aliases", [("a=a",), ("a=b", "b=a"), ("x=a", "a=b", "b=c", "c=a")])
def test_aliases_that_stand_for_each_other_are_refused_at_the_start(aliases):
    with pytest.raises(ConfigError, match=r"--model-alias: .*a=.* lead to no model"):
        World("chat=a", aliases=aliases)


def test_aliases_of_aliases_lead_to_a_model():
    world = World("chat=a", aliases=("a=b", "b=chat", "chat=a", "late=route"))
    assert world.resolved("a") == world.resolved("b") == world.resolved("chat") == "chat"
    world.route("route", ("a",))
    assert world.resolved("late") == "chat"


def test_weights_divide_the_keys_and_each_key_stays():
    targets = [target("chat", "v1", 90), target("chat", "v2", 10)]
    keys = [f"session {number}" for number in range(5000)]
    before = {key: pick_target(targets, key).version for key in keys}
    assert before == {key: pick_target(targets[::-1], key).version for key in keys}
    assert Counter(before.values())["v2"] == pytest.approx(500, abs=100)
    targets[0].weight, targets[1].weight = 50, 50
    after = {key: pick_target(targets, key).version for key in keys}
    assert Counter(after.values())["v2"] == pytest.approx(2500, abs=150)
    assert all(after[key] == "v2" for key in keys if before[key] == "v2"), "more weight takes none"
    assert describe_targets([target("chat", "v1", 9), target("chat", "v2", 1)]) == (
        "chat@v1 90 %, chat@v2 10 %"
    )


def test_a_version_that_cannot_serve_gets_nothing_while_another_can():
    world = World("chat=a")
    old = world.worker("chat", "v1")
    new = world.worker("chat", "v2")
    world.route("chat", ("chat", "v1", 1.0), ("chat", "v2", 1e9), ("chat", "v3", 0.0))
    assert world.resolved("chat") == "chat@v2"
    world.leave(new)
    assert world.resolved("chat") == "chat@v1"
    world.leave(old)
    assert world.resolved("chat") == "chat@v2", "requests wait there for its workers"


def test_versions_come_and_go_with_their_workers(caplog):
    caplog.set_level("INFO", "router.models")
    world = World("chat=a", "chat=b", "chat@v9=c", "code=d")
    versions = world.models.versions
    assert versions.keys() == {("chat", ""), ("chat", "v9"), ("code", "")}
    world.worker("chat", "v1", STARTING)
    world.worker("other", "v1")
    assert ("chat", "v1") not in versions, "its tokenizer is not known yet"
    assert [view.state for view in world.models.workers] == ["MISMATCH"]
    assert "which serves chat, code" in world.models.workers[0].reason
    second = world.worker("chat", "v2", fingerprint="b")
    world.worker("chat", "v9", fingerprint="x")
    assert versions["chat", "v2"].admission.name == "b"
    assert versions["chat", "v9"].admission.name == "c", "as its --model says"
    assert ("chat", "") not in versions, "the others have workers"
    assert [*versions["chat", "v2"].membership.records] == [second]
    versions["chat", "v2"].running = 1
    world.leave(second)
    assert ("chat", "v2") in versions, "a request waits for its workers"
    versions["chat", "v2"].running = 0
    world.publish()
    assert ("chat", "v2") not in versions
    assert ("code", "") in versions, "the last one of a model stays"
    left = [line for line in caplog.messages if "left" in line]
    assert left == ["chat@v2 has no workers left"], "not the first one, which had none"


def test_a_version_that_a_request_makes_knows_whether_the_registry_is_connected():
    world = World("chat=a")
    assert not world.models.registry_connected
    world.worker("chat", "v1")
    world.route("next", ("chat", "v2"))
    assert world.resolved("next") == "chat@v2"
    assert world.models.registry_connected
    world.registry.publish(world.records, connected=False)
    world.models._apply(world.registry.records, world.registry)
    world.route("last", ("chat", "v3"))
    assert world.resolved("last") == "chat@v3"
    assert not world.models.versions["chat", "v3"].membership.connected


async def test_models_follow_the_registry_to_its_end():
    world = World("chat=a")
    following = asyncio.create_task(world.models.follow(world.registry))
    changed = world.models.changed
    world.records["w"] = common_pb2.WorkerRecord(
        incarnation="w", model="chat", version="v1", state=READY, text_fingerprint="a"
    )
    world.registry.publish(world.records, connected=True)
    await changed.wait()
    while world.models.why_not_ready:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert world.resolved() == "chat@v1"
    world.registry.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            await following


def test_an_adapter_is_found_by_its_name_and_found_again_by_its_content():
    world = World("chat=a")
    world.worker("chat", "v1")
    adapted = world.worker("chat", "v2")
    world.records[adapted].adapters.add(name="sql", identity="1f")
    world.publish()
    found = world.models.resolve("sql", "k")
    assert (str(found.version), found.adapter) == ("chat@v2", "1f")
    assert dict(world.models.listed())["sql"] == "chat@v2"
    again = resumed_name(found.version.full_name, found.adapter)
    world.records[adapted].adapters[0].identity = "2e"  # another one by the same name
    world.publish()
    assert world.models.resolve(again, "k") == found
    assert world.models.resolve("sql", "k").adapter == "2e"
    assert world.models.resolve("chat@v2", "k").adapter == ""
    world.route("db", ("sql",))
    assert world.models.resolve("db", "k").adapter == "2e"
    assert world.models.resolve("db", "k").route == "db"
    world.leave(adapted)
    with pytest.raises(ModelNotFound, match="model 'sql' is not served here"):
        world.models.resolve("sql", "k")
