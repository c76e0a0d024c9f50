"""Routers are asked at every address that a name stands for."""

import asyncio
import contextlib
import socket

import pytest

from baton.net.server import bind
from baton.planner.routers import Routers
from baton.v1 import fleet_pb2, fleet_pb2_grpc
from tests.waiting import WAIT_S


class Router(fleet_pb2_grpc.FleetServiceServicer):
    def __init__(self, name, hangs=False):
        self.name, self.hangs, self.asked = name, hangs, []

    async def GetStatus(self, request, context):
        self.asked.append((request, dict(context.invocation_metadata())))
        if self.hangs:
            await asyncio.sleep(WAIT_S)
        return fleet_pb2.GetStatusResponse(router=fleet_pb2.RouterStatus(incarnation=self.name))


@pytest.fixture
async def serve():
    async with contextlib.AsyncExitStack() as stack:

        async def serve(router, host="127.0.0.1", port=0):
            server, address = bind(host, port)
            fleet_pb2_grpc.add_FleetServiceServicer_to_server(router, server)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            return address

        yield serve


@contextlib.asynccontextmanager
async def asking(target, timeout_s=WAIT_S):
    routers = Routers(target, "secret", timeout_s)
    try:
        yield routers
    finally:
        await routers.close()


def resolves(monkeypatch, names):
    """Names stand for these hosts; one that is not there cannot be resolved."""

    async def getaddrinfo(self, host, port, **_):
        if host not in names:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in names[host]]

    monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", getaddrinfo)


async def test_a_name_stands_for_all_its_addresses(serve, monkeypatch):
    names = {"routers": ["127.0.0.1", "127.0.0.2"]}
    resolves(monkeypatch, names)
    one, other = Router("one"), Router("other")
    port = (await serve(one)).rpartition(":")[2]
    await serve(other, "127.0.0.2", port)
    async with asking(f"routers:{port}") as routers:
        found = await routers.statuses()
        assert {a: s.router.incarnation for a, s in found.items()} == {
            f"127.0.0.1:{port}": "one",
            f"127.0.0.2:{port}": "other",
        }
        request, metadata = one.asked[0]
        assert request.without_pairs and metadata["authorization"] == "Bearer secret"
        names["routers"] = ["127.0.0.2"]  # one has left
        assert (await routers.statuses()).keys() == {f"127.0.0.2:{port}"}
        del names["routers"]  # the name service is away
        assert (await routers.statuses()).keys() == {f"127.0.0.2:{port}"}


async def test_a_router_that_hangs_or_is_gone_keeps_no_other_from_being_asked(serve):
    one, hangs = await serve(Router("one")), await serve(Router("hangs", hangs=True))
    gone = "127.0.0.1:1"
    async with asking(f"{one},{hangs},{gone}", timeout_s=0.5) as routers:
        found = await routers.statuses()
    assert found.keys() == {one, hangs, gone} and found[hangs] is found[gone] is None
