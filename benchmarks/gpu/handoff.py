"""A cluster of one prefill and one decode worker: its tokens, and the time of handoffs."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.engine.backends.gpu.backend import GpuBackend
from baton.engine.backends.gpu.device import Gpu
from baton.errors import DeadlineExceeded
from baton.generation.sampling_params import SamplingParams
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.single import SingleProcess
from baton.local.span_store import Span, SpanStore
from benchmarks.gpu.part import Cells, Part

_LENGTHS, _NEW_TOKENS = (64, 300, 700, 1500), 24
_VOCAB = 4000  # of the demo model's 4096: none of its special tokens
_FLUSHED_S = 3.0  # within which all exporters send their spans


def handoff(part: Part, transport: str) -> Cells:
    """Compares a cluster's tokens with one process's. Raises AssertionError if they differ."""
    prompts, engine = _prompts(part), _engine(part)
    wanted, _ = _generated(prompts, engine)
    store, taken = SpanStore(10_000, 500_000), set()
    rate = part.copy_bytes_per_s or float("inf")

    def has_cost(spans: Sequence[Span]) -> bool:
        return bookkeeping_ms(spans, rate) is not None

    async def compare() -> None:
        async with OtlpReceiver(store) as receiver:
            config = ClusterConfig(
                engine=engine, port=0, transport=transport, otlp=receiver.address
            )
            async with LocalCluster(config) as cluster, AsyncClient(cluster.address) as client:
                for prompt, tokens in zip(prompts, wanted, strict=True):
                    done = await client.generate(
                        prompt, max_tokens=_NEW_TOKENS, temperature=0, ignore_eos=True, timeout=60
                    )
                    assert done.token_ids == tokens, f"other tokens for a prompt of {len(prompt)}"
                    taken.add(done.route.transport)
                with suppress(DeadlineExceeded):
                    await store.wait_for(done.trace_id, has_cost, _FLUSHED_S)

    asyncio.run(compare())
    assert taken == {transport}, f"handoffs went by {taken}"
    costs = [cost for spans in store.traces() if (cost := bookkeeping_ms(spans, rate)) is not None]
    bookkeeping = statistics.median(costs[1:])  # the first opens the link
    return {"requests": len(prompts), "other tokens": 0, "bookkeeping p50 ms": bookkeeping}


def ranks(part: Part) -> Cells:
    """Compares tokens and time of two ranks with one process, on two GPUs or both on one.

    Sums over ranks round differently, which may decide a near tie. Raises AssertionError if more
    than an eighth of the prompts differ.
    """
    prompts, engine, backend = _prompts(part), _engine(part), None
    settings = replace(engine, tp=2, tp_backend="gloo")
    if part.cuda and torch.cuda.device_count() < 2:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        backend = GpuBackend(settings, _SharedGpu(part.device))
    wanted, alone_s = _generated(prompts, engine)
    found, both_s = _generated(prompts, settings, backend)
    others = sum(one != two for one, two in zip(wanted, found, strict=True))
    assert others <= len(prompts) / 8, f"{others} of {len(prompts)} prompts got other tokens"
    return {"requests": len(prompts), "other tokens": others, "s": both_s, "s of one": alone_s}


class _SharedGpu(Gpu):
    """A GPU that all ranks share."""

    def of_rank(self, rank: int) -> Gpu:
        return self


def _prompts(part: Part) -> list[list[int]]:
    dice = random.Random(0)
    lengths = part.sized(_LENGTHS * 8, _LENGTHS[:2])
    return [[dice.randrange(10, _VOCAB) for _ in range(length)] for length in lengths]


def _engine(part: Part) -> EngineConfig:
    """The demo model in float32, whose tokens do not depend on where they are computed."""
    kernels = "auto" if part.cuda else "torch"
    return EngineConfig(dtype="float32", device=part.device_name, kv_blocks=512, kernels=kernels)


def _generated(
    prompts: list[list[int]], engine: EngineConfig, backend: GpuBackend | None = None
) -> tuple[list[tuple[int, ...]], float]:
    """Tokens that one process, or its ranks, generate, and the seconds it takes."""
    params = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True)
    with SingleProcess(engine, backend) as single:
        single.generate(prompts[0], params)  # compiles kernels
        began = time.perf_counter()
        found = [single.generate(prompt, params).token_ids for prompt in prompts]
        return found, time.perf_counter() - began


def bookkeeping_ms(spans: Sequence[Span], copy_bytes_per_s: float) -> float | None:
    """Time of a trace's handoff without computing and copying; None if there is no handoff.

        last chunk ends ── notice ── last put ── Commit, verify ── the sequence can be decoded

    This time, minus the time to copy what was put after the last chunk.
    """
    named = {span.name: span for span in sorted(spans, key=lambda span: span.end_ns)}
    if any(name not in named for name in ("prefill.chunk", "kv.transfer", "decode.admit")):
        return None
    until_ms = (named["decode.admit"].start_ns - named["prefill.chunk"].end_ns) / 1e6
    attributes = named["kv.transfer"].attributes
    wire, hidden, moved = (float(attributes[name]) for name in ("wire_ms", "hidden_ms", "bytes"))
    late = moved * (1 - hidden / wire) if wire else 0.0
    return until_ms - 2 * late / copy_bytes_per_s * 1e3
