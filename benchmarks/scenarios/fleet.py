"""One router in front of a thousand workers.

The router is the real one, as `baton up` starts it, beside its etcd. Of the workers everything is
real that the two see: records under leases, gRPC servers, load reports, heartbeats and step events
(`fleet_workers.py`: a process for all prefill workers, another for all decode workers). Engines are
timers. First the router starts while all workers are there; then it is left alone, which shows what
heartbeats cost; then requests arrive, Poisson: chat messages of about 70 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.bench import servers
from baton.bench.generator import Generator, Run
from baton.bench.request import RequestOptions
from baton.bench.stats import percentile
from baton.bench.workload import Lengths, Workload
from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig, RouterLimits
from baton.local.cluster import LocalCluster
from baton.tables import align
from benchmarks.child import Failed
from benchmarks.environment import cores, machine
from benchmarks.scenarios import fleet_workers

_WORDS = 58  # of a prompt: 70 tokens with the template
_SEEN_S, _POLL_S = 120.0, 0.2
_MIB = 2**20
_MOST_SHOWN = 5
# Of which process, and series.
_HISTOGRAMS = {
    "event-loop lag": ("router", "baton_event_loop_lag_seconds_bucket"),
    "choice of workers": ("router", "baton_placement_duration_seconds_bucket"),
    "lag of prefill workers": ("prefill-0", "baton_event_loop_lag_seconds_bucket"),
    "lag of decode workers": ("decode-0", "baton_event_loop_lag_seconds_bucket"),
}
_ETCD = {
    "calls": "grpc_server_started_total",
    "bytes in": "etcd_network_client_grpc_received_bytes_total",
    "bytes out": "etcd_network_client_grpc_sent_bytes_total",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=1000, help="half of them prefill: 1000")
    add("--rate", type=float, default=50.0, help="requests a second: 50")
    add("--seconds", type=float, default=120.0, help="of requests: 120")
    add("--idle", type=float, default=10.0, help="seconds without requests before: 10")
    add("--tokens", type=int, default=32, help="of output: 32")
    add("--simulate", default="8000,20", help="speed of a worker, as of `baton up`: 8000,20")
    add("--silence", type=float, default=RouterLimits.silence_s, help="as of `baton router`")


async def main(args: argparse.Namespace) -> int:
    here = machine(cores(), len(cores()))
    print(f"{here['processor']}, {len(cores())} cores, load before {here['load_before']}")
    program = (sys.executable, fleet_workers.__file__, str(args.workers // 2))
    config = ClusterConfig(
        engine=EngineConfig(simulate=args.simulate),
        limits=RouterLimits(silence_s=args.silence),
        port=0,
        metrics_port=0,
    )
    programs = {"prefill": program, "decode": program}
    async with LocalCluster(config, programs=programs) as cluster:
        await cluster.restart("router")
        await _until_ready(cluster, args.workers)
        ready_s = cluster.processes["router"].age_s
        print(f"all {args.workers} READY {ready_s:.1f} s after the router's start")
        before = await _Reading.take(cluster)
        await asyncio.sleep(args.idle)
        after = await _Reading.take(cluster)
        print("", *after.since(before, "without requests"), sep="\n")
        load = Workload(
            rate=args.rate,
            duration_s=args.seconds,
            prompt_lengths=Lengths(_WORDS, _WORDS),
            output_lengths=Lengths(args.tokens, args.tokens),
        )
        async with servers.connected(cluster.address, RequestOptions(prompt_form="chat")) as server:
            await Generator(server).closed_loop(Workload(count=16).demands(), 4)  # warms up
            before = await _Reading.take(cluster)
            run = await Generator(server).open_loop(load.demands())
            after = await _Reading.take(cluster)
        print("", *after.since(before, f"{args.rate:g} requests/s"), sep="\n")
        await _until_ready(cluster, args.workers)
    ended = Counter(o.status if o.ok else f"{o.status}: {o.message}" for o in run.outcomes)
    handed_over = sum(bool(o.finish and o.finish.route.prefill) for o in run.outcomes)
    print(f"{run.ok / run.seconds:.1f} requests/s ended well of {args.rate:g}")
    for how, count in ended.most_common(_MOST_SHOWN):
        print(f"{count:6} {how}")
    print(f"handed over by a prefill worker: {handed_over}")
    print(f"TTFT {spread(o.ttft_s for o in run.outcomes)}")
    timings = [o.finish.timing for o in run.outcomes if o.finish]
    print(f"of it until placed {spread(t.queue_ms / 1e3 for t in timings)}")
    print(f"in the router's sight {spread(t.ttft_ms / 1e3 for t in timings)}")
    print(lag_of(run))
    return int(run.failed > 0)


async def _until_ready(cluster: LocalCluster, workers: int) -> None:
    """Returns once the router finds this many READY. Raises Failed with their states."""
    states: Counter[str] = Counter()
    try:
        async with asyncio.timeout(_SEEN_S), AsyncClient(cluster.address) as client:
            while states["READY"] < workers:
                await asyncio.sleep(_POLL_S)
                status = await client.status()
                states = Counter(worker["state"] for worker in status["workers"])
    except TimeoutError:
        found = f"after {_SEEN_S:g} s the router finds workers {dict(states)}"
        raise Failed(found) from None


@dataclass
class _Reading:
    """Totals at one moment."""

    at: float
    cpu_s: Mapping[str, float]  # by process
    rss: int  # of the router
    buckets: Mapping[str, Mapping[float, float]]  # of histograms: cumulative counts by bound
    sent: Counter[str]  # messages of workers, by kind
    etcd: Counter[str]

    @classmethod
    async def take(cls, cluster: LocalCluster) -> _Reading:
        pids = {name: process.pid for name, process in cluster.processes.items()}
        assert cluster.etcd is not None and cluster.etcd.pid is not None
        pids |= {"etcd": cluster.etcd.pid, "client": os.getpid()}
        times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
        buckets = {
            what: {
                float(sample.labels["le"]): sample.value
                for sample in await _samples(cluster.metrics[name], series)
            }
            for what, (name, series) in _HISTOGRAMS.items()
        }
        sent, etcd = Counter[str](), Counter[str]()
        for name in ("prefill-0", "decode-0"):
            for sample in await _samples(cluster.metrics[name], "sent_total"):
                sent[sample.labels["kind"]] += int(sample.value)
        for what, series in _ETCD.items():
            for sample in await _samples(cluster.etcd_address, series):
                etcd[what] += int(sample.value)
        return cls(
            time.monotonic(),
            {name: spent.user + spent.system for name, spent in times.items()},
            psutil.Process(pids["router"]).memory_info().rss,
            buckets,
            sent,
            etcd,
        )

    def since(self, before: _Reading, title: str) -> list[str]:
        """What has happened since, as a table."""
        seconds = self.at - before.at
        rows = [
            (f"CPU of {name}, %", f"{100 * (cpu_s - before.cpu_s[name]) / seconds:.0f}")
            for name, cpu_s in self.cpu_s.items()
        ]
        rows.append(("router, MiB (growth)", _mib(self.rss) + f" ({_mib(self.rss - before.rss)})"))
        for what, buckets in self.buckets.items():
            new = {bound: count - before.buckets[what][bound] for bound, count in buckets.items()}
            rows.append((f"{what}: p50, p99, max, ms at most", _quantiles(new)))
        sent, etcd = self.sent - before.sent, self.etcd - before.etcd
        rows += [(f"{kind}s/s", f"{count / seconds:.0f}") for kind, count in sent.items()]
        rows.append(("messages of workers/s", f"{sent.total() / seconds:.0f}"))
        router_s = self.cpu_s["router"] - before.cpu_s["router"]
        rows.append(("router, CPU µs a message", f"{1e6 * router_s / max(1, sent.total()):.0f}"))
        rows += [(f"etcd: {what}/s", f"{count / seconds:.0f}") for what, count in etcd.items()]
        return align([(title, ""), *rows])


async def _samples(address: str, *names: str) -> list[Sample]:
    """The samples of these names, all labels, on the metrics page at host:port."""
    async with aiohttp.request("GET", f"http://{address}/metrics") as response:
        response.raise_for_status()
        page = await response.text()
    families = text_string_to_metric_families(page)
    return [sample for family in families for sample in family.samples if sample.name in names]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f}"


def _quantiles(buckets: Mapping[float, float]) -> str:
    """Of a histogram's cumulative counts: the bounds of the buckets with p50, p99 and maximum."""
    total = max(buckets.values(), default=0)
    if not total:
        return "-"
    return " ".join(
        f"{1e3 * min(bound for bound, count in buckets.items() if count >= share * total):g}"
        for share in (0.5, 0.99, 1)
    )


def spread(values_s: Iterable[float | None]) -> str:
    """p50, p99 and maximum of seconds, in ms."""
    known = [value for value in values_s if value is not None]
    p50, p99, most = (percentile(known, p) * 1e3 for p in (50, 99, 100))
    return f"p50 {p50:.1f} p99 {p99:.1f} max {most:.1f} ms"


def lag_of(run: Run) -> str:
    """How late requests were sent and how late the generator's own loop ran."""
    late, loop = spread(o.sent_s - o.at_s for o in run.outcomes), spread(run.loop_late_s)
    return f"generator: requests sent late by {late}, its event loop late by {loop}"
