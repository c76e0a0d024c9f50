"""The other process of `test_kvtransfer_processes`.

`decode TRANSPORT` prints its port, serves handoffs "h" and "next", and ends with its input;
`stop WHERE NUM_TOKENS TARGET RECORD` is a sender that stops itself in the middle: it fills its pool
with ones, hands them over to the target at the decode worker of that record (protobuf, in
hexadecimal), and prints how that ended. It stops "before" the put, after the grant, or "amid" it.
"""

import asyncio
import os
import signal
import sys
import threading

import torch
from opentelemetry.trace import NoOpTracer

from baton.errors import BatonError
from baton.v1 import common_pb2, prefill_pb2
from kvtransfer import pool as pools
from kvtransfer.outgoing import OutgoingLinks
from kvtransfer.sender import HandoffSender
from kvtransfer.transports import shm
from tests.contract.kvtransfer_parts import TRANSPORTS, Decode, register


async def decode(name):
    register("p", pid=os.getppid())
    async with Decode(TRANSPORTS[name]()) as worker:
        worker.reserve("h", 18, 9, 4, 5, 6, 20)
        worker.reserve("next", 4, 0)
        print(worker.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def stop(where, num_tokens, target, record):
    num_tokens = int(num_tokens)
    to = prefill_pb2.HandoffTarget.FromString(bytes.fromhex(target))
    record = common_pb2.WorkerRecord.FromString(bytes.fromhex(record))
    kv = record.kv

    async def find(incarnation):
        return record

    stop_at(where)
    blocks = -(-num_tokens // kv.block_size)
    shape = (2 * blocks, kv.num_layers, 2, kv.num_kv_heads, kv.block_size, kv.head_size)
    ours = common_pb2.WorkerRecord(incarnation="stopped", kv=kv)
    links = OutgoingLinks([pools.KvPool(torch.ones(shape))], ours, [shm.ShmTransport()], find)
    try:
        handoff = HandoffSender(
            links, NoOpTracer(), to, "h", num_tokens, 120.0, step_timeout_s=10.0
        )
        async with handoff:
            # Every other block, so that the put is made of several pieces.
            handoff.send(pools.Slots(tuple(range(0, 2 * blocks, 2)), num_tokens))
            handoff.conclude(7)
            await handoff.committed()
        print("committed", flush=True)
    except BatonError as error:
        print(type(error).__name__, flush=True)
    await links.close()


def stop_at(where):
    """This process will stop once, before its first put or within it."""
    calls = []

    def stop_once():
        calls.append(1)
        if len(calls) == 1:
            # To this thread: it goes no further. One for the process might stop another one first.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    class SendingEnd(shm._ShmSendingEnd):
        def put(self, *arguments):
            stop_once()
            return super().put(*arguments)

    class Checksum(pools.Checksum):
        def add(self, data):
            super().add(data)
            stop_once()

    if where == "before":
        shm._ShmSendingEnd = SendingEnd
    else:
        pools.KvPool.new_checksum = lambda pool: Checksum()


if __name__ == "__main__":
    asyncio.run({"decode": decode, "stop": stop}[sys.argv[1]](*sys.argv[2:]))
