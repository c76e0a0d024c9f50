"""The other process of `test_kvtransfer_processes`: a decode worker, or a sender that hangs.

`decode TRANSPORT` serves handoffs "h" and "next": it prints its port, the hash of its pool once "h"
is committed, and ends with its input;
`hang ENDPOINT` connects to a gloo listener, says so and waits to be killed.
"""

import asyncio
import hashlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from kvtransfer_parts import TRANSPORTS, Decode, make_pool, register

REMOTE = (9, 4, 5, 6, 20)


async def decode(name):
    register("p", pid=os.getppid())
    async with Decode(TRANSPORTS[name]()) as worker:
        worker.reserve("h", 18, *REMOTE)
        worker.reserve("next", 4, 0)
        done = asyncio.Event()
        committed = worker.held.committed

        async def note(*args):
            await committed(*args)
            done.set()

        worker.held.committed = note
        print(worker.port, flush=True)
        await done.wait()
        print(hashlib.sha256(worker.pool.tensor.numpy()).hexdigest(), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def hang(endpoint):
    link = TRANSPORTS["gloo"]().connect(make_pool(1), bytes.fromhex(endpoint), os.getppid(), 5.0)
    print("connected", flush=True)
    signal.pause()
    link.close()


if __name__ == "__main__":
    if sys.argv[1] == "decode":
        asyncio.run(decode(sys.argv[2]))
    else:
        hang(sys.argv[2])
