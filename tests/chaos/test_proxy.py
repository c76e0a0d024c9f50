"""The proxy does to connections what the injector asks of it, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from baton.local import ports
from tests.chaos.proxy import Proxy

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Callers:
    """Dials a proxy under names; all connections are closed at the end."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # by local port
        self._writers: list[asyncio.StreamWriter] = []

    async def dial(self, proxy: Proxy, caller: str) -> Streams:
        """A connection that the proxy takes for one of `caller`."""
        host, _, port = proxy.address.rpartition(":")
        mine = ports.free()
        self.names[mine] = caller
        streams = await asyncio.open_connection(host, int(port), local_addr=(host, mine))
        self._writers.append(streams[1])
        return streams

    async def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


class Echo(asyncio.Protocol):
    """Says back what it hears."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.fixture
async def callers() -> AsyncIterator[Callers]:
    callers = Callers()
    yield callers
    await callers.close()


@pytest.fixture
async def proxy(callers: Callers) -> AsyncIterator[Proxy]:
    """A proxy in front of an echo."""
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Proxy(port, callers.names.__getitem__) as proxy:
        yield proxy
    server.close()
    await server.wait_closed()


async def says(streams: Streams, data: bytes, timeout_s: float = 5.0) -> bytes:
    """What comes back."""
    reader, writer = streams
    writer.write(data)
    async with asyncio.timeout(timeout_s):
        return await reader.readexactly(len(data))


async def test_bytes_pass_both_ways_and_the_end_is_passed_on(
    proxy: Proxy, callers: Callers
) -> None:
    streams = await callers.dial(proxy, "one")
    assert await says(streams, b"x" * 100_000) == b"x" * 100_000
    assert proxy.callers == ["one"]
    streams[1].close()
    await streams[1].wait_closed()
    while proxy.callers:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_cut_resets_the_callers_connections_alone(proxy: Proxy, callers: Callers) -> None:
    one, other = await callers.dial(proxy, "one"), await callers.dial(proxy, "other")
    await says(one, b"a")
    await says(other, b"b")
    assert proxy.cut("one") == 1
    with pytest.raises(ConnectionResetError):
        await one[0].readexactly(1)
    assert await says(other, b"still here") == b"still here"
    assert await says(await callers.dial(proxy, "one"), b"again") == b"again"


async def test_a_held_caller_hears_nothing_until_release_and_then_everything(
    proxy: Proxy, callers: Callers
) -> None:
    one, other = await callers.dial(proxy, "one"), await callers.dial(proxy, "other")
    await says(one, b"a")
    proxy.hold("one")
    late = await callers.dial(proxy, "one")  # a new connection is held, too
    for streams in (one, late):
        with pytest.raises(TimeoutError):
            await says(streams, b"held", timeout_s=0.2)
    assert await says(other, b"free") == b"free"
    proxy.release("one")
    for streams in (one, late):
        async with asyncio.timeout(5.0):
            assert await streams[0].readexactly(4) == b"held"


async def test_a_slow_connection_takes_its_time(proxy: Proxy, callers: Callers) -> None:
    streams = await callers.dial(proxy, "one")
    proxy.slow(200_000.0)
    began = time.monotonic()
    await says(streams, b"x" * 60_000)
    assert time.monotonic() - began > 0.2
    proxy.slow(0.0)


async def test_nobody_behind_it_is_a_reset(callers: Callers) -> None:
    async with Proxy(ports.free(), callers.names.__getitem__) as lonely:
        streams = await callers.dial(lonely, "one")
        with pytest.raises(ConnectionResetError):
            await streams[0].readexactly(1)
