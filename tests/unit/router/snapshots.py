"""Workers and snapshots made by hand, of real records, for tests of placement."""

import numpy as np

from baton.block_hash import hash_chain
from baton.v1 import common_pb2, worker_pb2
from router.fleet.kv_index import AssignedPrompt, KvIndex
from router.fleet.snapshot import Snapshot, WorkerView
from router.queueing.fair_queue import FairQueue
from router.request import Demand, TenantShare

BLOCK = 4
_TOKEN_OF_40_000_BYTES = {"num_layers": 10, "parts": 2, "num_kv_heads": 4, "head_size": 125}
PROMPT = tuple(range(100, 108))
INDEX, SLOTS = KvIndex(), {}


def worker(name, state="READY", reason="", tokens=0, sequences=0, caches=(), salt="", **fields):
    """A worker with chunks of 512 tokens and ten free blocks of four tokens of 40,000 bytes.

    `tokens` are assigned to it, due at 0; `caches` is a prompt whose whole blocks it caches.
    `fields` are a Load's, or a record's or its KV descriptor's where the Load has none.
    """
    kv = {"block_size": BLOCK, "dtype": "float32", **_TOKEN_OF_40_000_BYTES}
    load = {"blocks_total": 10, "blocks_free": 10, "chunk_tokens": 512}
    record = {"max_context": 64}
    for name_, value in fields.items():
        known = (worker_pb2.Load, load), (common_pb2.KvDescriptor, kv)
        target = next((t for m, t in known if name_ in m.DESCRIPTOR.fields_by_name), record)
        target[name_] = value
    return WorkerView(
        common_pb2.WorkerRecord(incarnation=name, kv=common_pb2.KvDescriptor(**kv), **record),
        worker_pb2.Load(**load),
        state,
        reason,
        (AssignedPrompt(tokens, 0.0),) if tokens else (),
        sequences,
        caching(caches, salt),
    )


def caching(prompt, salt=""):
    """The slot of workers that cache the whole blocks of a prompt."""
    hashes = tuple(hash_chain(tuple(prompt), BLOCK, salt))
    if hashes not in SLOTS:
        SLOTS[hashes] = INDEX.join()
        INDEX.store(SLOTS[hashes], hashes)
    return SLOTS[hashes]


def pending(virtual_finish, fair_s=0.0, tenant="t"):
    """A prompt with that virtual finish, of a tenant that is alone; in so many seconds."""
    fair_queue, flow = FairQueue(lambda: 0.0), TenantShare(tenant)
    fair_queue.remove(fair_queue.add(flow, virtual_finish - fair_s), computed=True)
    return fair_queue.add(flow, fair_s)


def fleet(prefill, decode, excluded=None, decode_alone=False, mixed=()):
    """A snapshot of workers with these roles."""
    views = []
    for role, each in (("PREFILL", prefill), ("DECODE", decode), ("MIXED", mixed)):
        for view in each:
            view.record.role = common_pb2.WorkerRole.Value(f"WORKER_ROLE_{role}")
            views.append(view)
    views.sort(key=lambda view: view.incarnation)
    return Snapshot(tuple(views), excluded or {}, INDEX, decode_alone)


def prefill_views(snapshot):
    """The views of the prefill workers."""
    return _with_role(snapshot, common_pb2.WORKER_ROLE_PREFILL)


def decode_views(snapshot):
    """The views of the decode workers."""
    return _with_role(snapshot, common_pb2.WORKER_ROLE_DECODE)


def _with_role(snapshot, role):
    return tuple(view for view in snapshot.workers if view.record.role == role)


def usable_pairs(snapshot):
    """Their names."""
    pairs = np.argwhere(snapshot.usable())
    return {tuple(snapshot.workers[row].incarnation for row in pair) for pair in pairs}


def queued(pending, tokens, **fields):
    """A demand in the wait queue, of which only the number of tokens counts."""
    return Demand(range(tokens), pending, **fields)


def needs(prompt=PROMPT, virtual_finish=1.0, **more):
    """A request whose prompt is `prompt`, or so many tokens; decode never computes it by itself."""
    tokens = tuple(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    return Demand(tokens, pending(virtual_finish), **{"max_itl_s": 0.05, **more})
