"""Runs generators beside a cluster, and watches the router's memory meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from baton.client import AsyncClient
from load.arrivals import Load
from load.outcomes import Run

_GENERATOR = Path(__file__).with_name("generator.py")
_SAMPLE_S = 0.5


async def drive(load: Load) -> Run:
    """Runs one load in a generator's process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(_GENERATOR),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ,
    )
    try:
        written, _ = await process.communicate(json.dumps(load.to_json()).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"the generator exited with status {process.returncode}")
    return Run.from_json(json.loads(written))


@asynccontextmanager
async def memory_of(pid: int) -> AsyncIterator[list[int]]:
    """Resident bytes of a process, sampled as long as the block runs."""
    samples: list[int] = []

    async def sample() -> None:
        process = psutil.Process(pid)
        while True:
            samples.append(process.memory_info().rss)
            await asyncio.sleep(_SAMPLE_S)

    task = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def blocks_held(address: str, wait_s: float) -> int:
    """KV blocks held or quarantined on all workers once that is none, or after `wait_s`."""
    async with AsyncClient(address) as client, asyncio.timeout(wait_s + 10):
        for _ in range(int(wait_s / _SAMPLE_S)):
            if not await _held(client):
                break
            await asyncio.sleep(_SAMPLE_S)
        return await _held(client)


async def _held(client: AsyncClient) -> int:
    status = await client.status()
    return sum(w["blocks_held"] + w["blocks_quarantined"] for w in status["workers"])
