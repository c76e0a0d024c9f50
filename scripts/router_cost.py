"""What a router and its HTTP gateway cost, with workers that take no time.

    python scripts/router_cost.py

Workers are simulated with steps of no length, so what is left is Python and gRPC: the router, the
control path of the workers, and the client here. First one caller on one keep-alive connection, for
latencies; then many, for throughput and CPU-seconds of each process. A request has a prompt of 16
tokens, which decode computes by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.local import ports
from baton.local.cluster import LocalCluster

TINY = Path(__file__).parent / "load" / "tiny.json"
PROMPT_TOKENS = 16
Request = Callable[[int], Awaitable[float]]  # the n-th one; seconds to its first output


def prompt(number: int) -> list[int]:
    """Token ids that share no prefix with another request's."""
    return [10 + (31 * number + 7 * i) % 900 for i in range(PROMPT_TOKENS)]


def over_grpc(client: AsyncClient, new_tokens: int) -> Request:
    """Streams over gRPC, through the SDK."""

    async def send(number: int) -> float:
        began, first = time.perf_counter(), 0.0
        options: dict[str, Any] = {"max_tokens": new_tokens, "ignore_eos": True}
        async for _ in client.stream(prompt(number), **options):
            first = first or time.perf_counter() - began
        return first

    return send


def over_http(session: aiohttp.ClientSession, base: str, new_tokens: int, stream: bool) -> Request:
    """Completions over HTTP, streamed or whole."""

    async def send(number: int) -> float:
        body = {
            "model": "tiny",
            "prompt": prompt(number),
            "max_tokens": new_tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        began, first = time.perf_counter(), 0.0
        async with session.post(f"http://{base}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.content.iter_any():
                first = first or time.perf_counter() - began
        return first

    return send


async def latencies(send: Request, count: int) -> str:
    """One caller: milliseconds to the first output and to the end, p50 and p99."""
    firsts, ends = [], []
    for number in range(count):
        began = time.perf_counter()
        firsts.append(await send(number))
        ends.append(time.perf_counter() - began)
    return f"{_spread(firsts)} | {_spread(ends)}"


async def throughput(
    send: Request, count: int, callers: int, processes: Mapping[str, psutil.Process]
) -> str:
    """Many callers: requests a second, and CPU-seconds of each process per 1,000 requests."""
    numbers = iter(range(count, 2 * count))
    before = {name: _cpu_s(process) for name, process in processes.items()}
    began = time.perf_counter()

    async def caller() -> None:
        for number in numbers:
            await send(number)

    await asyncio.gather(*(caller() for _ in range(callers)))
    rate = count / (time.perf_counter() - began)
    spent = {name: (_cpu_s(p) - before[name]) * 1000 / count for name, p in processes.items()}
    return f"{rate:.0f} | " + " | ".join(f"{seconds:.2f}" for seconds in spent.values())


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _spread(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"{cuts[49] * 1e3:.2f}, {cuts[98] * 1e3:.2f}"


async def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, help="of each kind")
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="of output")
    args = parser.parse_args()
    engine = EngineConfig(
        model=str(TINY), random_weights=True, simulate="1e9,0", prefix_cache=False
    )
    http_port = ports.free("127.0.0.1")
    config = ClusterConfig(engine=engine, port=0, http_port=http_port, model_name="tiny")
    async with (
        LocalCluster(config) as cluster,
        AsyncClient(cluster.address) as client,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        base = f"127.0.0.1:{http_port}"
        kinds = {
            "gRPC, streamed": over_grpc(client, args.tokens),
            "HTTP, streamed": over_http(session, base, args.tokens, stream=True),
            "HTTP, whole": over_http(session, base, args.tokens, stream=False),
        }
        processes = {n: psutil.Process(p.pid) for n, p in cluster.processes.items()}
        processes["client"] = psutil.Process()
        print("one caller | first output p50, p99 ms | end p50, p99 ms")
        for name, send in kinds.items():
            await latencies(send, 50)
            print(f"{name} | {await latencies(send, args.requests // 2)}", flush=True)
        print(f"{args.callers} callers | requests/s | CPU-s per 1,000: {' | '.join(processes)}")
        for name, send in kinds.items():
            told = await throughput(send, args.requests, args.callers, processes)
            print(f"{name} | {told}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
