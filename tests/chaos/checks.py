"""What must hold of a cluster after chaos: no block held, nothing leaked, no process left.

Looks at the processes from outside, and asks the workers themselves, not the router.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

from baton import rpc
from baton.client import AsyncClient
from baton.errors import BatonError
from baton.local import ports
from baton.local.cluster import LocalCluster
from baton.v1 import worker_pb2, worker_pb2_grpc
from tests.waiting import eventually

IDLE_S = 45.0  # a reservation's lease is 30 s, and nothing may be held after it
ANSWER_S = 10.0
RELEASE_S = 15.0
# What a process may hold more than after its warm-up: connections to processes that came later.
SLACK = {"tasks": 12, "threads": 6, "files": 16}

Found = TypeVar("Found")
Holdings = dict[str, dict[str, int]]  # kind of thing -> name -> count


async def _until_empty(look: Callable[[], Awaitable[Found]], timeout_s: float) -> Found:
    """Looks until nothing is found, or returns what is still found after the timeout."""
    try:
        return await eventually(look, lambda found: not found, "", timeout_s)
    except AssertionError:
        return await look()


async def wait_idle(cluster: LocalCluster) -> dict[str, str]:
    """Waits until no worker holds anything; what is still held then, by worker."""
    return await _until_empty(lambda: busy_workers(cluster), IDLE_S)


async def busy_workers(cluster: LocalCluster) -> dict[str, str]:
    """What each worker that is not idle holds, as it says itself."""
    records = list(cluster.membership.records.values())
    said = await asyncio.gather(*(_describe(record.address) for record in records))
    return {
        f"{record.role}/{record.incarnation} (pid {record.pid})": what
        for record, what in zip(records, said, strict=True)
        if what
    }


async def _describe(address: str) -> str:
    try:
        async with rpc.channel(address) as channel:
            with rpc.translated():
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                answer = await stub.Describe(worker_pb2.DescribeRequest(), timeout=ANSWER_S)
    except BatonError as error:
        return f"does not respond: {error}"
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
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


async def busy_routers(addresses: Iterable[str]) -> dict[str, str]:
    """Routers that still count requests after the last one has ended."""

    async def busy() -> dict[str, str]:
        found = {}
        for address in addresses:
            async with AsyncClient(address) as client:
                router = (await client.status())["router"]
            if router["queued"] or router["running"]:
                found[address] = f"{router['queued']} queued, {router['running']} running"
        return found

    return await _until_empty(busy, IDLE_S)


async def holdings(cluster: LocalCluster, directory: Path) -> dict[int, Holdings]:
    """What each process of `tests.chaos.process` holds now, by pid."""
    pids = [process.pid for process in cluster.processes.values() if process.running]
    return dict(zip(pids, [await _holding(pid, directory) for pid in pids], strict=True))


async def _holding(pid: int, directory: Path) -> Holdings:
    path = directory / f"{pid}.json"
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)

    async def written() -> bool:
        return path.exists()

    await eventually(written, bool, f"process {pid} does not respond SIGUSR1")
    held: Holdings = json.loads(path.read_text())
    return held


async def wait_no_leaks(
    cluster: LocalCluster, directory: Path, before: Mapping[int, Holdings]
) -> list[str]:
    """Waits until no process holds more than before; what is still held."""

    async def found() -> list[str]:
        return leaks(before, await holdings(cluster, directory))

    return await _until_empty(found, RELEASE_S)


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

    async def found() -> list[str]:
        workers = [p.pid for p in cluster.processes.values() if p.running and p.role != "router"]
        mapped = {pid: _mapped(pid) for pid in workers}
        pools = set().union(*mapped.values())
        if len(pools) <= len(workers):
            return []
        counts = {pid: len(names) for pid, names in mapped.items()}
        return [f"{len(pools)} pools of {len(workers)} workers are mapped, by pid {counts}"]

    return await _until_empty(found, RELEASE_S)


def _mapped(pid: int) -> set[str]:
    return set(re.findall("/memfd:.*", Path(f"/proc/{pid}/maps").read_text()))


def leftovers(processes: Iterable[psutil.Process], used_ports: Iterable[int]) -> list[str]:
    """Processes and ports of a stopped cluster that are still there."""
    found = [f"process {process.pid} still runs" for process in processes if _runs(process)]
    for port in used_ports:
        try:
            ports.check_free("127.0.0.1", port)
        except BatonError as error:
            found.append(str(error))
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
