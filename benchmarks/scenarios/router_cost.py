"""What do a router and its HTTP gateway cost, with workers that take no time?

Workers are simulated with steps of no length, so what is left is Python and gRPC: the router, the
control path of the workers, and the client. First one caller, for latencies; then many, for
throughput and CPU seconds of each process for 1,000 requests. A request has a prompt of 16 tokens,
which decode computes by itself.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import psutil

from baton.bench.generator import Generator, Run
from baton.bench.servers import Server
from baton.bench.terminal import table
from baton.bench.workload import Lengths, Workload
from baton.config import ClusterConfig, EngineConfig
from baton.local import ports
from baton.local.cluster import LocalCluster
from benchmarks.environment import console
from benchmarks.scenarios.common import connected, spread


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1000, help="of each kind: 1000")
    parser.add_argument("--callers", type=int, default=32, help="32")
    parser.add_argument("--tokens", type=int, default=32, help="of output: 32")
    text = "of the router: 1; gRPC's one connection reaches one, HTTP's one for each caller all"
    parser.add_argument("--router-processes", type=int, default=1, metavar="N", help=text)


async def main(args: argparse.Namespace) -> None:
    # The demo model for its tokenizer: without one, streams over HTTP would carry empty texts.
    engine = EngineConfig(simulate="1e9,0", prefix_cache=False)
    http = ports.free()
    gateway = f"http://127.0.0.1:{http}"
    load = Workload(
        prompt_lengths=Lengths(16, 16), output_lengths=Lengths(args.tokens, args.tokens)
    )

    async def send(server: Server, seed: int, count: int, callers: int) -> Run:
        demands = replace(load, concurrency=callers, count=count, seed=seed).demands()
        run = await Generator(server).closed_loop(demands, callers)
        assert run.ok == count, run.outcomes[0].message
        return run

    one: list[list[str]] = []
    many: list[list[str]] = []
    config = ClusterConfig(
        engine=engine, port=0, http_port=http, router_processes=args.router_processes
    )
    async with LocalCluster(config) as cluster:
        processes = {n: psutil.Process(p.pid) for n, p in cluster.processes.items()}
        processes["client"] = psutil.Process()
        for name, url in (("gRPC", cluster.address), ("HTTP", gateway)):
            async with connected(url) as server:
                await send(server, 0, 50, 1)  # warms up
                outcomes = (await send(server, 1, args.requests // 2, 1)).outcomes
                first, end = (o.ttft_s for o in outcomes), (o.ended_s for o in outcomes)
                one.append([name, spread(first), spread(end)])
                before = {n: sum(p.cpu_times()[:2]) for n, p in processes.items()}
                run = await send(server, 2, args.requests, args.callers)
                spent = [sum(p.cpu_times()[:2]) - before[n] for n, p in processes.items()]
            per_1000 = [f"{cpu_s * 1000 / args.requests:.2f}" for cpu_s in spent]
            many.append([name, f"{args.requests / run.seconds:.0f}", *per_1000])
    console.print(table("one caller", ("first output", "end"), one))
    columns = ("requests/s", *(f"{name}, CPU s per 1,000" for name in processes))
    console.print("", table(f"{args.callers} callers", columns, many), sep="\n")
