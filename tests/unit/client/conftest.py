"""Both clients, behind one interface, and servers for them."""

import asyncio
import contextlib
import socket

import pytest

import baton
from tests.unit.client.scripted_router import serving


@pytest.fixture
async def serve():
    """serve(router) starts a server for the test's length and gives its address."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(router):
            return await stack.enter_async_context(serving(router))

        yield start


@pytest.fixture
def dead_address():
    """An address with no listener, kept from others for the test's length."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


class Sync:
    """The sync client behind the async one's methods: each call runs in a thread."""

    def __init__(self, *args, **kwargs):
        self._client = baton.Client(*args, **kwargs)

    def __getattr__(self, name):
        return lambda *args, **kwargs: asyncio.to_thread(
            getattr(self._client, name), *args, **kwargs
        )

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        self._client.close()

    def stream(self, *args, **kwargs):
        return SyncStream(self._client.stream(*args, **kwargs))


class SyncStream:
    def __init__(self, stream):
        self._stream = stream

    @property
    def completion(self):
        return self._stream.completion

    def __aiter__(self):
        return self

    async def __anext__(self):
        delta = await asyncio.to_thread(next, self._stream, None)
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def close(self):
        self._stream.close()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        self._stream.close()


@pytest.fixture(params=[baton.AsyncClient, Sync], ids=["async", "sync"])
def connect(request):
    """Both clients, one after the other, under the async client's interface."""
    return request.param
