"""The routes of model names, over an etcd that comes and goes."""

import asyncio
import contextlib

import pytest

from baton.errors import Unavailable
from baton.net.backoff import Backoff
from baton.registry import routes
from baton.registry.routes import RouteTable
from baton.v1 import etcd_pb2
from baton.v1.route_pb2 import ModelRoute, RouteTarget
from tests.waiting import WAIT_S

CHAT = ModelRoute(name="chat", targets=[RouteTarget(model="chat", version="v2", weight=1.0)])


class AwayEtcd:
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
            await RouteTable(AwayEtcd(away), "/routes/").write("chat", route)
    assert str(raised.value).startswith(said)


class Etcd:
    """Answers one reading after the other as it is told, then ends the test's follower."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def range(self, prefix):
        if not self.answers:
            raise asyncio.CancelledError
        if not self.answers.pop(0):
            raise Unavailable("etcd at 127.0.0.1:2379 does not answer")
        return etcd_pb2.RangeResponse()

    async def watch(self, prefix, revision):
        for _ in ():
            yield


async def test_an_outage_is_logged_at_its_beginning_and_its_end(caplog, monkeypatch):
    caplog.set_level("INFO", "baton.registry.routes")
    monkeypatch.setattr(Backoff, "wait", lambda backoff: asyncio.sleep(0))
    table = RouteTable(Etcd(True, False, False, False, True, True, False, False), "routes/")
    with contextlib.suppress(asyncio.CancelledError):
        await table.follow()
    lost = "routing by the last known routes: etcd at 127.0.0.1:2379 does not answer"
    assert caplog.messages == [lost, "following the routes again", lost]
