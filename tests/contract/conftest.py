"""A prefill and a decode side for the contract tests of `kvtransfer`."""

import contextlib
import threading

import pytest

from tests.waiting import WAIT_S

from .kvtransfer_parts import TRANSPORTS, Decode, Prefill


@pytest.fixture
async def join():
    """(prefill, decode) over the transport of a name; closed after the test, with all threads."""
    async with contextlib.AsyncExitStack() as stack:

        async def joined(name, decode=None, prefill=None):
            transport = TRANSPORTS[name]()
            receiver = await stack.enter_async_context(Decode(transport, **decode or {}))
            return await stack.enter_async_context(Prefill(transport, **prefill or {})), receiver

        yield joined
    for thread in threading.enumerate():
        if thread.name == "kv-served":  # they stand for another host
            thread.join(WAIT_S)
    assert not [one.name for one in threading.enumerate() if one.name.startswith("kv-")]
