"""Both clients, behind one interface, and servers for them."""

import asyncio
import contextlib

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


class Threaded:
    """The sync client, or its stream, with the async one's methods: each runs in a thread."""

    def __init__(self, wrapped):
        self._wrapped = wrapped

    def __getattr__(self, name):
        return lambda *args, **kwargs: asyncio.to_thread(
            getattr(self._wrapped, name), *args, **kwargs
        )

    def stream(self, *args, **kwargs):
        return Threaded(self._wrapped.stream(*args, **kwargs))

    @property
    def completion(self):
        return self._wrapped.completion

    def __aiter__(self):
        return self

    async def __anext__(self):
        if (delta := await asyncio.to_thread(next, self._wrapped, None)) is None:
            raise StopAsyncIteration
        return delta

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        self._wrapped.close()


def _sync(*args, **kwargs):
    return Threaded(baton.Client(*args, **kwargs))


@pytest.fixture(params=[baton.AsyncClient, _sync], ids=["async", "sync"])
def connect(request):
    """Both clients, one after the other, under the async client's interface."""
    return request.param
