"""Workers that hang without exiting: sockets open, lease alive, no message.

They are stopped with SIGSTOP. Bounds on gaps are loose, for a busy machine; `docs/failures.md`
has those of a quiet one.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.client import AsyncClient, Completion
from baton.local.cluster import LocalCluster
from tests.cluster.conftest import ClusterFactory
from tests.cluster.oracle import Case, Oracle, all_blocks_free, check
from tests.cluster.streams import Streams, mixed_cases
from tests.waiting import eventually

SILENT_GAP_S = 3.0  # docs/failures.md
BACK_S = 30.0


@asynccontextmanager
async def stopped(cluster: LocalCluster, name: str) -> AsyncIterator[None]:
    """The process is stopped within the block and always continued after it."""
    cluster.kill(name, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.kill(name, signal.SIGCONT)


async def view(client: AsyncClient, cluster: LocalCluster, name: str) -> dict[str, Any]:
    """A worker as the router sees it; empty when it does not."""
    pid = cluster.processes[name].pid
    status = await client.status()
    found: list[dict[str, Any]] = [w for w in status["workers"] if w["pid"] == pid]
    return found[0] if found else {}


async def seen_as(client: AsyncClient, cluster: LocalCluster, name: str, state: str) -> str:
    """Returns the worker's incarnation once the router sees it in that state."""

    async def look() -> dict[str, Any]:
        return await view(client, cluster, name)

    worker = await eventually(look, lambda w: w.get("state") == state, f"{name}: {state}", BACK_S)
    return str(worker["incarnation"])


async def test_a_stopped_decode_worker_costs_no_token_and_gets_nothing_new(
    repaired_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """24 of 24 streams go on elsewhere; once it continues it holds no block and is used again."""
    cluster = await repaired_cluster(prefill=2, decode=2)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, mixed_cases(oracle, 24))
        running = await streams.start()
        async with stopped(cluster, "decode-0"):
            incarnation = await seen_as(client, cluster, "decode-0", "SILENT")
            case = Case(oracle.prompt(100, start=4000), "greedy")
            for number in range(6):
                done = await check(client, oracle, case, cache_salt=f"later-{number}")
                assert done.route.decode != incarnation, "it was suspected"
                assert done.route.attempts == 1
            done_all = await running
            assert any(one.route.attempts > 1 for one in done_all), "no stream was hit"
            streams.check_gap(SILENT_GAP_S)
        assert await seen_as(client, cluster, "decode-0", "READY") == incarnation
        await all_blocks_free(client)

        salts = itertools.count()

        async def used_again() -> bool:
            asked = (check(client, oracle, case, cache_salt=f"{next(salts)}") for _ in range(4))
            return any(one.route.decode == incarnation for one in await asyncio.gather(*asked))

        await eventually(used_again, bool, "it is not used again", BACK_S)
        await all_blocks_free(client)


async def check_lost(running: Awaitable[list[Completion]], incarnation: str) -> None:
    """All complete, at least one after a second attempt, and none on the lost worker."""
    done = await running
    assert any(one.route.attempts > 1 for one in done), "no stream was hit"
    assert incarnation not in {one.route.prefill for one in done}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_prefill_worker_lost_in_the_middle_of_a_prompt_is_replaced(
    repaired_cluster: ClusterFactory, oracle: Oracle, how: signal.Signals
) -> None:
    """Its prompts are computed elsewhere; once it continues, it overwrites no other blocks."""
    cluster = await repaired_cluster(
        prefill=2, decode=1, extra_args={"prefill": ["--chunk-tokens", "64"]}
    )
    first = 31 if how == signal.SIGKILL else 700  # other prompts: nothing of them is cached
    cases = [Case(oracle.prompt(1700, start=first + 31 * n), ("greedy", "seeded")[n % 2])
             for n in range(4)]  # fmt: skip
    for case in cases:
        oracle.tokens(case)
    async with AsyncClient(cluster.address) as client:
        await check(client, oracle, Case(oracle.prompt(60, start=5000), "greedy"))

        async def computes() -> bool:
            return bool((await view(client, cluster, "prefill-0")).get("queue_tokens"))

        running = asyncio.gather(*(check(client, oracle, case) for case in cases))
        await eventually(computes, bool, "prefill-0 got no prompt")
        lost = (await view(client, cluster, "prefill-0"))["incarnation"]
        if how == signal.SIGKILL:
            cluster.kill("prefill-0")
            await check_lost(running, lost)
            await all_blocks_free(client)
            return
        async with stopped(cluster, "prefill-0"):
            await seen_as(client, cluster, "prefill-0", "SILENT")
            await check_lost(running, lost)
        await seen_as(client, cluster, "prefill-0", "READY")
        again = [check(client, oracle, case, cache_salt="again") for case in cases]
        await asyncio.gather(*again)
        await all_blocks_free(client)


async def test_a_worker_that_stops_for_a_moment_keeps_its_streams(
    own_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """Half of what counts as silence: its streams pause and go on where they are."""
    cluster = await own_cluster(
        prefill=1, decode=1, restart=False, extra_args={"router": ["--silence", "20"]}
    )
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, mixed_cases(oracle, 4))
        running = await streams.start()
        async with stopped(cluster, "decode-0"):
            await asyncio.sleep(1.0)
        assert {one.route.attempts for one in await running} == {1}
        assert streams.largest_gap_s > 0.5
        await all_blocks_free(client)


async def test_a_stopped_router_suspects_no_worker(
    repaired_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """Silence is counted in ticks of the router's own loop."""
    cluster = await repaired_cluster(prefill=2, decode=2)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, mixed_cases(oracle, 4))
        running = await streams.start()
        async with stopped(cluster, "router"):
            await asyncio.sleep(4.0)
        assert {one.route.attempts for one in await running} == {1}
        await all_blocks_free(client)
