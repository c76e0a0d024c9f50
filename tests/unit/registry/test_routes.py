"""Routes while etcd is away: what a write has done is not known."""

import asyncio

import pytest

from baton.errors import Unavailable
from baton.registry import routes
from baton.registry.routes import RouteTable
from baton.v1.route_pb2 import ModelRoute, RouteTarget
from tests.waiting import WAIT_S

CHAT = ModelRoute(name="chat", targets=[RouteTarget(model="chat", version="v2", weight=1.0)])


class Etcd:
    """Refuses writes with a text, or never answers."""

    def __init__(self, away):
        self.away = away

    async def put_if(self, key, value, revision):
        if self.away:
            raise Unavailable(self.away)
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("route", "away", "said"),
    [
        (CHAT, "etcd is away", "etcd is away (the route of chat may still be set: see `baton"),
        (None, "etcd is away", "etcd is away (the route of chat may still be removed: see `baton"),
        (CHAT, None, "etcd does not answer within 0.001 s (the route of chat may still be set: "),
    ],
)
async def test_a_write_without_an_answer_ends_in_time_and_may_be_done(
    monkeypatch, route, away, said
):
    monkeypatch.setattr(routes, "WRITE_S", 0.001)
    with pytest.raises(Unavailable) as raised:
        async with asyncio.timeout(WAIT_S):
            await RouteTable(Etcd(away), "/routes/").write("chat", route)
    assert str(raised.value).startswith(said)
