"""What must hold of a cluster after chaos: no block held, nothing leaked, no memory mapped.

Looks at the processes from outside, and asks the workers themselves, not the router. Each check
returns what is wrong now, a line each.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from baton.client import AsyncClient
from baton.errors import BatonError
from baton.local.cluster import LocalCluster
from baton.net import rpc
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.v1.common_pb2 import WorkerRecord
from tests.waiting import eventually

ANSWER_S = 10.0
# What a process may hold more than after its warm-up: connections to processes that came later, and
# MiB of copies that `tests.chaos.kv_faults` makes.
SLACK = {"tasks": 12, "threads": 6, "files": 16, "memory": 256}

Holdings = dict[str, dict[str, int]]  # kind of thing -> name -> count


async def load_of(record: WorkerRecord) -> worker_pb2.Load:
    """A worker's load, as it says itself. Raises BatonError."""
    async with rpc.channel(record.address) as channel:
        with rpc.translated():
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            answer = await stub.Describe(worker_pb2.DescribeRequest(), timeout=ANSWER_S)
    load: worker_pb2.Load = answer.load
    return load


def used_links(pairs: Iterable[Mapping[str, Any]], living: Collection[str]) -> set[tuple[str, str]]:
    """The pairs of living workers that have handed KV over, by the names of their processes.

    `pairs`: of the SDK's status. `living`: incarnations.
    """
    return {
        (one["prefill"].rpartition("-")[0], one["decode"].rpartition("-")[0])
        for one in pairs
        if one["sent_bytes"] and one["prefill"] in living and one["decode"] in living
    }


async def busy_workers(cluster: LocalCluster) -> list[str]:
    """Workers that still hold something, as they say themselves."""
    found = []
    for record in cluster.membership.records.values():
        name = f"worker {record.incarnation} (pid {record.pid})"
        try:
            load = await load_of(record)
        except BatonError as error:
            found.append(f"{name} does not respond: {error}")
            continue
        held, quarantined = load.blocks_held, load.blocks_quarantined
        counts = {
            "held": held,
            "quarantined": quarantined,
            "running": load.running,
            "waiting": load.waiting,
            "queued tokens": load.queue_tokens,
            "lost": load.blocks_total - load.blocks_free - load.blocks_cached - held - quarantined,
        }
        found += [f"{name} has {count} {kind}" for kind, count in counts.items() if count]
    return found


async def busy_routers(cluster: LocalCluster) -> list[str]:
    """Routers that still have requests."""
    found = []
    for address in cluster.addresses:
        async with AsyncClient(address) as client:
            router = (await client.status())["router"]
        for kind in ("queued", "running"):
            found += [f"router {address} has {router[kind]} {kind}"] if router[kind] else []
    return found


async def holdings(cluster: LocalCluster, directory: Path) -> dict[str, Holdings]:
    """What each process of `tests.chaos.process` holds now, by name."""
    held = {}
    for name, pid in [(one.name, one.pid) for one in cluster.processes.values() if one.running]:
        path = directory / f"{pid}.json"
        path.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR2)
        written = partial(asyncio.to_thread, path.exists)
        await eventually(written, bool, f"process {pid} answers no SIGUSR2")
        held[name] = json.loads(path.read_text())
    return held


def leaks(before: Mapping[str, Holdings], after: Mapping[str, Holdings]) -> list[str]:
    """What processes, or their successors, hold more than before, beyond the slack."""
    found = []
    for process in before.keys() & after.keys():
        for kind, slack in SLACK.items():
            old, new = before[process][kind], after[process][kind]
            if sum(new.values()) > sum(old.values()) + slack:
                grown = {name: n - old.get(name, 0) for name, n in new.items()}
                more = {name: n for name, n in grown.items() if n > 0}
                found.append(f"{process} holds more {kind}: {more}")
    return found


async def stale_mappings(cluster: LocalCluster) -> list[str]:
    """KV pools that stay mapped although their workers are gone; each rank has its own."""
    pids = [p.pid for p in cluster.processes.values() if p.running and p.role != "router"]
    mapped = {pid: set(_mapped(pid)) for pid in pids}
    pools, counts = set().union(*mapped.values()), {pid: len(of) for pid, of in mapped.items()}
    own = sum(max(record.kv_pools, 1) for record in cluster.membership.records.values())
    what = f"{len(pools)} pools of {len(pids)} workers are mapped, by pid {counts}"
    return [what] if len(pools) > own else []


def _mapped(pid: int) -> list[str]:
    return re.findall("/memfd:baton-kv-.*", Path(f"/proc/{pid}/maps").read_text())
