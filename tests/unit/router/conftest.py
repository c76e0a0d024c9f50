"""What several test modules of the router need."""

import contextlib

import pytest

from .scripted_workers import Cluster


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def cluster_of():
    """Starts clusters of scripted workers; at the end nothing of them may be left."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(prefill=1, decode=1, **settings):
            return await stack.enter_async_context(Cluster(prefill, decode, **settings))

        yield start


@pytest.fixture
async def cluster(cluster_of):
    return await cluster_of()
