"""What operators may set as routes, and what is refused with the remedy."""

from types import SimpleNamespace

import pytest

from baton.errors import BatonError, InvalidRequest
from baton.v1 import route_pb2
from baton.v1.route_pb2 import Canary, ModelRoute, RouteTarget
from router.canary import PROMOTED, Decision, advanced
from router.route_service import RouteServicer

from .test_canary import Table
from .test_models import World, target

CONTEXT = SimpleNamespace(peer=lambda: "ipv4:10.0.0.1:5")
SETTINGS = {"steps": [10.0, 100.0], "step_s": 1.0, "min_requests": 5, "max_slowdown": 1.2}


@pytest.fixture
def world():
    """A router of two models, "chat" with the versions v1 and v2, and its routes."""
    made = World("chat=a", "code=b", aliases=["coder=code"])
    for name, version in (("chat", "v1"), ("chat", "v2"), ("code", "")):
        made.worker(name, version)
    made.table = Table({})
    made.table.failures = 0
    made.models.routes = lambda: made.table.routes
    made.service = RouteServicer(made.models, made.table)
    return made


async def put(world, name="chat", targets=(), **canary):
    route = ModelRoute(name=name, targets=targets)
    if canary:
        route.canary.CopyFrom(Canary(**{"target": target("v2"), **SETTINGS, **canary}))
    request = route_pb2.SetRouteRequest(route=route)
    return (await world.service.SetRoute(request, CONTEXT)).route


async def test_a_bare_name_is_a_version_else_a_model_or_a_route(world):
    found = await put(world, targets=[target("v1", weight=9), target("v2"), target("code")])
    assert [(one.model, one.version) for one in found.targets] == [
        ("chat", "v1"), ("chat", "v2"), ("code", "")
    ]  # fmt: skip
    assert [one.HasField("version") for one in found.targets] == [True, True, False]
    assert found.changed_ms > 0
    await put(world, "fast", [target("chat")])
    listed = await world.service.ListRoutes(route_pb2.ListRoutesRequest(), CONTEXT)
    assert {one.name for one in listed.routes} == {"chat", "fast"}
    await world.service.DeleteRoute(route_pb2.DeleteRouteRequest(name="fast"), CONTEXT)
    with pytest.raises(InvalidRequest, match="no route 'fast'; routes: chat"):
        await world.service.DeleteRoute(route_pb2.DeleteRouteRequest(name="fast"), CONTEXT)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"targets": [target("v3")]},
            "neither a version of chat nor a model; there are chat@v1, ch",
        ),
        ({"targets": [target("chat", "v3")]}, "chat@v3 has no workers; there are chat@v1"),
        ({"targets": [target("chat")]}, "neither"),  # by itself
        ({"targets": [target("v1"), target("chat", "v1")]}, "chat@v1 is given twice"),
        ({"targets": [target("v1", weight=0)]}, "weight above 0"),
        ({"targets": [target("v1", weight=-1)]}, "-1 is no weight"),
        ({"targets": [target("v1", weight=float("nan"))]}, "is no weight"),
        ({"targets": []}, "weight above 0"),
        ({"name": "a@b", "targets": [target("code")]}, "is no name"),
        ({"target": target("v1")}, "chat@v1 gets requests of chat already"),
        ({"target": target("code")}, "a canary is one version"),
        ({"steps": [50.0, 10.0]}, "rising percentages"),
        ({"steps": []}, "rising percentages"),
        ({"steps": [10.0, 101.0]}, "rising percentages"),
        ({"max_slowdown": 0.5}, "max_slowdown at least 1"),
        ({"name": "nothing", "target": target("chat", "v2")}, "is not served here"),
    ],
)
async def test_what_cannot_be_served_is_refused(world, fields, why):
    with pytest.raises(BatonError, match=why):
        await put(world, **fields)
    assert not world.table.stored


async def test_a_route_that_leads_back_to_itself_is_refused_with_its_circle(world):
    await put(world, "x", [target("code")])
    with pytest.raises(InvalidRequest, match=r"circle: 'code' -> 'x' -> 'code'$"):
        await put(world, "code", [target("x")])
    await put(world, "y", [target("chat", "v1", 9), target("x", weight=0)])
    with pytest.raises(InvalidRequest, match=r"circle: 'x' -> 'y' -> 'x'$"):
        await put(world, "x", [target("code"), target("y")])
    with pytest.raises(InvalidRequest, match=r"circle: 'code' -> 'y' -> 'x' -> 'code'$"):
        await put(world, "code", [target("y")])
    with pytest.raises(InvalidRequest, match=r"circle: 'code' -> 'coder' -> 'code'$"):
        await put(world, "code", [target("coder")])  # an alias
    await put(world, "y", [target("chat", "v1")])
    await put(world, "x", [target("code"), target("y")])  # y leads there no more
    assert str(world.models.resolve("code", "k").version) == "code"


async def test_what_a_canary_would_go_back_to_counts_for_circles(world):
    await put(world, targets=[target("code")])
    await put(world, steps=[100.0])
    with pytest.raises(InvalidRequest, match=r"circle: 'code' -> 'chat' -> 'code'$"):
        await put(world, "code", [target("chat")])
    promoted = advanced(world.table.routes["chat"], Decision(PROMOTED, "no worse"))
    await world.table.write("chat", promoted)
    await put(world, "code", [target("chat")])


async def test_a_canary_replaces_what_is_served_now_and_is_ended_by_a_route(world):
    begun = await put(world, target=target("v2"))
    assert [(one.version, one.weight) for one in begun.targets] == [("v1", 90.0), ("v2", 10.0)]
    assert [one.version for one in begun.canary.before] == ["v1"]
    with pytest.raises(InvalidRequest, match="is running: end it with `baton route set`"):
        await put(world, target=target("v2"))
    assert not (await put(world, targets=[target("v2")])).HasField("canary")
    back = await put(world, target=RouteTarget(model="chat", version="v1"))
    assert [one.version for one in back.targets] == ["v2", "v1"]


async def test_another_writer_is_written_over(world):
    world.table.stored["chat"] = ModelRoute(name="chat")
    await put(world, targets=[target("v2")])
    assert world.table.stored["chat"].targets[0].version == "v2"
