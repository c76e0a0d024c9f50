"""A cluster of one prefill and one decode worker on one GPU: its tokens, and its handoffs."""

from __future__ import annotations

import asyncio
import random
import statistics
from functools import partial

from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.single import SingleProcess
from baton.local.span_store import SpanStore
from baton.sampling import SamplingParams
from benchmarks.gpu.handoff import bookkeeping_ms
from benchmarks.gpu.job import Case, Cell, Job
from benchmarks.gpu.targets import HANDOFF
from benchmarks.gpu.transfer import nccl_shares_a_gpu

LENGTHS = (64, 300, 700, 1500)
_VOCAB = 4000  # of the demo model's 4096: none of its special tokens
_FLUSHED_S = 3.0  # all exporters have sent what they had
_NEW_TOKENS = 24


def cases(job: Job) -> list[Case]:
    """One for each transport between the workers."""
    transports = ["shm"] if job.device == "cpu" else ["cuda_ipc"]
    if job.device != "cpu" and nccl_shares_a_gpu():
        transports.append("nccl")
    return [(name, partial(measure, job, name)) for name in transports]


def _engine(job: Job) -> EngineConfig:
    """The demo model in float32, in which tokens are equal wherever they are computed."""
    return EngineConfig(
        dtype="float32", device=job.device, kv_blocks=512,
        kernels="torch" if job.device == "cpu" else "auto",
    )  # fmt: skip


def measure(job: Job, transport: str) -> dict[str, Cell]:
    """Raises AssertionError for a token that one process would not have given."""
    dice = random.Random(0)
    lengths = job.sized(LENGTHS * 8, LENGTHS * 3, LENGTHS[:2])
    prompts = [[dice.randrange(10, _VOCAB) for _ in range(length)] for length in lengths]
    params = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True)
    with SingleProcess(_engine(job)) as single:
        wanted = [single.generate(prompt, params).token_ids for prompt in prompts]
    return asyncio.run(_compare(job, transport, prompts, wanted))


async def _compare(
    job: Job, transport: str, prompts: list[list[int]], wanted: list[tuple[int, ...]]
) -> dict[str, Cell]:
    store = SpanStore(10_000, 500_000)
    taken: set[str | None] = set()
    async with OtlpReceiver(store) as receiver:
        config = ClusterConfig(
            engine=_engine(job), port=0, transport=transport, otlp=receiver.address
        )
        async with LocalCluster(config) as cluster, AsyncClient(cluster.address) as client:
            for prompt, tokens in zip(prompts, wanted, strict=True):
                done = await client.generate(
                    prompt, max_tokens=_NEW_TOKENS, ignore_eos=True, timeout=60
                )
                assert done.token_ids == tokens, f"other tokens for {len(prompt)} of a prompt"
                taken.add(done.route.transport)
            await asyncio.sleep(_FLUSHED_S)
    assert taken == {transport}, f"{HANDOFF} went by {taken}"
    rate = job.ceilings.copy_bytes_per_s if job.ceilings else float("inf")
    costs = [cost for spans in store.traces() if (cost := bookkeeping_ms(spans, rate)) is not None]
    return {
        "requests": len(prompts), "other tokens": 0,
        "bookkeeping p50 ms": statistics.median(costs[1:]),  # the first opens the link
    }  # fmt: skip
