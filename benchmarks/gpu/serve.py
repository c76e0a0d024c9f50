"""Part "serve": a cluster of one prefill and one decode worker on the GPU under load over HTTP.

Streams run alone, then with a long prompt every few seconds, from several client processes, since
one cannot read as fast as the cluster writes. `busiest client` is the CPU use of the busiest
client; near 100 % the clients are the limit. `x step` is the median gap between tokens divided by
the engine's step for that batch, if the part "engine" has measured it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
import uvloop

from baton.bench import servers
from baton.bench.generator import Run
from baton.bench.interference import phase, stream_stats
from baton.bench.request import RequestOptions
from baton.bench.stats import spread_of
from baton.bench.workload import Interference, Lengths, Workload
from baton.config import ClusterConfig, EngineConfig
from baton.local import ports
from baton.local.cluster import LocalCluster
from benchmarks.gpu.part import Cells, Part
from benchmarks.shapes import Shape

STREAMS = {"8B": (64,), "1B": (256, 64)}  # of each model
PROMPT, OUTPUT = 512, 256  # tokens of each stream's requests
_LONG = Interference(prompt=8192, output=1, every_s=2.0, periods=3, ramp_s=3.0)
_SMOKE = Interference(prompt=40, output=1, every_s=1.0, periods=1, ramp_s=1.0)
_START_S = 20.0  # to start a cluster and its first streams
_CLIENTS, _STARTED_S = 8, 0.5  # client processes; time to start them
_KV_BYTES, _SPARE_BYTES = 24 << 30, 6 << 30  # of each worker: maximum for KV; for steps


def row_name(shape: Shape, streams: int, beside: bool = False) -> str:
    """Name of a row."""
    return f"{shape.name}, {streams} streams" + (" beside prompts" if beside else "")


def serve(part: Part, shape: Shape) -> None:
    """Measures all rows of a model in one cluster, if there is time to start it."""
    if part.cuda and part.left < _START_S:
        return part.note("serve", f"no time for {shape.name}")
    clients = part.sized(min(_CLIENTS, max(1, (os.cpu_count() or 2) // 2)), 2)
    with (
        tempfile.TemporaryDirectory() as folder,
        # Clients import while the cluster starts.
        multiprocessing.get_context("spawn").Pool(clients, initializer=imported) as pool,
    ):
        write_model(shape, Path(folder))
        asyncio.run(_cluster(part, shape, Path(folder), pool, clients))
    return None


def imported() -> None:
    """Does nothing: a client has imported this module when it is called."""


def write_model(shape: Shape, folder: Path) -> None:
    """Writes a model's config, and a tokenizer with a word for each token."""
    words = {f"w{token_id}": token_id for token_id in range(shape.vocab)}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


async def _cluster(part: Part, shape: Shape, folder: Path, pool: Pool, clients: int) -> None:
    counts = STREAMS.get(shape.name, (2,))
    context = part.sized(_LONG.prompt + PROMPT, 128)
    engine = EngineConfig(
        model=str(folder), random_weights=True, device=part.device_name, dtype="bfloat16",
        max_batch=max(counts), max_context=context, chunk_tokens=part.sized(2048, 32),
        kv_cache_bytes=_kv_bytes(part, shape) if part.cuda else 8 << 20,
        kernels="auto" if part.cuda else "torch",
    )  # fmt: skip
    config = ClusterConfig(
        engine=engine, port=0, http_port=ports.free(), router_processes=part.sized(4, 1)
    )
    began = time.monotonic()
    async with LocalCluster(config) as cluster:
        url, ready_s = f"http://{cluster.http_addresses[0]}", time.monotonic() - began
        part.row("serve", f"{shape.name}, start", {"ready s": ready_s})
        for streams in counts:
            for beside in (False, True):
                if part.late:
                    return part.note("serve", f"no time for {row_name(shape, streams, beside)}")
                load = partial(_under_load, part, pool, clients)
                cells = await asyncio.to_thread(load, url, streams, beside)
                step_ms = part.step_ms.get(f"{shape.name} bf16, batch {streams}")
                if step_ms and (gap_ms := cells["ITL p50 ms"]):
                    cells["x step"] = float(gap_ms) / step_ms
                part.row("serve", row_name(shape, streams, beside), cells)
    return None


def _kv_bytes(part: Part, shape: Shape) -> int:
    """KV bytes of each worker; both hold the weights, and memory for steps and graphs."""
    free, _ = torch.cuda.mem_get_info(part.device)
    return min(_KV_BYTES, free // 2 - 2 * shape.num_parameters - _SPARE_BYTES)


def _under_load(
    part: Part, pool: Pool, clients: int, url: str, streams: int, beside: bool
) -> Cells:
    """Latencies and rates of streams of several processes. Raises AssertionError if one failed."""
    load = part.sized(_LONG, _SMOKE)
    lengths = part.sized((PROMPT, OUTPUT), (20, 8))
    (each, rest), begins_at = divmod(streams, clients), time.time() + _STARTED_S
    work = [
        # Different prompts in each phase, which no cache has.
        (url, each + (number < rest), lengths, 1000 * streams + 100 * beside + number,
         beside and number == 0, load, begins_at)
        for number in range(clients)
    ]  # fmt: skip
    found = pool.starmap(drive, work, chunksize=1)
    outcomes = [one for streamed, _ in found for one in streamed.outcomes]
    stats = stream_stats(outcomes, load.window_s)
    prompts = [one for _, sent in found for one in sent.outcomes]
    failed = stats["failed"] + sum(not one.ok for one in prompts)
    errors = sorted({f"{one.status}: {one.message}" for one in outcomes + prompts if not one.ok})
    assert not failed, f"{failed} failed: {errors[:3]}"
    cells: Cells = {"tokens/s": stats["tokens_per_s"]}
    for name, ranks in (("ttft", ("p50", "p99")), ("itl", ("p50", "p99", "max"))):
        spread = stats[f"{name}_s"] or {}
        cells |= {f"{name.upper()} {rank} ms": 1e3 * spread[rank] for rank in ranks if spread}
    if long := spread_of(one.ttft_s for one in prompts):
        cells["prompts' TTFT p50 ms"] = 1e3 * long["p50"]
    cells["busiest client"] = f"{max(run.cpu_s / run.seconds for run, _ in found):.0%}"
    return cells


def drive(
    url: str, streams: int, lengths: tuple[int, int], seed: int, sends_prompts: bool,
    load: Interference, begins_at: float,
) -> tuple[Run, Run]:  # fmt: skip
    """Runs streams, and long prompts if asked to, in a client process.

    lengths: tokens of a stream's prompt and output · begins_at: start of all processes by
    time.time().
    """
    workload = Workload(
        concurrency=streams, seed=seed, prompt_lengths=Lengths(lengths[0], lengths[0]),
        output_lengths=Lengths(lengths[1], lengths[1]),
    )  # fmt: skip
    options = RequestOptions(ids=range(10, 90))

    async def run() -> tuple[Run, Run]:
        async with servers.connected(url, options) as server:
            await asyncio.sleep(max(0.0, begins_at - time.time()))
            prompts = load.prompts(workload) if sends_prompts else iter(())
            return await phase(server, workload, load, prompts)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())
