"""The other process of `test_kvtransfer_fencing`: a sender that stops itself in the middle.

Reads one line of JSON: the target and the decode worker's record (protobuf, hexadecimal), the
number of tokens and where to stop: "before" the put, after the grant, or "amid" it. Fills its pool
with ones, hands over, and prints how that ended.
"""

import asyncio
import json
import signal
import sys
import threading

import torch
from opentelemetry.trace import NoOpTracer

from baton.errors import BatonError
from baton.v1 import common_pb2, prefill_pb2
from kvtransfer import pool as pools
from kvtransfer.links import LinkPool
from kvtransfer.sender import Handoff
from kvtransfer.transports import shm


def stop_once():
    """A function that stops this process when it is called for the first time."""
    calls = []

    def stop(*_):
        calls.append(1)
        if len(calls) == 1:
            # To this thread: it goes no further. One for the process might stop another one first.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    return stop


def stopping_before(stop):
    class Link(shm._ShmLink):
        def put(self, *arguments):
            stop()
            return super().put(*arguments)

    shm._ShmLink = Link


def stopping_amid(stop):
    class Digest(pools.Digest):
        def add(self, data):
            super().add(data)
            stop()

    pools.KvPool.new_digest = lambda pool: Digest()


async def main():
    order = json.loads(sys.stdin.readline())
    to = prefill_pb2.HandoffTarget.FromString(bytes.fromhex(order["target"]))
    record = common_pb2.WorkerRecord.FromString(bytes.fromhex(order["decode"]))
    kv = record.kv

    async def find(incarnation):
        return record

    {"before": stopping_before, "amid": stopping_amid}[order["where"]](stop_once())
    blocks = -(-order["num_tokens"] // kv.block_size)
    shape = (2 * blocks, kv.num_layers, 2, kv.num_kv_heads, kv.block_size, kv.head_size)
    links = LinkPool(pools.KvPool(torch.ones(shape)), [shm.ShmTransport()], kv, "stopped", find)
    try:
        async with Handoff(links, NoOpTracer(), to, "h", order["num_tokens"], 120.0) as handoff:
            # Every other block, so that the put is made of several pieces.
            handoff.send(0, pools.Slots(tuple(range(0, 2 * blocks, 2)), order["num_tokens"]))
            await handoff.commit(order["num_tokens"], 7)
        print("committed", flush=True)
    except BatonError as error:
        print(type(error).__name__, flush=True)
    await links.close()


if __name__ == "__main__":
    asyncio.run(main())
