"""What the tests of `kvtransfer` are made of: small pools, a decode side and a prefill side."""

import asyncio
import inspect
import json
import os
import socket
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import torch
from opentelemetry.trace import NoOpTracer

from baton.config import host_id, kv_heads_of
from baton.cuda import CudaArea
from baton.engine.engine import Reserved
from baton.engine.kernels.torch.row_quantization import is_quantized, split_rows
from baton.errors import TransferFailed
from baton.kv_groups import KvGroups
from baton.net import rpc
from baton.net.object_connection import ObjectConnection
from baton.v1 import common_pb2, decode_pb2, handoff_pb2_grpc, prefill_pb2
from baton.v1.dispatch_pb2 import WorkerMessage
from baton.worker.messages import ModelLimits
from decode_worker.reservations import Reservations
from decode_worker.service import HandoffService
from kvtransfer import copier
from kvtransfer.incoming import IncomingLinks
from kvtransfer.interface import ReceivingEnd, SendingEnd, Transport
from kvtransfer.outgoing import OutgoingLinks
from kvtransfer.pool import KvPool, Slots, copy_slots
from kvtransfer.remote_pool import KV_MESSAGES, PoolServer, RemotePool
from kvtransfer.sender import HandoffSender
from kvtransfer.transports import shm
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.gloo_nccl import GlooTransport
from tests.contract.kvtransfer_driver import CPU, DRIVER
from tests.waiting import WAIT_S

BLOCKS, BLOCK_SIZE = 24, 4
SHAPE = (BLOCKS, 2, 2, 2, BLOCK_SIZE, 8)  # 1 KiB a block
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
STAGING_BYTES = 4096  # two messages of two blocks


class MemoryTransport(Transport):
    """Between two pools of one process: both ends share one instance, which knows who listens."""

    name, kind, one_sided = "memory", common_pb2.TRANSPORT_MEMORY, True

    def __init__(self):
        self.pools = {}

    def listen(self, pool):
        listener = ReceivingEnd(uuid.uuid4().bytes)
        self.pools[listener.endpoint] = pool
        listener.close = lambda: self.pools.pop(listener.endpoint, None)
        return listener

    def connect(self, pool, endpoint, timeout_s):
        return MemoryLink(self.pools, pool, endpoint)


class MemoryLink(SendingEnd):
    def __init__(self, pools, pool, endpoint):
        self.pools, self.pool, self.endpoint = pools, pool, endpoint

    def put(self, local, remote, checksum, timeout_s):
        if (target := self.pools.get(self.endpoint)) is None:
            raise TransferFailed("memory: the receiver is gone")
        copy_slots(self.pool, local, target, remote, checksum)


TRANSPORTS = {
    "memory": MemoryTransport,
    "shm": shm.ShmTransport,
    "gloo": lambda: GlooTransport("127.0.0.1", STAGING_BYTES),
    "cuda_ipc": lambda: CudaIpcTransport(DRIVER),
}
# What all of them do with pools on a GPU is done here with pools that are taken for such.
POOLS = {"cuda_ipc": "gpu"}
DESCRIPTOR = common_pb2.KvDescriptor(
    model_fingerprint="m", dtype="float32", num_kv_heads=2, block_size=BLOCK_SIZE
)


def make_area(num_bytes, where="host"):
    """Memory that others can write into: the host's, or what is taken for a GPU's."""
    return CudaArea(num_bytes, CPU, DRIVER) if where == "gpu" else shm.SharedMemoryArea(num_bytes)


def make_pool(seed, where="host", dtype=torch.float32, head_size=SHAPE[-1]):
    """A pool in memory to share, with content that depends on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    content = (torch.randn((*SHAPE[:-1], head_size), generator=generator) * 50).to(dtype)
    area = make_area(content.nbytes, where)
    pool = KvPool(area.tensor.view(dtype).view(content.shape), area)
    pool.tensor.copy_(content)
    return pool


def make_rank_pools(seed, ranks, where="host"):
    """As `make_pool`, its heads spread over ranks, or each held by several of them."""
    whole, heads = make_pool(seed, where), SHAPE[3]
    pools = []
    for held in (kv_heads_of(rank, ranks, heads) for rank in range(ranks)):
        content = whole.tensor[:, :, :, held.start : held.stop].contiguous()
        area = make_area(content.nbytes, where)
        pools.append(KvPool(area.tensor.view(content.dtype).view(content.shape), area))
        pools[-1].tensor.copy_(content)
    whole.area.close()
    return pools


def across_hosts(pools, transport):
    """The pools as the first rank's process sees them, if the others are on another host."""
    return [pools[0], *(RemotePool(partial(_served, pool, transport)) for pool in pools[1:])]


def _served(pool, transport):
    ours, theirs = (ObjectConnection(end, KV_MESSAGES) for end in socket.socketpair())
    server = PoolServer(pool, [transport])
    threading.Thread(target=server.serve, args=(theirs,), name="kv-served").start()
    return ours


def connected(transport, pool, receiver, **change):
    """A link to the receiver's pool, or to what it says is that: some fields are changed."""
    listener = transport.listen(receiver)
    endpoint = json.dumps(json.loads(listener.endpoint) | change).encode()
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept, 5.0)
        try:
            return transport.connect(pool, endpoint, 5.0)
        finally:
            accepted.result()
            listener.close()


def slots(num_tokens, *ids):
    return Slots(tuple(ids), num_tokens)


def by_token(tensor):
    """A pool as `[num_blocks, .., block_size, size]`: its rows, or their elements and scales."""
    return split_rows(tensor) if is_quantized(tensor.dtype) else (tensor,)


def expect_only(source, local, target, remote, before):
    """`target` holds `source`'s local slots in its remote ones, and is `before` elsewhere."""
    expected = before.clone()
    left = local.num_tokens
    for here, there in zip(local.block_ids, remote.block_ids, strict=True):
        fill = min(left, BLOCK_SIZE)
        for written, read in zip(by_token(expected), by_token(source.tensor), strict=True):
            written[there, ..., :fill, :] = read[here, ..., :fill, :]
        left -= fill
    assert torch.equal(target.tensor, expected)


class Pair:
    """Both ends of one link in this process, without any control."""

    def __init__(self, transport, source=None, target=None):
        self.transport = transport
        where = POOLS.get(transport.name, "host")
        self.source, self.target = source or make_pool(1, where), target or make_pool(2, where)
        self.thread = ThreadPoolExecutor(1)
        self.listener = transport.listen(self.target)
        accepted = self.thread.submit(self.listener.accept, WAIT_S)
        self.link = transport.connect(self.source, self.listener.endpoint, WAIT_S)
        accepted.result(WAIT_S)

    def post(self, remote, timeout_s=WAIT_S, checksum=None):
        """(future of the receive, its checksum), once it is posted."""
        checksum, posted = checksum or self.target.new_checksum(), threading.Event()
        receive = self.thread.submit(self.listener.receive, remote, checksum, timeout_s, posted.set)
        assert posted.wait(WAIT_S)
        return receive, checksum

    def move(self, local, remote):
        """Moves slots; returns (sender's checksum, receiver's checksum)."""
        checksum = self.source.new_checksum()
        if self.transport.one_sided:
            self.link.put(local, remote, checksum, WAIT_S)
            return checksum, copier.copier(self.target).checksum_of(remote)
        receive, arrived = self.post(remote)
        self.link.put(local, remote, checksum, WAIT_S)
        receive.result(WAIT_S)
        return checksum, arrived

    def close(self):
        self.link.close()
        self.listener.close()
        self.thread.shutdown()
        for pool in (self.source, self.target):
            pool.area.close()


RECORDS = {}  # the registry, by incarnation


def register(incarnation, port=0, pid=None, host=None, kv=DESCRIPTOR):
    place = {
        "address": f"127.0.0.1:{port}",
        "pid": pid or os.getpid(),
        "host_id": host or host_id(),
    }
    RECORDS[incarnation] = common_pb2.WorkerRecord(incarnation=incarnation, kv=kv, **place)
    return RECORDS[incarnation]


async def find(incarnation):
    if incarnation not in RECORDS:
        raise TransferFailed(f"the registry has no worker {incarnation}")
    return RECORDS[incarnation]


class Engine:
    """The engine as handoffs use it: it has what a test reserves, and answers at once."""

    def __init__(self):
        self.blocks, self.committed_tokens = {}, {}
        self.freed = asyncio.Event()

    def reserve(self, sequence, local_tokens):
        return _done(self.blocks[sequence.seq_id])

    def resume(self, seq_id, num_tokens, token_id, verified):
        self.committed_tokens[seq_id] = token_id
        return _done(seq_id)

    def accept(self, seq_id):
        return _done(None)

    def discard(self, seq_id):
        del self.committed_tokens[seq_id]
        return _done(None)

    def release(self, seq_id, quarantine_from=None):
        if quarantine_from is None:
            self.freed.set()
        return _done([])

    def end_quarantine(self, blocks):
        self.freed.set()
        return _done(None)


def _done(result):
    future = Future()
    future.set_result(result)
    return future


class Spans:
    """Keeps why a handoff ended."""

    trace_id = ""

    def __init__(self, reasons, handoff_id):
        self.end = lambda reason, preemptions=0: reasons.setdefault(handoff_id, reason)

    def reserved(self, *_):
        pass

    def committed(self):
        pass


async def answer(service, name, request):
    """To one call without gRPC; raises."""
    return await getattr(HandoffService, name)(service, request)


def acting(name):
    async def served(service, request):
        if inspect.isawaitable(waits := service.acts.get(name, bool)(request)):
            await waits
        try:
            return await answer(service, name, request)
        finally:
            service.handoffs.check()
            if name == "ready":
                service.asked.set()

    return served


class Service(HandoffService):
    """Calls `acts[name](request)`, which may raise or wait, before it serves that call."""

    offer, ready, commit, abort = map(acting, ("offer", "ready", "commit", "abort"))


class Decode:
    """A decode worker's side: a pool for each rank, links, handoffs, a gRPC server."""

    def __init__(
        self, transport, *more, incarnation="d", host=None, pools=None, see=None, timeout_s=10.0
    ):
        self.pools = pools or [make_pool(2, POOLS.get(transport.name, "host"))]
        self.pool = self.pools[0]
        self.content = self.pool.tensor.clone()
        self.record = register(incarnation, host=host)
        self.record.kv_pools = len(self.pools)
        kinds = [transport, *more]
        seen = see(self.pools, transport) if see else self.pools
        self.router = SimpleNamespace(outgoing=WorkerMessage(), failed=lambda *_: None)
        self.engine, self.reasons = Engine(), {}
        limits = ModelLimits(1000, 64, KvGroups((0,), BLOCK_SIZE))
        self.handoffs = Reservations(self.engine, limits, None, 600.0, timeout_s)
        self.links = IncomingLinks(
            seen, self.record, kinds, find, self.handoffs, timeout_s=timeout_s
        )
        self.service = Service(self.handoffs, self.links)
        self.server = rpc.server()
        self.service.acts, self.service.asked = {}, asyncio.Event()
        self.before = self.service.acts
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(self.service, self.server)

    async def __aenter__(self):
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.record.address = f"127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        await self.server.stop(0)
        self.handoffs.lost(self.router)
        await self.links.close()
        self.service.close_streams()
        for pool in self.pools:
            pool.area.close()

    @property
    def committed_tokens(self):
        return self.engine.committed_tokens

    def writing(self, handoff_id):
        """Whether a sender may write into its blocks."""
        self.handoffs.check()
        handoffs = self.handoffs._handoffs.values()
        return any(one.may_be_written for one in handoffs if one.handoff_id == handoff_id)

    async def asked(self):
        """Returns when a handoff's first message has been taken in."""
        await asyncio.wait_for(self.service.asked.wait(), WAIT_S)

    async def freed(self):
        """Returns when blocks have come back."""
        await asyncio.wait_for(self.engine.freed.wait(), WAIT_S)

    def cancel(self, handoff_id):
        """Gives a reservation up."""
        self.handoffs.cancel(self.router, handoff_id)

    def reserve(self, handoff_id, num_tokens, *ids, cached=0):
        """The target of a new handoff into these blocks; an earlier one of that id ends."""
        self.cancel(handoff_id)
        self.reasons.pop(handoff_id, None)
        self.engine.blocks[handoff_id] = Reserved(cached, ids, False)
        self.engine.freed.clear()
        sampling = common_pb2.SamplingParams(max_tokens=1)
        spec = common_pb2.SequenceSpec(
            handoff_id=handoff_id, token_ids=[1] * num_tokens, prompt_tokens=num_tokens,
            sampling=sampling,
        )  # fmt: skip
        request = decode_pb2.ReserveRequest(sequence=spec)
        self.handoffs.reserve(self.router, request, Spans(self.reasons, handoff_id))
        handoff = self.handoffs._handoffs[handoff_id]
        handoff.token, handoff.token_digest = f"token-{handoff_id}", b""
        return target(self.record.incarnation, handoff_id, cached)


def target(incarnation, handoff_id, cached=0):
    return prefill_pb2.HandoffTarget(
        incarnation=incarnation, reservation_token=f"token-{handoff_id}", cached_tokens=cached
    )


class Handed(HandoffSender):
    """A handoff whose Commit is queued and awaited in one call."""

    async def commit(self, first_token_id):
        self.conclude(first_token_id)
        return await self.committed()


class Prefill:
    """A prefill worker's side: its ranks' pools, and links. `waits` are those of its handoffs."""

    def __init__(
        self, transport, *more, incarnation="p", kv=DESCRIPTOR, pools=None, see=None, waits=None,
        **options,
    ):  # fmt: skip
        self.pools = pools or [make_pool(1, POOLS.get(transport.name, "host"))]
        self.pool, record = self.pools[0], register(incarnation, kv=kv)
        record.kv_pools = len(self.pools)
        seen = see(self.pools, transport) if see else self.pools
        self.links = OutgoingLinks(seen, record, [transport, *more], find, **options)
        self.tracer = NoOpTracer()
        self.waits = {"step_timeout_s": WAIT_S, "abort_wait_s": WAIT_S, **(waits or {})}

    def open(self, to, handoff_id, num_tokens, timeout_s):
        return Handed(self.links, self.tracer, to, handoff_id, num_tokens, timeout_s, **self.waits)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.links.close()
        for pool in self.pools:
            pool.area.close()

    def opened(self, decode, num_tokens, *ids, timeout_s=WAIT_S):
        """Handoff "h" of `num_tokens` into the blocks `ids`, reserved now."""
        to = decode.reserve("h", num_tokens, *ids)
        return self.open(to, "h", num_tokens, timeout_s)

    async def hand_over(self, to, handoff_id, *chunks, timeout_s=WAIT_S):
        """Sends chunks one after another and commits; returns the stats."""
        total = to.cached_tokens + sum(chunk.num_tokens for chunk in chunks)
        async with self.open(to, handoff_id, total, timeout_s) as handoff:
            for chunk in chunks:
                handoff.send(chunk)
            return await handoff.commit(7)


class Times:
    """Does something the first `times` times, or raises it; counts every call."""

    def __init__(self, times, act):
        self.times, self.act, self.calls = times, act, 0

    def __call__(self, *arguments):
        self.calls += 1
        if self.calls > self.times:
            return None
        if isinstance(self.act, Exception):
            raise self.act
        return self.act(*arguments)
