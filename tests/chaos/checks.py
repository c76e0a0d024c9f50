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
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from baton import rpc
from baton.client import AsyncClient
from baton.errors import BatonError
from baton.local.cluster import LocalCluster
from baton.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.waiting import eventually

ANSWER_S = 10.0
# What a process may hold more than after its warm-up: connections to processes that came later.
SLACK = {"tasks": 12, "threads": 6, "files": 16}

Holdings = dict[str, dict[str, int]]  # kind of thing -> name -> count


async def busy_workers(cluster: LocalCluster) -> list[str]:
    """Workers that still hold something, as they say themselves."""
    records = cluster.membership.records.values()
    return list(chain(*await asyncio.gather(*(_busy_worker(record) for record in records))))


async def busy_routers(cluster: LocalCluster) -> list[str]:
    """Routers that still have requests."""
    found = []
    for address in cluster.addresses:
        async with AsyncClient(address) as client:
            router = (await client.status())["router"]
        for kind in ("queued", "running"):
            found += [f"router {address} has {router[kind]} {kind}"] if router[kind] else []
    return found


async def _busy_worker(record: common_pb2.WorkerRecord) -> list[str]:
    name = f"worker {record.incarnation} (pid {record.pid})"
    try:
        async with rpc.channel(record.address) as channel:
            with rpc.translated():
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                answer = await stub.Describe(worker_pb2.DescribeRequest(), timeout=ANSWER_S)
    except BatonError as error:
        return [f"{name} does not respond: {error}"]
    load = answer.load
    counts = {
        "held": load.blocks_held,
        "quarantined": load.blocks_quarantined,
        "running": load.running,
        "waiting": load.waiting,
        "queued tokens": load.queue_tokens,
        "lost": load.blocks_total
        - sum((load.blocks_free, load.blocks_cached, load.blocks_held, load.blocks_quarantined)),
    }
    return [f"{name} has {count} {kind}" for kind, count in counts.items() if count]


async def holdings(cluster: LocalCluster, directory: Path) -> dict[int, Holdings]:
    """What each process of `tests.chaos.process` holds now, by pid."""
    held = {}
    for pid in [process.pid for process in cluster.processes.values() if process.running]:
        path = directory / f"{pid}.json"
        path.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR1)
        written = partial(asyncio.to_thread, path.exists)
        await eventually(written, bool, f"process {pid} answers no SIGUSR1")
        held[pid] = json.loads(path.read_text())
    return held


def leaks(before: Mapping[int, Holdings], after: Mapping[int, Holdings]) -> list[str]:
    """What processes that lived through it hold more than before, beyond the slack."""
    found = []
    for pid in before.keys() & after.keys():
        for kind, slack in SLACK.items():
            old, new = before[pid][kind], after[pid][kind]
            if sum(new.values()) > sum(old.values()) + slack:
                grown = {name: n - old.get(name, 0) for name, n in new.items()}
                more = {name: n for name, n in grown.items() if n > 0}
                found.append(f"pid {pid} holds more {kind}: {more}")
    return found


async def stale_mappings(cluster: LocalCluster) -> list[str]:
    """KV pools that stay mapped although their workers are gone; one for each worker is right."""
    pids = [p.pid for p in cluster.processes.values() if p.running and p.role != "router"]
    mapped = {pid: _mapped(pid) for pid in pids}
    pools = set().union(*mapped.values())
    counts = {pid: len(names) for pid, names in mapped.items()}
    what = f"{len(pools)} pools of {len(pids)} workers are mapped, by pid {counts}"
    return [what] if len(pools) > len(pids) else []


def _mapped(pid: int) -> set[str]:
    return set(re.findall("/memfd:.*", Path(f"/proc/{pid}/maps").read_text()))
