"""Part "cluster": KV between processes by each transport, then a cluster of one prefill and one
decode worker: its tokens, and what its handoffs cost. The transports need neither gRPC nor etcd."""

from __future__ import annotations

import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu.part import Case, Cells, Part, summary
from benchmarks.shapes import GPU_SHAPES
from kvtransfer import copier
from kvtransfer.interface import Transport
from kvtransfer.pool import KvPool, Slots
from kvtransfer.transports.cuda import CudaArea, CudaDriver
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.process_group import GlooTransport, NcclTransport
from kvtransfer.transports.shm import SharedMemoryArea, ShmTransport

_TIMEOUT_S, _HOST = 30.0, "127.0.0.1"
_MOVED = 512 << 20  # bytes


def run(part: Part) -> None:
    """Transports, then the cluster."""
    part.measure("transfer", _transfers(part))
    try:
        from benchmarks.gpu.handoff import handoff  # noqa: PLC0415
    except Exception as error:  # protobuf refuses messages of a newer one with errors of its own
        part.note("handoff", f"no cluster is started: {summary(error)}")
        return
    transports = ["shm"] if part.device.type == "cpu" else ["cuda_ipc"]
    if part.device.type == "cuda" and _nccl_shares_a_gpu():
        transports.append("nccl")
    part.measure("handoff", [(name, partial(handoff, part, name)) for name in transports])


def _nccl_shares_a_gpu() -> bool:
    """Whether both ends of a pair may be on one GPU."""
    if not torch.distributed.is_nccl_available():
        return False
    return tuple(torch.cuda.nccl.version()[:2]) >= (2, 30)


@dataclass(frozen=True)
class Plan:
    """What travels: `num_blocks` of a pool in bfloat16 that has 8 more."""

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

    def pool(self, reachable: bool) -> KvPool:
        """An empty pool; where the transport's peers can reach it, if asked. Raises OSError."""
        device = torch.device(self.device)
        shape = (
            self.num_blocks + 8, self.layers, 2, self.kv_heads, self.block_size, self.head_size
        )  # fmt: skip
        num_bytes = 2 * torch.Size(shape).numel()
        area: CudaArea | SharedMemoryArea | None = None
        if reachable and self.transport == "cuda_ipc":
            area = CudaArea(num_bytes, device)
        elif reachable and self.transport == "shm":
            area = SharedMemoryArea(num_bytes)
        if area is None:
            return KvPool(torch.zeros(shape, dtype=torch.bfloat16, device=device))
        return KvPool(area.tensor.view(torch.bfloat16).view(shape), area)

    def made(self) -> Transport:
        """Its transport."""
        transports: dict[str, Callable[[], Transport]] = {
            "cuda_ipc": lambda: CudaIpcTransport(CudaDriver()),
            "shm": ShmTransport,
            "nccl": lambda: NcclTransport(_HOST, 8 << 20),
            "gloo": lambda: GlooTransport(_HOST),
        }
        return transports[self.transport]()


def _transfers(part: Part) -> Iterator[Case]:
    """A row for each transport: within this GPU, and to another one if there is."""
    shape = GPU_SHAPES["smoke" if part.job.smoke else "8B"]
    block_bytes = 2 * 16 * 2 * shape.layers * shape.kv_heads * shape.head_size
    count = 6 if part.job.smoke else _MOVED // block_bytes
    size = (count, shape.layers, shape.kv_heads, shape.head_size)

    def case(name: str, transport: str, here: str, there: str) -> Case:
        return name, partial(
            transfer, part, Plan(transport, here, *size), Plan(transport, there, *size)
        )

    if part.device.type == "cpu":
        for name in ("shm", "gloo"):
            yield case(name, name, "cpu", "cpu")
        return
    here = str(part.device)
    yield case("cuda_ipc", "cuda_ipc", here, here)
    others = [n for n in range(torch.cuda.device_count()) if n != part.device.index]
    for other in others[:1]:
        for name in ("cuda_ipc", "nccl"):
            yield case(f"{name}, to another GPU", name, here, f"cuda:{other}")
    if _nccl_shares_a_gpu():
        yield case("nccl, two ranks on one GPU", "nccl", here, here)
    elif not others:
        text = "nccl is left out: before NCCL 2.30 it refuses two ranks on one GPU"
        part.note("transfer", text)


def transfer(part: Part, sending: Plan, receiving: Plan) -> Cells:
    """Median of some puts, each checked by its checksum at both ends. Raises AssertionError."""
    pool = sending.pool(reachable=False)
    pool.tensor.normal_()
    if pool.device.type == "cuda":
        torch.cuda.synchronize(pool.device)
    digests = [pool.new_digest() for _ in range(1 + part.job.sized(5, 1))]
    transport, times = sending.made(), []
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    peer = context.Process(target=receive, args=(receiving, theirs), daemon=True)
    peer.start()
    theirs.close()
    try:
        link = transport.connect(pool, _hear(ours), peer.pid or 0, _TIMEOUT_S)
        try:
            assert _hear(ours) == "accepted"
            for number, digest in enumerate(digests):
                if not transport.one_sided:
                    ours.send(100 + number)
                    assert _hear(ours) == "posted"
                slots = sending.slots(number), receiving.slots(100 + number)
                start = time.perf_counter()
                link.put(*slots, digest, _TIMEOUT_S)
                times.append(time.perf_counter() - start)
                if transport.one_sided:
                    ours.send(100 + number)
                assert _hear(ours) == digest.value, "other bytes arrived"
        finally:
            link.close()
            ours.close()
    finally:
        peer.join(_TIMEOUT_S)
        peer.kill()
    seconds, moved = statistics.median(times[1:]), pool.nbytes(sending.slots(0))
    cells = {"MB": moved / 1e6, "ms": seconds * 1e3, **part.of_copy(2 * moved, seconds)}
    return cells | {"GB/s": moved / seconds / 1e9}  # of what travels, each byte once


def _hear(peer: Connection) -> Any:
    """The receiver's next message. Raises RuntimeError."""
    if not peer.poll(2 * _TIMEOUT_S):  # its process starts, too
        raise RuntimeError(f"the receiver: nothing within {2 * _TIMEOUT_S:g} s")
    message = peer.recv()
    if isinstance(message, Exception):
        raise message
    return message


def receive(plan: Plan, sender: Connection) -> None:
    """The receiving process: for each seed, the checksum of what arrived in its slots."""
    try:
        if plan.device != "cpu":
            torch.cuda.set_device(plan.device)
        pool, transport = plan.pool(reachable=True), plan.made()
        listener = transport.listen(pool, "bench/1")
        try:
            sender.send(listener.endpoint)
            listener.accept(_TIMEOUT_S)
            sender.send("accepted")
            while True:
                slots = plan.slots(sender.recv())
                if transport.one_sided:
                    digest = copier.digest(pool, slots)
                else:
                    digest = pool.new_digest()
                    posted = partial(sender.send, "posted")
                    listener.receive(slots, digest, _TIMEOUT_S, posted)
                sender.send(digest.value)
        finally:
            listener.close()
            if pool.area is not None:
                pool.area.close()
    except EOFError:  # the sender is done
        return
    except Exception as error:
        traceback.print_exc()
        sender.send(RuntimeError(f"the receiver: {summary(error)}"))
