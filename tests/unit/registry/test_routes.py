"""The routes of model names, over an etcd that comes and goes."""

import asyncio
import contextlib

from baton.errors import Unavailable
from baton.net.backoff import Backoff
from baton.registry.routes import RouteTable
from baton.v1 import etcd_pb2


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
