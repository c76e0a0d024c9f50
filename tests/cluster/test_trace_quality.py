"""A request's spans explain its time, and those worth looking at are kept when few are sampled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection, Sequence

import pytest

from baton.client import AsyncClient, Completion
from baton.config import EngineConfig, RouterLimits
from baton.errors import DeadlineExceeded
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore, is_complete
from baton.local.trace_tree import coverage
from tests.cluster.conftest import ClusterFactory
from tests.cluster.oracle import all_blocks_free

# Nobody computes, so that a busy machine's time goes into what is measured here.
ENGINE = EngineConfig(dtype="float32", kv_cache_bytes=64 << 20, simulate="500,10")
PROMPT = tuple(range(300, 700))
SERVICES = {"baton-router", "baton-prefill", "baton-decode"}
LEAST_SHARE = 0.95
TRIES = 8  # on a busy machine a process may sleep between two spans
ARRIVAL_S = 20.0


async def trace_of(receiver: OtlpReceiver, trace_id: str, services: set[str]) -> list[Span]:
    return await receiver.store.wait_for(
        trace_id, lambda spans: is_complete(spans, services), ARRIVAL_S
    )


# How long the router waited for workers: whatever they did meanwhile.
WAITING = {"router.prefill", "router.stream"}


def share(spans: Sequence[Span], without: Collection[str] = ()) -> float:
    """Of the request's time that its spans explain, those of some names left out."""
    explained = coverage([span for span in spans if span.name not in without])
    assert explained is not None
    return explained.share


@pytest.mark.parametrize("new_tokens", [1, 30])
async def test_spans_account_for_a_requests_time(
    cluster_factory: ClusterFactory, traces: OtlpReceiver, new_tokens: int
) -> None:
    """All of them for any request, and for one of some length what the workers did."""
    shares, of_workers = [0.0], [0.0]
    cluster = await cluster_factory(otlp=traces.address, engine=ENGINE)
    async with AsyncClient(cluster.address) as client:
        for number in range(TRIES):
            salt = f"{new_tokens}-{number}"
            done = await client.generate(
                list(PROMPT), max_tokens=new_tokens, ignore_eos=True, cache_salt=salt
            )
            spans = await trace_of(traces, done.trace_id, SERVICES)
            shares.append(share(spans))
            of_workers.append(share(spans, without=WAITING))
            if min(max(shares), max(of_workers)) >= LEAST_SHARE:
                break
    assert max(shares) >= LEAST_SHARE, shares
    assert max(of_workers) >= LEAST_SHARE, of_workers


async def killed_midway(cluster: LocalCluster, client: AsyncClient) -> Completion:
    """A stream whose decode worker dies after some tokens."""
    stream = client.stream(list(PROMPT), max_tokens=60, ignore_eos=True, cache_salt="killed")
    tokens = 0
    async with stream:
        async for delta in stream:
            tokens += len(delta.token_ids)
            if tokens == 10:
                cluster.kill(await _running_decode(cluster, client))
    return stream.completion


async def _running_decode(cluster: LocalCluster, client: AsyncClient) -> str:
    """The name of the process that runs the one stream there is."""
    async with asyncio.timeout(ARRIVAL_S):
        while True:
            workers = (await client.status())["workers"]
            pids = {w["pid"] for w in workers if w["role"] == "decode" and w["running"]}
            if pids:
                names = {process.pid: name for name, process in cluster.processes.items()}
                return names[pids.pop()]
            await asyncio.sleep(0.02)


async def test_failed_and_slow_requests_are_kept_whatever_is_sampled(
    own_cluster: ClusterFactory,
) -> None:
    """Nothing is sampled here; what is kept comes from the router and from the workers it told."""
    limits = RouterLimits(trace_slow_s=3.0, slos=("loose:ttft=1000,tpot=1000",))
    async with OtlpReceiver(SpanStore()) as receiver:
        cluster = await own_cluster(
            otlp=receiver.address, engine=ENGINE, decode=2, restart=False, trace_sample=0.0,
            limits=limits, log_format="json",
        )  # fmt: skip
        async with AsyncClient(cluster.address) as client:
            healthy = await client.generate(list(range(400, 480)), max_tokens=5, ignore_eos=True)
            # 1,900 tokens at 500 a second.
            slow = await client.generate(list(range(100, 2000)), max_tokens=3)
            with contextlib.suppress(DeadlineExceeded):
                await client.generate(
                    list(PROMPT), max_tokens=1000, ignore_eos=True, timeout=3.0, cache_salt="late"
                )
            broken = await killed_midway(cluster, client)
            await all_blocks_free(client)
        assert healthy.route.attempts == 1 and broken.route.attempts > 1
        assert slow.timing.ttft_ms > 3000
        for done in (slow, broken):
            assert is_complete(await trace_of(receiver, done.trace_id, SERVICES), SERVICES)
        spans = receiver.store.trace(broken.trace_id)
        assert share(spans) >= LEAST_SHARE
        assert sum(span.name == "router.attempt" for span in spans) == broken.route.attempts
        failed = await _failed_trace(receiver)
        assert {span.service for span in failed} == SERVICES
        assert receiver.store.trace(healthy.trace_id) == []
        assert len(receiver.store) == 3
        _check_log(cluster, broken.trace_id)


async def _failed_trace(receiver: OtlpReceiver) -> list[Span]:
    """The one trace whose request ended with an error."""
    async with asyncio.timeout(ARRIVAL_S):
        while True:
            for trace_id in list(receiver.store._traces):
                spans = receiver.store.trace(trace_id)
                entry = [span for span in spans if span.name == "router.generate"]
                services = {span.service for span in spans}
                cut = any(one.error is not None or "baton.cancelled" in one.attributes
                          for one in entry)  # fmt: skip
                if cut and services == SERVICES:
                    return spans
            await asyncio.sleep(0.05)


def _check_log(cluster: LocalCluster, trace_id: str) -> None:
    """The line that tells of the failed attempt leads to its trace."""
    lines = [json.loads(line) for line in cluster.processes["router"].log if line.startswith("{")]
    (failed,) = (line for line in lines if line.get("trace_id") == trace_id)
    assert failed["logger"].startswith("router.dispatch") and failed["level"] == "warning"
    assert failed["request_id"] in failed["message"]
