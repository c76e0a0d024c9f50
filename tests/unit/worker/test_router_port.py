"""How a worker counts that a router is silent."""

import asyncio
from unittest.mock import Mock

import uvloop

from baton.v1.dispatch_pb2 import RouterMessage
from baton.v1.worker_pb2 import LoadReport
from baton.worker.metrics import LoadTracker
from baton.worker.router_port import MIN_HEARTBEAT_S, RouterConnection


def test_a_silence_is_counted_in_heartbeats_whatever_is_sent_meanwhile():
    """uvloop's timers, of whole milliseconds, come a little early."""

    async def beats():
        worker = Mock(load_tracker=LoadTracker(), report=LoadReport, incarnation="d-1")
        connection = RouterConnection(Mock(worker=worker, routers=set()))
        connection._beat = Mock(wraps=connection._beat)
        transport = Mock(is_closing=lambda: False, get_write_buffer_size=lambda: 0)
        transport.get_extra_info = lambda name: None if name == "peercert" else Mock()
        connection.connection_made(transport)
        hello = RouterMessage()
        hello.hello.heartbeat_ms = 50
        connection.take(hello)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for pause_s in (0.007, 0.0213, 0.034) * 8:
            await asyncio.sleep(pause_s)
            _ = connection.outgoing
        took = loop.time() - began
        connection.connection_lost(None)
        return connection._beats_unheard, took

    count, took = uvloop.run(beats())
    assert 0 < count <= took / MIN_HEARTBEAT_S + 1
