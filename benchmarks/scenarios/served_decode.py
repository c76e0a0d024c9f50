"""What does serving take from decoding? Tokens/s of an engine alone and through a cluster.

Both have one thread on one core. Alone: an engine in this process. Served: as many streams through
router, prefill and decode worker, counted from when all of them run until the first ends. The two
take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from dataclasses import replace
from typing import Any

from baton.bench.generator import Generator
from baton.bench.interference import stream_stats
from baton.bench.workload import Lengths, Workload
from baton.config import ClusterConfig, EngineConfig
from baton.local.cluster import LocalCluster
from benchmarks import checkpoint
from benchmarks.engine.adapters.baton import Baton
from benchmarks.engine.adapters.protocol import Setup
from benchmarks.environment import console
from benchmarks.scenarios.common import connected
from benchmarks.shapes import SHAPES


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="M", help="M")
    add("--batch", type=int, default=8, help="8")
    add("--context", type=int, default=512, help="tokens of each prompt: 512")
    add("--tokens", type=int, default=400, help="that each stream gets: 400")
    add("--rounds", type=int, default=5, help="5")


async def main(args: argparse.Namespace) -> None:
    shape, batch, context, tokens = SHAPES[args.shape], args.batch, args.context, args.tokens
    all_cores = os.sched_getaffinity(0)
    core = max(all_cores)  # where the decode worker computes
    directory = checkpoint.directory_of(shape, checkpoint.default_cache())
    options: dict[str, Any] = {"dtype": "bfloat16"}
    setup = Setup(str(directory), shape.vocab, 1, (core,), batch, context + tokens, 1, options)
    os.sched_setaffinity(0, {core})  # the engine's thread inherits it
    alone = Baton(setup)
    os.sched_setaffinity(0, all_cores)
    blocks = batch * (-(-(context + tokens) // EngineConfig.block_size) + 1)
    engine = EngineConfig(model=str(directory), kv_blocks=blocks, max_batch=batch, **options)
    load = Workload(
        concurrency=batch,
        count=batch,
        prompt_lengths=Lengths(context, context),
        output_lengths=Lengths(tokens, tokens),
    )
    shares = []
    async with (
        LocalCluster(ClusterConfig(engine=engine, port=0)) as cluster,
        connected(cluster.address, ids=range(10, shape.vocab)) as server,
    ):
        for number in range(args.rounds + 1):
            seconds, _ = await asyncio.to_thread(alone.decode, batch, context, tokens // 2)
            by_engine = batch * (tokens // 2) / seconds
            demands = replace(load, seed=number).demands()
            run = await Generator(server).closed_loop(demands, batch)
            assert run.ok == batch, run.outcomes[0].message
            begin_s = max(o.sent_s + o.token_times_s[0] for o in run.outcomes)
            end_s = min(o.sent_s + o.token_times_s[-1] for o in run.outcomes)
            if end_s <= begin_s:
                raise SystemExit("a stream ended before the last one began: raise --tokens")
            by_cluster = stream_stats(run.outcomes, (begin_s, end_s))["tokens_per_s"]
            if number:  # the first warms up
                shares.append(by_cluster / by_engine)
                console.print(
                    f"alone {by_engine:.1f} tokens/s, served {by_cluster:.1f}: {shares[-1]:.1%}"
                )
    median = statistics.median(shares)
    console.print(f"serving keeps {median:.1%} (median of {len(shares)} rounds)")
