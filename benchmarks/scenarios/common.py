"""Clusters for the scenarios, the options that describe them, and small parts of reports."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.bench import servers
from baton.bench.generator import Run
from baton.bench.servers import RequestOptions, Server
from baton.bench.stats import percentile
from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.local.cluster import LocalCluster
from benchmarks.environment import console

TINY = Path(__file__).with_name("tiny.json")
_POLL_S = 0.5


def add_cluster_options(
    parser: argparse.ArgumentParser,
    workers: int,
    simulate: str = "",
    kv_blocks: int = 4096,
    chunk_tokens: int = 256,
) -> None:
    """How many workers of each role there are and what runs on them."""
    add = parser.add_argument
    add("--prefill", type=int, default=workers, help=f"prefill workers: {workers}")
    add("--decode", type=int, default=workers, help=f"decode workers: {workers}")
    speed = "TOKENS_PER_S,STEP_MS[,MS_PER_SEQUENCE]"
    text = f"simulated engines of this speed (default: {simulate or 'the demo model, computed'})"
    add("--simulate", default=simulate, metavar=speed, help=text)
    add("--kv-blocks", type=int, default=kv_blocks, help="of 16 tokens, each worker")
    add("--chunk-tokens", type=int, default=chunk_tokens, help="in one engine step")


def cluster(
    args: argparse.Namespace,
    router: Sequence[str] = (),
    programs: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> LocalCluster:
    """The cluster that the options describe; `router` are more of its router's options."""
    engine = EngineConfig(
        model=str(TINY) if args.simulate else "demo",
        random_weights=bool(args.simulate),
        simulate=args.simulate,
        kv_blocks=args.kv_blocks,
        chunk_tokens=args.chunk_tokens,
    )
    model = f"simulated engines ({args.simulate})" if args.simulate else "the demo model"
    console.print(
        f"{args.prefill} prefill and {args.decode} decode workers of {model}, {args.kv_blocks} KV "
        f"blocks and chunks of {args.chunk_tokens} tokens each"
    )
    config = ClusterConfig(engine=engine, port=0, prefill=args.prefill, decode=args.decode)
    return LocalCluster(config, extra_args={"router": router}, programs=programs)


def connected(url: str, **options: Any) -> AbstractAsyncContextManager[Server]:
    """A server as the generator sends to it."""
    return servers.connected(url, RequestOptions(**options))


async def blocks_held(address: str, wait_s: float = 20.0) -> int:
    """KV blocks held or quarantined on all workers once that is none, or after `wait_s`."""
    async with AsyncClient(address) as client, asyncio.timeout(wait_s + 10):
        for left in range(int(wait_s / _POLL_S), -1, -1):
            workers = (await client.status())["workers"]
            held = sum(w["blocks_held"] + w["blocks_quarantined"] for w in workers)
            if not held or not left:
                break
            await asyncio.sleep(_POLL_S)
        return int(held)


def spread(values_s: Iterable[float | None]) -> str:
    """p50, p99 and maximum of seconds, in ms."""
    known = [value for value in values_s if value is not None]
    p50, p99, most = (percentile(known, p) * 1e3 for p in (50, 99, 100))
    return f"p50 {p50:.1f} p99 {p99:.1f} max {most:.1f} ms"


def lag_of(run: Run) -> str:
    """How late requests were sent and how late the generator's own loop ran."""
    late, loop = spread(o.sent_s - o.at_s for o in run.outcomes), spread(run.loop_late_s)
    return f"generator: requests sent late by {late}, its event loop late by {loop}"
