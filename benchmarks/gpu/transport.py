"""Pools and transports for two processes, and what the receiving one does.

It is asked in JSON lines. Only kvtransfer's transports are at work: no gRPC, no engine.
"""

from __future__ import annotations

import base64
import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu.job import told
from kvtransfer import copier
from kvtransfer.interface import Listener, Transport
from kvtransfer.pool import KvPool, Slots
from kvtransfer.transports.cuda import CudaArea, CudaDriver
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.process_group import GlooTransport, NcclTransport
from kvtransfer.transports.shm import SharedMemoryArea, ShmTransport

# The receiver's program: `main` here, where packages may be absent.
PROGRAM = (
    "from benchmarks.gpu import absent; absent.stand_in(); "
    "from benchmarks.gpu.transport import main; main()"
)
PEER, EPOCH, TIMEOUT_S = "bench", 1, 30.0
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Plan:
    """What travels: `num_blocks` of a pool that has some more, in an order of each end's own."""

    transport: str
    device: str
    num_blocks: int
    layers: int
    kv_heads: int
    head_size: int
    block_size: int = 16

    def slots(self, seed: int) -> Slots:
        """Blocks in random order."""
        ids = random.Random(seed).sample(range(self.num_blocks + 8), self.num_blocks)
        return Slots(tuple(ids), self.num_blocks * self.block_size)

    @property
    def shape(self) -> tuple[int, ...]:
        """The pool's, in bfloat16."""
        return (
            self.num_blocks + 8, self.layers, 2, self.kv_heads, self.block_size, self.head_size
        )  # fmt: skip

    def to_json(self) -> str:
        """One argument of a command line."""
        return json.dumps(asdict(self))


def pool_of(plan: Plan) -> KvPool:
    """An empty pool, where the transport's peers can reach it. Raises OSError."""
    device, shape = torch.device(plan.device), plan.shape
    num_bytes = 2 * torch.Size(shape).numel()
    area: CudaArea | SharedMemoryArea | None = None
    if plan.transport == "cuda_ipc":
        area = CudaArea(num_bytes, device)
    elif plan.transport == "shm":
        area = SharedMemoryArea(num_bytes)
    if area is None:
        return KvPool(torch.zeros(shape, dtype=torch.bfloat16, device=device))
    return KvPool(area.tensor.view(torch.bfloat16).view(shape), area)


def transport_of(name: str) -> Transport:
    """By its name."""
    made: dict[str, Callable[[], Transport]] = {
        "cuda_ipc": lambda: CudaIpcTransport(CudaDriver()),
        "shm": ShmTransport,
        "nccl": lambda: NcclTransport(_HOST, 8 << 20),
        "gloo": lambda: GlooTransport(_HOST),
    }
    return made[name]()


class _Receiver:
    """Answers one request at a time."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._pool = plan, pool_of(plan)
        self._transport = transport_of(plan.transport)
        self._listener: Listener = self._transport.listen(self._pool)

    def answer(self, request: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
        """Does it; what was received is told by its checksum."""
        slots = self._plan.slots(request.get("seed", 0))
        if request["do"] == "offer":
            say({"endpoint": base64.b64encode(self._listener.offer(PEER, EPOCH)).decode()})
        elif request["do"] == "accept":
            self._listener.accept(PEER, EPOCH, TIMEOUT_S)
            say({})
        elif request["do"] == "receive":
            digest = self._pool.new_digest()
            self._listener.receive(PEER, EPOCH, slots, digest, TIMEOUT_S, lambda: say({}))
            say({"digest": digest.value})
        else:
            say({"digest": copier.digest(self._pool, slots).value})

    def close(self) -> None:
        """Frees the pool: nobody writes there any more."""
        self._listener.drop(PEER, EPOCH)
        self._listener.close()
        if self._pool.area is not None:
            self._pool.area.close()


def main() -> None:
    """Answers until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    receiver = None
    try:
        plan = Plan(**json.loads(sys.argv[1]))
        if plan.device != "cpu":
            torch.cuda.set_device(plan.device)
        receiver = _Receiver(plan)
        for line in sys.stdin:
            receiver.answer(json.loads(line), say)
    except Exception as error:
        traceback.print_exc()
        say({"error": told(error)})
    finally:
        if receiver is not None:
            receiver.close()
